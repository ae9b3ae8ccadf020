"""What others may do with a pipeline while it is open: its own offloading, and what would change its components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from streamflow.errors import RefusedWhileAttachedError, UnsupportedModelError

#: Methods that are refused while the pipeline is open, and what to do instead.
_REFUSED = {
    "enable_model_cpu_offload": "streamflow moves its components already; remove the call",
    "enable_sequential_cpu_offload": "streamflow streams its blocks already; remove the call",
    "enable_group_offload": "streamflow streams its blocks already; remove the call",
    "remove_all_hooks": "there are none of its own to be removed",
    "reset_device_map": "its components are placed by streamflow",
    "load_lora_weights": "load the adapter before opening",
    "unload_lora_weights": "close, unload and open again",
    "fuse_lora": "fuse before opening",
    "unfuse_lora": "close, unfuse and open again",
    "set_adapters": "choose the adapters before opening",
    "enable_lora": "choose the adapters before opening",
    "disable_lora": "choose the adapters before opening",
    "delete_adapters": "close, delete and open again",
    "set_lora_device": "its components are placed by streamflow",
    "load_ip_adapter": "load the adapter before opening",
    "unload_ip_adapter": "close, unload and open again",
    "load_textual_inversion": "load the embeddings before opening",
    "unload_textual_inversion": "close, unload and open again",
    "fuse_qkv_projections": "fuse before opening",
    "unfuse_qkv_projections": "close, unfuse and open again",
    "register_modules": "give the components to the pipeline before opening",
}


def check_pipeline(pipeline: Any) -> None:
    """Return if nobody else places the pipeline's components.

    :raises UnsupportedModelError: if it offloads them itself already, or a device map does.
    """
    name = type(pipeline).__name__
    if getattr(pipeline, "_all_hooks", None):
        raise UnsupportedModelError(
            name, "it offloads its components itself", "call pipeline.remove_all_hooks() before opening"
        )
    if getattr(pipeline, "hf_device_map", None) is not None:
        raise UnsupportedModelError(
            name,
            "a device map places its components",
            "load it without device_map, or call pipeline.reset_device_map()",
        )


class PipelineGuards:
    """Instance attributes that shadow methods of a pipeline with these components; `remove` takes them away again."""

    def __init__(self, pipeline: Any, modules: Sequence[nn.Module]) -> None:
        self._pipeline = pipeline
        self._modules = modules
        self._shadowed: list[str] = []

    def install(self) -> None:
        """Shadow the methods that the pipeline has."""
        name = type(self._pipeline).__name__
        for method, instead in _REFUSED.items():
            if callable(getattr(self._pipeline, method, None)):
                self._shadow(method, _refuse(f"{method}()", name, instead))
        if callable(getattr(self._pipeline, "to", None)):
            self._shadow("to", _move(self._pipeline, self._modules))

    def _shadow(self, attribute: str, value: object) -> None:
        if attribute not in vars(self._pipeline):
            object.__setattr__(self._pipeline, attribute, value)
            self._shadowed.append(attribute)

    def remove(self) -> None:
        """Leave the pipeline as it was found. Idempotent."""
        while self._shadowed:
            vars(self._pipeline).pop(self._shadowed.pop(), None)


def _refuse(operation: str, name: str, instead: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise RefusedWhileAttachedError(operation, name, instead)

    return refused


def _move(pipeline: Any, modules: Sequence[nn.Module]) -> Callable[..., Any]:
    def to(*args: Any, **kwargs: Any) -> Any:
        for module in modules:  # each says whether it is where it is to be
            module.to(*args, **kwargs)
        return pipeline

    return to
