"""Binding blocks to slots: re-pointing ``.data``, so that Parameter objects keep their identity and attributes."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from streamflow.binding.inventory import BlockTensors
from streamflow.binding.poison import Poison
from streamflow.errors import WeightsChangedError
from streamflow.stages.images import view_of

_VERSION = operator.attrgetter("_version")


class BoundBlock:
    """One block's tensors, their host data, their placeholders, and the views of them made so far.

    Unbound, they show poison; with ``rests_on_host`` their host data: a component that moves as a whole may be read
    while it is absent.
    """

    def __init__(self, tensors: BlockTensors, poison: Poison, *, rests_on_host: bool = False) -> None:
        self.path = tensors.block.path
        self.layout = tensors.layout
        self.names = tuple(owned.name for owned in tensors.tensors)
        self._tensors = tuple(owned.tensor for owned in tensors.tensors)
        self._host = tuple(tensor.data for tensor in self._tensors)
        self._rest = None if rests_on_host else tuple(poison.like(tensor) for tensor in self._tensors)
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._state = self._current_state()
        self._is_change_told = False

    @property
    def host(self) -> tuple[torch.Tensor, ...]:
        """The tensors as they were found, in the order of ``names``."""
        return self._host

    def identities(self) -> list[tuple[int, str]]:
        """``id`` and name of each tensor."""
        return [(id(tensor), name) for tensor, name in zip(self._tensors, self.names, strict=True)]

    def replace_host(self, host: Sequence[torch.Tensor]) -> None:
        """Take equal tensors elsewhere as the host data; only while these are shown."""
        self._host = tuple(host)
        self._show(self._host)

    def show_rest(self) -> None:
        """Unbind. Views of buffers that come and go are dropped with the buffer.

        :raises WeightsChangedError: if somebody re-pointed or wrote a tensor meanwhile, and was not told yet.
        """
        try:
            self._check_shown()
        finally:
            self._show(self._host if self._rest is None else self._rest)
            self._views = {place: views for place, views in self._views.items() if place >= 0}

    def show_slot(self, place: int, buffer: torch.Tensor) -> None:
        """Bind to ``buffer``, which is the same for one ``place`` (from 0 on) every time.

        :raises WeightsChangedError: if somebody re-pointed or wrote a tensor meanwhile, and was not told yet.
        """
        self._check_shown()
        views = self._views.get(place)
        if views is None:
            views = self._views[place] = tuple(view_of(buffer, view) for view in self.layout.views)
        self._show(views)

    def show_host(self) -> None:
        """Show the tensors as they were found."""
        self._show(self._host)
        self._views.clear()

    def _show(self, data: Sequence[torch.Tensor]) -> None:
        for tensor, shown in zip(self._tensors, data, strict=True):
            tensor.data = shown
        self._state = self._current_state()
        self._is_change_told = False

    def _check_shown(self) -> None:
        if not self._is_change_told:
            self.check_unchanged()

    def requires_grad(self) -> bool:
        """Whether one of the tensors asks for gradients."""
        return any(tensor.requires_grad for tensor in self._tensors)

    def check_unchanged(self) -> None:
        """Return if no tensor was written or re-pointed since it shows what it shows now.

        :raises WeightsChangedError: if one was.
        """
        current = self._current_state()
        if current != self._state:
            self._is_change_told = True
            for how, now, before in zip(("re-pointed", "written"), current, self._state, strict=True):
                for name, found, expected in zip(self.names, now, before, strict=True):
                    if found != expected:
                        raise WeightsChangedError(name, how)

    def check_unwritten(self) -> None:
        """The part of `check_unchanged` that is cheap enough for after every block: writes, not re-pointing.

        :raises WeightsChangedError: if a tensor was written.
        """
        if list(map(_VERSION, self._tensors)) != self._state[1]:
            self.check_unchanged()

    def _current_state(self) -> tuple[list[int], list[int]]:
        """Address and version of each tensor; a version grows with every write through its tensor."""
        return list(map(torch.Tensor.data_ptr, self._tensors)), list(map(_VERSION, self._tensors))


class BlockBinder:
    """The engine's binder over a model's blocks, by their index."""

    def __init__(self, blocks: Sequence[BoundBlock]) -> None:
        self.blocks = tuple(blocks)

    def bind(self, block: int, place: int, buffer: torch.Tensor) -> None:
        self.blocks[block].show_slot(place, buffer)

    def unbind(self, block: int) -> None:
        self.blocks[block].show_rest()

    def locate(self) -> dict[int, tuple[int, str]]:
        """Block and name of each streamed tensor, by the tensor's ``id``."""
        return {key: (i, name) for i, block in enumerate(self.blocks) for key, name in block.identities()}

    def show_rest(self) -> None:
        """Unbind all: what streams is in nobody's reach until a slot has it."""
        for block in self.blocks:
            block.show_rest()

    def show_host(self) -> None:
        """Show every block's tensors as they were found, whatever they show now."""
        for block in self.blocks:
            block.show_host()
