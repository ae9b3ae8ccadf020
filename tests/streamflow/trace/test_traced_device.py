"""A traced device is the device: it keeps every promise, and an engine on it is exact in every order of execution."""

from __future__ import annotations

from collections import Counter

import pytest

from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.devices.cuda import CudaDevice
from streamflow.stages.opening import EngineOptions
from streamflow.stages.ranks.slices import plan_gather
from streamflow.stages.testing.blocks import in_pieces, toy_blocks
from streamflow.stages.testing.scripted_ranks import ScriptedRanks
from streamflow.stages.testing.sim import SimDevice
from streamflow.stages.testing.walker import open_direct, open_staged, open_walker
from streamflow.stages.threads import ThreadCrew
from streamflow.stages.timing import HostClock
from streamflow.stages.transfers.base import Transfer
from streamflow.stages.transfers.gathered import StagingOptions, open_gathered
from streamflow.trace.engine import RecordedEngine
from streamflow.trace.records import CopyRecord, GatherRecord, RunRecord
from streamflow.trace.ring import Ring
from tests.stages.devices.test_conformance import *  # noqa: F403 - every test of it, on the devices below

pytestmark = pytest.mark.anyio

BLOCKS = in_pieces(toy_blocks([[700, 30], [256], [999, 1, 5], [2000], [64]]))


def recorder(capacity: int = 10_000) -> RecordedEngine:
    return RecordedEngine(0, {"toy": BLOCKS.images}, Ring(capacity), HostClock())


@pytest.fixture(params=["cpu", "sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    """A traced device, not opened."""
    inner = {"cpu": CpuDevice, "sim": lambda: SimDevice(0), "cuda": CudaDevice}[request.param]()
    return recorder().device(inner)


@pytest.mark.parametrize("opener", [open_direct, open_staged])
async def test_an_engine_that_is_recorded_stays_exact(opener: object) -> None:
    for seed in range(20):
        component = recorder()
        open_transfer = component.opener(opener(BLOCKS))  # type: ignore[operator]
        traced = component.device(SimDevice(seed))
        async with open_walker(traced, BLOCKS, EngineOptions(2, num_places=2), open_transfer) as walker:
            component.attach(walker.engine)
            assert await walker.run([range(5), [4, 0, 2]], [range(5)]) == 13
        records = [entry.record for entry in component._ring.snapshot()[0]]
        runs = [record for record in records if isinstance(record, RunRecord)]
        assert Counter(run.block for run in runs) == {0: 3, 1: 2, 2: 3, 3: 2, 4: 3}
        copies = [record for record in records if isinstance(record, CopyRecord)]
        assert all(copy.end.seconds() is not None for copy in copies)
        by_fetch: Counter[int | None] = Counter()
        for copy in copies:
            by_fetch[copy.fetch] += copy.nbytes
        for run in runs:
            image = BLOCKS.images[run.block]  # chunks hold the holes between their pieces, too
            assert sum(piece.nbytes for piece in image.pieces) <= by_fetch[run.fetch] <= image.nbytes


@pytest.mark.parametrize("staged", [None, StagingOptions(2, 256)], ids=["direct", "staged"])
async def test_gathers_belong_to_their_fetch_whatever_thread_queues_them(staged: StagingOptions | None) -> None:
    async def open_alone(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
        (communicator,) = ScriptedRanks(1).communicators
        images = list(BLOCKS.images.values())
        return await open_gathered(device, stream, crew, images, communicator, chunk_bytes=512, staged=staged)

    component = recorder()
    traced = component.device(CpuDevice())
    async with open_walker(traced, BLOCKS, EngineOptions(2), component.opener(open_alone)) as walker:
        component.attach(walker.engine)
        assert await walker.run([range(5)]) == 5
    records = [entry.record for entry in component._ring.snapshot()[0]]
    gathers = [record for record in records if isinstance(record, GatherRecord)]
    assert [gather.number for gather in gathers] == list(range(len(gathers)))
    assert {r.stream for r in records if isinstance(r, CopyRecord)} == {"copy"}
    meeting, *gathers = gathers
    assert (meeting.block, meeting.fetch) == (None, None)
    expected = {block: len(plan_gather(image.nbytes, 1, 512).chunks) for block, image in BLOCKS.images.items()}
    by_fetch = Counter((gather.block, gather.fetch) for gather in gathers)
    assert {block for block, _ in by_fetch} == set(expected)
    assert all(number == expected[block] for (block, _), number in by_fetch.items())
