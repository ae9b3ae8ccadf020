"""Compiled blocks: streamed equals resident, compiled alike, and nothing is compiled again from step to step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import streamflow
from streamflow.errors import UnsupportedModelError
from tests.streamflow.kit import ModelState, aligned_reference, in_worker, run_calls, sha256_of
from tests.streamflow.models import CALLS, blocks_of, mlp_stack

pytestmark = pytest.mark.anyio

NUM_STEPS = 3


@attrs.define
class CountingBackend:
    """Runs graphs as they are, and counts them."""

    num_graphs: int = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        forward: Callable[..., Any] = graph.forward
        return forward


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_in_place(model: nn.Module, backend: Any) -> None:
    for block in blocks_of(model):
        block.compile(backend=backend, fullgraph=True)


def wrap_in_list(model: nn.Module, backend: Any) -> None:
    blocks = blocks_of(model)
    for index, block in enumerate(list(blocks)):
        compiled: Any = torch.compile(block, backend=backend, fullgraph=True)
        blocks[index] = compiled


def compile_forwards(model: nn.Module, backend: Any) -> None:
    for block in blocks_of(model):
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


WAYS = {
    "block.compile": compile_in_place,
    "torch.compile in the list": wrap_in_list,
    "compiled forward": compile_forwards,
}
each_way = pytest.mark.parametrize("compile_blocks", WAYS.values(), ids=WAYS)


def expected_digests(compile_blocks: Callable[[nn.Module, Any], None], backend: Any) -> list[str]:
    reference = aligned_reference(mlp_stack(4))
    compile_blocks(reference, backend)
    return [sha256_of(output) for output in in_worker(lambda: run_calls(reference, CALLS))]


async def check_steps(model: nn.Module, expected: list[str], num_graphs: Callable[[], int]) -> None:
    """Three steps through two slots are exact, and only the first one compiles."""
    counts = []
    async with streamflow.open_offload(model, {"poison_freed_slots": True}) as offload:
        for _ in range(NUM_STEPS):
            outputs = await offload.run(run_calls, model, CALLS)
            assert [sha256_of(output) for output in outputs] == expected
            counts.append(num_graphs())
        assert offload.statistics().engine.num_fetches >= 4 + 2 * (NUM_STEPS - 1)
    assert counts == [counts[0]] * NUM_STEPS
    assert counts[0] > 0


@each_way
async def test_compiled_blocks_are_exact_and_compiled_once(compile_blocks: Callable[[nn.Module, Any], None]) -> None:
    expected = expected_digests(compile_blocks, CountingBackend())
    torch.compiler.reset()
    backend, model = CountingBackend(), mlp_stack(4)
    compile_blocks(model, backend)
    before = ModelState.of(model)
    await check_steps(model, expected, lambda: backend.num_graphs)
    before.assert_unchanged(model)


@each_way
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_opening_and_closing_again_compiles_nothing_more(
    compile_blocks: Callable[[nn.Module, Any], None],
) -> None:
    """However often: torch gives up compiling a function after eight times."""
    backend, model = CountingBackend(), mlp_stack(4)
    compile_blocks(model, backend)
    expected = [sha256_of(output) for output in in_worker(lambda: run_calls(model, CALLS))]
    counts = []
    for _ in range(9):
        await check_steps(model, expected, lambda: backend.num_graphs)
        assert [sha256_of(output) for output in run_calls(model, CALLS)] == expected
        counts.append(backend.num_graphs)
    assert counts == [counts[0]] * 9


@pytest.mark.parametrize("compile_blocks", [compile_in_place, wrap_in_list])
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_blocks_that_were_lowered_to_kernel_calls_are_exact(
    compile_blocks: Callable[[nn.Module, Any], None],
) -> None:
    """With AOTAutograd, parameters are inputs of the graph: they are handed in by their tensors, not by address."""
    counter = CountingBackend()
    backend = aot_autograd(fw_compiler=counter, inference_compiler=counter)
    expected = expected_digests(compile_blocks, backend)
    torch.compiler.reset()
    counter.num_graphs = 0
    model = mlp_stack(4)
    compile_blocks(model, backend)
    await check_steps(model, expected, lambda: counter.num_graphs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_blocks_compiled_to_machine_code_are_exact() -> None:
    expected = expected_digests(compile_in_place, "inductor")
    model = mlp_stack(4)
    compile_in_place(model, "inductor")
    await check_steps(model, expected, lambda: 1)


@pytest.mark.parametrize("how", ["model.compile", "torch.compile", "compiled forward"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_model_compiled_around_its_blocks_is_refused(how: str) -> None:
    model: Any = mlp_stack(4)
    opened = model
    if how == "model.compile":
        model.compile(backend=CountingBackend())
    elif how == "torch.compile":
        opened = torch.compile(model, backend=CountingBackend())
    else:
        model.forward = torch.compile(model.forward, backend=CountingBackend())
    before = ModelState.of(opened)
    with pytest.raises(UnsupportedModelError, match="compile its blocks instead"):
        async with streamflow.open_offload(opened):
            raise AssertionError("it was opened")
    before.assert_unchanged(opened)
