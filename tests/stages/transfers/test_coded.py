"""The seam of transfers, first proof: a coded stored form, device scratch, an unpacking step on a stream of its own.

Coded images are a header and the image's bytes xor-ed with a key that the header holds. The coded bytes are copied into
scratch on the copy stream; the unpacking stream turns scratch into the slot's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import attrs
import pytest
import torch

from streamflow.stages.devices.base import Device, Event, Stream
from streamflow.stages.images import BlockImage
from streamflow.stages.opening import EngineOptions, OpenTransfer
from streamflow.stages.testing.blocks import ToyBlocks, toy_blocks
from streamflow.stages.testing.queues import SimLeftoverError
from streamflow.stages.testing.trials import first_failure
from streamflow.stages.testing.walker import WrongBytesError, open_walker
from streamflow.stages.threads import ThreadCrew
from streamflow.stages.transfers.base import Issued, Transfer
from tests.corners import CORNERS

HEADER_BYTES = 16
NUM_SCRATCH = 2


@attrs.frozen(eq=False)
class CodedPiece:
    """A whole image in its stored form: ``coded`` is the header (key first) and the coded bytes."""

    coded: torch.Tensor

    offset_bytes = 0
    splittable = False

    @property
    def nbytes(self) -> int:
        return self.stored_bytes - HEADER_BYTES

    @property
    def stored_bytes(self) -> int:
        return self.coded.numel()

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        raise NotImplementedError("coded bytes are unpacked on the device only")


@attrs.define(eq=False)
class Scratch:
    """Room on the device for one coded image, and the unpacking that reads it last."""

    memory: torch.Tensor
    reader: Event | None = None


class XorCodedTransfer:
    """Copies coded images into scratch on ``copies``, and unpacks them into slots on ``unpacking``."""

    name = "xor-coded"
    staging_bytes = 0

    def __init__(self, device: Device, copies: Stream, unpacking: Stream, scratch_bytes: int) -> None:
        self._device = device
        self._copies = copies
        self._unpacking = unpacking
        self._scratch = [Scratch(device.allocate(scratch_bytes)) for _ in range(NUM_SCRATCH)]
        self._num_fetches = 0
        self.scratch_bytes = NUM_SCRATCH * scratch_bytes

    def fetch(self, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> Issued:
        (piece,) = image.pieces
        assert isinstance(piece, CodedPiece)
        scratch = self._scratch[self._num_fetches % NUM_SCRATCH]
        self._num_fetches += 1
        copied = self._copy(piece, scratch)
        for event in (copied, *after):
            self._unpacking.wait(event)
        self._unpacking.submit(lambda: unpack(scratch.memory[: piece.stored_bytes], slot[: piece.nbytes]))
        scratch.reader = self._unpacking.record()
        return Issued(scratch.reader)

    def _copy(self, piece: CodedPiece, scratch: Scratch) -> Event:
        if scratch.reader is not None:
            self._copies.wait(scratch.reader)
        self._copies.copy(scratch.memory[: piece.stored_bytes], piece.coded)
        return self._copies.record()

    def close(self) -> None:
        for scratch in self._scratch:
            self._device.free(scratch.memory)
        self._scratch.clear()


def unpack(coded: torch.Tensor, into: torch.Tensor) -> None:
    """Undo the code, on the device: the key is the first byte of the header."""
    torch.bitwise_xor(coded[HEADER_BYTES:], coded[:1], out=into)


def coded(blocks: ToyBlocks) -> ToyBlocks:
    """The same blocks in their coded form, each with a key of its own."""
    images = {}
    for block, image in blocks.images.items():
        header = torch.full((HEADER_BYTES,), (17 + 31 * block) % 256, dtype=torch.uint8)
        stored = torch.cat([header, blocks.expected[block] ^ header[0]])
        images[block] = BlockImage(image.name, image.layout, (CodedPiece(stored),))
    return ToyBlocks(images, blocks.expected)


def open_coded(blocks: ToyBlocks) -> OpenTransfer:
    async def open_it(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
        scratch_bytes = max(image.stored_bytes for image in blocks.images.values())
        return XorCodedTransfer(device, stream, device.open_copy_stream("unpacking"), scratch_bytes)

    return open_it


def open_coding(blocks: ToyBlocks) -> OpenTransfer:
    """For trials, whose blocks are not coded: fetches look their coded image up."""

    async def open_it(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
        transfer = await open_coded(stored)(device, stream, crew)
        by_name = {image.name: image for image in stored.images.values()}
        fetch = transfer.fetch
        transfer.fetch = lambda image, slot, after: fetch(by_name[image.name], slot, after)  # type: ignore[method-assign]
        return transfer

    stored = coded(blocks)
    return open_it


@pytest.mark.anyio
@pytest.mark.parametrize(("num_blocks", "window"), CORNERS)
async def test_coded_images_arrive_exact(device: Device, num_blocks: int, window: int) -> None:
    blocks = coded(toy_blocks([[100 + 500 * (i % 5), 256, 1 + i] for i in range(num_blocks)]))
    options = EngineOptions(window, poison_freed_slots=True)
    passes = [list(range(num_blocks))] * 3
    with anyio.fail_after(20):
        async with open_walker(device, blocks, options, open_coded(blocks)) as walker:
            assert await walker.run(passes) == 3 * num_blocks
            statistics = walker.engine.statistics()
    stored = max(image.stored_bytes for image in blocks.images.values())
    assert stored == blocks.largest + HEADER_BYTES
    assert statistics.scratch_bytes == NUM_SCRATCH * stored
    assert statistics.streamed_bytes >= blocks.nbytes
    assert statistics.device_peak_bytes == statistics.window_bytes + statistics.scratch_bytes


@pytest.mark.anyio
async def test_coded_residents_arrive_exact(device: Device) -> None:
    blocks = coded(toy_blocks([[700 * (1 + i % 5)] for i in range(7)]))
    async with open_walker(device, blocks, EngineOptions(2), open_coded(blocks), residents=[0, 3, 6]) as walker:
        assert await walker.run([list(range(7))] * 3) == 21
        assert walker.engine.statistics().resident_bytes > 0


@pytest.mark.anyio
async def test_closing_waits_for_an_unpacking_that_nobody_waited_for(device: Device) -> None:
    """The last fetch ends on the transfer's own stream: closing must not free the slot under it."""
    blocks = coded(toy_blocks([[1000]] * 4))
    async with open_walker(device, blocks, EngineOptions(2), open_coded(blocks)) as walker:
        await walker.run([[0]])


def unpacking_does_not_wait_for_the_copy(patch: pytest.MonkeyPatch) -> None:
    def copy(self: XorCodedTransfer, piece: CodedPiece, scratch: Scratch) -> Event:
        early = self._copies.record()
        original(self, piece, scratch)
        return early

    original = XorCodedTransfer._copy
    patch.setattr(XorCodedTransfer, "_copy", copy)


def scratch_is_used_again_early(patch: pytest.MonkeyPatch) -> None:
    def copy(self: XorCodedTransfer, piece: CodedPiece, scratch: Scratch) -> Event:
        scratch.reader = None
        return original(self, piece, scratch)

    original = XorCodedTransfer._copy
    patch.setattr(XorCodedTransfer, "_copy", copy)


def unpacking_does_not_wait_for_the_slot(patch: pytest.MonkeyPatch) -> None:
    def fetch(self: XorCodedTransfer, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> Issued:
        return original(self, image, slot, ())

    original = XorCodedTransfer.fetch
    patch.setattr(XorCodedTransfer, "fetch", fetch)


def the_fetch_ends_with_the_copy(patch: pytest.MonkeyPatch) -> None:
    def fetch(self: XorCodedTransfer, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> Issued:
        original(self, image, slot, after)
        return Issued(self._copies.record())

    original = XorCodedTransfer.fetch
    patch.setattr(XorCodedTransfer, "fetch", fetch)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "plant",
    [
        unpacking_does_not_wait_for_the_copy,
        scratch_is_used_again_early,
        unpacking_does_not_wait_for_the_slot,
        the_fetch_ends_with_the_copy,
    ],
)
async def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    num_seeds = 60
    with anyio.fail_after(60):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            caught = await first_failure(range(num_seeds), open_coding)
        assert caught is not None, f"nothing was seen in {num_seeds} seeds"
        # a fetch whose event comes too early is also one that closing does not wait for
        seen_as = (WrongBytesError, SimLeftoverError)
        assert isinstance(caught.failure, seen_as), f"{caught.trial}: seen as {caught.failure!r}"
        assert await first_failure(range(caught.trial.seed + 1), open_coding) is None
