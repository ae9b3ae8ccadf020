"""Known faults of hooks: run twice, or never, or on weights that are not there; early ends; kept callables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import streamflow
from streamflow.errors import AlreadyAttachedError, UnsupportedModelError
from tests.streamflow.kit import ModelState, compare, resident_digests, run_calls, save_checkpoint, sha256_of
from tests.streamflow.models import CALLS, block, mlp_stack

pytestmark = pytest.mark.anyio

NUM_BLOCKS = 4


class Log:
    """What user hooks saw: their name, and a digest of the weights of the module that they were called for."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str]] = []

    def note(self, name: str, module: nn.Module) -> None:
        weights = {key: tensor for key, tensor in module._parameters.items() if tensor is not None}
        self.entries.append((name, sha256_of(weights)))

    def take(self) -> list[tuple[str, str]]:
        """The entries, which are forgotten."""
        entries, self.entries = self.entries, []
        return entries


def add_hooks(model: nn.Module, log: Log) -> list[Any]:
    """Every kind of forward hook, on the root, on a block, and inside of one."""
    handles: list[Any] = []
    hooked = {"root": model, "block": block(model, 1), "inside": block(model, 1).up, "last": block(model, 3)}
    for name, module in hooked.items():
        handles += [
            module.register_forward_pre_hook(lambda m, args, name=name: log.note(f"{name} before", m)),
            module.register_forward_hook(lambda m, args, out, name=name: log.note(f"{name} after", m)),
            module.register_forward_pre_hook(
                lambda m, args, kwargs, name=name: log.note(f"{name} before, with kwargs", m), with_kwargs=True
            ),
            module.register_forward_hook(
                lambda m, args, out, name=name: log.note(f"{name} always after", m), always_call=True
            ),
        ]
    return handles


def digests_in_place(model: nn.Module) -> list[str]:
    """As `resident_digests`, without a copy: that of a module with a patched forward would call the original."""
    return [sha256_of(output) for output in run_calls(model, CALLS)]


async def test_user_hooks_run_exactly_once_before_during_and_after_and_see_real_weights() -> None:
    model, log = mlp_stack(NUM_BLOCKS), Log()
    add_hooks(model, log)
    run_calls(model, CALLS[:1])
    resident = log.take()
    assert len(resident) == 16
    for options in ({"window_blocks": 1}, {"resident_blocks": "all"}, {"transfer": "staged"}):
        async with streamflow.open_offload(model, {"poison_freed_slots": True, **options}) as offload:
            for _ in range(2):
                await offload.run(run_calls, model, CALLS[:1])
                assert log.take() == resident
        run_calls(model, CALLS[:1])
        assert log.take() == resident


async def test_hooks_of_every_module_see_real_weights_inside_the_blocks() -> None:
    model, log = mlp_stack(NUM_BLOCKS), Log()
    handles = [
        register_module_forward_pre_hook(lambda module, args: log.note("before", module)),
        register_module_forward_hook(lambda module, args, out: log.note("after", module)),
    ]
    try:
        run_calls(model, CALLS[:1])
        resident = log.take()
        async with streamflow.open_offload(model, {"window_blocks": 1}) as offload:
            await offload.run(run_calls, model, CALLS[:1])
            assert log.take() == resident
    finally:
        for handle in handles:
            handle.remove()


async def test_hooks_that_come_and_go_while_attached_stay_so() -> None:
    model, early, late = mlp_stack(NUM_BLOCKS), Log(), Log()
    handles = add_hooks(model, early)
    async with streamflow.open_offload(model) as offload:
        for handle in handles:
            handle.remove()
        late_handles = add_hooks(model, late)
        await offload.run(run_calls, model, CALLS[:1])
        during = late.take()
    run_calls(model, CALLS[:1])
    assert late.take() == during
    assert early.take() == []
    for handle in late_handles:
        handle.remove()


async def test_hooks_may_replace_inputs_and_outputs() -> None:
    model = mlp_stack(NUM_BLOCKS)
    block(model, 1).register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    block(model, 2).register_forward_hook(lambda module, args, out: out + module.scale)
    model.register_forward_hook(lambda module, args, out: out - 1)
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model) as offload:
        await compare(offload, model, CALLS, expected)


@pytest.mark.parametrize("failure", [ValueError("hook"), KeyboardInterrupt("hook"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("where", ["block before", "block after", "root before", "root after", "inside a block"])
async def test_a_hook_or_forward_that_raises_leaves_the_next_request_exact(failure: BaseException, where: str) -> None:
    """Nothing correct may depend on a post-hook: torch skips them when a KeyboardInterrupt comes."""
    model, log = mlp_stack(NUM_BLOCKS), Log()
    expected = resident_digests(model, CALLS)
    add_hooks(model, log)

    def fail(*args: Any) -> None:
        raise failure

    targets: dict[str, Callable[[], Any]] = {
        "block before": lambda: block(model, 2).register_forward_pre_hook(fail),
        "block after": lambda: block(model, 2).register_forward_hook(fail),
        "root before": lambda: model.register_forward_pre_hook(fail),
        "root after": lambda: model.register_forward_hook(fail),
        "inside a block": lambda: block(model, 2).up.register_forward_hook(fail),
    }
    before = ModelState.of(model)
    async with streamflow.open_offload(model, {"window_blocks": 2, "poison_freed_slots": True}) as offload:
        for _ in range(2):
            handle = targets[where]()
            with pytest.raises(type(failure)) as caught:
                await offload.run(run_calls, model, CALLS)
            handle.remove()
            assert caught.value is failure
            names = [name for name, _ in log.take()]
            assert names.count("root before") == 1
            await compare(offload, model, CALLS, expected)
            log.take()
        assert offload.state == "ready"
    before.assert_unchanged(model)


async def test_a_block_that_is_called_by_itself_is_a_pass_of_its_own() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(block(model, 2), CALLS)
    async with streamflow.open_offload(model) as offload:
        await compare(offload, block(model, 2), CALLS, expected)
        assert offload.statistics().engine.num_passes == 6


async def test_forward_called_past_the_hooks_is_a_pass_all_the_same() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)

    def call_forwards(calls: Any) -> list[Any]:
        return [model.forward(*call) for call in calls]

    def by_hand(calls: Any) -> list[Any]:
        outputs = []
        for (x,) in calls:
            x = model.get_submodule("enter").forward(x)
            for index in range(NUM_BLOCKS):
                x = block(model, index).forward(x)
            outputs.append(model.get_submodule("exit")(x))
        return outputs

    async with streamflow.open_offload(model, {"window_blocks": 1}) as offload:
        for work in (call_forwards, by_hand):
            with torch.no_grad():
                outputs = await offload.run(work, CALLS)
            assert [sha256_of(output) for output in outputs] == expected


async def test_a_forward_patched_before_opening_is_used_and_kept() -> None:
    model = mlp_stack(NUM_BLOCKS)
    original = block(model, 1).forward
    block(model, 1).forward = patched = lambda x: original(x) + 1
    expected = digests_in_place(model)
    before = ModelState.of(model)
    async with streamflow.open_offload(model) as offload:
        await compare(offload, model, CALLS, expected)
    assert vars(block(model, 1))["forward"] is patched
    before.assert_unchanged(model)


async def test_a_forward_patched_while_attached_outlives_the_offload() -> None:
    """As offloading and caching hooks of others do it: they wrap the forward that they find, which is ours."""
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    found: Callable[..., Any] = block(model, 1).forward
    async with streamflow.open_offload(model) as offload:
        found = block(model, 1).forward
        block(model, 1).forward = patched = lambda x: found(x)
        await compare(offload, model, CALLS, expected)
    assert vars(block(model, 1))["forward"] is patched
    assert digests_in_place(model) == expected


async def test_callables_kept_from_an_attached_module_work_after_closing() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    async with streamflow.open_offload(model):
        kept = model.forward
    assert [sha256_of(output) for output in run_calls(kept, CALLS)] == expected


async def test_attaching_twice_is_refused_and_leaves_the_first_one_alone() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    outer = nn.Module()
    outer.inner = model
    async with streamflow.open_offload(model) as offload:
        attached = ModelState.of(model)
        for opened, name in ((model, "Stack"), (outer, "Module.inner"), (block(model, 1), "Mlp")):
            with pytest.raises(AlreadyAttachedError, match=rf"^{name} is attached") as caught:
                async with streamflow.open_offload(opened):
                    raise AssertionError("it was opened")
            assert caught.value.name == name
        attached.assert_unchanged(model)
        await compare(offload, model, CALLS, expected)
    async with streamflow.open_offload(model) as offload:  # and once it is closed, opening works again
        await compare(offload, model, CALLS, expected)


async def test_a_model_that_another_system_moves_is_refused_by_the_module_that_carries_its_hook() -> None:
    model = mlp_stack(NUM_BLOCKS)
    expected = resident_digests(model, CALLS)
    add_hook_to_module(block(model, 2), ModelHook())
    before = ModelState.of(model)
    with pytest.raises(UnsupportedModelError, match="remove_hook_from_module") as caught:
        async with streamflow.open_offload(model):
            raise AssertionError("it was opened")
    assert caught.value.name == "blocks.2"
    before.assert_unchanged(model)
    remove_hook_from_module(model, recurse=True)
    async with streamflow.open_offload(model) as offload:
        await compare(offload, model, CALLS, expected)


async def test_a_model_that_a_loader_put_under_another_system_is_refused_too(tmp_path: Path) -> None:
    save_checkpoint(mlp_stack(2).to(torch.bfloat16), tmp_path)

    def load(skeleton: nn.Module) -> nn.Module:
        model = mlp_stack(2)
        add_hook_to_module(model, ModelHook())
        return model

    with pytest.raises(UnsupportedModelError, match="accelerate"):
        async with streamflow.open_streamed(lambda: mlp_stack(2), tmp_path, load=load):
            raise AssertionError("it was opened")
