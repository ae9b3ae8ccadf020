"""Offloads on a loop thread of their own: for scripts and notebooks, and where opening and closing are apart."""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Literal, ParamSpec, TypeVar

import anyio
from torch.distributed.device_mesh import DeviceMesh

from streamflow.config import OffloadConfig
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.loaded import open_offload
from streamflow.ranks.topology import RankGroups
from streamflow.runtime.offload import Offload, State
from streamflow.runtime.statistics import OffloadStatistics
from streamflow.stages.devices.base import Device
from streamflow.stages.errors import EngineClosedError
from streamflow.stages.signals import ThreadEvent, loop_waker
from streamflow.stages.threads import open_threads
from streamflow.warmup import WarmUp

Params = ParamSpec("Params")
Result = TypeVar("Result")

#: How long the end of the process waits for an offload that nobody closed, in seconds.
EXIT_WAIT_S = 10.0


class _LoopThread:
    """An event loop in a thread, and an offload that is open on it from `open` to `close`.

    The thread has no task that owns it, for want of a loop: whoever made this has to `close` it. A process that ends
    without having done so closes it then; the thread is a daemon, and its loop trio's, whose threads are daemons, too,
    so that the process gets there. A process that is forked meanwhile has no such thread: there, closing does nothing.
    """

    def __init__(self, opening: AbstractAsyncContextManager[Offload]) -> None:
        self._opening = opening
        self._made_by = os.getpid()
        self._offload: Offload | None = None
        self._failure: BaseException | None = None
        self._opened = ThreadEvent()
        self._owner: dict[str, str] = {}
        self._waiters: list[ThreadEvent] = []
        self._ended = False
        self._stopped = False
        self._cancel: Callable[[], object] | None = None
        self._leave: Callable[[], object] | None = None
        # a context of its own: in the caller's, a loop may run
        run = contextvars.Context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="streamflow loop", daemon=True)

    def open(self) -> Offload:
        """The offload, once it is open. Blocks; for one thread, once. What interrupts it leaves the rest to `close`.

        :raises EngineClosedError: if it is stopped meanwhile.

        All that `open_offload` raises, too.
        """
        atexit.register(self._close_at_exit)
        self._thread.start()
        self._opened.wait_blocking()
        if self._failure is not None:
            raise self._failure
        if self._offload is None:
            raise EngineClosedError
        return self._offload

    @property
    def offload(self) -> Offload:
        """The offload that is, or was, open.

        :raises EngineClosedError: if it was never opened.
        """
        if self._offload is None:
            raise EngineClosedError
        return self._offload

    def stop(self) -> None:
        """Begin to close, also in the middle of opening. From any thread; returns at once. Idempotent."""
        if os.getpid() != self._made_by:  # its own loop is a copy of ours, and would wake ours
            return
        self._stopped = True
        end = (
            self._leave or self._cancel
        )  # once it is open it need not be cancelled, which would cut its requests short
        if end is not None:
            end()

    def close(self) -> None:
        """Close the offload and end the thread; returns when all is given back. From any thread. Idempotent.

        Interrupts that come meanwhile are raised in the end: only another closing could do what is left of this one.
        One that comes between its steps, at the one moment when nothing absorbs it, is raised at once: in the main
        thread, `close_through` belongs after it.
        """
        interruption = self.close_through()
        failure = self._failure if self._offload is not None else None
        if interruption is not None:
            raise interruption from failure
        if failure is not None:
            raise failure

    def close_through(self) -> KeyboardInterrupt | None:
        """The same, but what failed is left out; returns the last interrupt that came meanwhile, if any."""
        interruption: KeyboardInterrupt | None = None
        is_closed = os.getpid() != self._made_by
        while not is_closed:
            try:
                self.stop()
                self._wait_until_ended()
                is_closed = True
            except KeyboardInterrupt as interrupt:
                interruption = interrupt
        atexit.unregister(self._close_at_exit)
        return interruption

    def _wait_until_ended(self) -> None:
        # Not by the thread's own `join` alone: in Python 3.11 a join that is interrupted takes the thread for dead.
        ended = ThreadEvent()
        self._waiters.append(ended)
        if not self._ended and not self._is_of("closer"):
            ended.wait_blocking()
        if self._thread.ident is not None:
            self._thread.join()

    def _close_at_exit(self) -> None:
        # Not for ever: what still runs in it may be a daemon that hangs.
        self.stop()
        if self._cancel is not None:
            self._cancel()
        self._thread.join(EXIT_WAIT_S)

    def _is_of(self, who: Literal["thread", "closer"]) -> bool:
        """Whether the loop is for the thread to run, or closed before the thread began; it stays what it was first.

        A single call into C: who is interrupted in it asks again, and gets the same answer.
        """
        return self._owner.setdefault("loop", who) == who

    def _run(self) -> None:
        if not self._is_of("thread"):
            return
        try:
            anyio.run(self._main, backend="trio")
        except BaseException as failure:
            self._failure = failure
        finally:
            self._ended = True
            for event in (self._opened, *self._waiters):
                event.set()

    async def _main(self) -> None:
        with anyio.CancelScope() as scope:
            wake_loop = loop_waker()
            self._cancel = lambda: wake_loop(scope.cancel)
            if self._stopped:  # before there was anything to cancel
                return
            async with self._opening as self._offload:
                left = anyio.Event()
                self._leave = lambda: wake_loop(left.set)
                self._opened.set()
                if not self._stopped:
                    await left.wait()


@contextmanager
def offload(
    model: Any,
    config: OffloadConfig | Mapping[str, Any] | None = None,
    *,
    inputs: LoadInputs | None = None,
    warmup: WarmUp = None,
    ranks: RankGroups | DeviceMesh | None = None,
    device: Device | None = None,
) -> Iterator[Offload]:
    """`open_offload` where there is no event loop: call the model directly from any thread while it is open.

    A direct call occupies the offload for one forward; its results are ready for the calling thread's current stream.
    An interrupt (SIGINT) ends the forward it comes in and leaves the next one exact; one that comes while this opens
    leaves nothing open, and one that comes while it closes is raised when it has. See `open_offload` for arguments and
    errors.
    """
    thread = _LoopThread(open_offload(model, config, inputs=inputs, warmup=warmup, ranks=ranks, device=device))
    try:
        yield thread.open()
    finally:
        try:
            thread.close()
        except KeyboardInterrupt:  # perhaps before that call absorbs any, and the next one before the next call does
            try:
                thread.close_through()
            finally:
                thread.close_through()
            raise


class StartedOffload:
    """An offload on a loop thread of its own. Made by `start_offload`; `aclose` ends it, from any loop."""

    def __init__(self, thread: _LoopThread) -> None:
        self._thread = thread

    @property
    def offload(self) -> Offload:
        """The offload itself."""
        return self._thread.offload

    @property
    def state(self) -> State:
        """See `Offload.state`."""
        return self.offload.state

    def statistics(self) -> OffloadStatistics:
        """See `Offload.statistics`."""
        return self.offload.statistics()

    async def run(self, work: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """See `Offload.run`; from any loop."""
        return await self.offload.run(work, *args, **kwargs)

    async def aclose(self) -> None:
        """Close it; returns when everything is given back, every time. A cancelled call closes it all the same."""
        await _close(self._thread)

    def __repr__(self) -> str:
        return f"<StartedOffload {self.offload!r}>"


async def start_offload(
    model: Any,
    config: OffloadConfig | Mapping[str, Any] | None = None,
    *,
    inputs: LoadInputs | None = None,
    warmup: WarmUp = None,
    ranks: RankGroups | DeviceMesh | None = None,
    device: Device | None = None,
) -> StartedOffload:
    """`open_offload` where opening and closing happen in different tasks (notebook cells, replicas, fixtures).

    The caller owns the result and must `aclose` it: until then the model stays attached. A process that ends without
    having done so closes it at exit, and waits for that for ten seconds at most. A cancelled call leaves nothing open.
    See `open_offload` for arguments and errors.
    """
    thread = _LoopThread(open_offload(model, config, inputs=inputs, warmup=warmup, ranks=ranks, device=device))
    try:
        async with open_threads() as crew:
            await crew.call(thread.open, on_cancel=thread.stop, name="start of an offload")
    except BaseException:
        await _close(thread)
        raise
    return StartedOffload(thread)


async def _close(thread: _LoopThread) -> None:
    async with open_threads() as crew:
        await crew.call_through(thread.close)
