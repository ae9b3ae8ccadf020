"""What the caller has in force (no_grad, inference mode, autocast) is in force in a request; the bytes are equal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import streamflow
from tests.streamflow.kit import ModelState, aligned_reference, in_worker, sha256_of
from tests.streamflow.models import CALLS, CASES, Case, mlp_stack

pytestmark = pytest.mark.anyio

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "grad enabled, but nothing asks for gradients": torch.enable_grad,
}
MODELS = (Case("mlp", lambda: mlp_stack(5), CALLS), *(case for case in CASES if case.name in ("buffers", "strides")))


def digests(model: Any, case: Case, mode: Callable[[], AbstractContextManager[Any]]) -> list[str]:
    with mode():
        return [sha256_of(model(*call)) for call in case.calls]


@pytest.mark.parametrize("case", MODELS, ids=str)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
async def test_a_mode_of_the_caller_is_exact(case: Case, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    model = case.build()
    reference = aligned_reference(model)
    expected = in_worker(lambda: digests(reference, case, mode))
    before = ModelState.of(model)
    async with streamflow.open_offload(model, {"poison_freed_slots": True}) as offload:
        for _ in range(2):
            with mode():
                outputs = [await offload.run(model, *call) for call in case.calls]
            assert [sha256_of(output) for output in outputs] == expected
        assert offload.statistics().engine.streamed_bytes > 0
    before.assert_unchanged(model)


@pytest.mark.parametrize("options", [{}, {"resident_blocks": 2}, {"transfer": "staged"}, {"resident_blocks": "all"}])
async def test_opening_in_inference_mode_leaves_no_inference_tensor_behind(options: dict[str, object]) -> None:
    """The mode of the task is that of the whole loop thread, where blocks are bound."""
    model = mlp_stack(5)
    reference = aligned_reference(model)
    expected = in_worker(lambda: digests(reference, MODELS[0], torch.inference_mode))
    before = ModelState.of(model)
    with torch.inference_mode():
        async with streamflow.open_offload(model, options) as offload:
            for _ in range(2):
                outputs = [await offload.run(model, *call) for call in CALLS]
                assert [sha256_of(output) for output in outputs] == expected
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())
    before.assert_unchanged(model)
    assert model.train()(CALLS[0][0]).requires_grad is False
