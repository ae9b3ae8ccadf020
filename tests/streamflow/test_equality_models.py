"""Every model of the kit streams to the bytes of the resident one, from the module and from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamflow.weights.checkpoint_plan import FallbackCode
from streamflow.weights.safetensors_dtypes import TORCH_TO_FILE
from tests.streamflow.kit import (
    ALIGNMENT,
    aligned_reference,
    run_calls,
    save_checkpoint,
    spans_of,
    stream_and_compare,
    stream_files_and_compare,
    tensors_of,
)
from tests.streamflow.models import CASES, DTYPE_NAMES, Case, Typed, all_dtypes, blocks_of

pytestmark = pytest.mark.anyio

each_case = pytest.mark.parametrize("case", CASES, ids=str)
#: Models whose tensors do not lie row by row, or share memory in part: files cannot hold that, so they are loaded.
NOT_IN_FILES = {"strides", "tied inside a block", "blocks of several kinds"}


@each_case
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_every_model_streams_exactly(case: Case) -> None:
    statistics = await stream_and_compare(case)
    assert (statistics.choice.source, statistics.choice.transfer) == ("module", "direct")
    assert statistics.fixed_bytes == 0


@each_case
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_model_streams_exactly_when_staged(case: Case) -> None:
    options = {"transfer": "staged", "window_blocks": 3, "staging_chunk_bytes": 512, "packing_threads": 3}
    statistics = await stream_and_compare(case, options)
    assert statistics.choice.transfer == "staged"


@each_case
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_every_model_streams_exactly_beside_a_resident_and_through_one_slot(case: Case) -> None:
    statistics = await stream_and_compare(case, {"window_blocks": 1, "resident_blocks": 1})
    assert statistics.num_resident_blocks == 1


@each_case
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_model_streams_exactly_from_its_checkpoint(case: Case, tmp_path: Path) -> None:
    save_checkpoint(case.build(), tmp_path, num_shards=1 + CASES.index(case) % 3)
    statistics = await stream_files_and_compare(case, tmp_path)
    if case.name in NOT_IN_FILES:
        assert statistics.choice.source == "module"
        assert statistics.choice.source_reason.startswith(FallbackCode.CHECKPOINT_PLAN_INCOMPATIBLE)
    else:
        assert statistics.choice.source == "checkpoint"


@pytest.mark.parametrize("transfer", ["auto", "staged"])
async def test_a_checkpoint_streams_exactly_under_both_loops(transfer: str, tmp_path: Path) -> None:
    case = CASES[1]
    save_checkpoint(case.build(), tmp_path, 2)
    options = {"transfer": transfer, "resident_blocks": 2, "staging_chunk_bytes": 1024, "packing_threads": 2}
    statistics = await stream_files_and_compare(case, tmp_path, options)
    assert (statistics.choice.source, statistics.num_resident_blocks) == ("checkpoint", 2)
    assert statistics.host_image_bytes == 0


def test_the_kit_holds_every_dtype_that_torch_has_and_a_file_can_hold() -> None:
    assert set(DTYPE_NAMES) == set(TORCH_TO_FILE)
    (case,) = (case for case in CASES if case.name == "every dtype")
    blocks = blocks_of(case.build())
    assert [block.matrix.dtype for block in blocks if isinstance(block, Typed)] == all_dtypes(DTYPE_NAMES)
    assert len(blocks) >= 18


@each_case
def test_the_reference_is_aligned_and_computes_what_the_model_computes(case: Case) -> None:
    model = case.build()
    reference = aligned_reference(model)
    assert all(span.start % ALIGNMENT == 0 for span in spans_of(tensors_of(reference)) if span.end > span.start)
    strides = [(tensor.shape, tensor.stride()) for tensor in tensors_of(model)]
    assert [(tensor.shape, tensor.stride()) for tensor in tensors_of(reference)] == strides
    torch.testing.assert_close(run_calls(reference, case.calls), run_calls(model, case.calls))
