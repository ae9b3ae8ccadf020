"""Which source and which transfer an offload uses, and why. Pure: no torch, no clock.

One order of preference, and one set of rules, for opening, for ``streamflow plan`` and for ``streamflow doctor``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import attrs

from streamflow.errors import ConfigurationError

SourceName = Literal["artifact", "checkpoint", "module"]

#: The best source first. A registered artifact is one copy for each block, a registered checkpoint one for each tensor;
#: where neither is registered both are read alike, and the checkpoint is there without anything being published.
WITH_REGISTRATION: tuple[SourceName, ...] = ("artifact", "checkpoint", "module")
WITHOUT_REGISTRATION: tuple[SourceName, ...] = ("checkpoint", "artifact", "module")


class StreamingOptions(Protocol):
    """The options that decide; `OffloadConfig` has them."""

    @property
    def transfer(self) -> str: ...
    @property
    def pin_host_memory(self) -> bool: ...
    @property
    def host_registration_limit_bytes(self) -> int | None: ...


@attrs.frozen
class SourceCandidate:
    """A source that blocks might come from.

    ``reason``: what makes it possible. ``problem``: what makes it impossible; None if nothing does. ``why_not_direct``:
    what rules a direct transfer out whatever its memory is like; None if nothing does.
    """

    name: SourceName
    reason: str = ""
    problem: str | None = None
    why_not_direct: str | None = None


@attrs.frozen
class TransferChoice:
    """The source of the blocks and the transfer, each with the reason."""

    source: str
    source_reason: str
    transfer: str
    transfer_reason: str


def choose(
    candidates: Sequence[SourceCandidate],
    options: StreamingOptions,
    *,
    device_is_host: bool,
    why_not_registered: str | None,
) -> TransferChoice:
    """The best of ``candidates`` that is possible, and the transfer from it.

    ``why_not_registered``: why mapped files are not page-locked, as far as it is known; None: they are, or will be.

    :raises ConfigurationError: if no candidate is possible, or ``direct`` was asked for and is not.
    """
    chosen, reason = choose_source(candidates, why_not_registered=why_not_registered)
    if chosen is None:
        raise ConfigurationError([f"there is nothing to stream from: {reason}"])
    transfer, why = choose_transfer(
        chosen, options, device_is_host=device_is_host, why_not_registered=why_not_registered
    )
    return TransferChoice(chosen.name, reason, transfer, why)


def choose_source(
    candidates: Iterable[SourceCandidate], *, why_not_registered: str | None
) -> tuple[SourceCandidate | None, str]:
    """The best candidate that is possible, and why it is this one; None, and what stands against each, if none is."""
    order = WITH_REGISTRATION if why_not_registered is None else WITHOUT_REGISTRATION
    ranked = sorted(candidates, key=lambda candidate: order.index(candidate.name))
    possible = [candidate for candidate in ranked if candidate.problem is None]
    against = [f"no {candidate.name}: {candidate.problem}" for candidate in ranked if candidate.problem is not None]
    if not possible:
        return None, "; ".join(against) or "there are no blocks"
    chosen, *others = possible
    reasons = [chosen.reason] if chosen.reason else against
    if chosen.name == "artifact" and any(other.name == "checkpoint" for other in others):
        reasons = [*reasons, "its images are registered whole, which the checkpoint's tensors are not"]
    return chosen, "; ".join(reasons)


def choose_transfer(
    source: SourceCandidate, options: StreamingOptions, *, device_is_host: bool, why_not_registered: str | None
) -> tuple[str, str]:
    """``direct`` or ``staged``, and why.

    :raises ConfigurationError: if ``direct`` was asked for and the device cannot read the blocks as they lie there.
    """
    if options.transfer == "staged":
        return "staged", "asked for"
    problem = source.why_not_direct
    if problem is None and not device_is_host:
        problem = _why_not_locked(source, options, why_not_registered)
    if problem is not None:
        if options.transfer == "direct":
            raise ConfigurationError([f"transfer='direct' is not possible: {problem}; use transfer='auto'"])
        return "staged", problem
    if device_is_host:
        return "direct", "the device is the host and reads the source itself"
    if source.name == "module":
        return "direct", "the block images are page-locked"
    return "direct", "the mapped files are page-locked"


def _why_not_locked(source: SourceCandidate, options: StreamingOptions, why_not_registered: str | None) -> str | None:
    why_not = why_not_page_locked(options, device_is_host=False) if source.name == "module" else why_not_registered
    return None if why_not is None else f"the {source.name} source is pageable memory ({why_not})"


def why_not_page_locked(options: StreamingOptions, *, device_is_host: bool) -> str | None:
    """Why no block's memory is page-locked, of whatever source; None if it may be."""
    if device_is_host:
        return "the device is the host"
    if options.transfer == "staged":
        return "a staged transfer was asked for"
    return None if options.pin_host_memory else "pin_host_memory=False"


def why_not_registered_by_options(options: StreamingOptions, *, device_is_host: bool) -> str | None:
    """Why mapped files are not even tried to be registered; None if they are."""
    if options.host_registration_limit_bytes == 0:
        return "host_registration_limit_bytes=0"
    return why_not_page_locked(options, device_is_host=device_is_host)


def why_too_much(nbytes: int, *, limit_bytes: int | None, available_bytes: int | None) -> str | None:
    """Why ``nbytes`` of mapped files are not registered; None if they fit.

    ``limit_bytes``: the option, None for no limit. ``available_bytes``: what the machine and the cgroup have for them,
    None if nobody knows.
    """
    if limit_bytes is not None and nbytes > limit_bytes:
        return f"its {nbytes:,} bytes are over host_registration_limit_bytes={limit_bytes:,}"
    if available_bytes is not None and nbytes > available_bytes:
        return f"its {nbytes:,} bytes are more than the {available_bytes:,} that this machine or cgroup has for them"
    return None
