"""What others may do with a module while it is streamed: real bytes, or a typed refusal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from streamflow.errors import AlreadyAttachedError, RefusedWhileAttachedError

#: ``id`` of every module, parameter and buffer that an open offload holds.
_claimed: set[int] = set()
_claims_lock = threading.Lock()

#: Methods that would move, convert or replace weights, and the operations that they stand for. ``to`` is apart.
_REFUSED = {
    "_apply": "moving or converting (to, half, cuda, ...)",
    "_load_from_state_dict": "load_state_dict()",
    "__deepcopy__": "copy.deepcopy()",
    "__reduce_ex__": "pickling",
    "compile": "compile()",
    "merge": "merging an adapter",
    "unmerge": "unmerging an adapter",
    "fuse_lora": "fusing a LoRA",
    "unfuse_lora": "unfusing a LoRA",
    "add_adapter": "adding an adapter",
    "load_lora_adapter": "loading a LoRA",
    "unload_lora": "unloading a LoRA",
    "delete_adapters": "deleting an adapter",
    "delete_adapter": "deleting an adapter",
    "set_adapters": "switching adapters",
    "enable_lora": "switching adapters",
    "disable_lora": "switching adapters",
    "update_layer": "adding an adapter",
    "disable_cache": "disabling a cache over steps",
    "enable_group_offload": "offloading by diffusers",
    "enable_layerwise_casting": "casting by layers",
    "enable_cache": "enabling a cache over denoising steps",
}
#: Of these, the ones that every module gets; the others only where the module has such a method.
_ALWAYS = ("_apply", "_load_from_state_dict", "__deepcopy__", "__reduce_ex__", "compile")


#: The real bytes of a streamed tensor, as a host tensor; None for a tensor that is not streamed.
ReadStreamed = Callable[[torch.Tensor], torch.Tensor | None]


def claimed(model: nn.Module, name: str) -> AbstractContextManager[None]:
    """Hold ``model`` for one offload: until this is left, nobody else can claim it or a part of it, from any thread.

    To be entered before the model is looked at: what another offload shows in the meantime is not what it holds.

    :raises AlreadyAttachedError: if a module, parameter or buffer of it is held.
    """
    return all_claimed({name: model})


@contextmanager
def all_claimed(models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Hold several models, by name, for one offload, as `claimed` does. They may have parts in common."""
    parts = {
        id(part): f"{name}.{path}" if path else name
        for name, model in models.items()
        for listing in (model.named_modules(), model.named_parameters(), model.named_buffers())
        for path, part in listing
    }
    with _claims_lock:
        held = next((part for part in parts if part in _claimed), None)
        if held is not None:
            raise AlreadyAttachedError(parts[held])
        _claimed.update(parts)
    try:
        yield
    finally:
        with _claims_lock:
            _claimed.difference_update(parts)


class Guards:
    """Instance attributes that shadow methods of a model's modules; `remove` takes all of them away again."""

    def __init__(self, model: nn.Module, name: str, device: torch.device) -> None:
        self._model = model
        self._name = name
        self._device = device
        self._shadowed: list[tuple[nn.Module, str]] = []

    def install(self, read_streamed: ReadStreamed) -> None:
        """Shadow the methods, and let ``state_dict`` return what ``read_streamed`` does for streamed tensors."""
        for path, module in self._model.named_modules():
            full = f"{self._name}.{path}" if path else self._name
            for method, operation in _refusals(module):
                self._shadow(module, method, _refuse(operation, full))
            self._shadow(module, "to", _move(module, full, self._device))
            self._shadow(module, "_save_to_state_dict", _save(module, full, read_streamed))

    def _shadow(self, module: nn.Module, attribute: str, value: object) -> None:
        if attribute not in module.__dict__:
            object.__setattr__(module, attribute, value)
            self._shadowed.append((module, attribute))

    def remove(self) -> None:
        """Leave the modules as they were found. Idempotent."""
        for module, attribute in reversed(self._shadowed):
            module.__dict__.pop(attribute, None)
        self._shadowed.clear()


def _refusals(module: nn.Module) -> Iterator[tuple[str, str]]:
    for method, operation in _REFUSED.items():
        if method in _ALWAYS or callable(getattr(type(module), method, None)):
            yield method, operation


def _refuse(operation: str, full: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise RefusedWhileAttachedError(operation, full)

    return refused


def _move(module: nn.Module, full: str, ours: torch.device) -> Callable[..., nn.Module]:
    def to(*args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is None and (device is None or _same_device(device, ours)):
            return module  # it is there already, as far as anybody can tell
        raise RefusedWhileAttachedError(_REFUSED["_apply"], full)

    return to


def _same_device(asked: torch.device, ours: torch.device) -> bool:
    return asked.type == ours.type and (asked.index is None or ours.index is None or asked.index == ours.index)


def _save(module: nn.Module, full: str, read_streamed: ReadStreamed) -> Callable[..., None]:
    original = module._save_to_state_dict

    def save(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        original(destination, prefix, keep_vars)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or prefix + key not in destination:
                continue
            real = read_streamed(tensor)
            if real is not None:
                if keep_vars:
                    raise RefusedWhileAttachedError("state_dict(keep_vars=True)", full)
                destination[prefix + key] = real

    return save
