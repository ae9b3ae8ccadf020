"""Cold, hit, remapped and resident give the same bytes for every kind of model, and stock readers read the entry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import streamflow
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.store.codes import StoreCode
from streamflow.store.lease import Lease
from streamflow.store.options import StoreOptions
from streamflow.store.packing import PAD_PREFIX
from streamflow.store.reports import StoreOutcome
from streamflow.store.stored_form import stored_form
from tests.streamflow.host_weights.kit import Stored, report_of
from tests.streamflow.kit import compare, resident_digests, run_calls, sha256_of
from tests.streamflow.models import CASES, Case
from tests.streamflow.store.crash.kit import opened

#: Cases with tensors that no file can hold as they lie: they have holes, or share memory without being the same. They
#: are loaded without the store, and are exact.
UNSTORABLE = {"strides", "tied inside a block", "blocks of several kinds"}
by_turns = pytest.mark.parametrize(
    ("case", "anyio_backend"),
    [(case, ["asyncio", "trio"][number % 2]) for number, case in enumerate(CASES)],
    ids=lambda value: str(value),
    indirect=["anyio_backend"],
)


@pytest.mark.anyio
@by_turns
async def test_loaded_models_are_exact_before_and_after_they_share(case: Case, tmp_path: Path) -> None:
    """Published and remapped, then found by another copy, and used after closing: the resident model's bytes."""
    stored = Stored(tmp_path, case)
    expected = resident_digests(case.build(), case.calls)
    outcomes = []
    for _ in range(2):
        model = case.build()
        async with streamflow.open_offload(model, stored.config("preferred")) as offload:
            report = report_of(offload)
            await compare(offload, model, case.calls, expected)
        outcomes.append(report.outcome)
        assert [sha256_of(output) for output in run_calls(model, case.calls)] == expected
    if case.name in UNSTORABLE:
        assert outcomes == [StoreOutcome.CANONICAL_FALLBACK] * 2
        assert report.code is StoreCode.UNSUPPORTED_TENSOR
    else:
        assert outcomes == [StoreOutcome.PUBLISHED, StoreOutcome.LOCAL_HIT]
        assert report.content_id is not None
        await check_stock_reader(stored, report.content_id)


async def check_stock_reader(stored: Stored, content_id: str) -> None:
    """Fail unless a stock reader gives every tensor of the model, and nothing more but padding."""
    model = stored.case.build()
    state = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    async with opened(stored.root, max_file_bytes=StoreOptions().max_file_bytes) as store:
        lease = await store.lease(content_id)
        assert lease is not None
        with lease:
            found = read_by_stock(lease)
            for image in lease.manifest.images:
                for tensor in image.image.tensors:
                    for name in (tensor.name, *tensor.aliases):
                        assert sha256_of(found[tensor.name].detach()) == sha256_of(state.pop(name).detach()), name
    assert not state, "tensors of the model are in no image"


def read_by_stock(lease: Lease) -> dict[str, torch.Tensor]:
    """The tensors of an entry as `safetensors.safe_open` reads them, permuted as the manifest says."""
    permutations = {}
    for image in lease.manifest.images:
        for tensor in image.image.tensors:
            permutations[tensor.name] = stored_form(tensor).permutation
    found = {}
    for file in lease.manifest.files:
        with safe_open(Path(lease.path, file.name), "pt") as opened_file:
            for name in opened_file.keys():  # noqa: SIM118 - no mapping
                if not name.startswith(PAD_PREFIX):
                    found[name] = opened_file.get_tensor(name).permute(permutations.pop(name))
    assert not permutations, "tensors of the manifest are in no file"
    return found


@pytest.mark.anyio
@by_turns
async def test_streamed_models_are_exact_cold_and_hit(case: Case, tmp_path: Path) -> None:
    stored = Stored(tmp_path, case)
    stored.save()
    inputs = LoadInputs(producer_abi="test 1")
    outcomes = [(await stored.stream_and_compare("preferred", load=True, inputs=inputs)).outcome for _ in range(2)]
    fallback = [StoreOutcome.CANONICAL_FALLBACK] * 2
    assert outcomes == (fallback if case.name in UNSTORABLE else [StoreOutcome.PUBLISHED, StoreOutcome.LOCAL_HIT])
