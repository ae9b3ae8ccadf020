"""Checkpoint adapters: the steps of loading that make a module's tensors from a checkpoint's, one tensor at a time.

A ``RenameAdapter`` maps names. A ``DropAdapter`` leaves tensors out. A ``TransformAdapter`` computes one tensor of the
module from one or more of the checkpoint; ``TensorAdapter`` takes any function, ``GroupedQKVAdapter`` is a ready-made
one. Preflight proves what they make on meta tensors, so a transform must work on those: it may not look at values.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import attrs
import torch

from streamflow.weights.errors import AdapterError
from streamflow.weights.name_patterns import fill_name, match_name, num_wildcards
from streamflow.weights.torch_dtypes import as_bits, dtype_name, torch_dtype

#: Names of the checkpoint's tensors that make a target: given outright, or as a function of the target's name.
SourceNames: TypeAlias = tuple[str, ...] | Callable[[str], Sequence[str]]


def _frozen_map(value: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType(dict(value))


@attrs.frozen(eq=False)
class RenameAdapter:
    """Names in the checkpoint to names in the module: ``names`` whole, else the longest of ``prefixes`` that fits.

    Names that neither mentions stay as they are.
    """

    names: Mapping[str, str] = attrs.field(factory=dict, converter=_frozen_map)
    prefixes: Mapping[str, str] = attrs.field(factory=dict, converter=_frozen_map)

    def rename(self, name: str) -> str:
        if name in self.names:
            return self.names[name]
        prefix = max((prefix for prefix in self.prefixes if name.startswith(prefix)), key=len, default=None)
        return name if prefix is None else self.prefixes[prefix] + name[len(prefix) :]


def _names(value: Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError(f"the names to drop must be a tuple of names, not one text: ({value!r},)")
    return tuple(value)


@attrs.frozen(eq=False)
class DropAdapter:
    """Tensors of the checkpoint that the module is not made from, though its files hold them.

    ``names`` are names as the checkpoint has them, before any renaming, perhaps with the wildcards ``*`` and ``?``. A
    dropped tensor is no source of anything: a module that needs it finds it missing.

    :raises ValueError: if ``names`` is one text.
    """

    names: tuple[str, ...] = attrs.field(converter=_names)

    def drops(self, name: str) -> bool:
        return any(match_name(pattern, name) is not None for pattern in self.names)


@attrs.frozen(eq=False)
class TransformAdapter(abc.ABC):
    """Makes every tensor of the module whose name matches ``target`` from the tensors that ``sources`` names.

    ``target`` is a name of the module, perhaps with the wildcards ``*`` and ``?``. ``sources`` are names as the
    checkpoint has them, before any renaming: a function of the target's name, or a tuple, in which each wildcard stands
    for what the target's wildcard at the same place matched; empty means the target's own name.

    :raises ValueError: if ``sources`` has more wildcards than ``target``, or ``target`` is empty.
    """

    target: str
    sources: SourceNames = ()

    def __attrs_post_init__(self) -> None:
        if not self.target:
            raise ValueError("a checkpoint adapter needs the name of its target")
        if isinstance(self.sources, str):
            raise ValueError(f"the adapter of {self.target!r}: sources must be a tuple of names, not one text")
        for source in () if callable(self.sources) else self.sources:
            if num_wildcards(source) > num_wildcards(self.target):
                raise ValueError(f"the source {source!r} has more wildcards than the target {self.target!r}")

    @property
    def label(self) -> str:
        """The adapter in messages."""
        return f"{type(self).__name__}({self.target!r})"

    @abc.abstractmethod
    def transform(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The module's tensor from the checkpoint's, which are in the order of ``sources`` and on one device.

        Called from worker threads, several at once; must not keep or change the tensors that it is given, may return
        one of them.
        """

    def sources_for(self, name: str) -> tuple[str, ...] | None:
        """The checkpoint's names that make the module's tensor ``name``; None if that is not a target of this one."""
        texts = match_name(self.target, name)
        if texts is None:
            return None
        if callable(self.sources):
            return tuple(self.sources(name))
        return tuple(fill_name(source, texts) for source in self.sources) or (name,)

    def output_spec(self, name: str, inputs: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of what ``transform`` makes of tensors of these dtypes and shapes; allocates nothing.

        :raises AdapterError: if the transform fails on meta tensors or returns no tensor.
        :raises DtypeUnavailableError: if the installed torch has no such dtype.
        """
        tensors = [torch.empty(shape, dtype=torch_dtype(dtype), device="meta") for dtype, shape in inputs]
        result = self._run(name, tensors)
        return dtype_name(result.dtype), tuple(result.shape)

    def make(self, name: str, tensors: list[torch.Tensor], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The module's tensor ``name``, on the CPU, proven to have this dtype and shape.

        :raises AdapterError: if the transform fails or returns anything else.
        """
        result = self._run(name, tensors)
        found = (dtype_name(result.dtype), tuple(result.shape), result.device.type, result.layout)
        if found != (dtype, tuple(shape), "cpu", torch.strided):
            raise AdapterError(
                self.label,
                name,
                f"it returned {found[0]} {list(found[1])} on {found[2]}, but the module needs {dtype} {list(shape)}",
            )
        return result

    def _run(self, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        try:
            with torch.no_grad():
                result = self.transform(tensors)
        except Exception as failure:  # whatever a user's function raises
            raise AdapterError(self.label, name, f"{type(failure).__name__}: {failure}") from failure
        if not isinstance(result, torch.Tensor):
            raise AdapterError(self.label, name, f"it returned a {type(result).__name__}, not a tensor")
        return result


@attrs.frozen(eq=False)
class TensorAdapter(TransformAdapter):
    """A transform adapter around ``transform``, any function from a list of tensors to a tensor."""

    _transform: Callable[[list[torch.Tensor]], torch.Tensor] = attrs.field(kw_only=True, alias="transform")

    def transform(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return self._transform(tensors)


def _positive(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{attribute.name} must be a whole number of at least 1, not {value!r}")


@attrs.frozen(eq=False)
class GroupedQKVAdapter(TransformAdapter):
    """Reorders a fused projection from ``[q_1 .. q_r, k, v]`` per key-value group to all Q, then all K, then all V.

    Rows (dimension 0) are heads times the size of a head; other dimensions stay. Works on weights and biases of any
    dtype; every byte is moved, none changed. ``num_heads`` counts query heads, a multiple of ``num_kv_groups``.

    :raises ValueError: if a count is not positive or ``num_heads`` is no multiple of ``num_kv_groups``.
    """

    num_heads: int = attrs.field(kw_only=True, validator=_positive)
    num_kv_groups: int = attrs.field(kw_only=True, validator=_positive)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_heads % self.num_kv_groups:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_groups={self.num_kv_groups}")

    def transform(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        (fused,) = tensors
        queries = self.num_heads // self.num_kv_groups
        heads = self.num_kv_groups * (queries + 2)
        if fused.dim() == 0 or fused.shape[0] % heads:
            raise ValueError(f"a tensor of shape {list(fused.shape)} cannot be cut into {heads} heads")
        head_rows = fused.shape[0] // heads
        grouped = as_bits(fused).reshape(self.num_kv_groups, queries + 2, head_rows, *fused.shape[1:])
        parts = grouped[:, :queries], grouped[:, queries : queries + 1], grouped[:, queries + 1 :]
        return torch.cat([part.flatten(0, 2) for part in parts]).view(fused.dtype)


#: Every kind of adapter that a checkpoint may be opened with.
CheckpointAdapter: TypeAlias = RenameAdapter | DropAdapter | TransformAdapter
