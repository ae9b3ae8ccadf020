"""The source identity: who the final weights of a model will be, known before they are loaded."""

from __future__ import annotations

import ctypes
import hashlib
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import attrs
import torch
from torch import nn

from streamflow._version import __version__
from streamflow.binding.inventory import dtype_name
from streamflow.host_weights.errors import UnstableConfigurationError
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.host_weights.plain_values import NotPlainError, digest_of, plain
from streamflow.plan import OffloadPlan
from streamflow.weights.adapters import CheckpointAdapter, DropAdapter, RenameAdapter
from streamflow.weights.needed import needed_tensors
from streamflow.weights.topology import WeightTopology

#: Changed whenever the same inputs come to other bytes, or an identity is made of other inputs.
IDENTITY_VERSION = 2
#: Libraries whose version can change what a loader makes of a checkpoint.
_LIBRARIES = ("diffusers", "transformers", "peft", "safetensors")
#: Keys of a configuration that say how it came about, not what it is. Diffusers lists the arguments that were left to
#: their defaults, in an order that differs from process to process.
_UNRELATED_KEYS = {"_name_or_path", "name_or_path", "_use_default_values"}


@attrs.frozen
class SourceIdentity:
    """``source_id`` is the SHA-256 of ``inputs``, which is kept in entries for people to read."""

    source_id: str
    inputs: Mapping[str, Any]


def source_identity(
    skeleton: nn.Module,
    files: Sequence[tuple[str, str]],
    topology: WeightTopology,
    plan: OffloadPlan | None,
    adapters: Sequence[CheckpointAdapter],
    inputs: LoadInputs,
    producer: str,
    *,
    replaced: Collection[str] = frozenset(),
) -> SourceIdentity:
    """The identity of the weights that ``skeleton`` is going to have.

    ``files`` are the source files, each by its role and SHA-256. ``producer`` names the streamflow code that makes the
    final weights of them. What the skeleton computed itself counts by its bytes, but for tensors whose names are in
    ``replaced``: loading gives them other values, and random ones would give each start an identity of its own. The
    data-parallel size and rank, and the rank within a sequence-parallel group, are not in it.

    :raises UnstableConfigurationError: if the model's configuration has no stable form.
    """
    document = {
        "identity": IDENTITY_VERSION,
        "files": sorted(map(list, files)),
        "model": f"{type(skeleton).__module__}.{type(skeleton).__qualname__}",
        "model_config": _model_config(skeleton, inputs),
        "tensors": list(_tensors(skeleton)),
        "computed": dict(_computed(skeleton, replaced)),
        "plan": plain(plan, "plan"),
        "adapters": [_adapter(adapter) for adapter in adapters],
        "loading": inputs.named_values(),
        "producer": producer,
        "topology": attrs.asdict(topology),
        "versions": dict(_versions()),
    }
    return SourceIdentity(digest_of(document), document)


def _adapter(adapter: CheckpointAdapter) -> list[Any]:
    """What an adapter declares; what a transform computes is in the producer's ABI string."""
    match adapter:
        case RenameAdapter(names=names, prefixes=prefixes):
            return ["rename", dict(names), dict(prefixes)]
        case DropAdapter(names=names):
            return ["drop", list(names)]
        case _:
            sources = None if callable(adapter.sources) else list(adapter.sources)
            return ["transform", adapter.label, adapter.target, sources]


def _model_config(skeleton: nn.Module, inputs: LoadInputs) -> Any:
    config = inputs.model_config if inputs.model_config is not None else getattr(skeleton, "config", None)
    if config is None:
        return None
    values = config if isinstance(config, Mapping) else _as_mapping(config)
    try:
        return plain({key: value for key, value in values.items() if key not in _UNRELATED_KEYS}, "config")
    except NotPlainError as failure:
        raise UnstableConfigurationError(str(failure)) from failure


def _as_mapping(config: object) -> Mapping[str, Any]:
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        return dict(to_dict())
    return vars(config) if hasattr(config, "__dict__") else {"config": config}


def _tensors(skeleton: nn.Module) -> Iterator[list[Any]]:
    for needed in needed_tensors(skeleton):
        yield [needed.kind, list(needed.names), needed.dtype, list(needed.shape), list(needed.stride)]


def _computed(skeleton: nn.Module, replaced: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Tensors that were made while the skeleton was built: position tables and the like."""
    for name, tensor in (*skeleton.named_parameters(), *skeleton.named_buffers()):
        if not tensor.is_meta and name not in replaced:
            values = tensor.detach().cpu().contiguous()
            content = (
                ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()) if values.numel() else b""
            )
            digest = hashlib.sha256(content).hexdigest()
            yield name, [dtype_name(tensor), list(tensor.shape), list(tensor.stride()), digest]


def _versions() -> Iterator[tuple[str, str | None]]:
    yield "streamflow", __version__
    yield "torch", str(torch.__version__)
    yield "machine", platform.machine()
    for library in _LIBRARIES:
        try:
            yield library, metadata.version(library)
        except metadata.PackageNotFoundError:
            yield library, None
