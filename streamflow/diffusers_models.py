"""Streaming a diffusers model from the directory that its ``save_pretrained`` wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamflow.errors import ConfigurationError, DiffusersUnavailableError, UnsupportedModelError
from streamflow.weights.default_dtype import DefaultDtypeWatch
from streamflow.weights.errors import CheckpointFormatError, CheckpointNotFoundError, CheckpointOpenError

_CONFIG = "config.json"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_OWN_BUILD = "pass a build of your own, or load the model and use open_offload"


def diffusers_builder(directory: str | os.PathLike[str], dtype: torch.dtype | None = None) -> Callable[[], nn.Module]:
    """A ``build`` for `streamflow.open_streamed` that gives what ``from_pretrained(directory, dtype)`` loads.

    Every tensor has the dtype that ``from_pretrained`` gives it: ``dtype``, or float32 where the model's class
    keeps it so. None is what ``from_pretrained`` makes of None: the dtypes that the class gives itself, whatever the
    files hold. What the files hold in another dtype cannot be streamed from them and is converted while it is loaded.

    ``from_pretrained`` sets torch's default dtype while it builds, which is the whole process's; ``build`` leaves that
    alone, and refuses a model in which it would show.

    Blocks while diffusers is imported and ``config.json`` is read; ``build`` may be called in any thread.

    :raises DiffusersUnavailableError: if diffusers is not installed.
    :raises CheckpointNotFoundError: if there is no ``config.json`` in ``directory``.
    :raises CheckpointOpenError: if it cannot be read.
    :raises CheckpointFormatError: if it is not the configuration of a diffusers model.
    :raises UnsupportedModelError: if it asks for quantization; from ``build``: if the model keeps, outside of its
        checkpoint, what it computes in torch's default dtype, and that is not ``dtype``.
    :raises ConfigurationError: if ``dtype`` is none that weights can be converted to.
    """
    if dtype is not None and dtype not in _DTYPES:
        known = ", ".join(map(str, _DTYPES))
        raise ConfigurationError([f"dtype must be one of {known}, or None, not {dtype!r}"])
    config = _read_config(Path(directory) / _CONFIG)
    model_class = _model_class(config, Path(directory) / _CONFIG)

    def build() -> nn.Module:
        return _build(model_class, config, dtype)

    return build


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointNotFoundError(str(path), _what_is_missing(path.parent)) from None
    except OSError as failure:
        raise CheckpointOpenError(str(path), f"it cannot be read ({failure.strerror})") from failure
    except ValueError as failure:
        raise CheckpointFormatError(str(path), f"it is not JSON ({failure})") from failure
    if not isinstance(config, dict):
        raise CheckpointFormatError(str(path), f"it holds a {type(config).__name__}, not an object")
    return config


def _what_is_missing(directory: Path) -> str:
    if (directory / "model_index.json").exists():
        return "this is a pipeline's directory; give the folder of one of its models, for example its transformer"
    return "there is no such file; give the directory that the model's save_pretrained wrote"


def _model_class(config: dict[str, Any], path: Path) -> Any:
    """The class that the configuration names, as diffusers exports it."""
    try:
        import diffusers
    except ImportError as failure:
        raise DiffusersUnavailableError from failure
    name = config.get("_class_name")
    found = getattr(diffusers, str(name), None)
    if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
        raise CheckpointFormatError(
            str(path), f"its _class_name is {name!r}, which is no model of diffusers {diffusers.__version__}"
        )
    if config.get("quantization_config") is not None:
        raise UnsupportedModelError(str(name), "its configuration asks for quantization while loading", _OWN_BUILD)
    return found


def _build(model_class: Any, config: dict[str, Any], dtype: torch.dtype | None) -> nn.Module:
    matters = dtype is not None and dtype != torch.get_default_dtype()
    watch = DefaultDtypeWatch() if matters else nullcontext()
    with watch:
        model: nn.Module = model_class.from_config(dict(config))
    if isinstance(watch, DefaultDtypeWatch) and (found := watch.found_in(model)):
        computed = f"it is computed in torch's default dtype, which from_pretrained sets to {dtype} meanwhile"
        raise UnsupportedModelError(f"{model_class.__name__}.{found[0]}", computed, _OWN_BUILD)
    if dtype is not None:
        _convert(model, dtype, model_class._keep_in_fp32_modules or ())
    return model


def _convert(model: nn.Module, dtype: torch.dtype, kept: str | Collection[str]) -> None:
    """Give every floating-point tensor of a checkpoint the dtype in which ``from_pretrained`` loads it."""
    kept = {kept} if isinstance(kept, str) else set(kept)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept & set(name.split(".")) else dtype)
