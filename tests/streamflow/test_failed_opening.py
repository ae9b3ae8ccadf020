"""An opening that fails at any stage, or is cancelled in it, leaves the model exactly as it was and holds nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import streamflow
from streamflow.attachment import Interceptions
from streamflow.binding.blocks import BlockBinder, BoundBlock
from streamflow.binding.calls import Interception
from streamflow.binding.fixed import FixedTensors
from streamflow.binding.guards import Guards
from streamflow.runtime.component import StreamedComponent
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.engine import Engine
from streamflow.stages.errors import DeviceMemoryError
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.slots import Window
from streamflow.weights.module_source import PinnedImages
from streamflow.weights.source import CheckpointSource, ModuleSource
from tests.streamflow.devices import FailingCopies, FarCpuDevice
from tests.streamflow.kit import (
    ModelState,
    compare,
    largest_block_bytes,
    resident_digests,
    run_calls,
    save_checkpoint,
    streamflow_threads,
)
from tests.streamflow.models import CALLS, blocks_of, mlp_stack

pytestmark = pytest.mark.anyio


class PlannedError(Exception):
    """The failure that a test put somewhere."""


@attrs.frozen
class Stage:
    """A stage of opening: where it fails, on which device, with which options. ``in_place``: nothing moved before."""

    owner: Any
    method: str
    options: dict[str, Any] = attrs.field(factory=dict)
    device: Callable[[], CpuDevice] = FarCpuDevice
    in_place: bool = False
    num_successes: int = 0


class LateDevice(FarCpuDevice):
    """A device whose methods the tests replace."""


PAGEABLE = {"pin_host_memory": False, "packing_threads": 2}
STAGES = {
    "the device opens": Stage(LateDevice, "open", device=LateDevice, in_place=True),
    "the source is made": Stage(ModuleSource, "__init__", in_place=True),
    "the source prepares": Stage(ModuleSource, "prepare", in_place=True),
    "the first image is packed": Stage(PinnedImages, "_pack_block", in_place=True),
    "a later image is packed": Stage(PinnedImages, "_pack_block", num_successes=2),
    "pages are locked": Stage(PageLock, "__init__", num_successes=1),
    "fixed tensors are loaded": Stage(FixedTensors, "load"),
    "fixed tensors are filled": Stage(ModuleSource, "fill", PAGEABLE, in_place=True, num_successes=1),
    "fixed tensors are shown": Stage(FixedTensors, "show_device", PAGEABLE, in_place=True),
    "guards are installed": Stage(Guards, "install", PAGEABLE, in_place=True),
    "a guard is installed": Stage(Guards, "_shadow", PAGEABLE, in_place=True, num_successes=20),
    "blocks are unbound": Stage(BlockBinder, "show_rest", PAGEABLE, in_place=True),
    "a block is unbound": Stage(BoundBlock, "show_rest", PAGEABLE, in_place=True, num_successes=2),
    "the copy stream opens": Stage(LateDevice, "open_copy_stream", PAGEABLE, LateDevice, in_place=True),
    "the transfer opens": Stage("streamflow.transfer_opening", "open_staged", PAGEABLE, in_place=True),
    "the window is allocated": Stage(Window, "__init__", PAGEABLE, in_place=True),
    "a slot is allocated": Stage(LateDevice, "allocate", PAGEABLE, LateDevice, in_place=True, num_successes=2),
    "a resident is allocated": Stage(
        LateDevice, "allocate", {**PAGEABLE, "resident_blocks": 2}, LateDevice, in_place=True, num_successes=3
    ),
    "the compute stream opens": Stage(LateDevice, "open_compute_stream", PAGEABLE, LateDevice, in_place=True),
    "the engine is made": Stage(Engine, "__init__", {**PAGEABLE, "resident_blocks": 1}, in_place=True),
    "the component is made": Stage(StreamedComponent, "__init__", {"resident_blocks": 1}, CpuDevice, in_place=True),
    "calls are intercepted": Stage(Interceptions, "install", {"resident_blocks": 1}, CpuDevice, in_place=True),
    "a call is intercepted": Stage(
        Interception, "install", {"resident_blocks": 1}, CpuDevice, in_place=True, num_successes=3
    ),
}


def fail_after(num_successes: int, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, which raises once it was called so often; an async one raises when it is awaited."""
    num_calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > num_successes:
            raise PlannedError
        return method(*args, **kwargs)

    return failing


async def check_failure(
    opened: Callable[[], Any], model: nn.Module, device: CpuDevice, error: type[BaseException], *, in_place: bool
) -> None:
    """Opening raises, unwrapped, and leaves the model as it was, no thread, and no device byte."""
    before, threads = ModelState.of(model), streamflow_threads()
    with pytest.raises(error):
        async with opened():
            raise AssertionError("it was opened")
    before.assert_unchanged(model, in_place=in_place)
    assert streamflow_threads() == threads
    assert device.memory().in_use == 0


async def check_works(model: nn.Module, expected: list[str]) -> None:
    """The next opening is exact."""
    async with streamflow.open_offload(model, {"resident_blocks": 1}) as offload:
        await compare(offload, model, CALLS, expected)


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
async def test_a_failure_at_any_stage_leaves_the_model_as_it_was(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = mlp_stack(5), stage.device()
    expected = resident_digests(model, CALLS)
    with monkeypatch.context() as patch:
        if isinstance(stage.owner, str):
            patch.setattr(f"{stage.owner}.{stage.method}", fail_after(stage.num_successes, lambda: None))
        else:
            original = getattr(stage.owner, stage.method)
            patch.setattr(stage.owner, stage.method, fail_after(stage.num_successes, original))
        opened = lambda: streamflow.open_offload(model, stage.options, device=device)  # noqa: E731
        await check_failure(opened, model, device, PlannedError, in_place=stage.in_place)
    await check_works(model, expected)


def block_bytes() -> int:
    blocks = blocks_of(mlp_stack(5))
    return largest_block_bytes(blocks)


@pytest.mark.parametrize("limit", ["nothing", "fixed tensors", "and one slot", "and a part of a resident"])
async def test_a_device_that_is_too_small_leaves_the_model_as_it_was(limit: str) -> None:
    fixed = 4 * 16 * 16 + 3 * 256
    limits = {
        "nothing": 0,
        "fixed tensors": fixed,
        "and one slot": fixed + 2 * block_bytes() - 1,
        "and a part of a resident": fixed + 3 * block_bytes() - 1,
    }
    model = mlp_stack(5)
    expected = resident_digests(model, CALLS)
    options = {**PAGEABLE, "resident_blocks": 1, "resident_placement": "leading"}
    device = FarCpuDevice(memory_limit_bytes=limits[limit])
    opened = lambda: streamflow.open_offload(model, options, device=device)  # noqa: E731
    await check_failure(opened, model, device, DeviceMemoryError, in_place=True)
    large_enough = FarCpuDevice(memory_limit_bytes=fixed + 3 * block_bytes())
    async with streamflow.open_offload(model, options, device=large_enough) as offload:
        await compare(offload, model, CALLS, expected)


@pytest.mark.parametrize("transfer", ["auto", "staged"])
async def test_residents_whose_copy_fails_are_told_and_the_model_is_whole(transfer: str) -> None:
    """By opening if it waits for the copies anyway, else by the first pass."""
    model, device = mlp_stack(5), FailingCopies(PlannedError("copy"))
    expected = resident_digests(model, CALLS)
    before = ModelState.of(model)
    with pytest.raises((streamflow.StreamflowError, PlannedError), match="copy"):
        async with streamflow.open_offload(
            model, {"resident_blocks": "all", "transfer": transfer}, device=device
        ) as offload:
            await offload.run(run_calls, model, CALLS)
    before.assert_unchanged(model)
    assert device.memory().in_use == 0
    await check_works(model, expected)


CHECKPOINT_STAGES = {
    "the source is made": (CheckpointSource, "__init__", 0),
    "fixed tensors are filled": (CheckpointSource, "fill", 1),
    "the window is allocated": (Window, "__init__", 0),
    "a call is intercepted": (Interception, "install", 2),
}


@pytest.mark.parametrize(("owner", "method", "num_successes"), CHECKPOINT_STAGES.values(), ids=CHECKPOINT_STAGES)
async def test_a_failure_while_a_checkpoint_opens_leaves_nothing_open(
    owner: Any, method: str, num_successes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(mlp_stack(5), tmp_path, 2)
    built: list[nn.Module] = []
    states: list[ModelState] = []

    def note(model: nn.Module) -> None:
        built.append(model.eval())
        states.append(ModelState.of(model))

    device, files = FarCpuDevice(), open_files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fail_after(num_successes, getattr(owner, method)))
        with pytest.raises(PlannedError):
            async with streamflow.open_streamed(lambda: mlp_stack(5), tmp_path, device=device, finalize=note):
                raise AssertionError("it was opened")
    states[0].assert_unchanged(built[0])
    assert next(built[0].parameters()).is_meta
    assert device.memory().in_use == 0
    assert open_files(tmp_path) == files == []


def open_files(directory: Path) -> list[str]:
    """The files of ``directory`` that this process has open or mapped."""
    opened = [str(link.resolve()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [path for path in (*opened, *mapped) if path.startswith(f"{directory}/")]


async def test_a_finalize_that_fails_leaves_no_file_open(tmp_path: Path) -> None:
    save_checkpoint(mlp_stack(2), tmp_path)

    def fail(model: nn.Module) -> None:
        assert open_files(tmp_path)
        raise PlannedError

    with pytest.raises(PlannedError):
        async with streamflow.open_streamed(lambda: mlp_stack(2), tmp_path, finalize=fail):
            raise AssertionError("it was opened")
    assert open_files(tmp_path) == []


async def test_what_cannot_be_loaded_leaves_no_file_open(tmp_path: Path) -> None:
    save_file({"unknown": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(streamflow.StreamflowError):
        async with streamflow.open_streamed(lambda: mlp_stack(2), tmp_path):
            raise AssertionError("it was opened")
    assert open_files(tmp_path) == []


async def test_an_opening_that_is_cancelled_anywhere_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancelled when the device opens, while images are packed, when the transfer opens, and just before it is open."""
    model = mlp_stack(5)
    expected = resident_digests(model, CALLS)
    for where in range(4):
        device, before = FarCpuDevice(), ModelState.of(model)
        with anyio.CancelScope() as scope, monkeypatch.context() as patch:
            cancel_at(where, scope, patch)
            async with streamflow.open_offload(model, {"resident_blocks": 1}, device=device):
                await anyio.lowlevel.checkpoint()
                raise AssertionError("it was opened, and the cancellation lost")
        assert scope.cancelled_caught
        before.assert_unchanged(model, in_place=False)
        assert device.memory().in_use == 0
        assert streamflow_threads() == []
    await check_works(model, expected)


def cancel_at(where: int, scope: anyio.CancelScope, patch: pytest.MonkeyPatch) -> None:
    """Cancel ``scope`` at the given one of four places, in the loop's thread."""
    if where == 0:
        patch.setattr(FarCpuDevice, "open", and_cancel(scope, FarCpuDevice.open))
    elif where == 1:
        patch.setattr(ModuleSource, "prepare", and_cancel(scope, ModuleSource.prepare))
    elif where == 2:
        patch.setattr(CpuDevice, "open_copy_stream", cancel_first(scope, CpuDevice.open_copy_stream))
    else:
        patch.setattr(Interceptions, "install", cancel_first(scope, Interceptions.install))


def and_cancel(scope: anyio.CancelScope, method: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def cancelling(*args: Any) -> None:
        scope.cancel()
        await method(*args)

    return cancelling


def cancel_first(scope: anyio.CancelScope, method: Callable[..., Any]) -> Callable[..., Any]:
    def cancelling(*args: Any) -> Any:
        scope.cancel()
        return method(*args)

    return cancelling
