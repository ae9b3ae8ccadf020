"""A forward that raises, wherever and whatever: the error leaves as it is, and the next request is exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import streamflow
from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.runtime.kit import Subject, make_subject

pytestmark = [pytest.mark.timeout(90)]

NUM_BLOCKS = 4


class Halt(BaseException):
    """What no ``except Exception`` catches."""


ERRORS = [ValueError("no"), KeyboardInterrupt(), Halt(), SystemExit(3), StopIteration("done")]
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)

#: Lets the model raise an error at a block, while it is entered.
Fault = Callable[[Subject, int, BaseException], Any]


def thrower(error: BaseException) -> Callable[..., None]:
    def throw(*args: Any, **kwargs: Any) -> None:
        raise error

    return throw


@contextmanager
def inside_block(subject: Subject, block: int, error: BaseException) -> Iterator[None]:
    subject.script.inside = lambda index: thrower(error)() if index == block else None
    yield


@contextmanager
def before_block(subject: Subject, block: int, error: BaseException) -> Iterator[None]:
    subject.script.between = lambda index: thrower(error)() if index == block else None
    yield


@contextmanager
def after_the_last_block(subject: Subject, block: int, error: BaseException) -> Iterator[None]:
    subject.script.between = lambda index: thrower(error)() if index == NUM_BLOCKS else None
    yield


@contextmanager
def in_pre_hook_of_block(subject: Subject, block: int, error: BaseException) -> Iterator[None]:
    with subject.model.blocks[block].register_forward_pre_hook(thrower(error)):  # type: ignore[index, union-attr]
        yield


@contextmanager
def in_post_hook_of_block(subject: Subject, block: int, error: BaseException) -> Iterator[None]:
    with subject.model.blocks[block].register_forward_hook(thrower(error)):  # type: ignore[index, union-attr]
        yield


@contextmanager
def in_hook_inside_block(subject: Subject, block: int, error: BaseException) -> Iterator[None]:
    with subject.model.blocks[block].down.register_forward_hook(thrower(error)):  # type: ignore[index, union-attr]
        yield


@contextmanager
def in_pre_hook_of_model(subject: Subject, block: int, error: BaseException) -> Iterator[None]:
    with subject.model.register_forward_pre_hook(thrower(error)):
        yield


@contextmanager
def in_post_hook_of_model(subject: Subject, block: int, error: BaseException) -> Iterator[None]:
    with subject.model.register_forward_hook(thrower(error)):
        yield


FAULTS = [
    inside_block,
    before_block,
    after_the_last_block,
    in_pre_hook_of_block,
    in_post_hook_of_block,
    in_hook_inside_block,
    in_pre_hook_of_model,
    in_post_hook_of_model,
]
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
#: Those that are where they are, whatever block they are given.
OUTSIDE_BLOCKS = (after_the_last_block, in_pre_hook_of_model, in_post_hook_of_model)

OPTIONS: list[dict[str, Any]] = [
    {"poison_freed_slots": True},
    {"transfer": "staged", "packing_threads": 1, "window_blocks": 1, "resident_blocks": 1},
]
with_each_options = pytest.mark.parametrize("options", OPTIONS, ids=["direct", "staged-one-slot"])


def cases(fault: Fault) -> Iterable[tuple[BaseException, int]]:
    """Each error at each block at which the fault can raise it."""
    return itertools.product(ERRORS, range(1 if fault in OUTSIDE_BLOCKS else NUM_BLOCKS))


def is_the_error(caught: BaseException, error: BaseException) -> bool:
    """Whether that is what leaves a coroutine in which the error was raised."""
    if isinstance(error, StopIteration):  # Python itself lets none out of a coroutine
        return isinstance(caught, RuntimeError) and caught.__cause__ is error
    return caught is error


@pytest.mark.anyio
@each_fault
@with_each_options
async def test_in_a_request(fault: Fault, options: dict[str, Any]) -> None:
    subject = make_subject(NUM_BLOCKS)
    device = CpuDevice()
    async with streamflow.open_offload(subject.model, options, device=device) as offload:
        for error, block in cases(fault):
            with fault(subject, block, error):
                try:
                    await offload.run(subject.forward)
                except BaseException as failure:
                    assert is_the_error(failure, error)
                else:
                    pytest.fail("the error was lost")
            await subject.check_next(offload)
    subject.check_restored(device)


@each_fault
@with_each_options
def test_in_a_direct_call(fault: Fault, options: dict[str, Any]) -> None:
    subject = make_subject(NUM_BLOCKS)
    device = CpuDevice()
    with streamflow.offload(subject.model, options, device=device) as offload:
        for error, block in cases(fault):
            with fault(subject, block, error):
                try:
                    subject.forward()
                except BaseException as failure:
                    assert failure is error
                else:
                    pytest.fail("the error was lost")
            subject.script.reset()
            assert subject.forward() == subject.expected
            assert offload.statistics().num_running == 0
    subject.check_restored(device)


@pytest.mark.anyio
@each_error
async def test_the_error_of_a_request_leaves_the_context_as_it_is(error: BaseException) -> None:
    subject = make_subject(NUM_BLOCKS)
    device = CpuDevice()
    subject.script.inside = thrower(error)
    try:
        async with streamflow.open_offload(subject.model, device=device) as offload:
            await offload.run(subject.forward)
    except BaseException as failure:
        assert is_the_error(failure, error)
    else:
        pytest.fail("the error was lost")
    assert offload.state == "closed"
    subject.check_restored(device)


@pytest.mark.anyio
@each_error
async def test_the_error_of_a_body_leaves_the_context_as_it_is(error: BaseException) -> None:
    subject = make_subject(NUM_BLOCKS)
    device = CpuDevice()
    try:
        async with streamflow.open_offload(subject.model, device=device) as offload:
            raise error
    except BaseException as failure:
        assert failure is error
    else:
        pytest.fail("the error was lost")
    assert offload.state == "closed"
    subject.check_restored(device)


@each_error
def test_the_error_of_a_body_without_a_loop_leaves_as_it_is(error: BaseException) -> None:
    subject = make_subject(NUM_BLOCKS)
    device = CpuDevice()
    try:
        with streamflow.offload(subject.model, device=device) as offload:
            raise error
    except BaseException as failure:
        assert failure is error
    else:
        pytest.fail("the error was lost")
    assert offload.state == "closed"
    subject.check_restored(device)


@pytest.mark.anyio
async def test_a_block_that_fails_alone_leaves_the_next_request_exact() -> None:
    """A block called by itself is a pass of its own."""
    subject = make_subject(NUM_BLOCKS)

    def call(block: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return block(subject.inputs)  # type: ignore[no-any-return]

    async with streamflow.open_offload(subject.model) as offload:
        for index, block in enumerate(subject.model.blocks):  # type: ignore[arg-type]
            with inside_block(subject, index, ValueError("no")), pytest.raises(ValueError, match="no"):
                await offload.run(call, block)
            await subject.check_next(offload)
