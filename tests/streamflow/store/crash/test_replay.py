"""Every disk that a stopped machine may leave leads to a sound entry or none; leaving out any one sync is noticed."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import anyio
import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.streamflow.store.crash.disk import Stopped, Unsynced, tree_of
from tests.streamflow.store.crash.kit import opened, publish_source, tiny
from tests.streamflow.store.crash.recording import Recorder, put
from tests.streamflow.store.crash.replaying import (
    Replay,
    Scenario,
    after_the_next_rename,
    evict,
    nothing,
    publish,
    publish_known,
    publish_other,
    publish_truncated,
    quarantine,
    record,
    record_after_a_kill,
    refuse_reports,
    syncs,
    without,
)


@attrs.frozen
class Case:
    """A scenario, and the syncs without which it goes well all the same; each is needed in another scenario."""

    scenario: Scenario
    spare: frozenset[str] = frozenset({"root 1"})


REPORTING = {"quarantine 1", "quarantine 2", "report 1"}
CASES = {
    "cold": Case(Scenario(nothing, publish, "there")),
    "second": Case(Scenario(publish_other, publish, "there")),
    # the new generation does not care what became of the damaged one, and its entry and source had names before
    "rebuild": Case(
        Scenario(publish_truncated, publish_known, "there", was_damaged=True),
        frozenset({"root 1", "entry 1", "entries 1", "sources 1", *REPORTING}),
    ),
    "evict": Case(Scenario(publish, evict, "gone")),
    # the report brings its folder's names to the disk again
    "quarantine": Case(Scenario(publish, quarantine, "aside"), frozenset({"root 1", "quarantine 1"})),
    "no room for a report": Case(Scenario(publish, quarantine, "aside", refuse=refuse_reports)),
}
each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_every_legal_state_leads_to_a_sound_entry_or_none(name: str, tmp_path: Path) -> None:
    """Of every number of operations all subsets, torn writes among them; none is left to chance: there are not so many.

    What is unfinished in ``tmp/`` counts by its name only, since nobody reads it.
    """

    async def replay() -> None:
        recorder = await record(tmp_path, CASES[name].scenario)
        replay = Replay(tmp_path, recorder.before, CASES[name].scenario)
        assert await replay.first_problem(recorder.log) is None
        assert sum(1 for _ in replay.states(recorder.log)) > replay.num_judged > 10

    anyio.run(replay)


@each_case
def test_each_sync_that_is_left_out_or_comes_too_late_is_noticed(name: str, tmp_path: Path) -> None:
    case = CASES[name]

    async def replay() -> set[str]:
        recorder = await record(tmp_path, case.scenario)
        replay = Replay(tmp_path, recorder.before, case.scenario)
        unnoticed = set()
        for what, index in syncs(recorder).items():
            if await replay.first_problem(without(recorder.log, index), since=index) is None:
                unnoticed.add(what)
            elif what in LATE:
                late = after_the_next_rename(recorder.log, index)
                assert await replay.first_problem(late, since=index) is not None, f"{what} may come later"
        return unnoticed

    assert anyio.run(replay) == case.spare


#: Syncs that have to be over before what they are about gets its name.
LATE = {"generation 1", "lease 1", "manifest.json 1", "weights-00001.safetensors 1", "store.json 1"}


@pytest.mark.slow
def test_after_a_kill_the_next_publication_makes_certain_what_it_finds(tmp_path: Path) -> None:
    """Names that a dead process gave may not be on the disk; who publishes what is there must not rely on them."""
    # a folder that was not hardened when its publisher died may be read, and stays as it is
    case = Scenario(nothing, publish_known, "there", is_hardened=False)

    async def after(at: int) -> bool | None:
        """Whether leaving out the first sync is noticed; None: the dead one had not so many operations."""
        folder = tmp_path / str(at)
        folder.mkdir()
        recorded = await record_after_a_kill(folder, at)
        if recorded is None:
            return None
        recorder, begins = recorded
        replay, log = Replay(folder, recorder.before, case), recorder.log
        assert await replay.first_problem(log, since=len(log)) is None, f"killed at {at}"
        first = min(index for index in syncs(recorder).values() if index >= begins)
        return await replay.first_problem(without(log, first), since=len(log) - 1) is not None

    noticed = []
    while (result := anyio.run(after, len(noticed))) is not None:
        noticed.append(result)
    assert len(noticed) > 50
    assert any(noticed)


def stopped(recorder: Recorder, data: st.DataObject) -> Stopped:
    """One of the states after one of the numbers of operations."""
    unsynced = Unsynced(recorder.before)
    for operation in recorder.log[: data.draw(st.integers(0, len(recorder.log)), label="stopped after")]:
        unsynced.add(operation)
    chance = random.Random(data.draw(st.integers(0, 1000), label="seed"))
    states = itertools.islice(
        unsynced.states(lambda path: True, chance), data.draw(st.integers(0, 400), label="state"), None
    )
    return next(states, None) or next(unsynced.states(lambda path: True, chance))


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_model_stopped_anywhere(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A draw of all states, contents of ``tmp/`` among them, for models of any number of images and files."""
    sizes = data.draw(st.lists(st.integers(17, 400), min_size=1, max_size=5), label="sizes")
    max_file_bytes = data.draw(st.sampled_from([1, 200_000, 1 << 30]), label="max_file_bytes")
    model, folder = tiny(seed=len(sizes), sizes=tuple(sizes)), tmp_path_factory.mktemp("replay")

    async def run() -> None:
        (folder / "disk").mkdir()
        recorder = Recorder(folder / "disk")
        async with opened(folder / "disk" / "store", recorder, max_file_bytes=max_file_bytes) as store:
            (await publish_source(store, model)).close()
        put(tree_of(stopped(recorder, data).disk), folder / "after")
        async with opened(folder / "after" / "store") as store:
            found = await store.content_of("source")
            lease = None if found is None else await store.lease(found)
            if lease is None:
                lease = await publish_source(store, model)
            with lease:
                assert model.is_in(lease)

    anyio.run(run)
