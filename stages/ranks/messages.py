"""What ranks tell the coordinating one in a round, and what it answers. Frozen values, and their form on the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs

from streamflow.stages.ranks.errors import RankClosedError, RankError, RankFailedError, RankLostError
from streamflow.stages.ranks.local_waves import WaveProgress
from streamflow.stages.ranks.signature import WaveSignature


class Closing(StrEnum):
    """Whether a rank closes its offload: once no wave is under way, or whatever is."""

    NO = "no"
    WHEN_OVER = "when over"
    NOW = "now"


class Ending(StrEnum):
    """How a rank ended the work of all."""

    LOST = "lost"
    FAILED = "failed"
    CLOSED = "closed"


@attrs.frozen
class RequestStatus:
    """A request that has waited ``waited_s`` for a wave. Not a point in time: each rank's clock is its own.

    ``alone``: as in `WaitingRequest`.
    """

    ticket: int
    name: str
    signature: WaveSignature
    waited_s: float
    alone: bool = False


@attrs.frozen
class Proposal:
    """A rank's part of an agreement: ``value`` is one for JSON. ``serial``: the rank's own number for it."""

    serial: int
    name: str
    value: Any


@attrs.frozen
class Standing:
    """The members of a rank, by what errors call them, that have held their wave up for ``seconds`` by themselves."""

    names: tuple[str, ...]
    seconds: float


@attrs.frozen
class RankStatus:
    """What one rank says in a round.

    ``progress`` None: it can begin no wave yet. ``standing`` None: no member of it holds the wave up. ``promise``: it
    starts no walk beyond so many (None: it may). ``failure``: why it cannot go on (None: it can).
    """

    progress: WaveProgress | None = None
    waiting: tuple[RequestStatus, ...] = ()
    promise: int | None = None
    proposal: Proposal | None = None
    closing: Closing = Closing.NO
    failure: str | None = None
    standing: Standing | None = None


@attrs.frozen
class WaveBegin:
    """A wave begins.

    ``founder``: the request whose signature it has. ``members``: this rank's tickets in it. ``refused``: those that
    cannot be.
    """

    wave: int
    signature: WaveSignature
    founder: str
    members: tuple[int, ...]
    refused: tuple[int, ...]


@attrs.frozen
class Verdict:
    """The end of the ranks' work together."""

    ending: Ending
    rank: int
    reason: str

    def error(self) -> RankError:
        """A new error that says so: an error that is raised in several tasks would gather all their tracebacks."""
        if self.ending is Ending.CLOSED:
            return RankClosedError(self.rank)
        return (RankLostError if self.ending is Ending.LOST else RankFailedError)(self.rank, self.reason)


@attrs.frozen
class RankReply:
    """What one rank is answered.

    ``timed_out``: tickets that waited too long. ``hold``: promise to start no more walks, and say in the next round
    after how many. ``end_after``: the wave has so many walks. ``agreed``: what all ranks proposed, by rank.
    ``is_busy``: speak again soon. ``verdict``: there is no other round.
    """

    begin: WaveBegin | None = None
    timed_out: tuple[int, ...] = ()
    hold: bool = False
    end_after: int | None = None
    agreed: tuple[Proposal, ...] | None = None
    is_busy: bool = False
    verdict: Verdict | None = None


def encode(message: RankStatus | RankReply) -> bytes:
    """``message`` for the wire."""
    return json.dumps(attrs.asdict(message, value_serializer=_plain)).encode()


def _plain(owner: Any, field: Any, value: Any) -> Any:
    return value.to_wire() if isinstance(value, WaveSignature) else value


def decode_status(data: bytes) -> RankStatus:
    """The status that `encode` was given."""
    values = json.loads(data)
    progress, proposal, standing = (values.pop(name) for name in ("progress", "proposal", "standing"))
    return RankStatus(
        progress=progress and WaveProgress(**progress),
        waiting=tuple(RequestStatus(**_with_signature(request)) for request in values.pop("waiting")),
        proposal=proposal and Proposal(**proposal),
        closing=Closing(values.pop("closing")),
        standing=standing and Standing(tuple(standing["names"]), standing["seconds"]),
        **values,
    )


def decode_reply(data: bytes) -> RankReply:
    """The reply that `encode` was given."""
    values = json.loads(data)
    begin, agreed, verdict = values.pop("begin"), values.pop("agreed"), values.pop("verdict")
    return RankReply(
        begin=begin and _begin(begin),
        timed_out=tuple(values.pop("timed_out")),
        agreed=None if agreed is None else tuple(Proposal(**proposal) for proposal in agreed),
        verdict=verdict and Verdict(**{**verdict, "ending": Ending(verdict["ending"])}),
        **values,
    )


def _begin(values: Mapping[str, Any]) -> WaveBegin:
    lists = {name: tuple(values[name]) for name in ("members", "refused")}
    return WaveBegin(**{**_with_signature(values), **lists})


def _with_signature(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "signature": WaveSignature.from_wire(values["signature"])}
