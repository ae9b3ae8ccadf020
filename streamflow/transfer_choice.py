"""Which transfer an offload uses, and why. Pure: no torch, no clock."""

from __future__ import annotations

import attrs


@attrs.frozen
class ChosenTransfer:
    """``name`` is ``direct`` or ``staged``."""

    name: str
    reason: str


def choose_transfer(asked: str, *, device_is_host: bool, page_locked: bool, why_not_locked: str) -> ChosenTransfer:
    """The transfer for blocks of one source; ``asked`` is the option.

    :raises ValueError: if ``direct`` was asked for and the device cannot read the source's memory.
    """
    can_be_direct = device_is_host or page_locked
    if asked == "staged":
        return ChosenTransfer("staged", "asked for")
    if asked == "direct" and not can_be_direct:
        raise ValueError(f"transfer='direct' is not possible: {why_not_locked}; use transfer='auto'")
    if device_is_host:
        return ChosenTransfer("direct", "the device is the host and reads the source itself")
    if page_locked:
        return ChosenTransfer("direct", "the block images are page-locked")
    return ChosenTransfer("staged", why_not_locked)
