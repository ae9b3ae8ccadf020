"""Opening pipelines: by policy and by plan, several components through one window, and what is refused meanwhile."""

from __future__ import annotations

import copy
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch
from torch import nn

import streamflow
from streamflow.errors import (
    AlreadyAttachedError,
    ComponentPolicyError,
    ComponentPolicyTypeError,
    DeviceBudgetError,
    NestedPassError,
    PlanError,
    RefusedWhileAttachedError,
    UnsupportedModelError,
)
from streamflow.plan import OffloadPlan
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.events import ComponentArrived, ComponentLeft, WalkStarted
from tests.streamflow.kit import ModelState, sha256_of
from tests.streamflow.pipelines.families.family import modules_of
from tests.streamflow.pipelines.families.flux import FLUX
from tests.streamflow.pipelines.families.wan import WAN
from tests.streamflow.pipelines.kit import open_ready, ready
from tests.streamflow.pipelines.test_staged import TOKENS, expected, sizes_of
from tests.streamflow.pipelines.toys import NUM_BLOCKS, WIDTH, ToyPipeline, Transformer, toy_pipeline

pytestmark = pytest.mark.anyio


def behaviours(offload: streamflow.Offload) -> dict[str, str]:
    return {sizes.name: sizes.behaviour for sizes in offload.statistics().components}


# The component policy


async def test_false_keeps_a_component_on_the_device_and_out_of_the_staged_lifecycle() -> None:
    pipeline = toy_pipeline()
    resident = expected(pipeline)
    async with streamflow.open_offload(pipeline, {"components": {"vae": False}}, device=CpuDevice()) as offload:
        with offload.observe() as events:
            assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
            seen = [events.receive_nowait() for _ in range(events.statistics().current_buffer_used)]
        moved = {event.component for event in seen if isinstance(event, (ComponentArrived, ComponentLeft))}
        assert behaviours(offload)["vae"] == "resident"
    assert "vae" not in moved
    assert "text_encoder" in moved


async def test_the_default_keeps_all_but_the_transformer_resident() -> None:
    pipeline = toy_pipeline()
    resident = expected(pipeline)
    options = {"components": {"default": False, "text_encoder": True}}
    async with streamflow.open_offload(pipeline, options, device=CpuDevice()) as offload:
        assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
        assert behaviours(offload) == {"text_encoder": "staged", "transformer": "streamed", "vae": "resident"}


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        (["vae"], ComponentPolicyTypeError, "map names to booleans"),
        ({"vae": 1}, ComponentPolicyTypeError, "True or False"),
        ({"": True}, ComponentPolicyTypeError, "component's name"),
        ({"vea": False}, ComponentPolicyError, "no encoder or VAE 'vea'.*text_encoder, vae"),
        ({"transformer": False}, ComponentPolicyError, "always streams"),
    ],
)
async def test_a_policy_that_is_none_is_refused_before_anything_is_touched(
    policy: Any, error: type[Exception], words: str
) -> None:
    pipeline = toy_pipeline()
    before = {name: ModelState.of(module) for name, module in pipeline.components.items()}
    with pytest.raises(error, match=words):
        async with streamflow.open_offload(pipeline, {"components": policy}, device=CpuDevice()):
            pytest.fail("it opened")
    for name, module in pipeline.components.items():
        before[name].assert_unchanged(module)


async def test_a_policy_for_a_model_that_is_no_pipeline_is_refused() -> None:
    with pytest.raises(ComponentPolicyError, match="this is one model"):
        async with streamflow.open_offload(Transformer(), {"components": {"vae": False}}, device=CpuDevice()):
            pytest.fail("it opened")


# Several components, one window


async def test_an_encoder_and_two_experts_stream_through_one_window() -> None:
    pipeline = toy_pipeline(experts=2)
    resident = expected(pipeline)
    plan = OffloadPlan(
        stacks=("transformer.blocks", "transformer_2.blocks"),
        encoder_stacks=("text_encoder.layers",),
        on_demand=("vae",),
    )
    async with streamflow.open_offload(pipeline, {"plan": plan}, device=CpuDevice()) as offload:
        window = offload.statistics().engine.window_bytes
        with offload.observe() as events:
            assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
            seen = [events.receive_nowait() for _ in range(events.statistics().current_buffer_used)]
        statistics = offload.statistics()
        assert behaviours(offload) == {
            "text_encoder": "streamed",
            "transformer": "streamed",
            "transformer_2": "streamed",
            "vae": "staged",
        }
    walks = [event.component for event in seen if isinstance(event, WalkStarted)]
    assert walks == ["text_encoder", "transformer", "transformer", "transformer_2"]
    assert statistics.num_blocks == 3 + 2 * NUM_BLOCKS
    assert statistics.engine.window_bytes == window  # two slots, for all of them
    largest = max(sizes.block_bytes // sizes.num_blocks for sizes in statistics.components if sizes.num_blocks)
    assert window == 2 * largest


async def test_guidance_walks_twice_a_step_over_one_component() -> None:
    given = ready(WAN)
    async with open_ready(given) as offload:
        with offload.observe() as events:
            await given.check(offload)
            seen = [events.receive_nowait() for _ in range(events.statistics().current_buffer_used)]
    walks = [event.component for event in seen if isinstance(event, WalkStarted)]
    assert walks == ["transformer"] * 2 + ["transformer_2"] * 2


async def test_resident_blocks_come_once_for_a_stage_and_go_before_the_next() -> None:
    pipeline = toy_pipeline()
    resident = expected(pipeline)
    async with streamflow.open_offload(pipeline, {"resident_blocks": 2}, device=CpuDevice()) as offload:
        with offload.observe() as events:
            assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
            seen = [events.receive_nowait() for _ in range(events.statistics().current_buffer_used)]
        statistics = offload.statistics()
    moves = [
        (type(event).__name__, event.component)
        for event in seen
        if isinstance(event, (ComponentArrived, ComponentLeft)) and event.component == "transformer"
    ]
    assert moves == [("ComponentArrived", "transformer"), ("ComponentLeft", "transformer")]
    per_block = statistics.components[1].block_bytes // NUM_BLOCKS
    assert statistics.components[1].moving_bytes == 2 * per_block
    assert statistics.engine.streamed_bytes == 2 * per_block  # the others, which the window then holds


async def test_all_blocks_may_be_resident_for_the_stage() -> None:
    pipeline = toy_pipeline(experts=2)
    resident = expected(pipeline)
    async with streamflow.open_offload(pipeline, {"resident_blocks": "all"}, device=CpuDevice()) as offload:
        for _ in range(2):
            assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
        assert offload.statistics().engine.streamed_bytes == 0


async def test_a_streamed_component_called_inside_another_is_refused_by_name() -> None:
    pipeline = toy_pipeline(experts=2)
    inner = pipeline.transformer_2
    latents, text = torch.ones(2, WIDTH), torch.ones(2, WIDTH)
    handle = pipeline.transformer.blocks[1].register_forward_pre_hook(lambda *_: inner(latents, text) and None)
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        with torch.no_grad(), pytest.raises(NestedPassError, match=r"transformer_2 was called inside .* transformer"):
            await offload.run(pipeline.transformer, latents, text)
        handle.remove()
        assert (await offload.run(torch.no_grad()(inner), latents, text)).isfinite().all()


async def test_a_staged_component_called_inside_a_streamed_one_is_served() -> None:
    pipeline = toy_pipeline()
    pipeline.transformer.blocks[1].register_forward_hook(lambda module, inputs, output: pipeline.vae.decode(output))
    resident = expected(pipeline)
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        for _ in range(2):
            assert sha256_of(await offload.run(pipeline, TOKENS)) == resident


# Budgets


async def test_a_budget_below_a_component_is_refused_with_the_numbers() -> None:
    pipeline = toy_pipeline()
    always, moving = await anyio.to_thread.run_sync(sizes_of, pipeline)
    before = {name: ModelState.of(module) for name, module in pipeline.components.items()}
    budget = always + moving["vae"] - 1
    with pytest.raises(DeviceBudgetError, match=r"vae takes .*device_budget_bytes=.*encoder_stacks") as caught:
        async with streamflow.open_offload(pipeline, {"device_budget_bytes": budget}, device=CpuDevice()):
            pytest.fail("it opened")
    assert (caught.value.component, caught.value.nbytes, caught.value.budget) == ("vae", moving["vae"], budget)
    for name, module in pipeline.components.items():
        before[name].assert_unchanged(module)


# What is refused


async def test_a_pipeline_without_anything_to_stream_is_refused() -> None:
    with pytest.raises(PlanError, match="nothing of ToyPipeline would stream"):
        async with streamflow.open_offload(ToyPipeline(vae=nn.Linear(2, 2)), device=CpuDevice()):
            pytest.fail("it opened")


async def test_a_pipeline_and_its_parts_are_attached_once() -> None:
    pipeline = toy_pipeline()
    async with streamflow.open_offload(pipeline, device=CpuDevice()):
        for again in (pipeline, pipeline.transformer):
            with pytest.raises(AlreadyAttachedError):
                async with streamflow.open_offload(again, device=CpuDevice()):
                    pytest.fail("it opened")


@pytest.mark.parametrize(
    "method", ["enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"]
)
async def test_the_pipelines_own_offloading_is_refused_with_an_explanation(method: str) -> None:
    pipeline = FLUX.build()
    async with streamflow.open_offload(pipeline, device=CpuDevice()):
        with pytest.raises(
            RefusedWhileAttachedError, match=rf"{method}\(\) of FluxPipeline .* already; remove the call"
        ):
            getattr(pipeline, method)("cpu")
    assert method not in vars(pipeline)


@pytest.mark.parametrize("method", ["fuse_lora", "load_lora_weights", "set_adapters"])
async def test_what_would_change_components_is_refused(method: str) -> None:
    pipeline = FLUX.build()
    async with streamflow.open_offload(pipeline, device=CpuDevice()):
        with pytest.raises(RefusedWhileAttachedError, match="before opening"):
            getattr(pipeline, method)()


async def test_moving_a_pipeline_to_where_it_is_does_nothing_and_anywhere_else_is_refused() -> None:
    pipeline = FLUX.build()
    async with streamflow.open_offload(pipeline, device=CpuDevice()):
        assert pipeline.to("cpu") is pipeline
        for target in (torch.float16, "meta"):
            with pytest.raises(RefusedWhileAttachedError):
                pipeline.to(target)


async def test_a_pipeline_that_a_device_map_places_is_refused() -> None:
    pipeline = FLUX.build()
    pipeline.hf_device_map = {"": "cpu"}
    with pytest.raises(UnsupportedModelError, match="a device map places its components"):
        async with streamflow.open_offload(pipeline, device=CpuDevice()):
            pytest.fail("it opened")


# What works as ever


async def test_callbacks_schedulers_and_progress_bars_work(capsys: pytest.CaptureFixture[str]) -> None:
    given = ready(FLUX)
    steps: list[tuple[int, torch.Size]] = []

    def note(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.append((step, tensors["latents"].shape))
        assert pipeline.scheduler.step_index is not None
        return {}

    given.pipeline.set_progress_bar_config(disable=False)
    async with open_ready(given) as offload:
        image = await offload.run(FLUX.generate, given.pipeline, 0, callback_on_step_end=note)
    assert sha256_of(image) == given.images[0]
    assert [step for step, _ in steps] == [0, 1]
    assert "2/2" in capsys.readouterr().err


async def test_the_pipelines_device_is_where_it_computes() -> None:
    pipeline = FLUX.build()
    async with streamflow.open_offload(pipeline, device=CpuDevice()):
        assert pipeline.device == pipeline._execution_device == torch.device("cpu")


@pytest.mark.parametrize("own_tokenizers", [True, False])
async def test_two_pipelines_over_the_same_models_are_exact_together(own_tokenizers: bool) -> None:
    """Each has a scheduler of its own. Where they share tokenizers, which keep how they pad, they take turns."""
    given = ready(FLUX, num_seeds=2)
    parts = dict(given.pipeline.components)
    parts["scheduler"] = type(parts["scheduler"]).from_config(parts["scheduler"].config)
    if own_tokenizers:
        parts |= {name: copy.deepcopy(parts[name]) for name in ("tokenizer", "tokenizer_2")}
    other = type(given.pipeline)(**parts)
    other.set_progress_bar_config(disable=True)
    async with open_ready(given) as offload:
        digests: dict[int, str] = {}
        most = 0

        async def run(pipeline: Any, seed: int) -> None:
            digests[seed] = sha256_of(await offload.run(FLUX.generate, pipeline, seed))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, given.pipeline, 0)
            tasks.start_soon(run, other, 1)
            while len(digests) < 2:
                most = max(most, offload.statistics().num_running)
                await anyio.lowlevel.checkpoint()
    assert [digests[0], digests[1]] == given.images
    assert most == (2 if own_tokenizers else 1)


async def test_components_can_be_saved_while_the_pipeline_is_open(tmp_path: Any) -> None:
    pipeline = FLUX.build()
    before = {name: ModelState.of(module) for name, module in modules_of(pipeline).items()}
    async with streamflow.open_offload(pipeline, device=CpuDevice()):
        states = {name: module.state_dict() for name, module in modules_of(pipeline).items()}
    for name, state in states.items():
        for key, tensor in state.items():
            assert sha256_of(tensor) == before[name].tensors[key].digest
