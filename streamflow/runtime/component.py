"""The streamed component: what happens around its forward, and around the forward of each of its blocks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from streamflow.binding.blocks import BoundBlock
from streamflow.errors import BlocksBypassedError, ForkedOffloadError, GradientError, LoopThreadError
from streamflow.runtime.admission import Admission
from streamflow.runtime.loans import Loan
from streamflow.runtime.state_gate import StateGate
from streamflow.spans import pass_span
from streamflow.stages.devices.base import Device, Stream
from streamflow.stages.engine import Engine
from streamflow.stages.errors import EngineClosedError, StopForward
from streamflow.stages.passes import Pass
from streamflow.stages.places import Place


class _ThreadState(threading.local):
    """What the current thread is doing here."""

    place: Place | None = None
    current: Pass | None = None
    block: int | None = None
    has_entered: bool = False


class StreamedComponent:
    """Runs passes, for calls from a request's place or from another thread, which then occupies one for the pass."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        blocks: Sequence[BoundBlock],
        device: Device,
        admission: Admission,
        gate: StateGate,
    ) -> None:
        self._name = name
        self._engine = engine
        self._blocks = blocks
        self._device = device
        self._admission = admission
        self._gate = gate
        self._opened_by = os.getpid()
        self._loop_thread = threading.get_ident()
        self._state = _ThreadState()
        self._last_callers: dict[int, Stream] = {}

    @contextmanager
    def request_in(self, place: Place, caller: Stream) -> Iterator[None]:
        """The calling thread works for a request in ``place``, on its stream, after what ``caller`` had queued.

        On leaving, the device has done all of it.

        :raises EngineBrokenError: if some of it failed there.
        """
        self._state.place = place
        try:
            self._engine.begin_request(place)
            self._follow(caller, place)
            with place.stream.activate():
                try:
                    yield
                finally:
                    self._engine.settle(place)
        finally:
            self._gate.leave()
            self._state.place = None

    def _follow(self, caller: Stream, place: Place) -> None:
        """Let the place's work start after ``caller``'s, and after the last caller's: that may still read results."""
        previous = self._last_callers.get(place.index)
        self._last_callers[place.index] = caller
        for stream in (previous, caller):
            if stream is not None:
                place.stream.wait(stream.record())

    def run_forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of the component: one pass."""
        if self._state.current is not None:
            return call(*args, **kwargs)
        return self._run_pass(lambda: self._whole_forward(call, args, kwargs), whole=True)

    def _whole_forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._state.has_entered = False
        result = call(*args, **kwargs)
        if not self._state.has_entered and self._blocks and _has_nan(result):
            raise BlocksBypassedError(self._name, len(self._blocks))
        return result

    def run_block(self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of a block: within its component's pass, or as a pass of its own."""
        if self._state.block == index:
            return call(*args, **kwargs)
        if self._state.current is None:
            return self._run_pass(lambda: self._enter(index, call, args, kwargs), whole=False)
        return self._enter(index, call, args, kwargs)

    def _run_pass(self, work: Callable[[], Any], *, whole: bool) -> Any:
        if os.getpid() != self._opened_by:
            raise ForkedOffloadError(self._opened_by, os.getpid())
        if self._state.place is not None:
            with pass_span(self._name, self._state.place.request_id):
                return self._pass_in(self._state.place, work, whole)
        if threading.get_ident() == self._loop_thread:
            raise LoopThreadError(self._name)
        with pass_span(self._name, None):
            return self._run_from_outside(work, whole)

    def _run_from_outside(self, work: Callable[[], Any], whole: bool) -> Any:
        """A pass of a thread that is no request: it occupies a place, and its own stream goes on after the pass."""
        loan = Loan()
        try:
            place = loan.borrow(self._admission)
            caller = self._device.caller_stream()
            self._state.place = place
            try:
                self._engine.begin_request(place)
                self._follow(caller, place)
                with place.stream.activate():
                    return self._pass_in(place, work, whole)
            except StopForward:  # only closing stops a thread that is no request
                raise EngineClosedError from None
            finally:
                self._gate.leave()
                self._state.place = None
                caller.wait(place.stream.record())
        finally:
            self._state.place = None
            loan.give_back()
            loan.wait_over()

    def _pass_in(self, place: Place, work: Callable[[], Any], whole: bool) -> Any:
        with self._gate.forward(place.mailbox.check) as alone:
            return self._pass_through(place, work, whole, alone)

    def _pass_through(self, place: Place, work: Callable[[], Any], whole: bool, alone: bool) -> Any:
        # The state is set and reset by plain assignments, first thing inside try and finally: no exception of a signal
        # handler comes in between, so none leaves the thread with a pass or a block that it is not in.
        begun: Pass | None = None
        completed = False
        try:
            self._state.current = begun = self._engine.begin_pass(place, self._name, alone=alone)
            result = work()
            completed = whole
            return result
        finally:
            self._state.current = None
            if begun is not None:
                begun.end(completed=completed)

    def _enter(self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begun, block = self._state.current, self._blocks[index]
        if begun is None:
            raise RuntimeError(f"{block.path} was entered outside a pass")
        if torch.is_grad_enabled():
            self._check_no_gradients(block, args, kwargs)
        started = time.thread_time()
        begun.enter(index)
        hooks_cpu_s = 0.0
        try:
            self._state.block, self._state.has_entered = index, True
            hooks_cpu_s = time.thread_time() - started
            result = call(*args, **kwargs)
            started = time.thread_time()
            block.check_unwritten()
        finally:
            self._state.block = None
            begun.leave(index)
        begun.count_hooks(hooks_cpu_s + time.thread_time() - started)
        begun.keep_pace()
        return result

    def _check_no_gradients(self, block: BoundBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs: Iterable[Any] = pytree.tree_leaves((args, kwargs))
        if block.requires_grad() or any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in inputs):
            raise GradientError(f"{self._name}.{block.path}")


def _has_nan(outputs: Any) -> bool:
    """Whether a floating-point tensor among ``outputs`` has a NaN: what poison makes of all that it touches."""
    tensors = (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    return any(t.is_floating_point() and t.element_size() > 1 and bool(t.isnan().any()) for t in tensors)
