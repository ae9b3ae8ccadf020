"""Passes that check bytes: an engine over toy blocks, whose blocks compute nothing but a copy of what they see."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import attrs
import torch

from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.engine import Engine
from streamflow.stages.errors import StreamflowError
from streamflow.stages.opening import EngineOptions, OpenTransfer, open_engine
from streamflow.stages.passes import Pass
from streamflow.stages.places import Place
from streamflow.stages.signals import LoopEvent
from streamflow.stages.testing.binder import BindingError, RecordingBinder
from streamflow.stages.testing.blocks import ToyBlocks
from streamflow.stages.threads import ThreadCrew, open_threads, wait_through
from streamflow.stages.transfers import staged
from streamflow.stages.transfers.base import Transfer
from streamflow.stages.transfers.direct import DirectTransfer
from streamflow.stages.walk_sources import WalkSource


class WrongBytesError(StreamflowError, RuntimeError):
    """Blocks computed with other bytes than theirs. ``visits`` names them as (place, pass, block)."""

    def __init__(self, visits: Sequence[tuple[int, int, int]]) -> None:
        self.visits = tuple(visits)
        super().__init__(f"{len(visits)} visits saw wrong bytes; (place, pass, block): {list(visits)}")


class LeftBehindError(StreamflowError, RuntimeError):
    """An engine closed without giving everything back. ``bound``: blocks still bound, by place."""

    def __init__(self, bound: dict[int, int], in_use_bytes: int) -> None:
        self.bound, self.in_use_bytes = bound, in_use_bytes
        super().__init__(f"the engine left {in_use_bytes} device bytes in use and these blocks bound: {bound}")


@attrs.frozen(eq=False)
class _Seen:
    """What the device saw when it ran a block: ``bytes_of`` gets a copy, made in the compute stream's turn."""

    visit: tuple[int, int, int]
    copies: list[torch.Tensor]


@attrs.define(eq=False)
class _Job:
    """All passes of one place, run in its thread."""

    place: Place
    passes: Sequence[Sequence[int]]
    done: LoopEvent
    seen: list[_Seen] = attrs.field(factory=list)
    failure: BaseException | None = None


class Walker:
    """Runs passes in the places of an engine and compares what each block saw with what it should have seen.

    ``inside``: called in the compute thread for each block, between entering and leaving (with place and block).
    """

    def __init__(
        self, engine: Engine, binder: RecordingBinder, blocks: ToyBlocks, components: Mapping[str, Sequence[int]]
    ) -> None:
        self.engine = engine
        self.binder = binder
        self.blocks = blocks
        self._components = components
        self.inside: Callable[[int, int], None] = lambda place, block: None

    async def run(self, *passes_by_place: Sequence[Sequence[int]]) -> int:
        """Run passes, one list for each place, and return the number of visits once the device has done them all.

        A pass is a list of blocks of one component. When a place fails, or this call is cancelled, all places are
        stopped first.

        :raises WrongBytesError: if a block saw other bytes than its own.
        :raises BaseException: what the first place to fail met.
        """
        jobs = [_Job(self.engine.places[index], passes, LoopEvent()) for index, passes in enumerate(passes_by_place)]
        for job in jobs:
            job.place.mailbox.reset()
        for job in jobs:
            job.place.thread.submit(partial(self._work, job, jobs))
        try:
            for job in jobs:
                await job.done.wait()
        except BaseException:
            self._stop(jobs)
            for job in jobs:
                await wait_through(job.done)
            raise
        return self._judge(jobs)

    def _stop(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            job.place.mailbox.stop()

    def _work(self, job: _Job, jobs: Sequence[_Job]) -> None:
        try:
            for index, visits in enumerate(job.passes):
                self._run_pass(job, index, visits)
            job.place.settle()
        except BaseException as failure:
            job.failure = failure
            self._stop([other for other in jobs if other is not job])
            with suppress(Exception):
                job.place.settle()
        finally:
            job.done.set()

    def _run_pass(self, job: _Job, index: int, visits: Sequence[int]) -> None:
        running = self.engine.begin_pass(job.place, self._component_of(visits))
        completed = False
        try:
            for block in visits:
                self._visit(job, running, index, block)
            completed = True
        finally:
            running.end(completed=completed)

    def _component_of(self, visits: Sequence[int]) -> str:
        """The component whose blocks a pass visits; the first one if it visits none."""
        named = (name for name, blocks in self._components.items() if set(visits) <= set(blocks))
        return next(named, next(iter(self._components)))

    def _visit(self, job: _Job, running: Pass, index: int, block: int) -> None:
        running.enter(block)
        buffer = self.binder.buffer_of(block)
        seen = _Seen((job.place.index, index, block), [])
        image = buffer[: self.blocks.images[block].nbytes]
        job.place.stream.submit(lambda: seen.copies.append(image.clone()))
        job.seen.append(seen)
        self.inside(job.place.index, block)
        if self.binder.buffer_of(block) is not buffer:
            raise BindingError(block, "was bound to another buffer while a pass was inside it")
        running.leave(block)
        running.keep_pace()

    def _judge(self, jobs: Sequence[_Job]) -> int:
        wrong = [seen.visit for job in jobs for seen in job.seen if not self._is_exact(seen)]
        for failure in sorted((job.failure for job in jobs if job.failure is not None), key=_is_consequence):
            raise failure
        if wrong:
            raise WrongBytesError(wrong)
        return sum(len(job.seen) for job in jobs)

    def _is_exact(self, seen: _Seen) -> bool:
        return len(seen.copies) == 1 and self.blocks.is_exact(seen.visit[2], seen.copies[0])


def _is_consequence(failure: BaseException) -> bool:
    """Whether a place failed only because another one did: those come last."""
    return not isinstance(failure, Exception)


def open_direct(blocks: ToyBlocks) -> OpenTransfer:
    """Opens the direct transfer."""

    async def open_it(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
        return DirectTransfer(stream, reads_any_memory=True)

    return open_it


def open_staged(blocks: ToyBlocks, *, num_threads: int = 2, chunk_bytes: int = 512) -> OpenTransfer:
    """Opens the staged transfer, with chunks so small that toy blocks have several."""

    async def open_it(device: Device, stream: Stream, crew: ThreadCrew) -> Transfer:
        images = list(blocks.images.values())
        return await staged.open_staged(device, stream, crew, images, num_threads=num_threads, chunk_bytes=chunk_bytes)

    return open_it


@asynccontextmanager
async def open_device(device: Device) -> AsyncIterator[ThreadCrew]:
    """``device`` between its opening and its closing, and the crew that its threads belong to."""
    async with open_threads() as crew:
        await device.open(crew)
        try:
            yield crew
        finally:
            device.close()


@asynccontextmanager
async def open_walker(
    device: Device,
    blocks: ToyBlocks,
    options: EngineOptions,
    open_transfer: OpenTransfer,
    *,
    residents: Sequence[int] = (),
    walk_source: WalkSource | None = None,
    components: Mapping[str, Sequence[int]] | None = None,
) -> AsyncIterator[Walker]:
    """A walker over an engine of its own on ``device``, which it opens and closes.

    ``components``: the blocks of each, by name; None: all blocks are one component's.

    :raises LeftBehindError: if the engine left blocks bound or device bytes in use.
    """
    binder = RecordingBinder()
    named = components if components is not None else {"toy": list(blocks.images)}
    async with open_device(device) as crew:
        async with open_engine(
            device=device,
            crew=crew,
            components={name: {b: blocks.images[b] for b in members} for name, members in named.items()},
            residents=residents,
            options=options,
            open_transfer=open_transfer,
            binder=binder,
            walk_source=walk_source,
        ) as engine:
            yield Walker(engine, binder, blocks, named)
        if binder.bound or device.memory().in_use:
            raise LeftBehindError(binder.bound, device.memory().in_use)
