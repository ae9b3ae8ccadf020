"""Errors between ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from streamflow.stages.errors import StreamflowError
from streamflow.stages.ranks.signature import WaveSignature


class GatherError(StreamflowError, RuntimeError):
    """Ranks could not gather a block from each other; ``reason`` says how it was noticed.

    ``rank`` of ``size`` is where it was noticed, which need not be the rank that failed.
    """

    def __init__(self, rank: int, size: int, reason: str) -> None:
        self.rank, self.size, self.reason = rank, size, reason
        super().__init__(
            f"rank {rank} of {size} could not gather a block from the others: {reason}; a rank has ended, stands still "
            "or broke off; close the offload on every rank and open new ones"
        )


class RankError(StreamflowError, RuntimeError):
    """The ranks cannot work together any more because of ``rank``, of the gather group; ``reason`` says why."""

    def __init__(self, rank: int, reason: str, message: str) -> None:
        self.rank, self.reason = rank, reason
        super().__init__(message)


class RankLostError(RankError):
    """A rank is dead, or was silent for too long: stopped, or its event loop blocked."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(
            rank,
            reason,
            f"rank {rank} is lost: {reason}; close the offload on every rank, see to that rank, and open new ones",
        )


class RankFailedError(RankError):
    """A rank's engine broke, or its offload failed to open."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(
            rank, reason, f"rank {rank} failed: {reason}; close the offload on every rank and open new ones"
        )


class RankClosedError(RankError):
    """A rank has closed its offload: no component is gathered any more, on any rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            rank,
            "it closed its offload",
            f"rank {rank} has closed its offload, and the weights are gathered by all ranks or none; let the ranks "
            "close together, after their last request",
        )


class WaveMismatchError(StreamflowError, ValueError):
    """A request differs from those that it would have had to walk with.

    ``request`` has ``signature``; ``founder``, which had waited longest, has ``wave_signature``. ``differences`` names
    the fields.
    """

    def __init__(self, request: str, signature: WaveSignature, founder: str, wave_signature: WaveSignature) -> None:
        self.request, self.signature = request, signature
        self.founder, self.wave_signature = founder, wave_signature
        self.differences = signature.differences(wave_signature)
        super().__init__(
            f"request {request!r} cannot walk with the wave of {founder}: {self.differences}; requests that wait "
            "together on the ranks have to do the same steps: send the others later, or to other ranks"
        )


class WaveTimeoutError(StreamflowError, TimeoutError):
    """A request waited longer than it may for the ranks to agree on a wave that it is in."""

    def __init__(self, request: str, waited_s: float, deadline_s: float) -> None:
        self.request, self.waited_s, self.deadline_s = request, waited_s, deadline_s
        super().__init__(
            f"request {request!r} waited {waited_s:.1f} s for a wave, longer than wave_deadline_s={deadline_s:g}: the "
            "waves before it took all the time; send fewer requests at once, or raise wave_deadline_s"
        )


class RanksDisagreeError(StreamflowError, ValueError):
    """The ranks have different values where they need the same.

    ``values`` are by rank, ``fields`` are those that differ in them.
    """

    def __init__(self, what: str, values: Sequence[object], fields: Sequence[str] = ()) -> None:
        self.what, self.values, self.fields = what, tuple(values), tuple(fields)
        each = ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values))
        differing = f" (in {', '.join(fields)})" if fields else ""
        super().__init__(f"the ranks differ in {what}{differing}: {each}; all ranks have to be given the same")


class OutOfTurnError(StreamflowError, RuntimeError):
    """A pass wants a block that the ranks are not gathering: it would be fetched by this rank alone, which cannot be.

    ``request`` None: the model was called directly.
    """

    def __init__(self, component: str, block: int, request: str | None) -> None:
        self.component, self.block, self.request = component, block, request
        who = "a direct call" if request is None else f"request {request!r}"
        super().__init__(
            f"{who} wants block {block} of {component!r} out of turn, but all ranks gather its blocks in one order, "
            "once a walk; switch off what skips or repeats blocks, or stream the component with gather='never'"
        )


class WaveOptionsError(StreamflowError, ValueError):
    """An option of waves has a value that cannot work."""

    def __init__(self, option: str, value: object, problem: str) -> None:
        self.option, self.value = option, value
        super().__init__(f"{option} is {value!r}, but {problem}")


class SignatureMissingError(StreamflowError, ValueError):
    """A request needs the ranks to walk together, and did not say how often. ``request``: as in `OutOfTurnError`."""

    def __init__(self, component: str, request: str | None) -> None:
        self.component, self.request = component, request
        who = "a direct call of the model" if request is None else f"{request!r}"
        super().__init__(
            f"{who} walks over {component!r}, which the ranks gather together, but says not for how many steps: use "
            f"offload.request(wave=WaveSignature(steps=(({component!r}, 30),))), or the option default_wave"
        )


class WaveComponentsError(StreamflowError, ValueError):
    """A request's wave does not begin with the component that it walks over, or names one that is not gathered.

    So it is with one that its wave has left behind, too, once it comes to a component that is not the wave's first.
    """

    def __init__(
        self, request: str | None, component: str, signature: WaveSignature, gathered: Collection[str]
    ) -> None:
        self.request, self.component, self.signature = request, component, signature
        self.gathered = tuple(sorted(gathered))
        is_later = component in signature.walks()[1:] and set(signature.walks()) <= set(gathered)
        hint = "; or its wave has left it behind (see member_deadline_s), and no other one begins where it is"
        super().__init__(
            f"{request!r} begins with {component!r}, but its wave has the steps {signature.steps}; the ranks gather "
            f"{', '.join(self.gathered)}{hint if is_later else ''}"
        )
