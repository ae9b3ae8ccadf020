"""What the ranks of a group do about the host weight store, registration and transfer: the same on each of them.

Each function ``combine_...`` is a decision over every rank's own outcome, made alike on each; ``agree_on_...`` asks the
ranks for theirs. A reason names the rank that makes the difference, or none where all say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs

from streamflow.ranks.agreement import Agreement
from streamflow.store.reports import StoreOutcome, StoreReport
from streamflow.transfer_choice import TransferChoice
from streamflow.weights.registering import RegistrationReport


@attrs.frozen
class StoreResult:
    """What the store did for one rank, as far as the others have to know.

    ``content_id`` is that of its weights, None where it is not known. ``uses_entry``: it would stream from its lease.
    """

    outcome: StoreOutcome
    reason: str
    content_id: str | None
    uses_entry: bool


@attrs.frozen
class StoreDecision:
    """What all ranks do about the store.

    ``entry``: each streams from its lease. ``own``: each streams from its own tensors, and closes its lease where it
    has one. ``fail``: these ranks are not to stream together. ``rank`` is the one that decides it; None: all have come
    to the same. ``is_same_content``: that all ranks have the same weights is known.
    """

    action: Literal["entry", "own", "fail"]
    reason: str
    rank: int | None = None
    is_same_content: bool = False


def combine_store(results: Sequence[StoreResult]) -> StoreDecision:
    """The decision over every rank's result, by rank."""
    for rank, result in enumerate(results):
        if result.outcome is StoreOutcome.FAILED:
            return StoreDecision("fail", f"rank {rank}: {result.reason}", rank)
    contents = [result.content_id for result in results]
    known = next((content for content in contents if content is not None), None)
    for rank, content in enumerate(contents):
        if content not in (None, known):
            reason = f"rank {rank} has the weights {content}, and rank {contents.index(known)} has {known}"
            return StoreDecision("fail", reason, rank)
    is_same = None not in contents
    without = [rank for rank, result in enumerate(results) if not result.uses_entry]
    if not without:
        return StoreDecision("entry", results[0].reason, is_same_content=is_same)
    rank = without[0]
    if len({(result.uses_entry, result.reason) for result in results}) == 1:
        return StoreDecision("own", results[rank].reason, is_same_content=is_same)
    return StoreDecision("own", f"rank {rank}: {results[rank].reason}", rank, is_same)


async def agree_on_store(
    agreement: Agreement, component: str, report: StoreReport, *, uses_entry: bool
) -> StoreDecision:
    """What all ranks do about the store, which gave this one ``report``; a rank that it failed asks, too, and only then
    raises. ``uses_entry``: this rank has a lease to stream from.

    :raises RankError: if a rank is gone.
    """
    result = StoreResult(report.outcome, report.reason, report.content_id, uses_entry)
    answers = await agreement.agree(f"store of {component}", attrs.asdict(result))
    return combine_store([_store_result(answer) for answer in answers])


def _store_result(answer: dict[str, Any]) -> StoreResult:
    return StoreResult(**{**answer, "outcome": StoreOutcome(answer["outcome"])})


def combine_registrations(problems: Sequence[str | None]) -> str | None:
    """Why no rank keeps its memory registered, given why each has not registered its own; None: every rank has."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            return problem if set(problems) == {problem} else f"rank {rank}: {problem}"
    return None


async def agree_on_registration(agreement: Agreement, component: str, report: RegistrationReport) -> str | None:
    """Why this rank has to `unregister` what it has registered; None: all ranks have registered, and keep it.

    :raises RankError: if a rank is gone.
    """
    return combine_registrations(await agreement.agree(f"registration of {component}", report.problem))


@attrs.frozen
class ChoiceDecision:
    """The source and the transfer of one rank, such that all have the same transfer.

    ``problem``: that the ranks have different sources, which nobody knows to hold the same; None: they have not.
    """

    choice: TransferChoice
    problem: str | None = None


def combine_choices(choices: Sequence[TransferChoice], rank: int) -> ChoiceDecision:
    """What ``rank`` does: what it has chosen, but staged, with the reason of the rank that has to, if one has to."""
    own = choices[rank]
    problem = next(
        (
            f"rank {other} streams from its {choice.source} ({choice.source_reason}), and rank 0 from its "
            f"{choices[0].source} ({choices[0].source_reason})"
            for other, choice in enumerate(choices)
            if choice.source != choices[0].source
        ),
        None,
    )
    staged = next((other for other, choice in enumerate(choices) if choice.transfer == "staged"), None)
    if staged is not None and own.transfer != "staged":
        own = attrs.evolve(own, transfer="staged", transfer_reason=f"rank {staged}: {choices[staged].transfer_reason}")
    return ChoiceDecision(own, problem)


async def agree_on_choice(agreement: Agreement, choice: TransferChoice) -> ChoiceDecision:
    """The transfer of this rank's blocks that all ranks have chosen, or can all follow.

    :raises RankError: if a rank is gone.
    """
    answers = await agreement.agree("transfer", attrs.asdict(choice))
    return combine_choices([TransferChoice(**answer) for answer in answers], agreement.rank)
