"""Ranks that cannot share, or must not: all are told the same, nothing is left of a copy, every model is as it was."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from typing import Any

import anyio
import attrs
import pytest
import torch
from torch import nn

from streamflow.ranks import shared_images
from streamflow.ranks.errors import SharedImagesError, WeightsDifferError
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.weights.anonymous_file import AnonymousFile
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import ModelState, compare, resident_digests
from tests.streamflow.models import CALLS, CASES, Case, Stack, Strided, TwoStacks, block, blocks_of, mlp_stack, seeded
from tests.streamflow.ranks.agreeing import AgreeingRank, AgreeingRanks, RankGoneError, on_ranks
from tests.streamflow.ranks.kit import NAME, STEPS, copies_left, opened, raise_first

pytestmark = pytest.mark.anyio

Change = Callable[[nn.Module], object]


def build() -> nn.Module:
    """With a zero in it, whose sign a rank may have lost."""
    model = mlp_stack(6)
    block(model, 3).up.bias.data[2] = 0.0
    return model


CASE = Case("mlp", build, (CALLS[0],))


async def outcomes_on(
    ranks: AgreeingRanks,
    case: Case = CASE,
    changes: dict[int, Change] | None = None,
    *,
    is_required: bool,
    device: Callable[[], CpuDevice] = CpuDevice,
) -> list[Any]:
    """Open on all ranks, after a change of some ranks' models, which must then stay as they are.

    Returns what opening raised, or why there is no copy.
    """

    async def work(rank: AgreeingRank) -> Any:
        model = case.build()
        (changes or {}).get(rank.rank, lambda model: None)(model)
        expected, before = resident_digests(model, case.calls), ModelState.of(model)
        backend, options = device(), {"plan": case.plan, "packing_threads": 2}
        in_place = True
        try:
            async with opened(model, rank, options, backend, is_required=is_required) as (offload, source):
                in_place = backend.is_host and source.sharing.failure is not None
                await compare(offload, model, case.calls, expected)
                assert offload.statistics().choice.source == "module"
                return source.sharing.failure
        finally:
            before.assert_unchanged(model, in_place=in_place)

    return await on_ranks(ranks, work)


# Weights that differ


def flip(tensor: torch.Tensor) -> None:
    """Change one bit of the last element."""
    tensor.data.view(-1).view(torch.uint8)[-1] ^= 1


DIFFERENCES: dict[str, tuple[Change, str | None, str | None]] = {
    "a weight": (lambda model: flip(block(model, 3).up.weight), "blocks.3", "blocks.3.up.weight"),
    "a buffer": (lambda model: flip(block(model, 0).scale), "blocks.0", "blocks.0.scale"),
    "outside the blocks": (lambda model: flip(model.get_parameter("enter.weight")), "(fixed)", "enter.weight"),
    "a sign": (lambda model: block(model, 3).up.bias.data[2].neg_(), "blocks.3", "blocks.3.up.bias"),
    "a dtype": (lambda model: block(model, 2).double(), "blocks.2", None),
    "how many blocks there are": (lambda model: blocks_of(model).append(block(build(), 0)), None, None),
}


@pytest.mark.parametrize(("is_required", "anyio_backend"), [(True, "trio"), (False, "asyncio")])
@pytest.mark.parametrize("what", DIFFERENCES)
async def test_a_rank_with_other_weights_is_named(what: str, is_required: bool) -> None:
    change, where, tensor = DIFFERENCES[what]
    case = CASE if what != "a dtype" else Case("mlp", build, ())
    outcomes = await outcomes_on(AgreeingRanks(3), case, {1: change}, is_required=is_required)
    for failure in outcomes:
        assert isinstance(failure, WeightsDifferError)
        assert (failure.component, failure.rank, failure.block, failure.tensor) == (NAME, 1, where, tensor)
        assert "rank 1" in str(failure)
        assert (tensor or where or NAME) in str(failure)


@pytest.mark.parametrize("changed", [{0}, {1, 2}, {0, 1}, {0, 1, 2}], ids=str)
@pytest.mark.parametrize("index", [0, 5])
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_whoever_packs_a_part_a_rank_that_differs_from_rank_0_is_named(changed: set[int], index: int) -> None:
    changes: dict[int, Change] = dict.fromkeys(changed, lambda model: flip(block(model, index).down.weight))
    different = {0, 1, 2} - changed if 0 in changed else changed
    for failure in await outcomes_on(AgreeingRanks(3), Case("mlp", build, ()), changes, is_required=False):
        assert failure.rank in different if different else failure is None


async def test_bits_that_are_no_number_are_compared_as_bits() -> None:
    def not_a_number(model: nn.Module) -> None:
        block(model, 3).up.bias.data[2] = torch.nan

    changes: dict[int, Change] = dict.fromkeys(range(2), not_a_number)
    assert await outcomes_on(AgreeingRanks(2), Case("mlp", build, ()), changes, is_required=True) == [None, None]


async def test_what_lies_between_the_elements_of_a_tensor_is_nobodys() -> None:
    def build_with_holes() -> nn.Module:
        return seeded(lambda: Stack(Strided() for _ in range(3)))

    def fill_holes(model: nn.Module) -> None:
        for each in blocks_of(model):
            sliced = next(tensor for tensor in each.parameters() if not tensor.is_contiguous() and has_holes(tensor))
            values = sliced.detach().clone()
            whole = torch.empty(0, dtype=torch.uint8).set_(sliced.untyped_storage())
            whole.bitwise_not_()
            sliced.data.copy_(values)

    case = Case("strides", build_with_holes, (CALLS[0],))
    assert await outcomes_on(AgreeingRanks(2), case, {1: fill_holes}, is_required=True) == [None, None]


def has_holes(tensor: torch.Tensor) -> bool:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 > tensor.numel()


async def test_buffers_that_are_in_no_state_dict_are_each_ranks_own() -> None:
    def build_two_stacks() -> nn.Module:
        return seeded(TwoStacks)

    case = Case("two stacks", build_two_stacks, (CALLS[0],))
    changes: dict[int, Change] = {1: lambda model: flip(model.get_buffer("table"))}
    for device in (CpuDevice, FarCpuDevice):
        outcomes = await outcomes_on(AgreeingRanks(2), case, changes, is_required=True, device=device)
        assert outcomes == [None, None]


@pytest.mark.parametrize("what", DIFFERENCES)
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_ranks_that_cannot_share_must_have_the_same_weights_all_the_more(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_images, "available_host_bytes", lambda: 1)
    change, where, tensor = DIFFERENCES[what]
    for failure in await outcomes_on(AgreeingRanks(3), Case("mlp", build, ()), {1: change}, is_required=False):
        assert isinstance(failure, WeightsDifferError)
        assert (failure.component, failure.rank, failure.block, failure.tensor) == (NAME, 1, where, tensor)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_ranks_that_cannot_share_may_have_any_tensors_that_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_images, "available_host_bytes", lambda: 1)
    for case in CASES:
        outcomes = await outcomes_on(AgreeingRanks(2), attrs.evolve(case, calls=()), is_required=False)
        assert all(isinstance(failure, SharedImagesError) for failure in outcomes), case


# Steps that fail


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.EACCES, "the test wants it so")


#: What fails, from which call of all ranks together on, and which rank it can be that is named.
FAILURES: dict[str, tuple[Any, str, int]] = {
    "no memory is left": (shared_images, "available_host_bytes", 0),
    "rank 0 makes no file": (AnonymousFile, "create", 0),
    "a rank cannot be told apart": (shared_images, "process_namespace", 2),
    "a rank finds no file": (AnonymousFile, "open_at", 1),
    "a rank cannot write to it": (AnonymousFile, "writing", 1),
    "a rank cannot pack": (shared_images, "share_of", 1),
    "a rank cannot seal it": (AnonymousFile, "seal", 2),
    "a rank cannot map it": (AnonymousFile, "map", 1),
    "a rank cannot map it for its module": (shared_images, "private_mapping", 2),
    "a rank cannot compare": (shared_images, "differing_tensor", 40),
}


@pytest.mark.parametrize(
    ("device", "is_required", "anyio_backend"),
    [(CpuDevice, True, "trio"), (FarCpuDevice, False, "asyncio")],
)
@pytest.mark.parametrize("what", FAILURES)
async def test_a_step_that_fails_on_a_rank_is_undone_on_all(
    what: str, is_required: bool, device: Callable[[], CpuDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, num_successes = FAILURES[what]
    original, calls = getattr(owner, name), []

    def fail_from(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs) if len(calls) <= num_successes else refuse()

    monkeypatch.setattr(owner, name, fail_from)
    outcomes = await outcomes_on(AgreeingRanks(3), is_required=is_required, device=device)
    assert len(calls) > num_successes
    assert len({str(failure) for failure in outcomes}) == 1
    for failure in outcomes:
        assert isinstance(failure, SharedImagesError)
        assert (failure.__traceback__ is None) != is_required, "what is kept must not hold the frames, and the tensors"
        assert failure.component == NAME
        assert "the test wants it so" in failure.reason
        assert "store_mode='preferred'" in str(failure)
    assert copies_left() == []


async def test_where_memory_is_short_all_are_told_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_images, "available_host_bytes", lambda: 1000)
    for failure in await outcomes_on(AgreeingRanks(2), is_required=False):
        assert isinstance(failure, SharedImagesError)
        assert (failure.rank, "1,000" in failure.reason) == (0, True)


@pytest.mark.parametrize("what", ["machine", "process namespace", "user"])
async def test_ranks_that_cannot_find_each_others_memory_are_told_what_differs(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, numbers = shared_images.process_namespace, itertools.count()

    def elsewhere() -> dict[str, str | int]:
        return {**original(), what: f"elsewhere {next(numbers)}"}

    monkeypatch.setattr(shared_images, "process_namespace", elsewhere)
    ranks = AgreeingRanks(2)
    for failure in await outcomes_on(ranks, is_required=True):
        assert isinstance(failure, SharedImagesError)
        assert what in failure.reason
    assert ranks.names == STEPS[:1]


# Ranks that go away


@pytest.mark.parametrize(("gone", "anyio_backend"), [(0, "asyncio"), (2, "trio")])
@pytest.mark.parametrize("step", range(len(STEPS)))
async def test_a_rank_that_is_cancelled_ends_the_opening_of_all(step: int, gone: int) -> None:
    scopes = [anyio.CancelScope() for _ in range(3)]

    async def cancel(rank: int, name: str) -> None:
        if (rank, name) == (gone, STEPS[step]):
            scopes[rank].cancel()
            await anyio.lowlevel.checkpoint()

    ranks = AgreeingRanks(3, before=cancel)

    async def work(rank: AgreeingRank) -> Any:
        model = build()
        before = ModelState.of(model)
        try:
            with scopes[rank.rank]:
                async with opened(model, rank, {"packing_threads": 2}, CpuDevice(), is_required=False):
                    raise AssertionError("it was opened")
        finally:
            before.assert_unchanged(model, in_place=step < len(STEPS) - 1)

    outcomes = await on_ranks(ranks, work)
    assert outcomes[gone] is None
    for rank in {0, 1, 2} - {gone}:
        assert isinstance(outcomes[rank], RankGoneError)
        assert outcomes[rank].rank == gone
    assert ranks.names == STEPS[:step]
    if step < len(STEPS) - 1:  # after that the models show the copy, as long as there are any
        assert copies_left() == []


async def test_two_openings_one_after_the_other_share_anew() -> None:
    async def work(rank: AgreeingRank) -> None:
        model = build()
        expected = resident_digests(model, CASE.calls)
        for _ in range(2):
            async with opened(model, rank, {}, CpuDevice()) as (offload, source):
                await compare(offload, model, CASE.calls, expected)
                assert source.sharing.shared_bytes > 0
                await rank.agree("all are open", None)

    raise_first(await on_ranks(AgreeingRanks(2), work))
