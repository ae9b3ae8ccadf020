"""Known faults of weights that change, of gradients and of threads, as far as one request meets them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from torch import nn

import streamflow
from streamflow.errors import GradientError, LoopThreadError, WeightsChangedError
from streamflow.stages.errors import EngineBrokenError, EngineClosedError
from tests.streamflow.devices import FailingCopies
from tests.streamflow.kit import ModelState, compare, resident_digests, run_calls, sha256_of
from tests.streamflow.models import CALLS, WIDTH, Buffers, Mlp, Stack, block, mlp_stack, seeded

pytestmark = pytest.mark.anyio

NUM_BLOCKS = 4
#: Where block 0 is evicted in each pass, where the window holds all blocks, and where all are resident.
PLACES: list[dict[str, Any]] = [{"window_blocks": 1}, {"window_blocks": NUM_BLOCKS}, {"resident_blocks": "all"}]
in_every_place = pytest.mark.parametrize("options", PLACES, ids=str)


class Writing(nn.Module):
    """A block that writes to its own weight as it runs, in the way that it was given, while ``on`` is set."""

    def __init__(self, write: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.write = write
        self.on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on:
            self.write(self.weight)
        return x * self.weight


def assign_data(weight: nn.Parameter) -> None:
    weight.data = weight.data + 1


IN_PLACE: dict[str, Callable[[nn.Parameter], object]] = {
    "add_": lambda weight: weight.add_(1),
    "copy_": lambda weight: weight.copy_(torch.zeros(WIDTH)),
    "item": lambda weight: weight.__setitem__(0, 3.0),
    "out=": lambda weight: torch.add(weight, 1, out=weight),
    "through a view": lambda weight: weight[2:4].mul_(2),
    "detached": lambda weight: weight.detach().zero_(),
}


@in_every_place
@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
async def test_a_block_that_writes_to_its_weights_is_told(
    write: Callable[[nn.Parameter], object], options: dict[str, Any]
) -> None:
    model = seeded(lambda: Stack([Mlp(), Writing(write), Mlp()]))
    before = ModelState.of(model)
    async with streamflow.open_offload(model, options) as offload:
        with torch.no_grad(), pytest.raises(WeightsChangedError, match="written while it is streamed") as caught:
            await offload.run(model, *CALLS[0])
        assert caught.value.name == "blocks.1.weight"
        assert offload.state == "ready"
    before.assert_unchanged(model)


@in_every_place
async def test_what_a_block_wrote_is_never_computed_with(options: dict[str, Any]) -> None:
    """Once a weight was written, a later request is exact or told: its slot still holds the changed bytes."""
    model = seeded(lambda: Stack([Mlp(), Writing(lambda weight: weight.add_(1)), Mlp()]))
    block(model, 1).on = False
    expected = resident_digests(model, CALLS)
    before = ModelState.of(model)
    async with streamflow.open_offload(model, options) as offload:
        block(model, 1).on = True
        with pytest.raises(WeightsChangedError):
            await offload.run(run_calls, model, CALLS)
        block(model, 1).on = False
        for _ in range(2):
            try:
                outputs = await offload.run(run_calls, model, CALLS)
            except WeightsChangedError:
                assert options != PLACES[0]
            else:
                assert [sha256_of(output) for output in outputs] == expected
                assert options == PLACES[0]
    before.assert_unchanged(model)


@in_every_place
async def test_a_write_from_outside_a_pass_is_told_by_the_next_one(options: dict[str, Any]) -> None:
    model = mlp_stack(NUM_BLOCKS)
    before = ModelState.of(model)
    async with streamflow.open_offload(model, options) as offload:
        await offload.run(run_calls, model, CALLS)
        with anyio.fail_after(20):
            while block(model, 0).up.weight.isnan().all():  # the next pass's first block is on its way
                await anyio.lowlevel.checkpoint()
        with torch.no_grad():
            block(model, 0).up.weight.add_(1)
        with pytest.raises(WeightsChangedError) as caught:
            await offload.run(run_calls, model, CALLS)
        assert caught.value.name == "blocks.0.up.weight"
    before.assert_unchanged(model)


async def test_a_write_to_a_placeholder_is_refused() -> None:
    model = mlp_stack(NUM_BLOCKS)
    async with streamflow.open_offload(model, {"window_blocks": 1}):
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            block(model, 3).up.weight.add_(1)


@in_every_place
@pytest.mark.parametrize("when", ["in a block", "between passes"])
async def test_a_weight_that_is_repointed_is_told_at_the_latest_when_the_offload_closes(
    options: dict[str, Any], when: str
) -> None:
    model = seeded(lambda: Stack([Writing(assign_data), Mlp(), Mlp(), Mlp()]))
    block(model, 0).on = when == "in a block"
    before = ModelState.of(model)
    errors: list[BaseException] = []
    try:
        async with streamflow.open_offload(model, options) as offload:
            for _ in range(2):
                if when == "between passes":
                    assign_data(block(model, 0).weight)
                try:
                    await offload.run(run_calls, model, CALLS)
                except (WeightsChangedError, EngineBrokenError) as failure:
                    errors.append(failure)
    except WeightsChangedError as failure:
        errors.append(failure)
    causes = [error.cause if isinstance(error, EngineBrokenError) else error for error in errors]
    assert causes
    for cause in causes:
        assert isinstance(cause, WeightsChangedError)
        assert (cause.name, cause.how) == ("blocks.0.weight", "re-pointed")
    before.assert_unchanged(model)


async def test_batch_norm_in_training_mode_is_refused_and_works_in_inference_mode() -> None:
    model = seeded(lambda: Stack([Mlp(), Buffers(), Mlp(), Mlp()]))
    expected = resident_digests(model, CALLS)
    before = ModelState.of(model)
    async with streamflow.open_offload(model, {"window_blocks": 1}) as offload:
        block(model, 1).train()
        with pytest.raises(WeightsChangedError, match=r"blocks\.1\.norm\.") as caught:
            await offload.run(run_calls, model, CALLS)
        assert "num_batches_tracked" in caught.value.name or "running" in caught.value.name
        block(model, 1).eval()
        await compare(offload, model, CALLS, expected)
    before.assert_unchanged(model)


async def test_what_is_outside_the_blocks_and_not_persistent_may_be_written() -> None:
    """Counters and caches: they stay where they are, and keep what is written to them."""

    class Counting(Mlp):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().forward(x) + self.count

    model = seeded(lambda: Stack(Counting() for _ in range(3)))
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model, {"window_blocks": 1}) as offload:
        outputs = await offload.run(run_calls, model, CALLS)
    assert [sha256_of(output) for output in outputs] == expected
    assert [block(model, index).count.item() for index in range(3)] == [len(CALLS)] * 3


# Gradients


def of_parameters(model: nn.Module) -> tuple[Any, ...]:
    block(model, 1).up.weight.requires_grad_(True)
    return CALLS[0]


def of_the_input(model: nn.Module) -> tuple[Any, ...]:
    return (CALLS[0][0].clone().requires_grad_(True),)


def of_what_is_before_the_blocks(model: nn.Module) -> tuple[Any, ...]:
    model.get_submodule("enter").requires_grad_(True)
    return CALLS[0]


@in_every_place
@pytest.mark.parametrize("asks", [of_parameters, of_the_input, of_what_is_before_the_blocks])
async def test_a_streamed_block_with_gradients_is_refused_before_it_computes(
    asks: Callable[[nn.Module], tuple[Any, ...]], options: dict[str, Any]
) -> None:
    """After its slot was refilled, a backward would give a wrong gradient and no error."""
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model, options) as offload:
        arguments = asks(model)
        with pytest.raises(GradientError, match="no_grad") as caught:
            await offload.run(model, *arguments)
        assert caught.value.block == ("Stack.blocks.1" if asks is of_parameters else "Stack.blocks.0")
        await compare(offload, model, CALLS, expected)
        with torch.inference_mode():
            assert sha256_of(await offload.run(model, *arguments)) == expected[0]
    assert all(parameter.grad is None for parameter in model.parameters())


async def test_gradients_hidden_in_nested_arguments_are_found() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(self.Block() for _ in range(2))

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Mlp()

            def forward(self, x: torch.Tensor, *, extra: dict[str, list[torch.Tensor]]) -> torch.Tensor:
                out: torch.Tensor = self.inner(x + extra["shift"][0])
                return out

        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            for inner in self.blocks:
                x = inner(x, extra={"shift": [shift]})
            return x

    model = seeded(Nested)
    async with streamflow.open_offload(model) as offload:
        with pytest.raises(GradientError):
            await offload.run(model, *CALLS[0], torch.ones(WIDTH, requires_grad=True))


# Threads


async def test_the_loop_thread_is_told_to_use_run_instead_of_waiting_for_itself() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model) as offload:
        for call in (model, model.forward, block(model, 2)):
            with torch.no_grad(), pytest.raises(LoopThreadError, match=r"await offload\.run\(model"):
                call(*CALLS[0])
        await compare(offload, model, CALLS, expected)


async def test_another_thread_may_call_the_model_directly() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model) as offload:
        outputs = await anyio.to_thread.run_sync(run_calls, model, CALLS)
        assert [sha256_of(output) for output in outputs] == expected
        assert offload.statistics().engine.num_passes == len(CALLS)


def test_without_a_loop_the_model_is_called_directly() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    before = ModelState.of(model)
    with streamflow.offload(model, {"poison_freed_slots": True}) as offload:
        for _ in range(2):
            assert [sha256_of(output) for output in run_calls(model, CALLS)] == expected
        assert offload.statistics().engine.streamed_bytes > 0
        with pytest.raises(GradientError):
            model(CALLS[0][0].clone().requires_grad_(True))
        with pytest.raises(RuntimeError, match="normalized_shape"), torch.no_grad():
            block(model, 1)(torch.zeros(2, 3))
        assert [sha256_of(output) for output in run_calls(model, CALLS)] == expected
    before.assert_unchanged(model)
    assert [sha256_of(output) for output in run_calls(model, CALLS)] == expected


async def test_a_thread_limiter_full_of_others_does_not_keep_a_request_waiting() -> None:
    """Neither to open, nor to run, nor to close: on the host's limiter, threads could wait for each other for ever."""
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    limiter = anyio.to_thread.current_default_thread_limiter()
    release, tokens = threading.Event(), limiter.total_tokens
    limiter.total_tokens = 1
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, lambda: release.wait(60))
            with anyio.fail_after(20):
                while limiter.borrowed_tokens < 1:
                    await anyio.lowlevel.checkpoint()
                options = {"transfer": "staged", "packing_threads": 2}
                async with streamflow.open_offload(model, options) as offload:
                    await compare(offload, model, CALLS, expected)
            release.set()
    finally:
        release.set()
        limiter.total_tokens = tokens


def test_two_threads_that_call_one_model_are_served_and_never_mixed() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    wrong: list[int] = []
    start = threading.Barrier(3)

    def work(index: int) -> None:
        start.wait(20)
        for _ in range(5):
            if [sha256_of(output) for output in run_calls(model, CALLS)] != expected:
                wrong.append(index)

    with streamflow.offload(model, {"window_blocks": 1, "poison_freed_slots": True}) as offload:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert offload.statistics().engine.num_passes == 3 * 5 * len(CALLS)
    assert wrong == []


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


async def test_the_worker_thread_inherits_what_the_caller_has_in_force() -> None:
    """Grad mode, inference mode, autocast, default device and context variables, and hands none of them back."""

    def look() -> tuple[Any, ...]:
        seen = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_default_device(),
            variable.get(),
        )
        variable.set("changed in the thread")
        torch.set_grad_enabled(not torch.is_grad_enabled())
        return seen

    async with streamflow.open_offload(mlp_stack(2)) as offload:
        plain = (True, False, False, torch.bfloat16, torch.device("cpu"), "unset")
        assert await offload.run(look) == plain
        token = variable.set("set by the caller")
        with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"):
            assert await offload.run(look) == (
                *(False, False, True, torch.float16, torch.device("meta"), "set by the caller"),
            )
            assert not torch.is_grad_enabled()
        with torch.inference_mode():
            assert (await offload.run(look))[:2] == (False, True)
        assert variable.get() == "set by the caller"
        variable.reset(token)
        assert await offload.run(look) == plain
    assert torch.is_grad_enabled()


async def test_a_copy_that_fails_breaks_the_offload_with_its_cause_and_leaves_the_model_whole() -> None:
    model = mlp_stack(NUM_BLOCKS)
    before = ModelState.of(model)
    failure = OSError("the link is down")
    device = FailingCopies(failure)
    async with streamflow.open_offload(model, device=device) as offload:
        for _ in range(2):
            with pytest.raises(EngineBrokenError, match="the link is down") as caught:
                await offload.run(run_calls, model, CALLS)
            assert caught.value.cause is failure
        assert (offload.state, offload.statistics().state) == ("broken", "broken")
    assert offload.statistics().state == "closed"
    assert device.memory().in_use == 0
    before.assert_unchanged(model)


async def test_a_closed_offload_refuses_and_the_model_computes_without_it() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model) as offload:
        pass
    with pytest.raises(EngineClosedError, match="open a new one"):
        await offload.run(run_calls, model, CALLS)
    assert [sha256_of(output) for output in run_calls(model, CALLS)] == expected
    assert "closed" in repr(offload)


@pytest.mark.parametrize("failure", [ValueError("body"), KeyboardInterrupt(), SystemExit(2)], ids=repr)
async def test_an_error_of_the_body_comes_out_as_it_is_and_everything_is_given_back(failure: BaseException) -> None:
    model = mlp_stack(NUM_BLOCKS)
    before = ModelState.of(model)
    opened: list[streamflow.Offload] = []

    async def open_and_fail() -> None:
        async with streamflow.open_offload(model) as offload:
            opened.append(offload)
            await offload.run(run_calls, model, CALLS[:1])
            raise failure

    with pytest.raises(type(failure)) as caught:
        await open_and_fail()
    assert caught.value is failure
    assert opened[0].state == "closed"
    before.assert_unchanged(model)
