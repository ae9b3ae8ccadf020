"""Ranks in processes of their own, whose requests walk together: each gets its own picture, in one walk a step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import attrs
import pytest
import torch

import streamflow
from streamflow import OffloadPlan
from streamflow.ranks.topology import RankGroups
from streamflow.stages.ranks.signature import WaveSignature
from streamflow.stages.signals import loop_waker
from tests.ranks import Rank, run_ranks
from tests.streamflow.kit import in_worker, sha256_of
from tests.streamflow.pipelines.toys import toy_pipeline
from tests.streamflow.ranks.joint import (
    STEPS,
    Asked,
    Denoiser,
    Member,
    Outcome,
    Seen,
    alone,
    asked_of,
    assert_nothing_left,
    backend_of,
    joined,
    live,
    options,
    outcome_of,
    there,
    wait_there,
)

Told = tuple[Outcome, Seen]


def assert_own_pictures(outcomes: list[Outcome], requests: list[tuple[int, int]]) -> None:
    """Each outcome is that of its request (rank, number) alone, and no other's."""
    expected = [alone(asked_of(*request)) for request in requests]
    assert len(set(expected)) == len(expected)
    assert [outcome.value for outcome in outcomes] == expected, outcomes


def assert_gathered(seen: Seen, num_walks: int, num_passes: int) -> None:
    assert (seen.transfer, seen.state, seen.peak_is_small) == ("gathered", "ready", True)
    assert (seen.num_walks, seen.num_passes) == (num_walks, num_passes)
    assert seen.streamed_bytes > 0


@pytest.mark.parametrize(("size", "backend"), [(2, "trio"), (3, "asyncio"), (4, None)])
def test_every_rank_gets_its_own_picture_in_one_walk_a_step(size: int, backend: str | None) -> None:
    async def scenario(member: Member) -> Told:
        outcome = await member.ask(asked_of(member.rank.rank))
        return outcome, member.seen()

    def work(rank: Rank) -> object:
        return live(rank, scenario, backend=backend or backend_of(rank))

    answers = run_ranks(size, work)
    assert_own_pictures([outcome for outcome, _ in answers], [(rank, 0) for rank in range(size)])
    for _, seen in answers:
        assert_gathered(seen, num_walks=STEPS, num_passes=STEPS)


def test_a_request_of_other_steps_is_refused_by_name_while_four_finish() -> None:
    other = asked_of(1, 1, steps=STEPS + 2)

    async def scenario(member: Member) -> tuple[Outcome, Outcome | None, Seen]:
        found: list[Outcome] = []

        async def ask_other() -> None:
            found.append(await member.ask(other))

        def on_step(step: int) -> None:
            if step == 0:
                member.announce(f"waits-{member.rank.rank}")

        async with anyio.create_task_group() as tasks:
            if member.rank.rank == 1:
                tasks.start_soon(after, member, [f"waits-{rank}" for rank in range(4)], ask_other)
            outcome = await member.ask(asked_of(member.rank.rank), on_step)
        return outcome, found[0] if found else None, member.seen()

    def work(rank: Rank) -> object:
        return live(rank, scenario, backend=backend_of(rank), max_running_requests=2)

    answers = run_ranks(4, work)
    assert_own_pictures([outcome for outcome, _, _ in answers], [(rank, 0) for rank in range(4)])
    refused = answers[1][1]
    assert (refused.value, refused.error) == (None, "WaveMismatchError")
    assert other.prompt in refused.text
    assert "steps [['Denoiser', 5]] against [['Denoiser', 3]]" in refused.text
    for rank, (_, _, seen) in enumerate(answers):
        assert_gathered(seen, num_walks=STEPS, num_passes=STEPS + (rank == 1))


async def after(member: Member, names: list[str], do: Callable[[], Awaitable[None]]) -> None:
    await there(member.rank, *names)
    await do()


def test_ranks_without_a_request_feed_the_one_that_has_one() -> None:
    async def scenario(member: Member) -> tuple[Outcome | None, Seen]:
        outcome = await member.ask(asked_of(1)) if member.rank.rank == 1 else None
        await member.meet("done")
        return outcome, member.seen()

    answers = run_ranks(3, lambda rank: live(rank, scenario, backend=backend_of(rank)))
    assert_own_pictures([answers[1][0]], [(1, 0)])
    for rank, (_, seen) in enumerate(answers):
        assert_gathered(seen, num_walks=STEPS, num_passes=STEPS if rank == 1 else 0)
    assert len({seen.streamed_bytes for _, seen in answers}) == 1


async def ask_all(member: Member, requests: list[Asked]) -> list[Outcome]:
    """What comes of requests that are made at once."""
    outcomes: dict[int, Outcome] = {}

    async def ask(number: int) -> None:
        outcomes[number] = await member.ask(requests[number])

    async with anyio.create_task_group() as tasks:
        for number in range(len(requests)):
            tasks.start_soon(ask, number)
    return [outcomes[number] for number in range(len(requests))]


def test_two_requests_of_each_of_two_ranks_share_a_walk() -> None:
    async def scenario(member: Member) -> tuple[list[Outcome], Seen]:
        outcomes = await ask_all(member, [asked_of(member.rank.rank, number) for number in range(2)])
        return outcomes, member.seen()

    def work(rank: Rank) -> object:
        # by the window nothing would begin in time: each rank has as many as may walk together
        return live(
            rank, scenario, backend=backend_of(rank.rank + 1), max_running_requests=2, ranks={"wave_window_s": 30}
        )

    answers = run_ranks(2, work)
    for rank, (outcomes, seen) in enumerate(answers):
        assert_own_pictures(outcomes, [(rank, 0), (rank, 1)])
        assert_gathered(seen, num_walks=STEPS, num_passes=2 * STEPS)


def test_a_request_that_comes_during_a_wave_goes_into_the_next() -> None:
    async def scenario(member: Member) -> tuple[list[Outcome], Seen]:
        rank, outcomes = member.rank, []

        def on_step(step: int) -> None:
            if step == 1:
                member.announce(f"under-way-{rank.rank}")
                wait_there(rank, "late")

        def on_late_step(step: int) -> None:
            member.announce("late")

        async def ask_late() -> None:
            outcomes.append(await member.ask(asked_of(1, 1), on_late_step))

        async with anyio.create_task_group() as tasks:
            if rank.rank == 1:
                tasks.start_soon(after, member, ["under-way-0", "under-way-1"], ask_late)
            outcomes.append(await member.ask(asked_of(rank.rank), on_step))
        await member.meet("done")
        return outcomes, member.seen()

    answers = run_ranks(2, lambda rank: live(rank, scenario, backend=backend_of(rank), max_running_requests=2))
    assert_own_pictures(answers[0][0], [(0, 0)])
    assert_own_pictures(answers[1][0], [(1, 0), (1, 1)])
    assert [seen.num_walks for _, seen in answers] == [2 * STEPS] * 2
    assert [seen.num_passes for _, seen in answers] == [STEPS, 2 * STEPS]


async def be_cancelled(member: Member, asked: Asked) -> Outcome:
    with anyio.CancelScope() as scope:
        cancel = loop_waker()

        def on_step(step: int) -> None:
            if step == 1:
                cancel(scope.cancel)

        return await member.ask(asked, on_step)
    return Outcome("cancelled")


async def raise_in_the_middle(member: Member, asked: Asked) -> Outcome:
    def on_step(step: int) -> None:
        if step == 1:
            raise OSError("the client is gone")

    return await member.ask(asked, on_step)


async def do_fewer(member: Member, asked: Asked) -> Outcome:
    return await member.ask(attrs.evolve(asked, steps=STEPS - 1), wave=asked.wave)


async def do_more(member: Member, asked: Asked) -> Outcome:
    return await member.ask(attrs.evolve(asked, steps=STEPS + 1), wave=asked.wave)


@pytest.mark.parametrize("who", [0, 1])
def test_a_request_that_does_not_do_what_was_agreed_is_nothing_to_the_others(who: int) -> None:
    disturb = [be_cancelled, raise_in_the_middle, do_fewer, do_more]

    async def scenario(member: Member) -> list[Outcome]:
        outcomes = []
        for number, act in enumerate(disturb):
            asked = asked_of(member.rank.rank, number)
            outcomes.append(await act(member, asked) if member.rank.rank == who else await member.ask(asked))
            outcomes.append(await member.ask(asked_of(member.rank.rank, number + 10)))
        await member.meet("done")
        return outcomes

    def work(rank: Rank) -> object:
        return live(rank, scenario, backend=backend_of(rank), max_running_requests=1)

    answers = run_ranks(2, work)
    other = 1 - who
    expected = [(other, number + after) for number in range(len(disturb)) for after in (0, 10)]
    assert_own_pictures(answers[other], expected)
    cancelled, _, raised, _, fewer, _, more, _ = answers[who]
    assert_own_pictures(answers[who][1::2], [(who, number + 10) for number in range(len(disturb))])
    assert cancelled.value == "cancelled"
    assert (raised.error, raised.text) == ("OSError", "the client is gone")
    assert fewer.value == alone(asked_of(who, 2, STEPS - 1))
    assert more.value == alone(asked_of(who, 3, STEPS + 1)), more


def test_a_wave_that_all_requests_leave_ends_early_and_the_next_one_is_exact() -> None:
    async def scenario(member: Member) -> tuple[list[Outcome], int, Seen]:
        rank = member.rank.rank
        short = asked_of(rank, 0, steps=2 + rank)
        outcomes = [await member.ask(short, wave=asked_of(rank, 0, steps=40).wave)]
        outcomes.append(await member.ask(asked_of(rank, 1)))
        await member.meet("done")
        return outcomes, member.seen().num_walks - STEPS, member.seen()

    answers = run_ranks(2, lambda rank: live(rank, scenario, backend=backend_of(rank), max_running_requests=1))
    for rank, (outcomes, _, _) in enumerate(answers):
        assert [outcome.value for outcome in outcomes] == [alone(asked_of(rank, 0, 2 + rank)), alone(asked_of(rank, 1))]
    lengths = {length for _, length, _ in answers}
    assert len(lengths) == 1, "the ranks did not walk together"
    assert 3 <= lengths.pop() < 40
    assert len({seen.streamed_bytes for _, _, seen in answers}) == 1


def test_a_request_without_a_signature_is_told_so_and_the_others_walk() -> None:
    async def scenario(member: Member) -> list[Outcome]:
        rank, outcomes = member.rank.rank, []
        if rank == 1:
            request = member.offload.request(request_id="no wave")
            outcomes.append(await outcome_of(request.run(asked_of(rank).make, member.model)))
            wrong = WaveSignature((("Denoiser", 2), ("decoder", 1)))
            outcomes.append(await member.ask(asked_of(rank), wave=wrong))
        outcomes.append(await member.ask(asked_of(rank)))
        await member.meet("done")
        return outcomes

    answers = run_ranks(2, lambda rank: live(rank, scenario, backend=backend_of(rank)))
    assert_own_pictures([outcomes[-1] for outcomes in answers], [(0, 0), (1, 0)])
    missing, unknown, _ = answers[1]
    assert missing.error == "SignatureMissingError"
    assert "'no wave' walks over 'Denoiser'" in missing.text
    assert unknown.error == "WaveComponentsError"
    assert "decoder" in unknown.text


@pytest.mark.parametrize("who", [0, 1])
def test_a_block_out_of_turn_is_refused_before_any_collective_and_the_others_go_on(who: int) -> None:
    async def scenario(member: Member) -> tuple[list[Outcome], Seen]:
        rank = member.rank.rank

        def on_step(step: int) -> None:
            member.model.goes_back = step == 1 and rank == who

        outcomes = [await member.ask(asked_of(rank), on_step)]
        member.model.goes_back = False
        outcomes.append(await member.ask(asked_of(rank, 1)))
        await member.meet("done")
        return outcomes, member.seen()

    def work(rank: Rank) -> object:
        return live(rank, scenario, backend=backend_of(rank), max_running_requests=1)

    answers = run_ranks(2, work)
    assert_own_pictures(answers[1 - who][0], [(1 - who, 0), (1 - who, 1)])
    refused, after = answers[who][0]
    assert refused.error == "OutOfTurnError"
    assert f"request {asked_of(who).prompt!r} wants block 0 of 'Denoiser'" in refused.text, refused
    assert_own_pictures([after], [(who, 1)])
    assert [seen.num_walks for _, seen in answers] == [2 * STEPS] * 2
    assert len({seen.streamed_bytes for _, seen in answers}) == 1


def test_direct_calls_walk_by_the_default_wave() -> None:
    """The blocking form: each call of the model is a request of its own, of one walk."""

    def work(rank: Rank) -> object:
        before = joined(rank)
        outcome, seen = call_directly(rank)
        assert_nothing_left(before)
        return outcome, seen

    def call_directly(rank: Rank) -> tuple[Outcome, Seen]:
        model = Denoiser()
        wave = {"steps": (("Denoiser", 1),)}
        given = options(ranks={"default_wave": wave}, max_running_requests=1)
        groups = RankGroups(data_parallel=torch.distributed.group.WORLD)
        with streamflow.offload(model, given, ranks=groups) as offload:
            outcome = Outcome(asked_of(rank.rank).make(model))
            return outcome, Seen.of(offload.statistics())

    answers = run_ranks(2, work)
    assert_own_pictures([outcome for outcome, _ in answers], [(0, 0), (1, 0)])
    for _, seen in answers:
        assert_gathered(seen, num_walks=STEPS, num_passes=STEPS)


TOKENS = ([1, 5, 2], [3, 3, 7, 0])
BY_ITSELF = OffloadPlan(
    stacks=("transformer.blocks", "transformer_2.blocks"),
    encoder_stacks=("text_encoder.layers",),
    on_demand=("vae",),
)


@pytest.mark.parametrize(
    "plan",
    [None, BY_ITSELF],
    ids=["the encoder comes as a whole", "the encoder streams by itself"],
)
def test_pipelines_with_two_experts_walk_together(plan: OffloadPlan | None) -> None:
    """Two steps by the first expert and three by the second; encoder and VAE are each rank's own."""
    wave = WaveSignature((("transformer", 2), ("transformer_2", 3)))

    async def scenario(member: Member) -> tuple[list[Outcome], Seen]:
        outcomes, tokens = [], TOKENS[member.rank.rank]
        for seed in (7, 8):
            request = member.offload.request(wave=wave)
            picture = request.run(member.model, tokens, num_steps=5, seed=seed + 10 * member.rank.rank)
            outcome = await outcome_of(picture)
            outcomes.append(attrs.evolve(outcome, value=sha256_of(outcome.value)))
        return outcomes, member.seen()

    def work(rank: Rank) -> object:
        def build() -> object:
            return toy_pipeline(experts=2)

        return live(rank, scenario, backend=backend_of(rank), build=build, plan=plan, max_running_requests=1)

    answers = run_ranks(2, work)
    pipeline = toy_pipeline(experts=2)
    digests = []
    for rank, (outcomes, seen) in enumerate(answers):
        for outcome, seed in zip(outcomes, (7, 8), strict=True):
            picture = in_worker(partial(pipeline, TOKENS[rank], num_steps=5, seed=seed + 10 * rank))
            assert outcome.value == sha256_of(picture), outcome
            digests.append(outcome.value)
        num_own = 0 if plan is None else 2
        assert (seen.transfer, seen.num_walks, seen.num_passes) == ("gathered", 10 + num_own, 10 + num_own)
    assert len(set(digests)) == 4


def test_a_request_that_has_the_model_for_itself_does_not_wait_for_others_beside_it() -> None:
    """Of a stateful model a request keeps it: no other one of the rank can come to wait, however long the window is."""

    async def scenario(member: Member) -> list[Outcome]:
        outcomes = await ask_all(member, [asked_of(member.rank.rank, number) for number in range(2)])
        await member.meet("done")
        return outcomes

    def work(rank: Rank) -> object:
        changes = {"stateful_modules": ("condition",), "max_running_requests": 2, "ranks": {"wave_window_s": 30}}
        return live(rank, scenario, backend=backend_of(rank), **changes)

    for rank, outcomes in enumerate(run_ranks(2, work)):
        assert_own_pictures(outcomes, [(rank, 0), (rank, 1)])
        assert max(outcome.seconds for outcome in outcomes) < 20
