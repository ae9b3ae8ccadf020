"""What decides the final weights of a model besides its files, as whoever loads it declares it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import nn

from streamflow.errors import ConfigurationError
from streamflow.host_weights.plain_values import NotPlainError, plain

#: Load formats whose weights come from nowhere: they have no identity that another start could have.
UNREPEATABLE_FORMATS = ("dummy", "random")


@attrs.frozen(kw_only=True)
class LoadInputs:
    """The inputs of loading by name, for the identity of what comes out. Values are plain: numbers, text, lists and
    mappings.

    Attributes:
        producer_abi: a name and version for what ``load``, ``finalize`` and transforming adapters do to weights. Who
            changes what they do changes it: code is never looked at. None is right only without any of them.
        load_format: where weights come from; ``"dummy"`` and ``"random"`` cannot be stored.
        model_config: the model's configuration; None: what its ``config`` holds.
        load_arguments, pipeline_arguments: what was passed to the loader and to a custom pipeline.
        lora_path: a file or a directory with weights that are merged while loading; its content counts, not its name.
            In a directory, the names of the files count, too.
        lora_scale, lora_backend: how they are merged.
        extra_files: further files, or directories, that ``load`` reads; which of them comes first counts.
        neighbours: the other modules of the pipeline; a tensor that shares memory with one of them cannot be stored.

    :raises ConfigurationError: if a value has no stable form or a kind is wrong.
    """

    producer_abi: str | None = None
    load_format: str = "safetensors"
    model_config: Mapping[str, Any] | None = None
    load_arguments: Mapping[str, Any] = attrs.field(factory=dict)
    pipeline_arguments: Mapping[str, Any] = attrs.field(factory=dict)
    lora_path: str | os.PathLike[str] | None = None
    lora_scale: float | None = None
    lora_backend: str | None = None
    extra_files: tuple[str | os.PathLike[str], ...] = ()
    neighbours: tuple[nn.Module, ...] = ()

    def __attrs_post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigurationError(problems)

    def named_values(self) -> dict[str, Any]:
        """What is declared, as plain values; files by content are apart."""
        names = ("producer_abi", "load_format", "load_arguments", "pipeline_arguments", "lora_scale", "lora_backend")
        return {name: plain(getattr(self, name), name) for name in names}

    def files(self) -> list[tuple[str, str]]:
        """What each file whose content counts is to loading, and its path. Blocks: folders are looked into.

        :raises OSError: if a folder cannot be read.
        """
        lora = () if self.lora_path is None else (("lora", self.lora_path),)
        extra = ((f"extra file {number}", path) for number, path in enumerate(self.extra_files))
        return [found for role, path in (*lora, *extra) for found in _files_at(role, os.fspath(path))]


def _files_at(role: str, path: str, above: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """The file at ``path``, or all below it. Links are followed; one that leads back up (``above``) adds nothing."""
    if not os.path.isdir(path):
        yield role, path
        return
    here = os.path.realpath(path)
    if here not in above:
        for name in sorted(os.listdir(path)):
            yield from _files_at(f"{role}/{name}", os.path.join(path, name), (*above, here))


def _problems(inputs: LoadInputs) -> Iterator[str]:
    for name in ("model_config", "load_arguments", "pipeline_arguments"):
        value = getattr(inputs, name)
        if value is None and name == "model_config":
            continue
        if not isinstance(value, Mapping):
            yield f"{name} must be a mapping, not {value!r}"
            continue
        try:
            plain(value, name)
        except NotPlainError as failure:
            yield str(failure)
    for name in ("producer_abi", "lora_backend"):
        value = getattr(inputs, name)
        if value is not None and (not isinstance(value, str) or not value):
            yield f"{name} must be a non-empty name or None, not {value!r}"
    if not isinstance(inputs.load_format, str):
        yield f"load_format must be a name, not {inputs.load_format!r}"
    if isinstance(inputs.extra_files, str) or not all(_is_path(path) for path in inputs.extra_files):
        yield f"extra_files must be a tuple of paths, not {inputs.extra_files!r}"
    if inputs.lora_path is not None and not _is_path(inputs.lora_path):
        yield f"lora_path must be a path or None, not {inputs.lora_path!r}"
    scale = inputs.lora_scale
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        yield f"lora_scale must be a number or None, not {scale!r}"
    if not all(isinstance(module, nn.Module) for module in inputs.neighbours):
        yield "neighbours must be modules"


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)
