"""Components that move as a whole: there for whoever uses them in whatever way, and back where they were afterwards."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from torch import nn

import streamflow
from streamflow.errors import GradientError, LoopThreadError, RefusedWhileAttachedError, WeightsChangedError
from streamflow.runtime.state_gate import Holding, StateGate
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import DeviceMemoryError
from streamflow.stages.events import CacheDecided, ComponentArrived, ComponentFailed, ComponentLeft
from streamflow.stages.mailbox import Mailbox
from streamflow.stages.retention import Reason
from tests.streamflow.kit import ModelState, in_worker, sha256_of
from tests.streamflow.pipelines.masters import in_read_only_memory
from tests.streamflow.pipelines.toys import WIDTH, Encoder, ToyPipeline, toy_pipeline
from tests.streamflow.runtime.kit import until, wait_for

pytestmark = pytest.mark.anyio

TOKENS = [1, 5, 2]


def expected(pipeline: ToyPipeline, tokens: list[int] = TOKENS) -> str:
    return sha256_of(in_worker(lambda: pipeline(tokens)))


def inside(pipeline: ToyPipeline, name: str, look: Callable[[nn.Module], object]) -> None:
    """Let ``look`` see the component in the middle of its next forward."""
    module = pipeline.components[name]
    handle = module.register_forward_pre_hook(lambda *_: (look(module), handle.remove())[1])


USES: dict[str, Callable[[ToyPipeline], torch.Tensor]] = {
    "its forward": lambda pipeline: pipeline.text_encoder(torch.tensor(TOKENS)),
    "a method": lambda pipeline: pipeline.vae.decode(torch.ones(2, WIDTH)),
    "another method": lambda pipeline: pipeline.vae.encode(torch.ones(2, WIDTH)),
    "a module in it": lambda pipeline: pipeline.text_encoder.final_norm(torch.ones(2, WIDTH)),
    "a module in a module": lambda pipeline: pipeline.vae.decoder[2](torch.ones(2, 64)),
    "forward by name": lambda pipeline: pipeline.text_encoder.forward(torch.tensor(TOKENS)),
    "a statistic": lambda pipeline: pipeline.vae.latents_mean * 2,
    "a weight": lambda pipeline: pipeline.text_encoder.embedding.weight.clone(),
}


@pytest.mark.parametrize("use", USES)
async def test_every_way_to_use_a_component_is_exact(use: str) -> None:
    pipeline, device = toy_pipeline(), CpuDevice()
    work = torch.no_grad()(lambda: USES[use](pipeline))
    resident = sha256_of(in_worker(work))
    async with streamflow.open_offload(pipeline, {"poison_freed_slots": True}, device=device) as offload:
        window = device.memory().in_use
        for _ in range(2):
            assert sha256_of(await offload.run(work)) == resident
        reads_only = use in ("a statistic", "a weight")
        assert (device.memory().peak > window) == (not reads_only)


async def test_a_component_is_on_the_device_while_it_is_used_and_where_it_was_afterwards() -> None:
    pipeline, addresses = toy_pipeline(), []
    encoder = pipeline.text_encoder
    before = ModelState.of(encoder)
    inside(pipeline, "text_encoder", lambda module: addresses.append(module.layers[0].weight.data_ptr()))
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        await offload.run(pipeline, TOKENS)
        (there,) = addresses
        assert there != before.tensors["layers.0.weight"].address
        state = encoder.state_dict()
        with offload.observe() as events:
            await offload.run(pipeline, TOKENS)
            await _until_left(events, "vae")
        assert encoder.layers[0].weight.data_ptr() == before.tensors["layers.0.weight"].address
    encoder.calls.zero_()
    before.assert_unchanged(encoder)
    assert sha256_of(state["layers.0.weight"]) == before.tensors["layers.0.weight"].digest


async def _until_left(events: Any, component: str) -> None:
    async for event in events:
        if isinstance(event, ComponentLeft) and event.component == component:
            return


async def test_nothing_is_copied_back() -> None:
    """The masters are memory that nothing can be written to."""
    pipeline = toy_pipeline()
    resident = expected(pipeline)
    parts = ["text_encoder", "vae"]
    read_only = [in_read_only_memory(pipeline.components[name]) for name in parts]
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
        statistics = offload.statistics()
    assert all(mapping.size() for mapping in read_only)
    assert statistics.staging is not None
    assert statistics.staging.staged_peak_bytes > 0


async def test_tied_weights_are_counted_and_moved_once_and_stay_tied() -> None:
    pipeline, seen = toy_pipeline(), []
    encoder = pipeline.text_encoder
    inside(pipeline, "text_encoder", lambda m: seen.append(m.head.weight.data_ptr() - m.embedding.weight.data_ptr()))
    bytes_once = sum(-(-parameter.nbytes // 256) * 256 for parameter in encoder.parameters())
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        await offload.run(pipeline, TOKENS)
        sizes = {sizes.name: sizes for sizes in offload.statistics().components}
    assert sizes["text_encoder"].moving_bytes == bytes_once
    assert seen == [0]
    assert encoder.head.weight is encoder.embedding.weight


async def test_views_of_one_storage_are_moved_once_and_stay_views() -> None:
    pipeline, seen = toy_pipeline(), []
    whole = torch.randn(2, WIDTH, WIDTH)
    pipeline.vae.first, pipeline.vae.second = nn.Parameter(whole[:], False), nn.Parameter(whole[1], False)

    def look() -> torch.Tensor:
        pipeline.vae.encode(torch.ones(1, WIDTH))
        seen.append(pipeline.vae.second.data_ptr() - pipeline.vae.first.data_ptr())
        return pipeline.vae.second.sum()

    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        with torch.no_grad():
            assert (await offload.run(look)).item() == whole[1].sum().item()
    assert seen == [WIDTH * WIDTH * 4]


async def test_what_a_component_notes_in_a_buffer_of_its_own_stays() -> None:
    pipeline = toy_pipeline()
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        for _ in range(3):
            await offload.run(pipeline, TOKENS)
    assert pipeline.text_encoder.calls.item() == 3


async def test_a_weight_written_while_it_is_there_is_told() -> None:
    pipeline = toy_pipeline()
    resident = expected(pipeline)
    inside(pipeline, "text_encoder", lambda module: module.layers[1].bias.add_(1))
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        with pytest.raises(WeightsChangedError, match=r"layers\.1\.bias was written"):
            await offload.run(pipeline, TOKENS)
        assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
    assert expected(pipeline) == resident


async def test_gradients_are_refused() -> None:
    pipeline = toy_pipeline()
    pipeline.vae.requires_grad_(True)
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        with pytest.raises(GradientError, match="vae"):
            await offload.run(lambda: pipeline.vae.decode(torch.ones(1, WIDTH)))


@pytest.mark.parametrize("operation", ["to", "half", "load", "copy"])
async def test_moving_or_changing_a_component_is_refused(operation: str) -> None:
    pipeline = toy_pipeline()
    operations: dict[str, Callable[[], object]] = {
        "to": lambda: pipeline.vae.to(torch.float16),
        "half": lambda: pipeline.vae.half(),
        "load": lambda: pipeline.vae.load_state_dict(pipeline.vae.state_dict()),
        "copy": lambda: copy.deepcopy(pipeline.vae),
    }
    async with streamflow.open_offload(pipeline, device=CpuDevice()):
        with pytest.raises(RefusedWhileAttachedError, match="vae"):
            operations[operation]()


async def test_a_call_on_the_loops_own_thread_is_refused() -> None:
    pipeline = toy_pipeline()
    async with streamflow.open_offload(pipeline, device=CpuDevice()):
        with pytest.raises(LoopThreadError, match="vae was called on the thread"):
            pipeline.vae.decode(torch.ones(1, WIDTH))


# Memory


def sizes_of(pipeline: ToyPipeline, **options: Any) -> tuple[int, dict[str, int]]:
    """What is always on the device, and what each component adds while it is used."""
    with streamflow.offload(pipeline, options, device=CpuDevice()) as offload:
        statistics = offload.statistics()
    moving = {sizes.name: sizes.moving_bytes for sizes in statistics.components}
    return statistics.engine.device_in_use_bytes, moving


async def test_the_second_request_does_not_find_the_vae_still_there() -> None:
    """A device on which encoder and VAE do not fit together serves any number of requests."""
    pipeline = toy_pipeline()
    resident = expected(pipeline)
    always, moving = await anyio.to_thread.run_sync(sizes_of, pipeline)
    device = CpuDevice(memory_limit_bytes=always + moving["text_encoder"] + moving["vae"] - 1)
    budget = always + max(moving.values())
    async with streamflow.open_offload(pipeline, {"device_budget_bytes": budget}, device=device) as offload:
        for _ in range(3):
            assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
    assert device.memory().peak <= budget


async def test_a_component_that_does_not_fit_is_told_and_leaves_nothing() -> None:
    pipeline = toy_pipeline()
    always, moving = await anyio.to_thread.run_sync(sizes_of, pipeline)
    assert moving["vae"] > moving["text_encoder"]
    device = CpuDevice(memory_limit_bytes=always + moving["vae"] - 1)
    async with streamflow.open_offload(pipeline, device=device) as offload:
        with offload.observe() as events:
            for _ in range(2):
                with pytest.raises(DeviceMemoryError) as caught:
                    await offload.run(pipeline, TOKENS)
                assert caught.value.wanted == moving["vae"]
            seen = [events.receive_nowait() for _ in range(events.statistics().current_buffer_used)]
        failed = [event.component for event in seen if isinstance(event, ComponentFailed)]
        reasons = [event.retention.reason for event in seen if isinstance(event, CacheDecided)]
        assert failed[0] == "vae"
        assert reasons.count(Reason.OUT_OF_MEMORY) == 2
        assert Reason.FAILURE in reasons
        assert device.memory().in_use == always
        encoded = await offload.run(torch.no_grad()(pipeline.text_encoder), torch.tensor(TOKENS))
        assert encoded.isfinite().all()


async def test_a_call_that_fails_gives_the_allocators_cache_back_and_the_next_is_exact() -> None:
    pipeline = toy_pipeline()
    resident = expected(pipeline)

    def fail(module: nn.Module) -> None:
        raise ValueError("broken")

    inside(pipeline, "text_encoder", fail)
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        with offload.observe() as events:
            with pytest.raises(ValueError, match="broken"):
                await offload.run(pipeline, TOKENS)
            async for event in events:
                if isinstance(event, CacheDecided) and event.retention.reason is Reason.FAILURE:
                    break
        pipeline.text_encoder._forward_pre_hooks.clear()
        assert sha256_of(await offload.run(pipeline, TOKENS)) == resident


async def test_requests_in_a_row_leave_device_memory_flat() -> None:
    pipeline, device = toy_pipeline(experts=2), CpuDevice()
    resident = expected(pipeline)
    peaks = []
    async with streamflow.open_offload(pipeline, {"resident_blocks": 1}, device=device) as offload:
        with offload.observe() as events:
            for _ in range(50):
                assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
                await _until_left(events, "vae")
                peaks.append((device.memory().in_use, device.memory().peak))
    assert len(set(peaks)) == 1


# Two requests at once


async def test_two_requests_in_different_stages_stay_inside_the_budget() -> None:
    """One stands between two steps, the other wants the VAE: it waits where there is no room for both."""
    first, second = toy_pipeline(), None
    second = ToyPipeline(**first.components)
    resident = expected(first)
    always, moving = await anyio.to_thread.run_sync(lambda: sizes_of(first, resident_blocks=2))
    budget = always + moving["transformer"] + moving["vae"] - 1
    device = CpuDevice(memory_limit_bytes=budget)
    options = {"device_budget_bytes": budget, "resident_blocks": 2, "poison_freed_slots": True}
    async with streamflow.open_offload(first, options, device=device) as offload:
        results: list[torch.Tensor] = []

        async def run(pipeline: ToyPipeline) -> None:
            results.append(await offload.run(pipeline, TOKENS))

        with anyio.fail_after(20):
            for _ in range(5):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(run, first)
                    tasks.start_soon(run, second)
    assert {sha256_of(result) for result in results} == {resident}
    assert len(results) == 10
    assert device.memory().peak <= budget


async def test_a_component_does_not_move_under_another_request() -> None:
    """The first leaves the encoder while the second is inside it: it stays where it is."""
    pipeline = toy_pipeline()
    other = ToyPipeline(**pipeline.components)
    resident = expected(pipeline)
    arrived = 0
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        with offload.observe() as events:
            async with anyio.create_task_group() as tasks:
                for one in (pipeline, other):
                    tasks.start_soon(offload.run, one, TOKENS)
            seen = [events.receive_nowait() for _ in range(events.statistics().current_buffer_used)]
        arrived = sum(isinstance(event, ComponentArrived) and event.component == "text_encoder" for event in seen)
        assert sha256_of(await offload.run(other, TOKENS)) == resident
    assert 1 <= arrived <= 2


# Without a loop


def test_a_pipeline_is_called_directly_where_there_is_no_loop() -> None:
    pipeline, device = toy_pipeline(experts=2), CpuDevice()
    resident = expected(pipeline)
    with streamflow.offload(pipeline, {"resident_blocks": 1, "poison_freed_slots": True}, device=device) as offload:
        for _ in range(3):
            assert sha256_of(pipeline(TOKENS)) == resident
        statistics = offload.statistics()
    assert device.memory().in_use == 0
    assert statistics.engine.streamed_bytes > 0


def test_what_a_direct_call_used_stays_until_another_component_is_used() -> None:
    pipeline, device, addresses = toy_pipeline(), CpuDevice(), []
    tokens = torch.tensor(TOKENS)
    with streamflow.offload(pipeline, device=device), torch.no_grad():
        for _ in range(3):
            inside(pipeline, "text_encoder", lambda module: addresses.append(module.layers[0].weight.data_ptr()))
            pipeline.text_encoder(tokens)
        there = device.memory().in_use
        pipeline.vae.decode(torch.ones(1, WIDTH))
        assert device.memory().in_use != there
    assert len(set(addresses)) == 1


# Hooks


async def test_hooks_of_users_run_once_for_each_call_and_stay() -> None:
    pipeline, calls = toy_pipeline(), []
    resident = expected(pipeline)
    pipeline.vae.decoder.register_forward_hook(lambda *_: calls.append("decoder"))
    pipeline.text_encoder.register_forward_pre_hook(lambda *_: calls.append("encoder"))
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
        assert calls == ["encoder", "decoder"]
    pipeline(TOKENS)
    assert calls == ["encoder", "decoder"] * 2


async def test_a_compiled_component_keeps_its_one_graph() -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    pipeline = toy_pipeline()
    resident = expected(pipeline)
    pipeline.vae.decoder.compile(backend=backend, fullgraph=True)
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        for _ in range(3):
            assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
    assert len(graphs) == 1


# Components with something in common


async def test_a_tensor_that_two_components_have_is_always_there_and_theirs_both() -> None:
    pipeline = toy_pipeline(more={"text_encoder_2": Encoder()})
    pipeline.text_encoder_2.embedding.weight = pipeline.text_encoder.embedding.weight
    pipeline.text_encoder_2.head.weight = pipeline.text_encoder.embedding.weight
    shared = pipeline.text_encoder.embedding.weight

    def both() -> torch.Tensor:
        tokens = torch.tensor(TOKENS)
        return torch.cat([pipeline.text_encoder(tokens), pipeline.text_encoder_2(tokens)])

    work = torch.no_grad()(both)
    resident, address = sha256_of(in_worker(work)), shared.data_ptr()
    async with streamflow.open_offload(pipeline, device=CpuDevice()) as offload:
        for _ in range(2):
            assert sha256_of(await offload.run(work)) == resident
        sizes = {sizes.name: sizes.moving_bytes for sizes in offload.statistics().components}
    assert sizes["text_encoder"] == sizes["text_encoder_2"]
    assert shared.data_ptr() == address
    assert pipeline.text_encoder_2.head.weight is shared


async def test_requests_use_stateful_components_in_opposite_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps those that it has used until it ends, and must not wait for the other's meanwhile."""
    pipeline, done = toy_pipeline(experts=2), list[str]()
    first_is_in, second_goes_on = threading.Event(), threading.Event()
    take = Holding.take

    def take_or_tell(holding: Holding, gate: StateGate, mailbox: Mailbox) -> bool:
        taken = take(holding, gate, mailbox)
        if not taken:
            second_goes_on.set()  # it waits for the first one
        return taken

    def use(name: str) -> None:
        pipeline.components[name](torch.ones(2, WIDTH), torch.ones(2, WIDTH))

    def first() -> None:
        use("transformer")
        first_is_in.set()
        wait_for(second_goes_on)
        use("transformer_2")
        done.append("first")

    def second() -> None:
        use("transformer_2")
        second_goes_on.set()
        use("transformer")
        done.append("second")

    monkeypatch.setattr(Holding, "take", take_or_tell)
    options = {"stateful_modules": ("transformer", "transformer_2"), "max_running_requests": 2}
    with torch.no_grad(), anyio.fail_after(20):
        async with (
            streamflow.open_offload(pipeline, options, device=CpuDevice()) as offload,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(offload.run, first)
            await until(first_is_in)
            tasks.start_soon(offload.run, second)
    assert done == ["first", "second"]
