"""Ranks of one loop, over a control star in memory: they walk together, and each failure names its rank in time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import attrs
import pytest

from streamflow.stages.ranks.coordinator import Coordinator, open_coordinator
from streamflow.stages.ranks.errors import (
    RankClosedError,
    RankError,
    RankFailedError,
    RankLostError,
    RanksDisagreeError,
    WaveMismatchError,
    WaveTimeoutError,
)
from streamflow.stages.ranks.options import WaveOptions
from streamflow.stages.ranks.signature import WaveSignature
from streamflow.stages.testing.control import MemoryStar
from streamflow.stages.testing.waves import ScriptedWaves
from streamflow.stages.threads import open_tasks, open_threads

pytestmark = pytest.mark.anyio

OPTIONS = WaveOptions(max_passes=2, window_s=0.05, deadline_s=5.0, rank_deadline_s=1.0, heartbeat_s=0.01)
LONG, SHORT = WaveSignature((("transformer", 3),)), WaveSignature((("transformer", 2),))
SIZES = pytest.mark.parametrize("size", [2, 4])


@attrs.define
class Rank:
    coordinator: Coordinator
    waves: ScriptedWaves
    changed: anyio.Event

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait for what the coordinator makes happen in the waves."""
        with anyio.fail_after(10):
            while not happened():
                await self.changed.wait()
                self.changed = anyio.Event()


class WatchedWaves(ScriptedWaves):
    """Scripted ones that say when anything was done to them, failures included."""

    def __init__(self, on_any: Callable[[], None]) -> None:
        super().__init__(anyio.current_time)
        self._on_any = on_any

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self._on_any()

    def refuse(self, *args: Any) -> None:
        super().refuse(*args)
        self._on_any()

    def end_after(self, num_walks: int) -> None:
        super().end_after(num_walks)
        self._on_any()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._on_any()


def attached(coordinator: Coordinator) -> Rank:
    rank: Rank
    waves = WatchedWaves(lambda: rank.changed.set())
    rank = Rank(coordinator, waves, anyio.Event())
    coordinator.attach(waves)
    return rank


@asynccontextmanager
async def open_ranks(star: MemoryStar, options: WaveOptions = OPTIONS) -> AsyncIterator[list[Rank]]:
    """All ranks of ``star``; they close together."""
    async with open_threads() as crew, AsyncExitStack() as stack:
        ranks = []
        for rank in range(star.size):
            coordinator = await stack.enter_async_context(open_coordinator(star.end(rank), crew, options))
            ranks.append(attached(coordinator))
        yield ranks


async def gathered(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each of the calls returns or raises."""
    outcomes: list[Any] = [None] * len(calls)

    async def note(index: int) -> None:
        try:
            outcomes[index] = await calls[index]()
        except RankError as failure:
            outcomes[index] = failure
        except RanksDisagreeError as failure:
            outcomes[index] = failure

    with anyio.fail_after(10):
        async with open_tasks() as tasks:
            for index in range(len(calls)):
                tasks.start_soon(note, index)
    return outcomes


async def walk_to_the_end(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        while rank.waves.can_walk():
            rank.waves.walk()


@SIZES
async def test_requests_of_all_ranks_walk_in_one_wave(size: int) -> None:
    async with open_ranks(MemoryStar(size)) as ranks:
        tickets = [rank.waves.add(LONG) for rank in ranks[1:]]
        for rank in ranks:
            await rank.until(lambda rank=rank: bool(rank.waves.begun))
        assert [rank.waves.begun[0].members for rank in ranks[1:]] == [{ticket} for ticket in tickets]
        assert ranks[0].waves.begun[0].members == set()
        await walk_to_the_end(ranks)
        ranks[0].waves.add(SHORT)
        for rank in ranks:
            await rank.until(lambda rank=rank: len(rank.waves.begun) == 2)
        await walk_to_the_end(ranks)
    assert [rank.waves.num_walks_done for rank in ranks] == [{1: 3, 2: 2}] * size
    assert [rank.waves.failure for rank in ranks] == [None] * size


async def test_a_request_that_differs_is_refused_by_name() -> None:
    async with open_ranks(MemoryStar(2)) as ranks:
        ranks[0].waves.add(LONG, "thirty steps")
        late = ranks[1].waves.add(SHORT, "two steps")
        await ranks[1].until(lambda: bool(ranks[1].waves.refused))
        error = ranks[1].waves.refused[late]
        await walk_to_the_end(ranks)
    assert isinstance(error, WaveMismatchError)
    assert (error.request, error.signature, error.wave_signature) == ("two steps", SHORT, LONG)
    assert error.founder == "request 'thirty steps' of rank 0"
    assert "steps" in error.differences


async def test_a_request_that_waits_too_long_is_timed_out() -> None:
    options = attrs.evolve(OPTIONS, deadline_s=0.2)
    async with open_ranks(MemoryStar(2), options) as ranks:
        ranks[0].waves.add(LONG)
        await ranks[1].until(lambda: bool(ranks[1].waves.begun))
        late = ranks[1].waves.add(LONG, "late")
        await ranks[1].until(lambda: bool(ranks[1].waves.refused))
        error = ranks[1].waves.refused[late]
        await walk_to_the_end(ranks)
    assert isinstance(error, WaveTimeoutError)
    assert error.request == "late"
    assert error.waited_s >= error.deadline_s == 0.2


async def test_a_wave_that_all_members_left_ends_early_everywhere() -> None:
    async with open_ranks(MemoryStar(3)) as ranks:
        ticket = ranks[1].waves.add(LONG)
        for rank in ranks:
            await rank.until(lambda rank=rank: bool(rank.waves.begun))
        ranks[2].waves.walk()
        ranks[1].waves.end(ticket)
        for rank in ranks:
            await rank.until(lambda rank=rank: rank.waves.progress().num_walks == 1)
        await walk_to_the_end(ranks)
    assert [rank.waves.num_walks_done for rank in ranks] == [{1: 1}] * 3


@SIZES
async def test_agreements_give_every_rank_all_values(size: int) -> None:
    async with open_ranks(MemoryStar(size)) as ranks:
        for name in ("first", "second"):
            calls = [lambda r=r, name=name: r.coordinator.agree(name, [r.coordinator.rank]) for r in ranks]
            assert await gathered(calls) == [[[rank] for rank in range(size)]] * size


async def test_agreements_of_different_names_are_an_error_on_all_ranks_and_the_next_one_works() -> None:
    async with open_ranks(MemoryStar(2)) as ranks:
        outcomes = await gathered([lambda r=r: r.coordinator.agree(f"name {r.coordinator.rank}", 0) for r in ranks])
        for outcome in outcomes:
            assert isinstance(outcome, RanksDisagreeError)
            assert "rank 0 has 'name 0', rank 1 has 'name 1'" in str(outcome)
        assert await gathered([lambda r=r: r.coordinator.agree("same", 0) for r in ranks]) == [[0, 0]] * 2


async def test_agreements_of_one_rank_take_turns() -> None:
    async with open_ranks(MemoryStar(2)) as ranks:
        answers: dict[str, list[Any]] = {}

        async def agree(name: str) -> None:
            answers[name] = await ranks[0].coordinator.agree(name, 0)

        async with open_tasks() as tasks:
            tasks.start_soon(agree, "a")
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(agree, "b")
            await anyio.wait_all_tasks_blocked()
            assert [await ranks[1].coordinator.agree(name, name) for name in ("a", "b")] == [[0, "a"], [0, "b"]]
        assert answers == {"a": [0, "a"], "b": [0, "b"]}


async def test_a_cancelled_agreement_is_withdrawn() -> None:
    async with open_ranks(MemoryStar(2)) as ranks:
        with anyio.move_on_after(0.05):
            await ranks[1].coordinator.agree("given up", 1)
        outcomes = await gathered([lambda r=r: r.coordinator.agree("next", r.coordinator.rank) for r in ranks])
        assert outcomes == [[0, 1]] * 2


async def test_what_json_cannot_hold_is_refused_before_anybody_hears_of_it() -> None:
    async with open_ranks(MemoryStar(2)) as ranks:
        with pytest.raises(TypeError):
            await ranks[0].coordinator.agree("values", object())


async def expect_lost(ranks: Sequence[Rank], lost: int, within_s: float = OPTIONS.rank_deadline_s) -> None:
    """All but ``lost`` raise from a waiting agreement, and their engines are broken, by errors that name it."""
    others = [rank for rank in ranks if rank.coordinator.rank != lost]
    started = anyio.current_time()
    outcomes = await gathered([lambda r=r: r.coordinator.agree("ready", 0) for r in others])
    assert anyio.current_time() - started < within_s + 0.5  # the machine may be busy
    for rank, outcome in zip(others, outcomes, strict=True):
        for error in (outcome, rank.waves.failure, rank.coordinator.failure):
            assert isinstance(error, RankLostError)
            assert error.rank == lost
        with pytest.raises(RankLostError):
            await rank.coordinator.agree("later", 0)


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_rank_that_dies_is_named_at_once(lost: int) -> None:
    star = MemoryStar(3)
    async with open_ranks(star) as ranks:
        star.kill(lost)
        await expect_lost(ranks, lost, within_s=0.2)


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_rank_that_is_silent_is_named_within_the_deadline(lost: int) -> None:
    star = MemoryStar(3)
    async with open_ranks(star) as ranks:
        star.silence(lost)
        await expect_lost(ranks, lost)


async def test_a_slow_rank_is_waited_for() -> None:
    star = MemoryStar(2)
    star.delay(1, 0.2)
    async with open_ranks(star) as ranks:
        assert await gathered([lambda r=r: r.coordinator.agree("ready", 0) for r in ranks]) == [[0, 0]] * 2


@pytest.mark.parametrize("failing", [0, 1])
async def test_an_engine_that_broke_is_a_failure_on_every_rank(failing: int) -> None:
    async with open_ranks(MemoryStar(2)) as ranks:
        ranks[failing].coordinator.report(OSError("no space left"))
        outcomes = await gathered([lambda r=r: r.coordinator.agree("ready", 0) for r in ranks])
    for rank, outcome in zip(ranks, outcomes, strict=True):
        for error in (outcome, rank.waves.failure):
            assert isinstance(error, RankFailedError)
            assert (error.rank, error.reason) == (failing, "OSError: no space left")


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_rank_that_raises_while_opening_tells_the_others(failing: int) -> None:
    star = MemoryStar(2)

    async def fail() -> None:
        async with open_threads() as crew, open_coordinator(star.end(failing), crew, OPTIONS):
            raise ValueError("wrong model")

    async def agree() -> object:
        async with open_threads() as crew, open_coordinator(star.end(1 - failing), crew, OPTIONS) as coordinator:
            return await coordinator.agree("opening", 0)

    caught: list[object] = []

    async def fail_and_note() -> None:
        try:
            await fail()
        except ValueError as error:
            caught.append(error)

    outcomes = await gathered([fail_and_note, agree])
    assert len(caught) == 1
    assert isinstance(outcomes[1], RankFailedError)
    assert (outcomes[1].rank, outcomes[1].reason) == (failing, "ValueError: wrong model")


class Bug(Exception):
    pass


@pytest.mark.parametrize("failing", [0, 1])
async def test_waves_that_raise_are_a_failure_of_their_rank(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_ranks(MemoryStar(2)) as ranks:

        def begin(*args: Any) -> None:
            raise Bug("in begin")

        monkeypatch.setattr(ranks[failing].waves, "begin", begin)
        ranks[0].waves.add(LONG)
        for rank in ranks:
            await rank.until(lambda rank=rank: rank.waves.failure is not None)
            assert rank.coordinator.failure is not None
            assert (rank.coordinator.failure.rank, rank.coordinator.failure.reason) == (failing, "Bug: in begin")


@pytest.mark.parametrize("first", [0, 1])
async def test_a_rank_that_closes_first_lets_the_others_finish_what_needs_no_rank(first: int) -> None:
    async with open_ranks(MemoryStar(2)) as ranks:
        await ranks[first].coordinator.close()
        other = ranks[1 - first]
        outcomes = await gathered([lambda: other.coordinator.agree("later", 0)])
        assert isinstance(outcomes[0], RankClosedError)
        assert outcomes[0].rank == first
        assert other.waves.failure is None
        ticket = other.waves.add(LONG)
        await other.until(lambda: ticket in other.waves.refused)
        assert isinstance(other.waves.refused[ticket], RankClosedError)


async def test_closing_waits_for_the_wave_under_way() -> None:
    async with open_ranks(MemoryStar(2)) as ranks:
        ranks[0].waves.add(LONG)
        for rank in ranks:
            await rank.until(lambda rank=rank: bool(rank.waves.begun))
        closed = anyio.Event()

        async def close() -> None:
            await ranks[1].coordinator.close()
            closed.set()

        async with open_tasks() as tasks:
            tasks.start_soon(close)
            await anyio.wait_all_tasks_blocked()
            waiting = ranks[0].waves.add(LONG)
            await walk_to_the_end(ranks[:1])
            assert not closed.is_set()
            await walk_to_the_end(ranks[1:])
            await closed.wait()
        await ranks[0].until(lambda: waiting in ranks[0].waves.refused)
    assert [rank.waves.failure for rank in ranks] == [None, None]
    assert [rank.waves.num_walks_done for rank in ranks] == [{1: 3}] * 2


async def test_a_wave_that_does_not_end_holds_closing_no_longer_than_the_deadline() -> None:
    async with open_ranks(MemoryStar(2)) as ranks:
        ranks[0].waves.add(LONG)
        for rank in ranks:
            await rank.until(lambda rank=rank: bool(rank.waves.begun))
        started = anyio.current_time()
        await ranks[1].coordinator.close()
        assert OPTIONS.rank_deadline_s <= anyio.current_time() - started < 3 * OPTIONS.rank_deadline_s
        await ranks[0].until(lambda: ranks[0].waves.failure is not None)
    failure = ranks[0].waves.failure
    assert isinstance(failure, RankClosedError)
    assert failure.rank == 1


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_a_cancelled_rank_tells_the_others_before_it_goes(cancelled: int) -> None:
    star = MemoryStar(2)

    async def be_cancelled() -> None:
        with anyio.move_on_after(0.1):
            async with open_threads() as crew, open_coordinator(star.end(cancelled), crew, OPTIONS) as coordinator:
                attached(coordinator)
                await anyio.sleep_forever()

    async def agree() -> object:
        async with open_threads() as crew, open_coordinator(star.end(1 - cancelled), crew, OPTIONS) as coordinator:
            return await coordinator.agree("opening", 0)

    outcomes = await gathered([be_cancelled, agree])
    assert isinstance(outcomes[1], RankClosedError)
    assert outcomes[1].rank == cancelled


async def test_closing_that_is_cancelled_does_not_wait_for_the_wave() -> None:
    options = attrs.evolve(OPTIONS, rank_deadline_s=5.0)
    async with open_ranks(MemoryStar(2), options) as ranks:
        ranks[0].waves.add(LONG)
        for rank in ranks:
            await rank.until(lambda rank=rank: bool(rank.waves.begun))
        started = anyio.current_time()
        with anyio.move_on_after(0.05) as scope:
            await ranks[1].coordinator.close()
        assert scope.cancelled_caught
        assert anyio.current_time() - started < 2.5
        await ranks[0].until(lambda: ranks[0].waves.failure is not None)


@pytest.mark.parametrize("silent", [0, 1])
async def test_cancellation_beside_a_silent_rank_ends_within_the_deadline(silent: int) -> None:
    star = MemoryStar(2)
    async with open_threads() as crew:
        star.silence(silent)
        with anyio.move_on_after(0.1) as scope:
            async with open_coordinator(star.end(1 - silent), crew, OPTIONS):
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert anyio.current_time() - scope.deadline < OPTIONS.rank_deadline_s + 0.5


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("cancelled", [0, 1])
async def test_a_rank_cancelled_by_asyncio_tells_the_others_before_it_goes(cancelled: int) -> None:
    star = MemoryStar(2)

    async def sleep() -> None:
        async with open_threads() as crew, open_coordinator(star.end(cancelled), crew, OPTIONS):
            await anyio.sleep_forever()

    async with open_threads() as crew, open_coordinator(star.end(1 - cancelled), crew, OPTIONS) as coordinator:
        task = asyncio.create_task(sleep())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 0.1)
        with pytest.raises(RankClosedError) as caught:
            await coordinator.agree("later", 0)
    assert caught.value.rank == cancelled


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_rank_cancelled_by_asyncio_does_not_wait_for_the_wave_under_way() -> None:
    options = attrs.evolve(OPTIONS, rank_deadline_s=10.0)
    star = MemoryStar(2)

    async def take_part() -> None:
        async with open_threads() as crew, open_coordinator(star.end(1), crew, options) as coordinator:
            attached(coordinator).waves.add(LONG)
            await anyio.sleep_forever()

    async with open_threads() as crew, open_coordinator(star.end(0), crew, options) as coordinator:
        rank = attached(coordinator)
        task = asyncio.create_task(take_part())
        await rank.until(lambda: bool(rank.waves.begun))
        started = anyio.current_time()
        task.cancel()
        await asyncio.wait([task])
        assert anyio.current_time() - started < 5.0
        await rank.until(lambda: rank.waves.failure is not None)
    assert task.cancelled()
    assert isinstance(rank.waves.failure, RankClosedError)


@pytest.mark.parametrize("seed", range(3))
async def test_every_request_ends_whatever_comes(seed: int) -> None:
    """Requests come, end and differ at random; a rank dies, or closes, or fails: nobody waits for ever."""
    randomness = random.Random(seed)
    star = MemoryStar(3)
    star.delay(randomness.randrange(3), 0.02)
    num_requests = 0

    async def use(rank: Rank) -> None:
        nonlocal num_requests
        for _ in range(6):
            num_requests += 1
            await request(rank, rank.waves.add(randomness.choice([LONG, LONG, SHORT])))
            await anyio.sleep(randomness.random() * 0.05)

    async def request(rank: Rank, ticket: int) -> None:
        waves = rank.waves
        await rank.until(lambda: ticket not in {request.ticket for request in waves.waiting()})
        if randomness.random() < 0.3:
            waves.end(ticket)
        await rank.until(lambda: ticket not in waves.live)

    async def walk(rank: Rank) -> None:
        while rank.waves.failure is None:
            if rank.waves.can_walk():
                rank.waves.walk()
                rank.changed.set()
            await anyio.sleep(0.002)

    with anyio.fail_after(20):
        async with open_ranks(star) as ranks, open_tasks() as walkers:
            for rank in ranks:
                walkers.start_soon(walk, rank)
            async with open_tasks() as users:
                for rank in ranks:
                    users.start_soon(use, rank)
                await anyio.sleep(0.3)
                [star.kill, lambda r: ranks[r].coordinator.report(OSError("broke")), star.silence][seed](seed)
            walkers.cancel_scope.cancel()
    assert num_requests == 18
    assert {
        rank.coordinator.failure and rank.coordinator.failure.rank for rank in ranks if rank is not ranks[seed]
    } == {seed}


async def test_waves_that_are_attached_after_a_failure_are_broken_at_once() -> None:
    star = MemoryStar(2)
    async with open_threads() as crew, open_coordinator(star.end(1), crew, OPTIONS) as coordinator:
        star.kill(0)
        with pytest.raises(RankLostError):
            await coordinator.agree("opening", 0)
        assert isinstance(attached(coordinator).waves.failure, RankLostError)


async def test_blame_names_the_lost_rank() -> None:
    star = MemoryStar(3)
    async with open_threads() as crew, open_ranks(star) as ranks:
        star.silence(2)
        error = await crew.call(lambda: ranks[1].coordinator.blame(OSError("gather timed out")))
    assert isinstance(error, RankLostError)
    assert error.rank == 2


async def test_a_gather_that_failed_while_all_ranks_go_on_is_a_failure_of_its_rank() -> None:
    async with open_threads() as crew, open_ranks(MemoryStar(2)) as ranks:
        error = await crew.call(lambda: ranks[1].coordinator.blame(OSError("gather timed out")))
        await ranks[0].until(lambda: ranks[0].waves.failure is not None)
        assert isinstance(ranks[0].waves.failure, RankFailedError)
        for failure in (error, ranks[0].waves.failure):
            assert isinstance(failure, RankFailedError)
            assert (failure.rank, failure.reason) == (1, "OSError: gather timed out")
