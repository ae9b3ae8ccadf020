"""A model whose blocks do what a test wants beside computing, and what has to be so after whatever happened to it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, TypeVar

import anyio
import anyio.to_thread
import attrs
import pytest
import torch
from torch import nn

from streamflow import Offload
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.mailbox import Mailbox
from tests.streamflow.kit import ModelState, resident_digests, settled, sha256_of, streamflow_threads
from tests.streamflow.models import Mlp, Stack, seeded, some_inputs

Result = TypeVar("Result")

#: Longer than anything here takes on a machine that does other things, too. Whoever waits so long has found a fault.
PATIENCE_S = 60.0
#: The mode that serves one request after the other.
ONE_AT_A_TIME = {"max_running_requests": 1}


def wait_for(event: threading.Event) -> None:
    """Block the calling thread until ``event`` is set, and fail if it never is."""
    assert event.wait(PATIENCE_S), "what the test waits for did not happen"


async def until(event: threading.Event) -> None:
    """Return when a thread has set ``event``, and fail if none does."""
    await anyio.to_thread.run_sync(wait_for, event)


async def until_so(is_so: Callable[[], bool]) -> None:
    """Return when it is so, and fail if it never is. Others get the time that the loop does not need."""

    def watch() -> None:
        pause, deadline = threading.Event(), time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, "what the test waits for did not come about"
            pause.wait(0.001)

    await anyio.to_thread.run_sync(watch)


class Stops:
    """Tells when a request is told to stop: ``told`` is set then, after ``action`` was called."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told = threading.Event()
        self.action: Callable[[], object] = lambda: None
        original = Mailbox.stop

        def stop(mailbox: Mailbox) -> None:
            original(mailbox)
            self.action()
            self.told.set()

        patch.setattr(Mailbox, "stop", stop)


@attrs.define(eq=False)
class Script:
    """What the blocks of one model do beside computing, and what they did.

    ``inside`` is called in a block, before it computes, with its index; ``between`` before the block is entered (and,
    with the number of blocks, after the last). ``num_inside`` counts threads that are in a block now.
    """

    inside: Callable[[int], object] = lambda index: None
    between: Callable[[int], object] = lambda index: None
    entered: list[int] = attrs.field(factory=list)
    num_inside: int = 0

    def reset(self) -> None:
        """Do nothing beside computing from now on."""
        self.inside = self.between = lambda index: None
        self.entered.clear()


class Step(Mlp):
    """A block that follows a script."""

    def __init__(self, index: int, script: Script) -> None:
        super().__init__(hidden=16 + 8 * (index % 3))
        self.index = index
        self.script = script

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.script.entered.append(self.index)
        self.script.num_inside += 1
        try:
            self.script.inside(self.index)
            return super().forward(x)
        finally:
            self.script.num_inside -= 1


class Scripted(Stack):
    """A model of such blocks."""

    def __init__(self, num_blocks: int, script: Script) -> None:
        super().__init__(Step(index, script) for index in range(num_blocks))
        self.script = script

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            self.script.between(index)
            x = block(x)
        self.script.between(len(self.blocks))
        out: torch.Tensor = self.exit(x)
        return out


@attrs.frozen(eq=False)
class Subject:
    """A model, what it has to give, and what it was like before anything happened to it."""

    model: nn.Module
    script: Script
    inputs: torch.Tensor
    expected: str
    before: ModelState
    threads: list[str]

    @property
    def num_blocks(self) -> int:
        return len(self.model.blocks)  # type: ignore[arg-type]

    def forward(self) -> str:
        """The digest of what the model gives now, called by whoever calls this."""
        with torch.no_grad():
            return sha256_of(self.model(self.inputs))

    def check_restored(self, device: CpuDevice, *, in_place: bool = True) -> None:
        """Fail unless everything is as it was: the model to the last attribute, no thread, no device memory."""
        self.before.assert_unchanged(self.model, in_place=in_place)
        pause, deadline = threading.Event(), time.monotonic() + 2
        while streamflow_threads() != self.threads and time.monotonic() < deadline:
            pause.wait(0.01)  # one whose starting was interrupted may begin now; it has nothing to do but end
        assert streamflow_threads() == self.threads
        assert device.memory().in_use == 0

    async def check_next(self, offload: Offload) -> None:
        """Fail unless the next request is exact, and leaves every slot, place and pass accounted for."""
        self.script.reset()
        with anyio.fail_after(PATIENCE_S):
            assert await offload.run(self.forward) == self.expected
            assert self.script.entered == list(range(self.num_blocks))
            await check_accounts(offload, self.model.blocks)  # type: ignore[arg-type]


def make_subject(num_blocks: int = 5, **script: Callable[[int], object]) -> Subject:
    """A model with so many blocks, and what it gives while it is resident, aligned as in slots."""
    shared = Script()
    model = seeded(lambda: Scripted(num_blocks, shared))
    inputs = some_inputs(1)[0]
    (expected,) = resident_digests(model, [(inputs,)])
    for name, action in script.items():
        setattr(shared, name, action)
    shared.entered.clear()
    return Subject(model, shared, inputs, expected, ModelState.of(model), streamflow_threads())


async def check_accounts(offload: Offload, blocks: Iterable[nn.Module]) -> None:
    """Fail unless nobody runs or waits, no pass holds a claim, and a block is bound to the slot that holds it, if any.

    For the offload's own loop.
    """
    statistics = offload.statistics()
    assert (statistics.num_running, statistics.num_waiting) == (0, 0)
    engine = offload._engine
    planner, window = engine._planner, list(engine._window)
    await settled(offload)
    assert not any(planner.claims_on(slot.index) for slot in window)
    holders = {slot.block: slot.buffer for slot in window if slot.block is not None}
    assert len(holders) == sum(slot.block is not None for slot in window), "a block is in two slots"
    holders |= {block: resident.buffer for block, resident in engine._residents.items()}
    for index, block in enumerate(blocks):
        buffer = holders.get(index)
        for tensor in block.parameters():
            if buffer is None:
                assert tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size(), "that is no poison"
            else:
                assert 0 <= tensor.data_ptr() - buffer.data_ptr() < buffer.numel(), f"block {index} is bound elsewhere"


class Steps(Generic[Result]):
    """Awaits a coroutine; before each of its steps ``at_step`` is called with the step's number, from 1.

    A step is what a task does from one checkpoint to the next. Works on any loop.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Result], at_step: Callable[[int], object]) -> None:
        self._coroutine = coroutine
        self._at_step = at_step
        self.num = 0

    def __await__(self) -> Generator[Any, Any, Result]:
        sent: Any = None
        thrown: BaseException | None = None
        while True:
            self.num += 1
            self._at_step(self.num)
            try:
                yielded = self._coroutine.send(sent) if thrown is None else self._coroutine.throw(thrown)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            sent, thrown = None, None
            try:
                sent = yield yielded
            except BaseException as error:
                thrown = error


#: Runs a coroutine, cancels it at the k-th step, and returns the number of steps that it made.
CancelAt = Callable[[Coroutine[Any, Any, object], int], Awaitable[int]]


async def by_scope(coroutine: Coroutine[Any, Any, object], k: int) -> int:
    """Cancel a scope around ``coroutine`` at its k-th step; returns how many steps it made."""
    with anyio.CancelScope() as scope:
        steps = Steps(coroutine, lambda number: scope.cancel() if number == k else None)
        await steps
    return steps.num


async def natively(coroutine: Coroutine[Any, Any, object], k: int, num_cancels: int = 1) -> int:
    """Cancel a task of its own that runs ``coroutine``, at its k-th step and perhaps at the next ones, by
    ``task.cancel()``. Fails if it is not cancelled then; returns how many steps it made.
    """

    def cancel_me(number: int) -> None:
        if k <= number < k + num_cancels:
            task.cancel()

    steps = Steps(coroutine, cancel_me)
    task = asyncio.create_task(as_task(steps))
    await asyncio.wait([task])
    assert task.cancelled() == (steps.num >= k), "a cancellation was lost"
    if not task.cancelled():
        task.result()
    return steps.num


async def as_task(awaitable: Awaitable[Result]) -> Result:
    """The same as a coroutine, which is what makes a task."""
    return await awaitable
