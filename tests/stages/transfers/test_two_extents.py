"""The seam of transfers, second proof: an image put together from two extents, each on a stream of its own.

Two ranks that each bring a slice, or two links, look like this: the slot holds the image once both parts are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import pytest
import torch

from streamflow.stages.devices.base import Device, Event, Stream
from streamflow.stages.images import BlockImage
from streamflow.stages.opening import EngineOptions, OpenTransfer
from streamflow.stages.testing.blocks import ToyBlocks, toy_blocks
from streamflow.stages.testing.trials import first_failure
from streamflow.stages.testing.walker import WrongBytesError, open_walker
from streamflow.stages.threads import ThreadCrew
from streamflow.stages.transfers.base import Issued, Transfer
from tests.corners import CORNERS


class TwoExtentTransfer:
    """Copies the first third of an image on ``first`` and the rest on ``second``."""

    name = "two extents"
    scratch_bytes = 0
    staging_bytes = 0

    def __init__(self, first: Stream, second: Stream) -> None:
        self._first = first
        self._second = second

    def fetch(self, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> Issued:
        assert image.memory is not None
        cut = image.nbytes // 3
        self._copy(self._first, slot[:cut], image.memory[:cut], after)
        self._copy(self._second, slot[cut : image.nbytes], image.memory[cut:], after)
        self._join()
        return Issued(self._second.record())

    def _copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]) -> None:
        for event in after:
            stream.wait(event)
        stream.copy(target, source)

    def _join(self) -> None:
        self._second.wait(self._first.record())

    def close(self) -> None:
        pass


def open_two_extents(blocks: ToyBlocks) -> OpenTransfer:
    async def open_it(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
        return TwoExtentTransfer(stream, device.open_copy_stream("second copy"))

    return open_it


@pytest.mark.anyio
@pytest.mark.parametrize(("num_blocks", "window"), CORNERS)
async def test_images_of_two_extents_arrive_exact(device: Device, num_blocks: int, window: int) -> None:
    blocks = toy_blocks([[100 + 500 * (i % 5), 256, 1 + i] for i in range(num_blocks)])
    options = EngineOptions(window, poison_freed_slots=True)
    passes = [list(range(num_blocks))] * 3
    with anyio.fail_after(20):
        async with open_walker(device, blocks, options, open_two_extents(blocks)) as walker:
            assert await walker.run(passes) == 3 * num_blocks
            statistics = walker.engine.statistics()
    assert statistics.streamed_bytes >= blocks.nbytes
    assert statistics.device_peak_bytes == statistics.window_bytes


def the_parts_are_not_joined(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TwoExtentTransfer, "_join", lambda self: None)


def one_part_does_not_wait_for_the_slot(patch: pytest.MonkeyPatch) -> None:
    def copy(
        self: TwoExtentTransfer, stream: Stream, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event]
    ) -> None:
        original(self, stream, target, source, after if stream is self._first else ())

    original = TwoExtentTransfer._copy
    patch.setattr(TwoExtentTransfer, "_copy", copy)


@pytest.mark.anyio
@pytest.mark.parametrize("plant", [the_parts_are_not_joined, one_part_does_not_wait_for_the_slot])
async def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    num_seeds = 60
    with anyio.fail_after(60):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            caught = await first_failure(range(num_seeds), open_two_extents)
        assert caught is not None, f"nothing was seen in {num_seeds} seeds"
        assert isinstance(caught.failure, WrongBytesError), f"{caught.trial}: seen as {caught.failure!r}"
        assert await first_failure(range(caught.trial.seed + 1), open_two_extents) is None
