"""Which transfer an offload uses, and why. Pure: no torch, no clock."""

from __future__ import annotations

import attrs

from streamflow.errors import ConfigurationError


@attrs.frozen
class ChosenTransfer:
    """``name`` is ``direct`` or ``staged``."""

    name: str
    reason: str


def choose_transfer(
    asked: str, *, device_is_host: bool, page_locked: bool, why_not_locked: str, why_not_direct: str | None = None
) -> ChosenTransfer:
    """The transfer for blocks of one source; ``asked`` is the option.

    ``why_not_direct``: what rules a direct transfer out whatever the memory is like; None if nothing does.

    :raises ConfigurationError: if ``direct`` was asked for and the device cannot read the blocks as they lie there.
    """
    if asked == "staged":
        return ChosenTransfer("staged", "asked for")
    if why_not_direct is None and not (device_is_host or page_locked):
        why_not_direct = why_not_locked
    if why_not_direct is not None:
        if asked == "direct":
            problem = f"transfer='direct' is not possible: {why_not_direct}; use transfer='auto'"
            raise ConfigurationError([problem])
        return ChosenTransfer("staged", why_not_direct)
    if device_is_host:
        return ChosenTransfer("direct", "the device is the host and reads the source itself")
    return ChosenTransfer("direct", "the block images are page-locked")
