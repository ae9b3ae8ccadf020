"""Known faults of options: accepted and without effect, out of range, unknown, or lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import streamflow
from streamflow import OffloadConfig, OffloadPlan
from streamflow.errors import ConfigurationError
from streamflow.ranks.options import RankOptions
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.errors import StreamflowError
from streamflow.store.options import StoreOptions
from streamflow.weights.topology import WeightTopology
from tests.streamflow.devices import FarCpuDevice
from tests.streamflow.kit import ModelState, largest_block_bytes, save_checkpoint, stream_and_compare
from tests.streamflow.models import CALLS, Case, blocks_of, mlp_stack

CASE = Case("mlp", lambda: mlp_stack(6), CALLS)

#: For each option a value that is not its default.
EVERY_OPTION: dict[str, Any] = {
    "window_blocks": 3,
    "resident_blocks": 2,
    "resident_bytes": 1 << 20,
    "resident_placement": "leading",
    "transfer": "staged",
    "pin_host_memory": False,
    "host_registration_limit_bytes": 1 << 20,
    "registration_piece_bytes": 1 << 20,
    "probe_deadline_s": 3,
    "packing_threads": 3,
    "staging_chunk_bytes": 4096,
    "run_ahead_blocks": 5,
    "device": "cpu",
    "plan": OffloadPlan(stacks="blocks"),
    "topology": WeightTopology(sequence_parallel_size=2),
    "store_mode": "disabled",
    "remap_after_publish": False,
    "store": StoreOptions(publication_wait_s=5.0),
    "ranks": RankOptions(gather_chunk_bytes=1 << 20, default_wave={"steps": [["transformer", 3]]}),
    "trace_path": "trace.json",
    "trace_events": 1000,
    "poison_freed_slots": True,
    "max_running_requests": 3,
    "max_passes_per_walk": 2,
    "max_waiting_requests": 7,
    "stateful_modules": (),
    "admission_window_s": 0.5,
    "close_mode": "drain",
    "close_deadline_s": 3.0,
    "warmup_failure": "warn",
    "components": {},
    "device_budget_bytes": 1 << 30,
}

#: Options that are groups of options.
GROUPS = {"plan", "topology", "store", "ranks"}

WRONG: dict[str, list[Any]] = {
    "window_blocks": [0, -1, 2.0, True, "2", None],
    "resident_blocks": [-1, 1.5, True, "ALL", "2"],
    "resident_bytes": [-1, 0.5, "1GB", True],
    "resident_placement": ["evenly", None, 3],
    "transfer": ["gathered", None, 1],
    "pin_host_memory": [1, "yes", None],
    "host_registration_limit_bytes": [-1, 1.5, "1GB", False],
    "registration_piece_bytes": [0, 4095, -1, None, 1e9, True],
    "probe_deadline_s": [0, -1, float("inf"), float("nan"), None, True, "20"],
    "packing_threads": [0, -2, 1.0, False],
    "staging_chunk_bytes": [0, 255, -4096, 1e6, None],
    "run_ahead_blocks": [0, -1, "all", 1.5],
    "device": ["gpu", "meta", "cuda:99", 3.5, "mps"],
    "plan": ["blocks", ("blocks",), {"stacks": "blocks"}],
    "topology": [
        *({"tensor_parallel_size": size} for size in (0, -1, None, 1.5)),
        *({"tensor_parallel_size": 2, "tensor_parallel_rank": rank} for rank in (2, -1, 0.5)),
        *({"hsdp": value} for value in (None, 1, "no")),
        *({"online_quantization": value} for value in (True, 8)),
        {"tensor_parallel_sizes": 2},
        None,
        2,
    ],
    "store_mode": ["on", None, True],
    "remap_after_publish": [None, 1],
    "store": [{"publication_wait_s": 0}, {"verification": "never"}, {"rot": "/tmp"}, None, "/tmp"],
    "ranks": [{"gather": "sometimes"}, {"gather_chunk_bytes": 255}, {"gathr": "auto"}, None, "auto"],
    "trace_path": ["", 3, b"trace.json", True],
    "trace_events": [0, -1, 1.5, True, "many"],
    "poison_freed_slots": [None, 0],
    "max_running_requests": [0, -1, 25, 2.0, None, True],
    "max_passes_per_walk": [0, -1, 5, 1.5, False],
    "max_waiting_requests": [-1, None, 0.5, True],
    "stateful_modules": ["blocks.0", ["blocks.0"], (1,)],
    "admission_window_s": [-0.1, float("inf"), float("nan"), None, "1", True],
    "close_mode": ["stop", None, 1],
    "close_deadline_s": [-1, float("inf"), None, "5"],
    "warmup_failure": ["ignore", None, True],
    "device_budget_bytes": [0, -1, 1.5, "1GB", True],
}
#: Options whose wrong values are type errors; see tests/streamflow/pipelines/test_policy.py.
TYPED = {"components"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_out_of_range_is_refused_by_the_name_of_its_option(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        OffloadConfig(**{name: value})
    (problem,) = caught.value.problems
    assert problem.startswith(name)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, StreamflowError)
    with pytest.raises(ConfigurationError, match=name):
        OffloadConfig.from_mapping({name: value})


def test_all_problems_are_in_one_error() -> None:
    options = {name: values[0] for name, values in WRONG.items()}
    with pytest.raises(ConfigurationError) as caught:
        OffloadConfig.from_mapping(options)
    assert len(caught.value.problems) == len(options)
    for name in options:
        assert f"- {name}" in str(caught.value)


def test_every_option_is_checked_here() -> None:
    assert set(WRONG) | TYPED == set(EVERY_OPTION) == set(OffloadConfig().effective())


def test_unknown_options_are_all_refused_and_the_nearest_one_suggested() -> None:
    with pytest.raises(ConfigurationError) as caught:
        OffloadConfig.from_mapping({"windw_blocks": 2, "residents": 1, "window_blocks": 2})
    first, second = caught.value.problems
    assert "'windw_blocks'; did you mean 'window_blocks'" in first
    assert "'residents'" in second


@pytest.mark.anyio
@pytest.mark.parametrize(
    "config", [{"windw_blocks": 2}, {"window_blocks": 0}, "window_blocks=2", 3, [("a", 1)]], ids=str
)
async def test_a_configuration_that_is_not_usable_is_refused_before_anything_is_touched(
    config: Any, tmp_path: Path
) -> None:
    model, built = mlp_stack(2), []
    before = ModelState.of(model)
    with pytest.raises(ConfigurationError):
        async with streamflow.open_offload(model, config):
            raise AssertionError("it was opened")
    with pytest.raises(ConfigurationError):
        async with streamflow.open_streamed(lambda: built.append(1) or model, tmp_path, config):  # type: ignore[func-returns-value]
            raise AssertionError("it was opened")
    with pytest.raises(ConfigurationError):
        await streamflow.start_offload(model, config)
    with pytest.raises(ConfigurationError), streamflow.offload(model, config):
        raise AssertionError("it was opened")
    before.assert_unchanged(model)
    assert built == []


@pytest.mark.anyio
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
async def test_a_device_by_name_in_place_of_a_backend_is_refused_and_the_option_named(device: Any) -> None:
    with pytest.raises(ConfigurationError, match="'device': 'cpu'"):
        async with streamflow.open_offload(mlp_stack(2), device=device):
            raise AssertionError("it was opened")


@pytest.mark.anyio
async def test_every_option_arrives_where_it_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is lost between the caller and the runtime: the effective configuration is the offload's, and it shows."""
    monkeypatch.chdir(tmp_path)  # where the trace is written
    async with streamflow.open_offload(CASE.build(), EVERY_OPTION, device=FarCpuDevice()) as offload:
        assert offload.config == OffloadConfig(**EVERY_OPTION)
        effective = offload.config.effective()
        statistics = offload.statistics()
    assert {name: value for name, value in EVERY_OPTION.items() if name not in GROUPS}.items() <= effective.items()
    assert effective["plan"]["stacks"] == ("blocks",)
    assert effective["topology"]["sequence_parallel_size"] == 2
    assert effective["store"]["publication_wait_s"] == 5.0
    assert effective["ranks"]["gather_chunk_bytes"] == 1 << 20
    assert statistics.num_resident_blocks == 2
    blocks = blocks_of(CASE.build())
    assert statistics.engine.window_bytes == 3 * largest_block_bytes(blocks)
    assert statistics.choice.transfer == "staged"
    assert statistics.engine.staging_bytes > 3 * 2 * 2048
    assert statistics.host_image_bytes == 0
    assert (tmp_path / "trace.json").stat().st_size > 0


def test_the_effective_configuration_has_every_default_filled_in_and_can_be_printed() -> None:
    effective = OffloadConfig(window_blocks=3).effective()
    assert effective["run_ahead_blocks"] == 8
    assert effective["packing_threads"] >= 1
    assert effective["device"] in ("cpu", "cuda")
    assert effective["plan"] is None
    assert json.loads(json.dumps(effective))["window_blocks"] == 3
    assert json.dumps(OffloadConfig(**EVERY_OPTION).effective())


@pytest.mark.anyio
async def test_the_chosen_source_and_transfer_are_said_and_why() -> None:
    async with streamflow.open_offload(CASE.build(), {"window_blocks": 9, "resident_blocks": 1}) as offload:
        statistics, text = offload.statistics(), repr(offload)
    assert statistics.choice.source_reason
    assert statistics.choice.transfer_reason
    assert "5 of 6 blocks" in text
    assert "through 5 slots" in text  # more than are asked for would be a count that nothing has
    assert "direct from module" in text


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        {"window_blocks": 1_000_000},
        {"run_ahead_blocks": 1_000_000},
        {"staging_chunk_bytes": 1 << 40, "transfer": "staged"},
        {"packing_threads": 64, "transfer": "staged"},
        {"resident_bytes": 1 << 60, "window_blocks": 1_000_000},
    ],
    ids=str,
)
async def test_a_count_larger_than_the_model_is_as_good_as_the_largest_that_fits(options: dict[str, Any]) -> None:
    statistics = await stream_and_compare(CASE, options, streams="resident_bytes" not in options)
    assert statistics.engine.device_peak_bytes <= 6 * statistics.block_bytes


@pytest.mark.anyio
async def test_more_residents_than_blocks_are_refused_with_the_numbers() -> None:
    model = CASE.build()
    before = ModelState.of(model)
    with pytest.raises(ConfigurationError, match="resident_blocks is 7 but the model has 6") as caught:
        async with streamflow.open_offload(model, {"resident_blocks": 7}):
            raise AssertionError("it was opened")
    assert "use 'all'" in str(caught.value)
    before.assert_unchanged(model)


@pytest.mark.anyio
async def test_a_direct_transfer_that_is_not_possible_is_refused_and_undone() -> None:
    model, device = CASE.build(), FarCpuDevice()
    before = ModelState.of(model)
    with pytest.raises(ConfigurationError, match=r"direct.*pin_host_memory=False") as caught:
        async with streamflow.open_offload(model, {"transfer": "direct", "pin_host_memory": False}, device=device):
            raise AssertionError("it was opened")
    assert isinstance(caught.value, ValueError)
    before.assert_unchanged(model)
    assert device.memory().in_use == 0


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"topology": {"tensor_parallel_size": 2}}, "unsupported_tp"),
        ({"topology": {"hsdp": True}}, "unsupported_hsdp"),
        ({"topology": {"online_quantization": "fp8"}}, "unsupported_online_quantization"),
    ],
)
async def test_an_option_that_rules_the_files_out_is_not_ignored(
    options: dict[str, Any], code: str, tmp_path: Path
) -> None:
    save_checkpoint(CASE.build(), tmp_path)
    opened = streamflow.open_streamed(CASE.build, tmp_path, options, load=lambda skeleton: CASE.build())
    async with opened as (offload, _):
        choice = offload.statistics().choice
    assert choice.source == "module"
    assert choice.source_reason.startswith(code)


@pytest.mark.anyio
async def test_an_offload_that_streams_nothing_says_so() -> None:
    """A flag accepted, and nothing streamed: it must be seen in the numbers and the text."""
    async with streamflow.open_offload(CASE.build(), {"resident_blocks": "all"}, device=CpuDevice()) as offload:
        statistics, text = offload.statistics(), repr(offload)
    assert "0 of 6 blocks" in text
    assert statistics.num_resident_blocks == statistics.num_blocks
    assert statistics.engine.streamed_bytes == 0
