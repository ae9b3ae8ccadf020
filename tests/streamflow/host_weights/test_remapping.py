"""A loaded model that shows the entry in place of its own copies: the same objects, right bytes, no file harmed."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import streamflow
from streamflow.host_weights import remapping
from streamflow.store.codes import StoreCode
from streamflow.store.reports import StoreOutcome
from streamflow.tools.bench.process_memory import mapping_kinds
from tests.streamflow.host_weights.kit import CASE, Stored, report_of
from tests.streamflow.kit import compare, resident_digests, run_calls, sha256_of, tensors_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


async def test_parameters_keep_identity_and_attributes_and_private_copies_go(stored: Stored) -> None:
    model = CASE.build()
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.__dict__["note"] = "kept"
    copies = [weakref.ref(tensor.untyped_storage()) for tensor in tensors_of(model)]
    expected = resident_digests(model, CASE.calls)
    async with streamflow.open_offload(model, stored.config("preferred")) as offload:
        report = report_of(offload)
        await compare(offload, model, CASE.calls, expected)
        kinds = mapping_kinds("weights-00001.safetensors")
    assert (report.outcome, report.remapped) == (StoreOutcome.PUBLISHED, True)
    assert kinds["Size"] > 0
    assert kinds["Private_Dirty"] == kinds["Anonymous"] == 0, kinds
    found = dict(model.named_parameters())
    assert all(found[name] is parameter and parameter.note == "kept" for name, parameter in parameters.items())  # type: ignore[attr-defined]
    gc.collect()
    assert all(copy() is None for copy in copies), "private copies are still there"


async def test_after_closing_the_model_computes_and_may_be_changed_without_the_file_being_touched(
    stored: Stored,
) -> None:
    model = CASE.build()
    expected = resident_digests(model, CASE.calls)
    async with streamflow.open_offload(model, stored.config("preferred")):
        pass
    before = [hashlib.sha256(file.read_bytes()).hexdigest() for file in stored.weight_files]
    assert [sha256_of(output) for output in run_calls(model, CASE.calls)] == expected
    with torch.no_grad():
        for tensor in tensors_of(model):
            tensor.zero_()
    assert all(not tensor.any() for tensor in tensors_of(model))
    assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in stored.weight_files] == before
    async with streamflow.open_offload(CASE.build(), stored.config("required")) as offload:
        assert report_of(offload).outcome is StoreOutcome.LOCAL_HIT


async def test_without_remapping_the_model_keeps_its_own_copies(stored: Stored) -> None:
    model = CASE.build()
    places = [tensor.data_ptr() for tensor in tensors_of(model)]
    config = stored.config("preferred", remap_after_publish=False)
    async with streamflow.open_offload(model, config) as offload:
        assert offload.statistics().choice.source == "module"
        assert report_of(offload).outcome is StoreOutcome.PUBLISHED
        assert not report_of(offload).remapped
    assert [tensor.data_ptr() for tensor in tensors_of(model)] == places


async def test_tied_and_permuted_tensors_come_back_as_they_were(stored: Stored) -> None:
    model = CASE.build()
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        block.up.weight.data = block.up.weight.data.t().contiguous().t()
    blocks[1].down.bias = blocks[1].norm.bias
    strides = [tensor.stride() for tensor in tensors_of(model)]
    expected = resident_digests(model, CASE.calls)
    async with streamflow.open_offload(model, stored.config("preferred")) as offload:
        await compare(offload, model, CASE.calls, expected)
    assert [tensor.stride() for tensor in tensors_of(model)] == strides
    assert blocks[1].down.bias is blocks[1].norm.bias
    assert [sha256_of(output) for output in run_calls(model, CASE.calls)] == expected


async def test_a_model_that_fails_to_open_after_its_copies_went_keeps_right_bytes(stored: Stored) -> None:
    model = CASE.build()
    expected = {name: sha256_of(tensor) for name, tensor in model.state_dict().items()}
    with pytest.raises(streamflow.StreamflowError):
        async with streamflow.open_offload(model, stored.config("preferred", resident_blocks=99)):
            raise AssertionError("it was opened")
    assert {name: sha256_of(tensor) for name, tensor in model.state_dict().items()} == expected


async def test_where_nothing_can_be_mapped_the_model_keeps_its_copies(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> memoryview:
        raise OSError(errno.ENOMEM, "too many mappings")

    monkeypatch.setattr(remapping, "private_mapping", refuse)
    model = CASE.build()
    expected = resident_digests(model, CASE.calls)
    async with streamflow.open_offload(model, stored.config("preferred")) as offload:
        await compare(offload, model, CASE.calls, expected)
        report = report_of(offload)
    assert (report.outcome, report.code) == (StoreOutcome.CANONICAL_FALLBACK, StoreCode.OPERATION_FAILED)


def test_a_private_mapping_outlives_the_descriptor_and_keeps_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = os.urandom(10_001)
    path.write_bytes(content)
    before = len(os.listdir("/proc/self/fd"))
    with path.open("rb") as file:
        memory = remapping.private_mapping(file.fileno())
    assert len(os.listdir("/proc/self/fd")) == before
    memory[0] ^= 255
    assert (memory[1:], path.read_bytes()) == (content[1:], content)
    part = memory[:1]
    memory.release()
    assert part[0] == content[0] ^ 255
    assert str(path) in Path("/proc/self/maps").read_text()
    part.release()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_file_that_cannot_be_mapped_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(5000)
        with pytest.raises(PermissionError):
            remapping.private_mapping(file.fileno())
