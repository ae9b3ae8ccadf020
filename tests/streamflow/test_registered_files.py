"""Streaming from registered files: exact, without a host pass; staged with a reason where that is not possible."""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streamflow
from streamflow.errors import ConfigurationError
from streamflow.stages.errors import NotPageLockedError, StillRegisteredError
from streamflow.stages.registration.probe import Verdicts
from streamflow.stages.slots import Window
from streamflow.weights import registering
from streamflow.weights.adapters import TensorAdapter
from tests.streamflow.devices import FarCpuDevice, RegisteringDevice
from tests.streamflow.kit import compare, resident_digests, run_calls, save_checkpoint, stream_files_and_compare
from tests.streamflow.models import CALLS, Case, blocks_of, mlp_stack, seeded, tied_across_blocks
from tests.streamflow.test_failed_opening import PlannedError, fail_after, open_files

pytestmark = pytest.mark.anyio

CASE = Case("mlp", lambda: mlp_stack(6), CALLS)


@pytest.fixture(autouse=True)
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Verdicts:
    """Verdicts of one test alone."""
    own = Verdicts()
    monkeypatch.setattr(registering, "VERDICTS", own)
    return own


def registered_calls(device: RegisteringDevice) -> list[tuple[int, int]]:
    return [(address, nbytes) for call, address, nbytes in device.script.calls if call == "register read-only"]


# Direct from the files


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("piece_pages", [1, 2, 1 << 10])
async def test_blocks_are_copied_from_where_they_lie(num_shards: int, piece_pages: int, tmp_path: Path) -> None:
    save_checkpoint(CASE.build(), tmp_path, num_shards)
    device = RegisteringDevice()
    options = {"registration_piece_bytes": piece_pages * mmap.PAGESIZE}
    statistics = await stream_files_and_compare(CASE, tmp_path, options, device=device)
    assert (statistics.choice.source, statistics.choice.transfer) == ("checkpoint", "direct")
    assert statistics.choice.transfer_reason == "the mapped files are page-locked"
    assert (statistics.engine.staging_bytes, statistics.host_image_bytes) == (0, 0)
    registration = statistics.registration
    ranges = registered_calls(device)
    assert registration.problem is None
    assert (registration.num_ranges, registration.registered_bytes) == (len(ranges), sum(n for _, n in ranges))
    blocks = sum(tensor.nbytes for block in blocks_of(CASE.build()) for tensor in block.state_dict().values())
    assert blocks <= registration.registered_bytes < 2 * statistics.model_bytes
    assert max(n for _, n in ranges) <= piece_pages * mmap.PAGESIZE
    assert device.script.registered == {}
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("options", [{"resident_blocks": 3}, {"resident_blocks": "all"}], ids=str)
async def test_residents_are_copied_so_too(options: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(CASE.build(), tmp_path)
    model, device = CASE.build(), RegisteringDevice()
    expected = resident_digests(model, CALLS)
    async with streamflow.open_streamed(CASE.build, tmp_path, options, device=device) as (offload, streamed):
        await compare(offload, streamed, CALLS, expected)
        assert offload.statistics().choice.transfer == "direct"
        assert offload.statistics().engine.staging_bytes == 0
    assert device.script.registered == {}


async def test_tied_tensors_are_registered_once(tmp_path: Path) -> None:
    case = Case("tied", lambda: seeded(tied_across_blocks), CALLS)
    save_checkpoint(case.build(), tmp_path)
    device = RegisteringDevice()
    statistics = await stream_files_and_compare(case, tmp_path, device=device)
    assert statistics.choice.transfer == "direct"
    assert device.script.registered == {}


# Staged instead


async def staged_because(device: FarCpuDevice, directory: Path, options: dict[str, Any] | None = None) -> str:
    """Stream, and check that it was staged and exact; returns why nothing was registered."""
    save_checkpoint(CASE.build(), directory)
    statistics = await stream_files_and_compare(
        CASE, directory, {"packing_threads": 2, **(options or {})}, device=device
    )
    problem = statistics.registration.problem
    assert problem is not None
    assert (statistics.choice.source, statistics.choice.transfer) == ("checkpoint", "staged")
    assert problem in statistics.choice.transfer_reason or statistics.choice.transfer_reason == "asked for"
    assert statistics.engine.staging_bytes > 0
    assert (statistics.registration.registered_bytes, statistics.registration.num_ranges) == (0, 0)
    return problem


@pytest.mark.parametrize("fails_at", [0, 1, 3])
async def test_a_registration_that_fails_is_rolled_back_and_logged(
    fails_at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = RegisteringDevice()
    device.script.failure = lambda: RuntimeError("CUDA error: unknown")
    locks_for_staging = 1

    def fail_while_files_are_registered() -> None:
        device.script.fails_at = fails_at if device.script.num_registers <= fails_at else None

    device.script.before_register = fail_while_files_are_registered
    with caplog.at_level(logging.WARNING, logger="streamflow"):
        problem = await staged_because(device, tmp_path, {"registration_piece_bytes": mmap.PAGESIZE})
    assert "CUDA error: unknown" in problem
    assert len(registered_calls(device)) == fails_at
    assert device.script.num_registers == fails_at + 1 + locks_for_staging
    assert device.script.registered == {}
    (record,) = caplog.records
    assert problem in record.getMessage()
    assert open_files(tmp_path) == []


REFUSED = "the device does not register read-only host memory"


@pytest.mark.parametrize(
    ("script", "options", "reason"),
    [
        ({"refusal": REFUSED}, {}, REFUSED),
        ({}, {"host_registration_limit_bytes": 0}, "host_registration_limit_bytes=0"),
        ({}, {"host_registration_limit_bytes": 4096}, "bytes are over host_registration_limit_bytes=4,096"),
        ({}, {"pin_host_memory": False}, "pin_host_memory=False"),
        ({}, {"transfer": "staged"}, "a staged transfer was asked for"),
    ],
    ids=str,
)
async def test_what_is_refused_or_turned_off_is_never_tried(
    script: dict[str, Any], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    device = RegisteringDevice(**script)
    assert reason in await staged_because(device, tmp_path, options)
    assert registered_calls(device) == []


async def test_more_than_the_cgroup_has_room_for_is_never_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registering, "pinnable_host_bytes", lambda: 5000)
    device = RegisteringDevice()
    assert "are more than the 5,000 that this machine or cgroup has" in await staged_because(device, tmp_path)
    assert registered_calls(device) == []


PROBES = {
    "hangs": ("import time; time.sleep(1000)", "the probe did not answer within 0.5 s"),
    "dies": ("import os; os.abort()", "the probe ended without an answer (signal 6)"),
    "raves": ("print('pinned!')", "the probe gave an answer that is none: b'pinned!'"),
    "refuses": ('print(\'{"problem": "returned 801", "is_conclusive": true}\')', "returned 801"),
    "is unsure": ('print(\'{"problem": "exclusive", "is_conclusive": false}\')', "exclusive"),
}
ANSWERS = 'print(\'{"problem": null, "is_conclusive": true}\')'


def program(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


@pytest.mark.parametrize(("code", "reason"), PROBES.values(), ids=PROBES)
async def test_a_probe_that_does_not_say_yes_makes_it_staged(code: str, reason: str, tmp_path: Path) -> None:
    device = RegisteringDevice(command=program(code))
    deadline_s = 0.5 if "sleep" in code else 60.0
    assert reason in await staged_because(device, tmp_path, {"probe_deadline_s": deadline_s})
    assert registered_calls(device) == []


async def test_one_probe_is_enough_for_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(CASE.build(), tmp_path, 3)
    started: list[object] = []
    original = registering.probe

    async def probe(command: Any, deadline_s: float) -> Any:
        started.append(command)
        return await original(command, deadline_s)

    monkeypatch.setattr(registering, "probe", probe)
    for _ in range(2):
        device = RegisteringDevice(command=program(ANSWERS))
        statistics = await stream_files_and_compare(CASE, tmp_path, device=device)
        assert statistics.choice.transfer == "direct"
    assert len(started) == 1


async def test_with_adapters_nothing_is_registered(tmp_path: Path) -> None:
    model, device = CASE.build(), RegisteringDevice()
    save_checkpoint(model, tmp_path)
    expected = resident_digests(model, CALLS)
    adapter = TensorAdapter("blocks.0.*.weight", ("blocks.0.*.weight",), transform=lambda tensors: tensors[0])
    options = {"packing_threads": 2}
    async with streamflow.open_streamed(CASE.build, tmp_path, options, adapters=[adapter], device=device) as (
        offload,
        streamed,
    ):
        await compare(offload, streamed, CALLS, expected)
        statistics = offload.statistics()
    assert statistics.choice.transfer == "staged"
    assert statistics.registration.problem == statistics.choice.transfer_reason
    assert "checkpoint adapters make tensors" in statistics.choice.transfer_reason
    assert registered_calls(device) == []


async def test_direct_that_was_asked_for_and_is_not_possible_is_an_error(tmp_path: Path) -> None:
    save_checkpoint(CASE.build(), tmp_path)
    device = RegisteringDevice(refusal=REFUSED)
    with pytest.raises(ConfigurationError, match=f"'direct' is not possible: .*{REFUSED}"):
        async with streamflow.open_streamed(CASE.build, tmp_path, {"transfer": "direct"}, device=device):
            raise AssertionError("it was opened")
    assert open_files(tmp_path) == []


async def test_files_that_are_not_registered_never_reach_the_direct_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was decided: a wrong decision is an error, not a slow or a wrong copy."""
    save_checkpoint(CASE.build(), tmp_path)
    choose = streamflow.transfer_opening.choose  # type: ignore[attr-defined]

    def wrong(candidates: Any, config: Any, **situation: Any) -> Any:
        return choose(candidates, config, **{**situation, "why_not_registered": None})

    monkeypatch.setattr("streamflow.transfer_opening.choose", wrong)
    device = RegisteringDevice(refusal=REFUSED)
    with pytest.raises(NotPageLockedError, match=r"blocks\.0 is not page-locked, so the device cannot copy it"):
        async with streamflow.open_streamed(CASE.build, tmp_path, {"resident_blocks": "all"}, device=device):
            raise AssertionError("it was opened")
    assert open_files(tmp_path) == []


# The way back


async def test_a_failed_opening_after_registering_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(CASE.build(), tmp_path, 2)
    device = RegisteringDevice()
    with monkeypatch.context() as patch:
        patch.setattr(Window, "__init__", fail_after(0, Window.__init__))
        with pytest.raises(PlannedError):
            async with streamflow.open_streamed(CASE.build, tmp_path, device=device):
                raise AssertionError("it was opened")
    assert registered_calls(device)
    assert device.script.registered == {}
    assert open_files(tmp_path) == []


async def failing_close(
    directory: Path, device: RegisteringDevice, prepare: Callable[[], object]
) -> StillRegisteredError:
    """Open, run, and close while the device gives nothing back."""
    save_checkpoint(CASE.build(), directory, 2)
    model = CASE.build()
    expected = resident_digests(model, CALLS)
    opened = streamflow.open_streamed(CASE.build, directory, device=device)
    offload, streamed = await opened.__aenter__()
    await compare(offload, streamed, CALLS, expected)
    prepare()
    with pytest.raises(StillRegisteredError) as caught:
        await opened.__aexit__(None, None, None)
    assert offload.state == "closed"
    assert device.memory().in_use == 0
    assert all(parameter.is_meta for parameter in streamed.parameters())
    return caught.value


async def test_what_cannot_be_given_back_keeps_its_files_until_a_retry(tmp_path: Path) -> None:
    device = RegisteringDevice()

    def stick() -> None:
        device.script.num_stuck = 1

    failure = await failing_close(tmp_path, device, stick)
    assert len(device.script.registered) == 1
    assert len(open_files(tmp_path)) >= 2
    device.script.num_stuck = 1
    with pytest.raises(StillRegisteredError) as again:
        failure.retry()
    again.value.retry()
    assert device.script.registered == {}
    assert open_files(tmp_path) == []


async def test_a_rollback_that_fails_ends_the_start_and_keeps_the_files_until_a_retry(tmp_path: Path) -> None:
    save_checkpoint(CASE.build(), tmp_path)
    device = RegisteringDevice(fails_at=2, num_stuck=4)
    options = {"registration_piece_bytes": mmap.PAGESIZE}
    with pytest.raises(StillRegisteredError, match="stay page-locked") as caught:
        async with streamflow.open_streamed(CASE.build, tmp_path, options, device=device):
            raise AssertionError("it was opened")
    assert len(device.script.registered) == 2
    assert open_files(tmp_path)
    assert isinstance(caught.value.__context__, StillRegisteredError)
    caught.value.retry()
    assert device.script.registered == {}
    assert open_files(tmp_path) == []


async def test_a_failed_rollback_that_closing_makes_good_leaves_nothing(tmp_path: Path) -> None:
    save_checkpoint(CASE.build(), tmp_path)
    device = RegisteringDevice(fails_at=2, num_stuck=2)
    options = {"registration_piece_bytes": mmap.PAGESIZE}
    with pytest.raises(StillRegisteredError):
        async with streamflow.open_streamed(CASE.build, tmp_path, options, device=device):
            raise AssertionError("it was opened")
    assert device.script.registered == {}
    assert open_files(tmp_path) == []


async def test_a_failed_copy_does_not_keep_the_files_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure stays with the offload, and its traceback with it; the views that it went through must not."""
    save_checkpoint(CASE.build(), tmp_path)
    device = RegisteringDevice()
    async with streamflow.open_streamed(CASE.build, tmp_path, device=device) as (offload, model):
        await offload.run(run_calls, model, CALLS)
        monkeypatch.setattr("tests.streamflow.devices.CpuCopyStream.copy", _fail_to_copy)
        with pytest.raises(streamflow.StreamflowError, match=r"broken by an earlier failure .PlannedError: copy of"):
            await offload.run(run_calls, model, CALLS)
    assert offload.state == "closed"
    assert device.script.registered == {}
    assert open_files(tmp_path) == []


def _fail_to_copy(stream: object, target: Any, source: Any) -> None:
    raise PlannedError(f"copy of {source.numel()} bytes")
