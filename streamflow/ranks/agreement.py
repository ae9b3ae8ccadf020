"""Doing a step on every rank of a group, or on none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import attrs


class Agreement(Protocol):
    """The ranks of a group, among whom this one is ``rank``, from 0, of ``size``."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    async def agree(self, name: str, value: object) -> list[Any]:
        """Every rank's ``value`` (of JSON), by rank; equal on all of them. All ranks ask for the same in one order.

        :raises RankError: if a rank is gone, failed or asks for something else: the others hear of it.
        """


@attrs.frozen
class Refusal:
    """Why a step that all ranks have to take cannot be taken: ``reason``, on ``rank``. ``details``: for programs."""

    rank: int
    reason: str
    details: Any = None


class DetailedError(Exception):
    """A failure that tells the other ranks more than its words: ``details``, of JSON."""

    def __init__(self, reason: str, details: Any) -> None:
        self.details = details
        super().__init__(reason)


class StepRefusedError(Exception):
    """Some ranks could not take a step, so that all undo it; ``refusals``, in the order of ranks, is the same on each.

    It is for those who take steps, who tell their callers what it means.
    """

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        self.refusals = tuple(refusals)
        super().__init__("; ".join(f"rank {refusal.rank}: {refusal.reason}" for refusal in refusals))


async def together(agreement: Agreement, name: str, step: Callable[[], Awaitable[Any]]) -> list[Any]:
    """What ``step`` returns (JSON) on each rank, by rank, once all have taken it.

    Whatever error it raises on some rank goes to all: to be undone there, since the others may have succeeded.

    :raises StepRefusedError: if it failed on a rank: on all of them. Where it failed, the failure is the cause.
    """
    value: Any = None
    refused: dict[str, Any] | None = None
    cause: Exception | None = None
    try:
        value = await step()
    except Exception as failure:
        details = failure.details if isinstance(failure, DetailedError) else None
        cause, refused = failure, {"reason": str(failure) or type(failure).__name__, "details": details}
    answers = await agreement.agree(name, {"value": value, "refused": refused})
    refusals = [Refusal(rank, **each["refused"]) for rank, each in enumerate(answers) if each["refused"] is not None]
    if refusals:
        raise StepRefusedError(refusals) from cause
    return [answer["value"] for answer in answers]
