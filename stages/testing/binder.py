"""A binder that holds no model: it checks the engine's promises about binding, and remembers what happened."""

from __future__ import annotations

import threading
from typing import Literal

import attrs
import torch

from streamflow.stages.errors import StreamflowError


class BindingError(StreamflowError, RuntimeError):
    """The engine broke a promise about binding, or a block was used while it was bound to nothing."""

    def __init__(self, block: int, problem: str) -> None:
        self.block = block
        super().__init__(f"block {block}: {problem}")


@attrs.frozen
class Binding:
    """One call of the engine. ``place`` is the slot, or -1 - block for a resident; None where it was not bound."""

    action: Literal["bind", "unbind"]
    block: int
    place: int | None


class RecordingBinder:
    """Binds blocks to buffers and nothing else. The engine calls it on the loop; `buffer_of` works from any thread."""

    def __init__(self) -> None:
        self.history: list[Binding] = []
        self._bound: dict[int, tuple[int, torch.Tensor]] = {}
        self._loop_thread: int | None = None

    @property
    def bound(self) -> dict[int, int]:
        """The blocks that are bound now, each with its place."""
        return {block: place for block, (place, _) in self._bound.items()}

    def bind(self, block: int, place: int, buffer: torch.Tensor) -> None:
        """Note that ``block`` lies in ``buffer``.

        :raises BindingError: if it is bound already, if ``place`` holds another block, or in another thread.
        """
        self._check_thread(block)
        if block in self._bound:
            raise BindingError(block, f"is bound to place {self._bound[block][0]} and was to be bound to {place} too")
        others = [other for other, (taken, _) in self._bound.items() if taken == place]
        if others:
            raise BindingError(block, f"was to be bound to place {place}, which holds block {others[0]}")
        self._bound[block] = (place, buffer)
        self.history.append(Binding("bind", block, place))

    def unbind(self, block: int) -> None:
        """Note that ``block`` lies nowhere; it need not have been bound.

        :raises BindingError: in another thread than before.
        """
        self._check_thread(block)
        place, _ = self._bound.pop(block, (None, None))
        self.history.append(Binding("unbind", block, place))

    def buffer_of(self, block: int) -> torch.Tensor:
        """The buffer that ``block`` is bound to; the engine's, valid until it unbinds the block.

        :raises BindingError: if it is bound to none.
        """
        found = self._bound.get(block)
        if found is None:
            raise BindingError(block, "is bound to no buffer, but was told that it may run")
        return found[1]

    def _check_thread(self, block: int) -> None:
        thread = threading.get_ident()
        if self._loop_thread not in (None, thread):
            raise BindingError(block, "was bound or unbound outside the loop's thread")
        self._loop_thread = thread
