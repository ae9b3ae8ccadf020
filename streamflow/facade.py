"""Offloads on a loop thread of their own: for scripts and notebooks, and where opening and closing are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal
from torch import nn

from streamflow.config import OffloadConfig
from streamflow.opening import open_offload
from streamflow.runtime.offload import Offload, State
from streamflow.runtime.statistics import OffloadStatistics
from streamflow.stages.devices.base import Device

Params = ParamSpec("Params")
Result = TypeVar("Result")


class _LoopThread:
    """An event loop in a thread, with an offload open on it."""

    def __init__(self, opened: AbstractAsyncContextManager[Offload]) -> None:
        with ExitStack() as stack:
            portal: BlockingPortal = stack.enter_context(start_blocking_portal("asyncio", name="streamflow loop"))
            self.offload = stack.enter_context(portal.wrap_async_context_manager(opened))
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the offload, then end the loop and its thread. Idempotent."""
        self._stack.close()


@contextmanager
def offload(
    model: nn.Module, config: OffloadConfig | Mapping[str, Any] | None = None, *, device: Device | None = None
) -> Iterator[Offload]:
    """`open_offload` where there is no event loop: call the model directly from any thread while it is open.

    A direct call occupies the offload for one forward; its results are ready for the calling thread's current stream.
    An interrupt (SIGINT) ends the forward it comes in, and leaves the next one exact. See `open_offload` for arguments
    and errors.
    """
    thread = _LoopThread(open_offload(model, config, device=device))
    try:
        yield thread.offload
    finally:
        thread.close()


class StartedOffload:
    """An offload on a loop thread of its own. Made by `start_offload`; `aclose` ends it, from any task of any loop."""

    def __init__(self, thread: _LoopThread) -> None:
        self._thread = thread
        self._closing = False

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
        """Close it; returns when everything is given back. Idempotent. A cancelled call closes it all the same."""
        if self._closing:
            return
        self._closing = True
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.close, limiter=anyio.CapacityLimiter(1))

    def __repr__(self) -> str:
        return f"<StartedOffload {self.offload!r}>"


async def start_offload(
    model: nn.Module, config: OffloadConfig | Mapping[str, Any] | None = None, *, device: Device | None = None
) -> StartedOffload:
    """`open_offload` where opening and closing happen in different tasks (notebook cells, replicas, fixtures).

    The caller owns the result and must `aclose` it. A cancelled call leaves nothing open. See `open_offload` for
    arguments and errors.
    """
    with anyio.CancelScope(shield=True) as scope:
        started = await anyio.to_thread.run_sync(
            lambda: _LoopThread(open_offload(model, config, device=device)), limiter=anyio.CapacityLimiter(1)
        )
    del scope
    return StartedOffload(started)
