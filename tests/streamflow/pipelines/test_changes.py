"""Adapters, compiled blocks, caches over steps, other dtypes: exact where they are there before opening, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from peft import LoraConfig
from torch import nn

import streamflow
from streamflow.errors import RefusedWhileAttachedError, UnsupportedModelError
from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.kit import ModelState, aligned_reference, in_worker, sha256_of
from tests.streamflow.pipelines.families.family import modules_of
from tests.streamflow.pipelines.families.flux import FLUX
from tests.streamflow.pipelines.kit import Ready, open_ready
from tests.streamflow.pipelines.masters import in_read_only_memory
from tests.streamflow.pipelines.test_staged import TOKENS, expected
from tests.streamflow.pipelines.toys import WIDTH, toy_pipeline

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")]


def lora(rank: int = 4) -> Any:
    """An adapter that changes something from the start."""
    return LoraConfig(r=rank, lora_alpha=8, init_lora_weights=False, target_modules=["to_q", "to_v", "proj_mlp"])


def changed(change: Callable[[Any], object]) -> Ready:
    """Flux after ``change``, whose weights are aligned, and what it gives resident."""
    pipeline = FLUX.build()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        change(pipeline)
    for name, module in modules_of(pipeline).items():
        module.eval().requires_grad_(False)
        setattr(pipeline, name, aligned_reference(module))
    image = in_worker(lambda: FLUX.generate(pipeline))
    return Ready(FLUX, pipeline, [sha256_of(image)], [])


def plain_digest() -> str:
    return changed(lambda pipeline: None).images[0]


# Adapters


def two_adapters(pipeline: Any) -> None:
    pipeline.transformer.add_adapter(lora(), "one")
    pipeline.transformer.add_adapter(lora(2), "two")
    pipeline.transformer.set_adapters(["one", "two"], [0.7, -0.5])


def fused(pipeline: Any) -> None:
    pipeline.transformer.add_adapter(lora(), "one")
    pipeline.transformer.fuse_lora()


@pytest.mark.parametrize("change", [two_adapters, fused])
async def test_adapters_that_are_there_before_opening_work(change: Callable[[Any], None]) -> None:
    given = changed(change)
    assert given.images[0] != plain_digest()
    async with open_ready(given) as offload:
        for _ in range(2):
            await given.check(offload)
        assert offload.statistics().engine.streamed_bytes > 0


async def test_an_adapter_never_changes_shared_bytes() -> None:
    """The weights under it lie in memory that nothing can be written to."""
    given = changed(two_adapters)
    mapping = in_read_only_memory(given.pipeline.transformer)
    async with open_ready(given) as offload:
        await given.check(offload)
    assert mapping.size() > 0


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("add_adapter", [None]),
        ("set_adapters", ["one"]),
        ("fuse_lora", []),
        ("unfuse_lora", []),
        ("delete_adapters", ["one"]),
        ("unload_lora", []),
    ],
)
async def test_adapters_are_neither_added_nor_switched_nor_fused_while_open(method: str, arguments: list[Any]) -> None:
    given = changed(lambda pipeline: pipeline.transformer.add_adapter(lora(), "one"))
    async with open_ready(given) as offload:
        with pytest.raises(RefusedWhileAttachedError, match="transformer is refused while it is streamed"):
            getattr(given.pipeline.transformer, method)(*arguments)
        await given.check(offload)


async def test_weights_are_swapped_under_traffic_by_a_second_pipeline() -> None:
    """The recipe of the page: what serves stays open until the other is."""
    old, new = changed(lambda pipeline: None), changed(two_adapters)
    async with open_ready(old) as before:
        await old.check(before)
        async with open_ready(new) as after:
            await old.check(before)
            await new.check(after)


# Compiled


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_repeated_blocks_that_are_compiled_need_no_graph_more_than_resident() -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    given = changed(lambda pipeline: None)
    given.pipeline.transformer.compile_repeated_blocks(backend=backend, fullgraph=True)
    torch._dynamo.reset()
    assert sha256_of(in_worker(lambda: FLUX.generate(given.pipeline))) == given.images[0]
    num_resident = len(graphs)
    torch._dynamo.reset()
    async with streamflow.open_offload(given.pipeline, device=CpuDevice()) as offload:
        for _ in range(2):
            await given.check(offload)
    assert len(graphs) == 2 * num_resident


# Caches over steps, casting, quantization


async def test_a_cache_over_steps_is_refused_by_name() -> None:
    pipeline = FLUX.build()
    pipeline.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    with pytest.raises(UnsupportedModelError, match=r"diffusers' hooks \(.*block.*\)"):
        async with streamflow.open_offload(pipeline, device=CpuDevice()):
            pytest.fail("it opened")
    pipeline.transformer.disable_cache()
    async with streamflow.open_offload(pipeline, device=CpuDevice()):
        with pytest.raises(RefusedWhileAttachedError, match="a cache over"):
            pipeline.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))


async def test_casting_by_layers_is_refused_by_name() -> None:
    pipeline = FLUX.build()
    pipeline.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"diffusers' hooks \(.*layerwise_casting.*\)"):
        async with streamflow.open_offload(pipeline, device=CpuDevice()):
            pytest.fail("it opened")


class Float8Linear(nn.Module):
    """A linear layer that stores its weight in eight bits, with a scale."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH)
        self.scale = nn.Parameter(weight.abs().max() / 448)
        self.weight = nn.Parameter((weight / self.scale).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ (self.weight.to(hidden.dtype) * self.scale).T


async def test_weights_in_eight_bits_stream_and_move_exactly() -> None:
    pipeline = toy_pipeline()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in pipeline.transformer.blocks:
            block[0] = Float8Linear().requires_grad_(False)
        pipeline.vae.decoder.append(Float8Linear().requires_grad_(False))
    resident = expected(pipeline)
    before = ModelState.of(pipeline.transformer)
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        for _ in range(2):
            assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
    before.assert_unchanged(pipeline.transformer)


class Quantized(torch.Tensor):
    """A tensor subclass, as quantization libraries make them."""


@pytest.mark.parametrize("name", ["transformer", "vae"])
async def test_a_tensor_subclass_is_refused_by_name(name: str) -> None:
    pipeline = toy_pipeline()
    module = {"transformer": pipeline.transformer.blocks[0][0], "vae": pipeline.vae.encoder}[name]
    module.weight = nn.Parameter(module.weight.data.as_subclass(Quantized), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="tensor subclass"):
        async with streamflow.open_offload(pipeline, device=CpuDevice()):
            pytest.fail("it opened")
