"""Opening and closing an engine: the order in which its parts are made, and in which they go."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial

import attrs
import torch

from streamflow.stages.binder import Binder
from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.engine import Engine, Resident
from streamflow.stages.errors import DeviceStreamError
from streamflow.stages.images import BlockImage
from streamflow.stages.places import Place
from streamflow.stages.progress import tracked
from streamflow.stages.slots import Window
from streamflow.stages.threads import ThreadCrew, open_tasks
from streamflow.stages.transfers.base import Transfer
from streamflow.stages.walk_sources import SharedWalks, WalkSource
from streamflow.stages.walks import WalkPlanner

#: Makes the transfer, on the loop, with the streams and threads that it may use.
OpenTransfer = Callable[[Device, Stream, ThreadCrew], Awaitable[Transfer]]


@attrs.frozen
class EngineOptions:
    """How an engine streams.

    ``window_slots``: device buffers. ``num_places``: requests that may run at once. ``run_ahead_blocks``: how far, in
    blocks, a compute thread may be ahead of the device (None: 2 x window + 2). ``poison_freed_slots`` is for tests.
    """

    window_slots: int
    num_places: int = 1
    run_ahead_blocks: int | None = None
    poison_freed_slots: bool = False

    @property
    def effective_run_ahead(self) -> int:
        """``run_ahead_blocks`` with its default filled in."""
        return 2 * self.window_slots + 2 if self.run_ahead_blocks is None else self.run_ahead_blocks


@asynccontextmanager
async def open_engine(
    *,
    device: Device,
    crew: ThreadCrew,
    components: Mapping[str, Mapping[int, BlockImage]],
    residents: Sequence[int],
    movable: Collection[int] = (),
    options: EngineOptions,
    open_transfer: OpenTransfer,
    binder: Binder,
    walk_source: WalkSource | None = None,
) -> AsyncIterator[Engine]:
    """An engine over ``components``: for each, by name, the images of its blocks, in expected execution order. Blocks
    are integers, each in one component. ``residents`` are loaded once and stay; the ``movable`` come and go with what
    the caller does (see `Engine.blocks_there`) and are there whenever a pass enters them; the others stream.

    ``device`` is open and ``crew`` runs; both stay the caller's. The caller sees to it that no pass runs any more when
    it leaves. Leaving, in this order and also under cancellation: fetches under way are finished, device work is
    drained, blocks are unbound, buffers are freed. An error of the body leaves as it is, whatever happens then.

    :raises DeviceMemoryError: if window and residents do not fit.
    :raises SourceReadError: if a resident cannot be read.
    """
    images = {block: image for blocks in components.values() for block, image in blocks.items()}
    elsewhere = {*residents, *movable}
    streamed = {block: image for block, image in images.items() if block not in elsewhere}
    num_slots = min(options.window_slots, len(streamed))
    orders = {name: [block for block in blocks if block in streamed] for name, blocks in components.items()}
    source = walk_source or SharedWalks(options.num_places)
    planner = WalkPlanner(orders, num_slots, source)
    copy_stream = device.open_copy_stream("copy")
    parts = _Parts(device, binder, copy_stream)
    try:
        parts.transfer = transfer = await open_transfer(device, copy_stream, crew)
        slot_bytes = max((image.nbytes for image in streamed.values()), default=0)
        parts.window = window = await crew.call(
            lambda: Window(device, num_slots, slot_bytes, poison=options.poison_freed_slots), undo=Window.close
        )
        for block in tracked("loading resident blocks", residents):
            await parts.load_resident(block, images[block], transfer)
        await parts.wait_for_residents(crew)
        parts.places = [_open_place(device, crew, index, options) for index in range(options.num_places)]
        async with open_tasks() as nursery:
            engine = Engine(
                device=device,
                images=images,
                window=window,
                residents=parts.residents,
                planner=planner,
                transfer=transfer,
                copy_stream=copy_stream,
                binder=binder,
                places=parts.places,
                is_joint=source.feed is not None,
                open_watch=partial(crew.start, "streamflow link"),
                nursery=nursery,
            )
            nursery.start_soon(engine.serve, name="prefetch nursery")
            try:
                yield engine
            finally:
                engine.stop_serving()
                nursery.cancel_scope.cancel()
    except BaseException as failure:
        try:
            await parts.give_back(crew)
        except Exception as second:  # what led here is what the caller must hear of
            failure.add_note(f"closing the engine failed, too: {type(second).__name__}: {second}")
        raise
    else:
        await parts.give_back(crew)


def _open_place(device: Device, crew: ThreadCrew, index: int, options: EngineOptions) -> Place:
    stream = device.open_compute_stream(f"compute {index}")
    return Place(index, stream, crew.start(f"streamflow place {index}"), options.effective_run_ahead)


@attrs.define
class _Parts:
    """What an engine has acquired so far, for the way back."""

    device: Device
    binder: Binder
    copy_stream: Stream
    transfer: Transfer | None = None
    window: Window | None = None
    residents: dict[int, Resident] = attrs.field(factory=dict)
    places: list[Place] = attrs.field(factory=list)
    buffers: list[torch.Tensor] = attrs.field(factory=list)

    async def load_resident(self, block: int, image: BlockImage, transfer: Transfer) -> None:
        """Bring a resident block to the device and bind it for good."""
        buffer = self.device.allocate(image.nbytes)
        self.buffers.append(buffer)  # freed after draining, also when the next line fails: copies may be queued
        event = await transfer.fetch(image, buffer, ()).issued()
        self.residents[block] = Resident(buffer, event)
        self.binder.bind(block, -1 - block, buffer)

    async def wait_for_residents(self, crew: ThreadCrew) -> None:
        """Return once every resident is there: the first pass could not tell the caller of the opening that one is not.

        :raises SourceReadError: if one cannot be read.
        """
        try:
            for resident in self.residents.values():
                await crew.call(resident.event.wait, name="waiting for a resident")
        except DeviceStreamError as failure:
            raise failure.cause from failure.cause.__cause__  # not from what it is itself the cause of

    async def give_back(self, crew: ThreadCrew) -> None:
        """Wait until the device is done with everything, then release all of it, whatever interrupts or fails."""
        try:
            await crew.call_through(self.drain)
        finally:
            self.release()

    def drain(self) -> None:
        """Wait, in a thread, until the device is done with everything. What failed there has been told before."""
        streams = (self.copy_stream, *(place.stream for place in self.places))
        # a transfer may end a fetch on a stream of its own: its event tells when that is done
        fetches = [event for slot in self.window or () for event in slot.busy_until]
        fetches += [resident.event for resident in self.residents.values()]
        for event in (*(stream.record() for stream in streams), *fetches):
            with suppress(DeviceStreamError):
                event.wait()

    def release(self) -> None:
        """Unbind every block, then free the buffers under them, whatever fails on the way."""
        with ExitStack() as rest:
            rest.callback(self._free)
            for block in (*self.residents, *(slot.block for slot in self.window or ())):
                if block is not None:
                    rest.callback(self.binder.unbind, block)

    def _free(self) -> None:
        for buffer in self.buffers:
            self.device.free(buffer)
        self.residents.clear()  # the engine, which outlives them in its owner's hands, sees the same dictionary
        self.buffers.clear()
        if self.window is not None:
            self.window.close()
        if self.transfer is not None:
            self.transfer.close()
