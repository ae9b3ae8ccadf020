"""Streaming on a real CUDA device: byte equality, bounded device memory, nothing left behind."""

from __future__ import annotations

import copy
import hashlib
import threading
from typing import Any

import anyio
import pytest
import torch
from torch import nn

import streamflow
from streamflow.stages.devices.cuda import CudaDevice
from streamflow.stages.errors import EngineBrokenError
from streamflow.stages.signals import loop_waker

pytestmark = [pytest.mark.gpu]


class Block(nn.Module):
    """A block with weights of two dtypes and a buffer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, dtype=torch.bfloat16)
        self.down = nn.Linear(hidden, width, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("gain", torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(self.norm(x).bfloat16()))
        result: torch.Tensor = x + self.gain * self.down(hidden).float()
        return result


class Stack(nn.Module):
    """Blocks of sizes 5:1, with weights outside them."""

    def __init__(self, num_blocks: int, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width, 2560 if i % 3 == 0 else 512) for i in range(num_blocks))
        self.last = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.last(x)
        return result


def make(num_blocks: int) -> Stack:
    torch.manual_seed(num_blocks)
    return Stack(num_blocks).eval().requires_grad_(False)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


CONFIGS: list[dict[str, Any]] = [
    {"transfer": "direct"},
    {"transfer": "staged", "staging_chunk_bytes": 1 << 18, "packing_threads": 3},
    {"pin_host_memory": False},
    {"resident_blocks": "all"},
    {"resident_bytes": 4 << 20, "resident_placement": "leading"},
]


@pytest.mark.anyio
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("num_blocks", range(1, 10))
async def test_three_walks_of_two_requests_are_byte_equal(
    num_blocks: int, window: int, config: dict[str, Any], anyio_backend: str
) -> None:
    model = make(num_blocks)
    inputs = [torch.randn(64, 16, device="cuda") for _ in range(2)]
    resident = copy.deepcopy(model).cuda()
    expected = [[digest(y) for y in walks(resident, x)] for x in inputs]
    options = {"window_blocks": window, "poison_freed_slots": True, "device": "cuda", **config}
    async with streamflow.open_offload(model, options) as offload:
        await offload.run(walks, model, inputs[0])  # the matrix library keeps a workspace for each stream
    before = allocated()
    async with streamflow.open_offload(model, options) as offload:
        found = [[digest(y) for y in await offload.run(walks, model, x)] for x in inputs]
        statistics = offload.statistics()
    assert found == expected
    engine = statistics.engine
    assert engine.streamed_bytes > 0 or engine.resident_bytes == statistics.block_bytes
    assert engine.device_peak_bytes <= engine.window_bytes + engine.resident_bytes + statistics.fixed_bytes
    assert engine.device_in_use_bytes == engine.device_peak_bytes
    assert allocated() < before + (64 << 10)  # no slot or resident stays with the closed offload
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert [n for n in threading.enumerate() if n.name.startswith("streamflow")] == []


def allocated() -> int:
    """Device bytes in use, without the workspaces that the matrix library keeps for each thread and stream."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def walks(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    results = []
    with torch.no_grad():
        for _ in range(3):
            x = model(x)
            results.append(x)
    return results


@pytest.mark.anyio
async def test_a_cancelled_request_leaves_the_next_one_exact(anyio_backend: str) -> None:
    model = make(9)
    x = torch.randn(64, 16, device="cuda")
    expected = digest(copy.deepcopy(model).cuda()(x))
    async with streamflow.open_offload(model, {"device": "cuda", "poison_freed_slots": True}) as offload:
        for cut in range(9):
            reached = anyio.Event()
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(_cancel_when, reached, scope)
                    hook = model.blocks[cut].register_forward_hook(_setter(reached))
                    try:
                        await offload.run(walks, model, x)
                    finally:
                        hook.remove()
            assert digest((await offload.run(walks, model, x))[0]) == expected


def _setter(reached: anyio.Event) -> Any:
    wake = loop_waker()
    return lambda *_: wake(reached.set) and None


async def _cancel_when(reached: anyio.Event, scope: anyio.CancelScope) -> None:
    await reached.wait()
    scope.cancel()


def test_the_sync_facade_is_exact_on_the_callers_stream() -> None:
    model = make(7)
    x = torch.randn(64, 16, device="cuda")
    expected = digest(copy.deepcopy(model).cuda()(x))
    with streamflow.offload(model, {"device": "cuda"}), torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                assert digest(model(x)) == expected
        assert digest(model(x)) == expected


@pytest.mark.anyio
async def test_a_window_that_does_not_fit_is_a_typed_error_and_changes_nothing(anyio_backend: str) -> None:
    model = make(3)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(streamflow.StreamflowError, match="window_blocks"):
        async with streamflow.open_offload(
            model, {"device": "cuda", "window_blocks": 3, "pin_host_memory": False}, device=_TinyCuda()
        ):
            pass
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


class _TinyCuda(CudaDevice):
    """A CUDA device on which nothing of a megabyte or more fits."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        return super().allocate(nbytes if nbytes < (1 << 20) else 1 << 50)


@pytest.mark.anyio
async def test_device_calls_of_a_broken_source_break_the_offload(anyio_backend: str, monkeypatch: Any) -> None:
    model = make(5)
    x = torch.randn(64, 16, device="cuda")
    async with streamflow.open_offload(model, {"device": "cuda", "transfer": "staged"}) as offload:
        await offload.run(walks, model, x)
        monkeypatch.setattr("streamflow.stages.images.MemoryPiece.read_into", _fail)
        with pytest.raises(EngineBrokenError, match="gone"):
            await offload.run(walks, model, x)
        assert offload.state == "broken"


def _fail(*args: Any) -> None:
    raise OSError("gone")
