"""The kit's own promises: what it must notice, so that tests built on it can fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import anyio
import pytest
import torch

from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import SourceReadError, StopForward
from streamflow.stages.images import MemoryPiece, Piece
from streamflow.stages.opening import EngineOptions, OpenTransfer
from streamflow.stages.testing.binder import Binding, BindingError, RecordingBinder
from streamflow.stages.testing.blocks import ToyBlocks, in_pieces, toy_blocks
from streamflow.stages.testing.pieces import FailingPiece, GatedPiece, SlowPiece, WholePiece, WrappedPiece
from streamflow.stages.testing.sim import SimDevice
from streamflow.stages.testing.trials import TrialError, draw_trial, first_failure
from streamflow.stages.testing.walker import LeftBehindError, WrongBytesError, open_direct, open_walker
from streamflow.stages.threads import ThreadCrew
from streamflow.stages.transfers.base import Transfer
from streamflow.stages.transfers.direct import DirectTransfer
from streamflow.stages.walk_sources import ImmediateWalks

# The binder


def test_the_binder_remembers_and_hands_out() -> None:
    binder, buffer = RecordingBinder(), torch.zeros(4)
    binder.bind(3, 0, buffer)
    assert binder.buffer_of(3) is buffer
    assert binder.bound == {3: 0}
    binder.unbind(3)
    binder.unbind(4)
    assert binder.history == [Binding("bind", 3, 0), Binding("unbind", 3, 0), Binding("unbind", 4, None)]
    with pytest.raises(BindingError, match="bound to no buffer"):
        binder.buffer_of(3)


def test_the_binder_refuses_two_buffers_for_a_block_and_two_blocks_for_a_buffer() -> None:
    binder, buffer = RecordingBinder(), torch.zeros(4)
    binder.bind(3, 0, buffer)
    with pytest.raises(BindingError, match="is bound to place 0 and was to be bound to 1 too"):
        binder.bind(3, 1, buffer)
    with pytest.raises(BindingError, match="was to be bound to place 0, which holds block 3"):
        binder.bind(5, 0, buffer)


def test_the_binder_refuses_a_second_thread() -> None:
    binder = RecordingBinder()
    binder.bind(3, 0, torch.zeros(4))
    failures: list[BaseException] = []

    def unbind() -> None:
        try:
            binder.unbind(3)
        except BindingError as failure:
            failures.append(failure)

    thread = threading.Thread(target=unbind)
    thread.start()
    thread.join()
    assert "outside the loop's thread" in str(failures[0])


# Pieces


def read(piece: Piece, start: int, nbytes: int) -> list[int]:
    target = torch.zeros(nbytes, dtype=torch.uint8)
    piece.read_into(target.data_ptr(), start, nbytes)
    return target.tolist()


def test_scripted_pieces_read_what_they_wrap_and_do_their_part() -> None:
    inner = MemoryPiece(512, torch.arange(10, dtype=torch.uint8))
    gated, failing = GatedPiece(inner), FailingPiece(inner, fails_at=1)
    gated.gate.set()
    for piece in (WrappedPiece(inner), gated, failing, SlowPiece(inner, delay_s=0.0)):
        assert (piece.offset_bytes, piece.nbytes, piece.stored_bytes, piece.splittable) == (512, 10, 10, True)
        assert read(piece, 2, 3) == [2, 3, 4]
    assert gated.entered.is_set()
    with pytest.raises(SourceReadError):
        read(failing, 0, 1)
    whole = WholePiece(inner)
    assert not whole.splittable
    assert read(whole, 0, 10) == list(range(10))
    with pytest.raises(ValueError, match="a piece that has only all 10"):
        read(whole, 0, 9)


def test_toy_blocks_are_the_same_for_the_same_seed_and_exact_only_with_their_own_bytes() -> None:
    blocks, same, other = (toy_blocks([[300, 1], [700]], seed) for seed in (1, 1, 2))
    assert blocks.expected[0].equal(same.expected[0])
    assert not blocks.is_exact(0, other.expected[0])
    seen = blocks.expected[0].clone()
    seen[301:512] = 255  # a hole
    assert blocks.is_exact(0, seen)
    seen[299] ^= 1
    assert not blocks.is_exact(0, seen)
    with pytest.raises(ValueError, match="cannot be cut"):
        in_pieces(in_pieces(blocks))


# The walker


@pytest.mark.anyio
@pytest.mark.parametrize("make_device", [CpuDevice, partial(SimDevice, 0)])
async def test_wrong_bytes_are_seen_with_their_visit(make_device: Callable[[], Device]) -> None:
    blocks, spoiled = toy_blocks([[300], [700], [100]]), toy_blocks([[300], [700], [100]])
    spoiled.expected[1][5] ^= 1
    async with open_walker(make_device(), blocks, EngineOptions(2), open_direct(blocks)) as walker:
        walker.blocks = spoiled
        with pytest.raises(WrongBytesError) as caught:
            await walker.run([[0, 1, 2], [2, 1]])
    assert caught.value.visits == ((0, 0, 1), (0, 1, 1))


@pytest.mark.anyio
async def test_a_block_left_bound_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingBinder, "unbind", lambda self, block: None)
    blocks = toy_blocks([[300]])
    with pytest.raises(LeftBehindError, match=r"these blocks bound: \{0: 0\}"):
        async with open_walker(CpuDevice(), blocks, EngineOptions(1), open_direct(blocks)) as walker:
            await walker.run([[0]])


@pytest.mark.anyio
async def test_one_place_that_fails_stops_the_others() -> None:
    blocks, ran = toy_blocks([[300]] * 3), list[int]()
    both_inside = threading.Barrier(2, timeout=30)

    def inside(place: int, block: int) -> None:
        both_inside.wait()
        if place == 1:
            raise ZeroDivisionError
        with suppress(StopForward):
            while True:
                walker.engine.places[place].mailbox.check()
        ran.append(block)

    with anyio.fail_after(30):
        options = EngineOptions(3, num_places=2)
        together = ImmediateWalks(min_passes=2)
        async with open_walker(CpuDevice(), blocks, options, open_direct(blocks), walk_source=together) as walker:
            walker.inside = inside
            with pytest.raises(ZeroDivisionError):
                await walker.run([[0, 1, 2]], [[0]])
    assert ran == [0]


# Trials


def test_a_seed_draws_one_trial() -> None:
    for seed in range(20):
        assert str(draw_trial(seed)) == str(draw_trial(seed))


@pytest.mark.anyio
async def test_a_trial_sees_more_memory_than_was_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(blocks: ToyBlocks) -> OpenTransfer:
        async def open_it(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
            transfer = DirectTransfer(stream, reads_any_memory=True)
            hidden = device.allocate(1 << 20)
            monkeypatch.setattr(transfer, "close", lambda: device.free(hidden), raising=True)
            return transfer

        return open_it

    caught = await first_failure(range(3), greedy)
    assert caught is not None
    assert isinstance(caught.failure, TrialError)
    assert "the device peak is" in str(caught.failure)
