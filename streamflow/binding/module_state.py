"""Modules that keep something between calls: found by what they are, or seen to change in a forward.

Two requests in one such module would each find what the other left. Parameters do not count here, and neither do
tensors that are streamed: writing those is refused while the model is attached.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from streamflow.errors import ConfigurationError

#: Attributes in which video VAEs keep the last frames of their causal convolutions between calls.
_CONVOLUTION_CACHES = ("_feat_map", "_enc_feat_map", "_feat_cache", "feat_cache", "conv_cache", "_conv_cache")
#: Of ``vars(module)``: what is not the module's own to change, or is looked at apart.
_IGNORED = ("_parameters", "_buffers", "_modules", "_compiled_call_impl", "forward")


@attrs.frozen
class Stateful:
    """A module that keeps state between calls, and how that is known."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def find_stateful(model: nn.Module, named: tuple[str, ...] | None) -> tuple[Stateful, ...]:
    """The modules that are ``named``, by their paths; None: those that can be told by what they are.

    :raises ConfigurationError: if there is no module at a path.
    """
    if named is None:
        return tuple(_recognised(model))
    paths = [path for path, _ in model.named_modules()]
    problems = [_no_module(path, paths) for path in named if path not in paths]
    if problems:
        raise ConfigurationError(problems)
    return tuple(Stateful(path, "it is named in stateful_modules") for path in named)


def _no_module(path: str, paths: list[str]) -> str:
    near = difflib.get_close_matches(path, paths, n=3)
    return f"stateful_modules: there is no module {path!r}" + (f"; there is {', '.join(near)}" if near else "")


def _recognised(model: nn.Module) -> Iterator[Stateful]:
    for path, module in model.named_modules():
        name = path or type(model).__name__
        if module.training and isinstance(module, _NormBase) and module.track_running_stats:
            yield Stateful(name, f"a {type(module).__name__} in training mode updates its running statistics")
        caches = [attribute for attribute in _CONVOLUTION_CACHES if hasattr(module, attribute)]
        if caches:
            yield Stateful(name, f"it keeps {caches[0]}, a cache of causal convolutions")
        if getattr(module, "_cache_config", None) is not None:
            yield Stateful(name, "a cache over denoising steps is enabled in it")


class Snapshot:
    """What the modules of a model held at one moment, one level deep."""

    def __init__(self, model: nn.Module, ignored: frozenset[int] = frozenset()) -> None:
        """``ignored``: the ``id`` of tensors that do not count."""
        self._ignored = ignored
        self._held = {path: dict(self._attributes(module)) for path, module in model.named_modules()}

    def changed(self, later: Snapshot) -> Iterator[Stateful]:
        """The modules that hold something else in ``later``, each with the first attribute that differs."""
        for path, before in self._held.items():
            after = later._held.get(path, {})
            for key in {**before, **after}:
                if not _same(before.get(key), after.get(key)):
                    yield Stateful(path or "the model", f"a forward changes its attribute {key!r}")
                    break

    def _attributes(self, module: nn.Module) -> Iterator[tuple[str, list[tuple[Any, int]]]]:
        for key, value in (*vars(module).items(), *module._buffers.items()):
            if key not in _IGNORED and id(value) not in self._ignored:
                yield key, _seen(value)


def _seen(value: Any) -> list[tuple[Any, int]]:
    """The value, or what a container holds: kept, so that nothing else gets its identity, and with its version."""
    if isinstance(value, Mapping):
        return [_with_version(part) for part in (*value.keys(), *value.values())]
    if isinstance(value, (list, tuple, set)):
        return [_with_version(part) for part in value]
    return [_with_version(value)]


def _with_version(value: Any) -> tuple[Any, int]:
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value, value._version if is_counted else 0


def _same(before: list[tuple[Any, int]] | None, after: list[tuple[Any, int]] | None) -> bool:
    if before is None or after is None:
        return before is after
    return len(before) == len(after) and all(map(_same_one, before, after))


def _same_one(before: tuple[Any, int], after: tuple[Any, int]) -> bool:
    if before[0] is after[0]:
        return before[1] == after[1]
    plain = (int, float, str, bool, torch.dtype, torch.device)
    return isinstance(before[0], plain) and type(before[0]) is type(after[0]) and bool(before[0] == after[0])
