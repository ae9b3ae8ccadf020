"""What adds up: memory, open files and locks over many openings; memory of several processes; pages before the first
walk.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import anyio
import pytest

import streamflow
from streamflow.store.reports import StoreOutcome
from streamflow.tools.bench.memory import measure_memory
from streamflow.tools.bench.process_memory import mapping_kinds
from tests.streamflow.host_weights.kit import CASE, Stored, report_of
from tests.streamflow.kit import compare, resident_digests
from tests.streamflow.models import CALLS, Case, Mlp, Stack, seeded

#: 800 KB of weights: a copy of them that is left behind every time would be found.
LARGER = Case("larger", lambda: seeded(lambda: Stack(Mlp(1024) for _ in range(6))), CALLS)
WARM_UP, CYCLES = 40, 200
#: What the allocator may keep back and forth; a copy of the weights in each cycle would be 120 MB.
SLACK_BYTES = 8 << 20


def anonymous_bytes() -> int:
    """This process's private memory that no file backs (RssAnon)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel tells no RssAnon")


def num_locks() -> int:
    """File locks that this process holds."""
    lines = Path("/proc/locks").read_text().splitlines()
    return sum(line.split()[4:5] == [str(os.getpid())] for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_two_hundred_cycles_leave_memory_files_and_locks_as_they_were(tmp_path: Path) -> None:
    stored = Stored(tmp_path, LARGER)
    stored.save()
    expected = resident_digests(LARGER.build(), CALLS[:1])
    gc.collect()  # what other tests have left goes now, and not between two readings
    seen = []
    for cycle in range(CYCLES):
        if cycle % 4:
            async with stored.streamed("preferred") as (offload, model):
                await compare(offload, model, CALLS[:1], expected)
        else:
            model = LARGER.build()
            async with streamflow.open_offload(model, stored.config("preferred")) as offload:
                await compare(offload, model, CALLS[:1], expected)
        del model, offload
        if cycle in (WARM_UP, WARM_UP + 1, CYCLES - 4, CYCLES - 3):
            seen.append((anonymous_bytes(), len(os.listdir("/proc/self/fd")), num_locks()))
    for before, after in zip(seen[:2], seen[2:], strict=True):
        assert after[0] - before[0] < SLACK_BYTES
        assert after[1:] == before[1:]
    assert seen[-1][2] == 0


@pytest.mark.anyio
async def test_before_the_first_walk_nothing_of_the_entry_is_in_memory(tmp_path: Path) -> None:
    """Nor does opening read it into pages of this process: what is mapped is not touched."""
    stored = Stored(tmp_path)
    stored.save()
    gc.collect()  # models of other tests that show entries of theirs
    for mode in ("preferred", "required"):
        async with stored.streamed(mode) as (offload, _):
            assert report_of(offload).outcome in (StoreOutcome.PUBLISHED, StoreOutcome.LOCAL_HIT)
            assert mapping_kinds("weights-").get("Rss", 0) == 0
    model = CASE.build()
    async with streamflow.open_offload(model, stored.config("preferred")) as offload:
        assert report_of(offload).remapped
        kinds = mapping_kinds("weights-")
        assert kinds["Size"] > 0
        assert kinds["Rss"] == 0
        await offload.run(model, *CASE.calls[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("nbytes", [64_000_000, 512_000_000], ids=["64MB", "512MB"])
def test_two_processes_hold_one_copy(nbytes: int, tmp_path: Path) -> None:
    reading = anyio.run(measure_memory, tmp_path, nbytes, 2)
    assert reading.is_met, reading
    assert reading.artifact_bytes >= nbytes * 0.95
    assert sorted(reading.outcomes) == [StoreOutcome.LOCAL_HIT, StoreOutcome.PUBLISHED]
    assert reading.private_bytes == 0
