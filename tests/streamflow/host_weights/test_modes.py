"""Modes and outcomes: what is used, what is loaded, and what is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import streamflow
from streamflow.host_weights import streaming
from streamflow.host_weights.errors import AmbiguousOwnershipError, EntryMissingError, UndeclaredProducerError
from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.stages.errors import EngineBrokenError
from streamflow.store.codes import StoreCode
from streamflow.store.errors import EntryRejectedError, IdentityCollisionError, SourceChangedError, StoreError
from streamflow.store.reports import StoreOutcome
from streamflow.weights.checkpoint import Checkpoint
from tests.streamflow.host_weights.kit import CASE, REFUSED, Stored, report_of
from tests.streamflow.kit import compare, resident_digests
from tests.streamflow.models import Mlp, Stack, seeded
from tests.streamflow.runtime.kit import until_so

pytestmark = pytest.mark.anyio


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    found = Stored(tmp_path)
    found.save()
    return found


async def test_the_store_is_not_looked_at_unless_it_is_asked_for(stored: Stored) -> None:
    async with stored.streamed("disabled") as (offload, _):
        assert offload.statistics().store is None
    assert not stored.root.exists()


@pytest.mark.parametrize("load", [False, True], ids=["from-files", "loaded"])
async def test_a_miss_publishes_and_a_hit_loads_nothing(stored: Stored, load: bool) -> None:
    if load:  # files that cannot stream as they lie: a tensor of another dtype
        _save_in(stored, torch.float64)
    cold = await stored.stream_and_compare("preferred", load=load)
    assert cold.outcome is StoreOutcome.PUBLISHED
    assert cold.remapped == load
    assert stored.calls.num_loads == load
    for mode in ("preferred", "required"):
        warm = await stored.stream_and_compare(mode, load=load)
        assert warm.outcome is StoreOutcome.LOCAL_HIT
        assert (warm.content_id, warm.source_id) == (cold.content_id, cold.source_id)
    assert stored.calls.num_loads == load, "a hit loaded"
    assert len(stored.entries) == 1


def _save_in(stored: Stored, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.to(dtype) for name, tensor in stored.case.build().state_dict().items()}
    save_file(tensors, stored.checkpoint / "model.safetensors")


async def test_a_checkpoint_that_is_replaced_after_it_was_opened_is_never_stored_under_the_others_name(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are opened, then hashed by their paths: what is read has to be what was hashed."""
    original = streaming.open_checkpoint

    def replaced_at_once(path: Path) -> Checkpoint:
        checkpoint = original(path)
        file = stored.checkpoint / "model.safetensors"
        others = file.with_name("others")
        others.write_bytes(file.read_bytes())
        others.rename(file)
        return checkpoint

    monkeypatch.setattr(streaming, "open_checkpoint", replaced_at_once)
    report = await stored.stream_and_compare("preferred")
    assert report.outcome is StoreOutcome.CANONICAL_FALLBACK
    assert "changed while it was opened and hashed" in report.reason
    with pytest.raises(SourceChangedError):
        async with stored.streamed("required"):
            raise AssertionError("it was opened")
    assert stored.entries == []


async def test_without_an_entry_required_fails_and_loads_nothing(stored: Stored) -> None:
    with pytest.raises(EntryMissingError, match="streamflow store publish") as caught:
        async with stored.streamed("required", load=True):
            raise AssertionError("it was opened")
    assert stored.calls.num_loads == 0
    assert caught.value.code is StoreCode.ENTRY_MISSING
    assert caught.value.report is not None
    assert caught.value.report.outcome is StoreOutcome.FAILED
    assert stored.entries == []


@pytest.mark.parametrize(("code", "topology"), REFUSED.items(), ids=list(REFUSED))
async def test_what_the_store_cannot_hold_is_loaded_without_it(
    stored: Stored, code: str, topology: dict[str, Any]
) -> None:
    async with stored.streamed("preferred", load=True, topology=topology) as (offload, model):
        report = report_of(offload)
        await compare(offload, model, CASE.calls, resident_digests(CASE.build(), CASE.calls))
    assert (report.outcome, report.code) == (StoreOutcome.CANONICAL_FALLBACK, code)
    assert stored.entries == []
    num_builds, num_loads = stored.calls.num_builds, stored.calls.num_loads
    with pytest.raises(StoreError) as caught:
        async with stored.streamed("required", load=True, topology=topology):
            raise AssertionError("it was opened")
    assert caught.value.code == code
    assert (stored.calls.num_builds, stored.calls.num_loads) == (num_builds, num_loads)


@pytest.mark.parametrize("load_format", ["dummy", "random"])
async def test_weights_from_nowhere_have_no_identity(stored: Stored, load_format: str) -> None:
    inputs = LoadInputs(load_format=load_format)
    async with stored.streamed("preferred", inputs=inputs) as (offload, _):
        assert report_of(offload).code is StoreCode.UNSUPPORTED_LOAD_FORMAT


async def test_a_quantized_part_is_found_on_the_modules(stored: Stored) -> None:
    model = CASE.build()
    model.blocks[2].up.quantization_method = "int8"  # type: ignore[union-attr, index]
    async with streamflow.open_offload(model, stored.config("preferred")) as offload:
        report = report_of(offload)
    assert report.code is StoreCode.UNSUPPORTED_QUANTIZATION
    assert "blocks.2.up" in report.reason


async def test_a_tensor_of_another_module_of_the_pipeline_is_not_this_models_to_store(stored: Stored) -> None:
    model, neighbour = CASE.build(), nn.Linear(16, 16)
    neighbour.weight = model.blocks[0].up.weight  # type: ignore[union-attr, index]
    inputs = LoadInputs(neighbours=(neighbour,))
    async with streamflow.open_offload(model, stored.config("preferred"), inputs=inputs) as offload:
        report = report_of(offload)
    assert (report.outcome, report.code) == (StoreOutcome.CANONICAL_FALLBACK, StoreCode.UNSUPPORTED_ALIAS)
    assert "blocks.0.up.weight" in report.reason


@pytest.mark.parametrize("mode", ["preferred", "required"])
@pytest.mark.parametrize("part", ["load", "finalize"])
async def test_code_of_the_caller_needs_a_declared_version(stored: Stored, mode: str, part: str) -> None:
    given: dict[str, Any] = {part: nn.Module.eval}
    with pytest.raises(UndeclaredProducerError, match=f"{part}=") as caught:
        async with streamflow.open_streamed(CASE.build, stored.checkpoint, stored.config(mode), **given):
            raise AssertionError("it was opened")
    assert caught.value.code is StoreCode.INVALID_CONFIGURATION


async def test_one_source_with_two_contents_is_a_collision_and_no_miss(stored: Stored) -> None:
    seeds = iter([0, 1])
    _save_in(stored, torch.float64)

    def load(skeleton: nn.Module) -> nn.Module:
        return seeded(lambda: Stack(Mlp() for _ in range(6)), seed=next(seeds))

    async def open_it() -> None:
        inputs = LoadInputs(producer_abi="not deterministic")
        config = stored.config("preferred")
        async with streamflow.open_streamed(CASE.build, stored.checkpoint, config, load=load, inputs=inputs):
            pass

    await open_it()
    for entry in stored.entries:  # the content goes, the source's record stays
        _remove(entry)
    with pytest.raises(IdentityCollisionError):
        await open_it()


def _remove(entry: Path) -> None:
    for path in (entry, *entry.iterdir()):
        path.chmod(0o755)
    for path in entry.iterdir():
        path.unlink()
    entry.rmdir()


async def test_an_error_of_the_loader_is_the_callers(stored: Stored) -> None:
    _save_in(stored, torch.float64)

    def load(skeleton: nn.Module) -> nn.Module:
        raise ZeroDivisionError("the loader's own")

    config, inputs = stored.config("preferred"), LoadInputs(producer_abi="broken 1")
    with pytest.raises(ZeroDivisionError):
        async with streamflow.open_streamed(CASE.build, stored.checkpoint, config, load=load, inputs=inputs):
            raise AssertionError("it was opened")
    assert stored.entries == []
    assert list((stored.root / "tmp").iterdir()) == []


async def test_a_finished_model_with_other_tensors_than_the_entry_is_refused(stored: Stored) -> None:
    await stored.stream_and_compare("preferred", finalize=nn.Module.eval)

    def another(model: nn.Module) -> None:
        model.eval().bfloat16()

    for mode in ("preferred", "required"):
        with pytest.raises(AmbiguousOwnershipError, match="producer_abi"):
            async with stored.streamed(mode, finalize=another):
                raise AssertionError("it was opened")


async def test_a_hit_finishes_the_skeleton_as_loading_finished_the_model(stored: Stored) -> None:
    def convert(model: nn.Module) -> None:
        model.eval().bfloat16()

    reports = []
    for _ in range(2):
        async with stored.streamed("preferred", load=True, finalize=convert) as (offload, model):
            reports.append(report_of(offload))
            expected = resident_digests(CASE.build().bfloat16(), _calls_in_bfloat16())
            await compare(offload, model, _calls_in_bfloat16(), expected)
    assert [report.outcome for report in reports] == [StoreOutcome.PUBLISHED, StoreOutcome.LOCAL_HIT]


def _calls_in_bfloat16() -> tuple[Any, ...]:
    return tuple(tuple(argument.bfloat16() for argument in call) for call in CASE.calls)


async def _damage(stored: Stored) -> None:
    for file in stored.weight_files:
        file.chmod(0o644)
        data = bytearray(file.read_bytes())
        data[-1000] ^= 1
        file.write_bytes(data)


async def test_damage_is_rebuilt_where_the_store_is_preferred_and_refused_where_it_is_required(stored: Stored) -> None:
    first = await stored.stream_and_compare("preferred")
    await _damage(stored)
    with pytest.raises(EntryRejectedError):
        async with stored.streamed("required", store={"verification": "digest"}):
            raise AssertionError("it was opened")
    rebuilt = await stored.stream_and_compare("preferred", store={"verification": "digest"})
    assert rebuilt.outcome is StoreOutcome.PUBLISHED
    assert rebuilt.content_id == first.content_id
    assert rebuilt.generation != first.generation
    assert (await stored.stream_and_compare("required")).outcome is StoreOutcome.LOCAL_HIT


async def test_damage_that_is_found_in_the_background_breaks_the_offload(stored: Stored) -> None:
    await stored.stream_and_compare("preferred")
    await _damage(stored)
    async with stored.streamed("required") as (offload, model):
        await until_so(lambda: offload.state != "ready")
        assert offload.state == "broken"
        with pytest.raises(EngineBrokenError) as caught:
            await offload.run(model, *CASE.calls[0])
        assert isinstance(caught.value.__cause__, EntryRejectedError)
    assert (await stored.stream_and_compare("preferred")).outcome is StoreOutcome.PUBLISHED


async def test_random_values_that_loading_replaces_do_not_hide_the_entry(tmp_path: Path) -> None:
    """Many models initialise a table of theirs at random where they are built."""

    def build() -> nn.Module:
        model = CASE.build()
        model.table = nn.Parameter(torch.randn(4))
        return model

    stored = Stored(tmp_path, attrs.evolve(CASE, build=build))
    stored.save()
    for mode in ("preferred", "required"):
        async with stored.streamed(mode) as (offload, _model):
            outcome = report_of(offload).outcome
    assert outcome is StoreOutcome.LOCAL_HIT
