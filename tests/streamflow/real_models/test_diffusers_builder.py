"""A builder for a diffusers directory gives what ``from_pretrained`` loads, or says why it does not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.configuration_utils import register_to_config
from torch import nn

import streamflow
from streamflow.diffusers_models import diffusers_builder
from streamflow.errors import ConfigurationError, DiffusersUnavailableError, UnsupportedModelError
from streamflow.weights.errors import CheckpointFormatError, CheckpointNotFoundError, CheckpointOpenError
from streamflow.weights.skeleton import build_skeleton
from tests.streamflow.kit import sha256_of
from tests.streamflow.real_models.models import FLUX_MODEL, MODELS, WAN_MODEL, DiffusersModel, Variant

Saved = Callable[[Variant], Path]
ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def kinds_of(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Dtype, shape and gradient of every parameter and buffer, of no module in particular order."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tensor.dtype, tensor.shape, tensor.requires_grad) for name, tensor in tensors.items()}


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.float32, torch.bfloat16), *((torch.bfloat16, dtype) for dtype in (None, *ALL_DTYPES))],
    ids=str,
)
def test_every_tensor_has_the_dtype_that_from_pretrained_gives_it(
    model: DiffusersModel, stored: torch.dtype, dtype: torch.dtype | None, saved: Saved
) -> None:
    directory = saved(Variant(model, stored, sharded=False))
    loaded = model.model_class.from_pretrained(directory, torch_dtype=dtype)
    skeleton = build_skeleton(diffusers_builder(directory, dtype))
    assert type(skeleton) is type(loaded)
    assert kinds_of(skeleton) == kinds_of(loaded)


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_no_checkpoint_holds_has_the_values_that_from_pretrained_computes(
    model: DiffusersModel, dtype: torch.dtype, saved: Saved
) -> None:
    directory = saved(Variant(model, torch.bfloat16, sharded=False))
    loaded = dict(model.model_class.from_pretrained(directory, torch_dtype=dtype).named_buffers())
    built = dict(build_skeleton(diffusers_builder(directory, dtype)).named_buffers())
    assert {name: sha256_of(buffer) for name, buffer in built.items()} == {
        name: sha256_of(buffer) for name, buffer in loaded.items()
    }
    assert bool(built) == (model is WAN_MODEL)


def test_wan_keeps_parameters_in_float32(saved: Saved) -> None:
    directory = saved(Variant(WAN_MODEL, torch.bfloat16, sharded=True))
    dtypes = {name: kind[0] for name, kind in kinds_of(diffusers_builder(directory, torch.bfloat16)()).items()}
    assert dtypes["blocks.3.scale_shift_table"] == torch.float32
    assert dtypes["blocks.3.norm2.weight"] == torch.float32
    assert dtypes["blocks.3.ffn.net.0.proj.weight"] == torch.bfloat16


def test_the_large_tensors_of_a_skeleton_are_never_made(saved: Saved) -> None:
    directory = saved(Variant(FLUX_MODEL, torch.float32, sharded=False))
    skeleton = build_skeleton(diffusers_builder(directory, torch.bfloat16))
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_building_leaves_the_default_dtype_to_others(saved: Saved) -> None:
    seen: list[torch.dtype] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(torch.get_default_dtype())
            return func(*args, **(kwargs or {}))

    build = diffusers_builder(saved(Variant(WAN_MODEL, torch.float32, sharded=False)), torch.bfloat16)
    with Watch():
        build()
    assert set(seen) == {torch.float32}


class Steps(diffusers.ModelMixin, diffusers.ConfigMixin):  # type: ignore[misc]
    """A model that keeps a table, which it computes in torch's default dtype."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, buffer: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        table = torch.arange(4) / 3
        if buffer:
            self.register_buffer("table", table, persistent=False)
        else:
            self.tables = {"all": [table.float()]}


@pytest.mark.parametrize(("buffer", "path"), [(True, "table"), (False, "tables")])
def test_a_model_that_computes_in_the_default_dtype_is_refused_and_told_what(
    buffer: bool, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffusers, "Steps", Steps, raising=False)
    Steps(buffer=buffer).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="pass a build of your own") as caught:
        diffusers_builder(tmp_path, torch.bfloat16)()
    assert caught.value.name == f"Steps.{path}"
    assert "torch.bfloat16" in caught.value.reason
    for dtype in (None, torch.float32):
        built, loaded = diffusers_builder(tmp_path, dtype)(), Steps.from_pretrained(tmp_path, torch_dtype=dtype)
        assert kinds_of(built) == kinds_of(loaded)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn, "bfloat16"], ids=str)
def test_a_dtype_that_weights_cannot_be_converted_to_is_refused(dtype: Any, saved: Saved) -> None:
    with pytest.raises(ConfigurationError, match=r"dtype must be one of .*torch\.bfloat16"):
        diffusers_builder(saved(Variant(FLUX_MODEL, torch.float32, sharded=False)), dtype)


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="save_pretrained wrote") as caught:
        diffusers_builder(tmp_path / "nowhere")
    assert caught.value.path == str(tmp_path / "nowhere" / "config.json")
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="for example its transformer"):
        diffusers_builder(tmp_path)


def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointOpenError, match="it cannot be read"):
        diffusers_builder(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointOpenError, match="it cannot be read"):
        diffusers_builder(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is not JSON"),
        ("[]", "it holds a list, not an object"),
        ("{}", "its _class_name is None, which is no model of diffusers"),
        ('{"_class_name": 3}', "its _class_name is 3"),
        ('{"_class_name": "DDIMScheduler"}', "its _class_name is 'DDIMScheduler'"),
        ('{"_class_name": "NoSuchModel"}', "its _class_name is 'NoSuchModel'"),
        ('{"_class_name": "__version__"}', "its _class_name is '__version__'"),
    ],
)
def test_a_configuration_of_something_else_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointFormatError, match=words):
        diffusers_builder(tmp_path)


def test_a_configuration_that_asks_for_quantization_is_refused(tmp_path: Path) -> None:
    config = {"_class_name": "FluxTransformer2DModel", "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="quantization while loading"):
        diffusers_builder(tmp_path)


def test_without_diffusers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(DiffusersUnavailableError, match=r"streamflow-offload\[diffusers\]") as caught:
        diffusers_builder(tmp_path)
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "diffusers"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_refused_build_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "Steps", Steps, raising=False)
    Steps().save_pretrained(tmp_path)
    build = diffusers_builder(tmp_path, torch.bfloat16)
    with pytest.raises(UnsupportedModelError):
        async with streamflow.open_streamed(build, tmp_path):
            pytest.fail("it opened")
