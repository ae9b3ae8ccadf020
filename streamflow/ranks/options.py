"""The options of many ranks: each validated, all problems in one error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import attrs

from streamflow.errors import ConfigurationError
from streamflow.stages.ranks.signature import WaveSignature, WaveSignatureError

Gather = Literal["auto", "always", "never"]
LocalBlocks = Literal["auto", "none"]
#: How many heartbeats a rank may be silent at least: idle ones come at a fifth of the rate.
MIN_HEARTBEATS = 10
_DURATIONS = ("wave_deadline_s", "rank_deadline_s", "heartbeat_s")
#: As long as torch.distributed's own collectives wait over NCCL by default.
DEFAULT_MEMBER_DEADLINE_S = 600.0


@attrs.frozen(kw_only=True)
class RankOptions:
    """How ranks share transfers and form waves. Frozen; every field is an option, equal on all ranks.

    Attributes:
        gather: ``"auto"`` gathers where several ranks can: each copies its slice of a block over its own host link, and
            they gather the rest from each other. Where they cannot, every rank copies whole blocks, and
            ``statistics()`` says why. ``"always"`` is an error there. ``"never"`` copies whole blocks.
        gather_chunk_bytes: how much of a block image is copied and then gathered at a time; a smaller chunk overlaps
            sooner and costs more calls. It is rounded to a multiple of 256 bytes for each rank.
        local_blocks: blocks that every rank copies whole, because gathering them would take longer: ``"auto"`` by their
            size and the measured links (on a host device all of them), ``"none"``, or a tuple of their names.
        wave_window_s: how long the first request that waits for a wave waits for others, in seconds. A wave begins
            early when every rank has as many requests waiting as may walk together.
        wave_deadline_s: how long a request may wait for a wave before it fails, in seconds.
        rank_deadline_s: within it all ranks know of one that is dead or silent, and fail, in seconds. At least ten
            heartbeats.
        heartbeat_s: how often ranks exchange their state while requests wait, in seconds; else a fifth as often.
        member_deadline_s: how long the others wait, in seconds, for a request in their wave whose own code does not go
            on, while its rank is alive and the blocks it needs are there. One that does not come to the next walk is
            left behind; one that stands still within a walk, or that ranks share, fails all ranks. None: for ever.
        default_wave: the signature of requests that state none, or a mapping of its fields; None: each has to state it,
            by ``offload.request(wave=...)``. Without gathering it has no effect.

    :raises ConfigurationError: if an option is not usable; it lists every problem.
    """

    gather: Gather = "auto"
    gather_chunk_bytes: int = 64 << 20
    local_blocks: LocalBlocks | tuple[str, ...] = "auto"
    wave_window_s: float = 0.5
    wave_deadline_s: float = 60.0
    rank_deadline_s: float = 10.0
    heartbeat_s: float = 0.05
    member_deadline_s: float | None = DEFAULT_MEMBER_DEADLINE_S
    default_wave: WaveSignature | None = None

    def __attrs_post_init__(self) -> None:
        problems = [*_problems(self), *self._take_wave()]
        if problems:
            raise ConfigurationError(problems)

    def _take_wave(self) -> Iterator[str]:
        """Let a mapping become the signature that it describes; yields what is wrong with it."""
        wave: object = self.default_wave
        if wave is None or isinstance(wave, WaveSignature):
            return
        if not isinstance(wave, Mapping):
            yield f"default_wave must be a WaveSignature, a mapping of its fields or None, not {wave!r}"
            return
        known = [field.name for field in attrs.fields(WaveSignature)]
        unknown = [name for name in wave if name not in known]
        if unknown or "steps" not in wave:
            given = ", ".join(map(str, wave))
            yield f"default_wave has the fields {given}; it takes {', '.join(known)}, and needs steps"
            return
        try:
            object.__setattr__(self, "default_wave", WaveSignature(**wave))
        except WaveSignatureError as failure:
            yield f"default_wave: {failure}"


def _problems(options: RankOptions) -> Iterator[str]:
    if options.gather not in get_args(Gather):
        yield f"gather must be one of {', '.join(map(repr, get_args(Gather)))}, not {options.gather!r}"
    chunk = options.gather_chunk_bytes
    if type(chunk) is not int or chunk < 256:
        yield f"gather_chunk_bytes must be an integer of at least 256, not {chunk!r}"
    if not _is_blocks(options.local_blocks):
        yield f"local_blocks must be 'auto', 'none' or a tuple of blocks' names, not {options.local_blocks!r}"
    yield from list(_wrong_durations(options)) or _short_deadlines(options)


def _wrong_durations(options: RankOptions) -> Iterator[str]:
    window = options.wave_window_s
    if not _is_number(window) or window < 0:
        yield f"wave_window_s must be a finite number of seconds of at least 0, not {window!r}"
    for name in _DURATIONS:
        value = getattr(options, name)
        if not _is_positive(value):
            yield f"{name} must be a positive, finite number of seconds, not {value!r}"
    if options.member_deadline_s is not None and not _is_positive(options.member_deadline_s):
        value = options.member_deadline_s
        yield f"member_deadline_s must be a positive, finite number of seconds, or None for no limit, not {value!r}"


def _short_deadlines(options: RankOptions) -> Iterator[str]:
    if options.wave_deadline_s < options.wave_window_s:
        window = f"wave_window_s={options.wave_window_s:g}"
        yield f"wave_deadline_s is {options.wave_deadline_s:g}, less than {window}: no request could wait for its wave"
    if options.rank_deadline_s < MIN_HEARTBEATS * options.heartbeat_s:
        yield (
            f"rank_deadline_s is {options.rank_deadline_s:g}, less than {MIN_HEARTBEATS} times heartbeat_s="
            f"{options.heartbeat_s:g}: ranks that have nothing to say would be given up"
        )


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_positive(value: object) -> bool:
    return _is_number(value) and value > 0  # type: ignore[operator]


def _is_blocks(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(name, str) and name for name in value)
    return value in get_args(LocalBlocks)
