"""The streamed component: what happens around its forward, and around the forward of each of its blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from streamflow.binding.blocks import BoundBlock
from streamflow.errors import BlocksBypassedError, NestedPassError
from streamflow.runtime.inputs import check_no_gradients, has_nan
from streamflow.runtime.workplace import Workplace
from streamflow.stages.engine import Engine
from streamflow.stages.passes import Pass
from streamflow.stages.places import Place


class StreamedComponent:
    """Runs passes. ``blocks`` are its own, of which the engine knows the first as ``first_block``."""

    def __init__(
        self, name: str, engine: Engine, blocks: Sequence[BoundBlock], workplace: Workplace, first_block: int = 0
    ) -> None:
        self._name = name
        self._engine = engine
        self._blocks = blocks
        self._workplace = workplace
        self._first_block = first_block
        self._state = workplace.state

    def run_forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of the component: one pass."""
        if self._state.passing == self._name:
            return call(*args, **kwargs)
        return self._run_pass(lambda: self._whole_forward(call, args, kwargs), whole=True)

    def _whole_forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._state.has_entered = False
        result = call(*args, **kwargs)
        if not self._state.has_entered and self._blocks and has_nan(result):
            raise BlocksBypassedError(self._name, len(self._blocks))
        return result

    def run_block(self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of the block number ``index`` of the component: within its pass, or as a pass of its own."""
        if self._state.block == self._first_block + index:
            return call(*args, **kwargs)
        if self._state.passing == self._name:
            return self._enter(index, call, args, kwargs)
        return self._run_pass(lambda: self._enter(index, call, args, kwargs), whole=False)

    def _run_pass(self, work: Callable[[], Any], *, whole: bool) -> Any:
        if self._state.passing is not None:
            raise NestedPassError(self._name, self._state.passing)
        return self._workplace.run(self._name, lambda place, alone: self._pass_in(place, work, whole, alone))

    def _pass_in(self, place: Place, work: Callable[[], Any], whole: bool, alone: bool) -> Any:
        # The state is set and reset by plain assignments, first thing inside try and finally: no exception of a signal
        # handler comes in between, so none leaves the thread with a pass or a block that it is not in.
        begun: Pass | None = None
        completed = False
        try:
            self._state.current = begun = self._engine.begin_pass(place, self._name, alone=alone)
            self._state.passing = self._name
            result = work()
            completed = whole
            return result
        finally:
            self._state.current = self._state.passing = None
            if begun is not None:
                begun.end(completed=completed)

    def _enter(self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begun, block, number = self._state.current, self._blocks[index], self._first_block + index
        if begun is None:
            raise RuntimeError(f"{block.path} was entered outside a pass")
        if torch.is_grad_enabled():
            check_no_gradients(f"{self._name}.{block.path}", block, args, kwargs)
        started = time.thread_time()
        begun.enter(number)
        hooks_cpu_s = 0.0
        try:
            self._state.block, self._state.has_entered = number, True
            hooks_cpu_s = time.thread_time() - started
            result = call(*args, **kwargs)
            started = time.thread_time()
            block.check_unwritten()
        finally:
            self._state.block = None
            begun.leave(number)
        begun.count_hooks(hooks_cpu_s + time.thread_time() - started)
        begun.keep_pace()
        return result
