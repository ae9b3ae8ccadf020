"""The staged component: what happens around a call of it, or of a part of it, from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from streamflow.binding.blocks import BoundBlock
from streamflow.runtime.inputs import check_no_gradients, on_device
from streamflow.runtime.workplace import Workplace
from streamflow.stages.devices.base import Device


class StagedComponent:
    """Runs calls of a component that is on the device only while it is used; all its weights are in one ``block``."""

    def __init__(self, name: str, block: BoundBlock, device: Device, workplace: Workplace) -> None:
        self._name = name
        self._block = block
        self._device = device
        self._workplace = workplace
        self._state = workplace.state

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the component, of one of its methods, or of a module in it; within such a call, just the call."""
        if self._name in self._state.inside:
            return call(*args, **kwargs)
        return self._workplace.run(self._name, lambda place, alone: self._run_there(call, args, kwargs))

    def _run_there(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            check_no_gradients(self._name, self._block, args, kwargs)
        if not self._device.is_host:
            args, kwargs = on_device((args, kwargs), self._device.torch_device)
        result = call(*args, **kwargs)
        self._block.check_unwritten()
        return result
