"""The order in which a streamed checkpoint is closed: nothing goes before everything that uses it has gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from torch import nn

import streamflow
from streamflow.attachment import Interceptions
from streamflow.binding.blocks import BlockBinder
from streamflow.binding.guards import Guards
from streamflow.stages.opening import _Parts
from streamflow.stages.registration.registration import Registration
from streamflow.weights.checkpoint_file import CheckpointFile
from streamflow.weights.file_mapping import FileMapping
from streamflow.weights.registering import RegisteredFiles
from tests.streamflow.devices import RegisteringDevice
from tests.streamflow.kit import run_calls, save_checkpoint
from tests.streamflow.models import CALLS, mlp_stack
from tests.streamflow.test_failed_opening import PlannedError, fail_after, open_files

pytestmark = pytest.mark.anyio

#: Each step by the method that does it, in the order that has to be kept.
STEPS: dict[str, tuple[type, str]] = {
    "requests stop": (Interceptions, "remove"),
    "the device drains": (_Parts, "drain"),
    "blocks are unbound and buffers freed": (_Parts, "release"),
    "the module shows the host": (BlockBinder, "show_host"),
    "guards go": (Guards, "remove"),
    "views of the mapping go": (RegisteredFiles, "close"),
    "pages are given back": (Registration, "close"),
    "the file is unmapped": (FileMapping, "close"),
}


def build() -> nn.Module:
    return mlp_stack(4)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that were done, as they are done."""
    done: list[str] = []

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return method(*args, **kwargs)

        return noted

    for name, (owner, method) in STEPS.items():
        monkeypatch.setattr(owner, method, noting(name, getattr(owner, method)))
    return done


def first_times(steps: list[str]) -> list[str]:
    return list(dict.fromkeys(steps))


async def test_after_the_body(steps: list[str], tmp_path: Path) -> None:
    save_checkpoint(build(), tmp_path)
    device = RegisteringDevice()
    async with streamflow.open_streamed(build, tmp_path, device=device) as (offload, model):
        await offload.run(run_calls, model, CALLS)
        assert steps == []
    assert steps == list(STEPS)
    assert (device.script.registered, open_files(tmp_path)) == ({}, [])


async def test_after_a_failure_of_the_body(steps: list[str], tmp_path: Path) -> None:
    save_checkpoint(build(), tmp_path)
    with pytest.raises(PlannedError):
        async with streamflow.open_streamed(build, tmp_path, device=RegisteringDevice()):
            raise PlannedError
    assert steps == list(STEPS)


async def test_under_a_cancellation(steps: list[str], tmp_path: Path) -> None:
    save_checkpoint(build(), tmp_path)
    device = RegisteringDevice()
    with anyio.CancelScope() as scope:
        async with streamflow.open_streamed(build, tmp_path, device=device) as (offload, model):
            await offload.run(run_calls, model, CALLS)
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert steps == list(STEPS)
    assert (device.script.registered, open_files(tmp_path)) == ({}, [])


@pytest.mark.parametrize("num_successes", [0, 3])
async def test_of_an_opening_that_fails_late(
    num_successes: int, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(build(), tmp_path)
    device = RegisteringDevice()
    with monkeypatch.context() as patch:
        patch.setattr(RegisteringDevice, "allocate", fail_after(num_successes, RegisteringDevice.allocate))
        with pytest.raises(PlannedError):
            async with streamflow.open_streamed(build, tmp_path, {"resident_blocks": 2}, device=device):
                raise AssertionError("it was opened")
    order = [step for step in STEPS if step in steps]
    assert first_times(steps) == order
    assert order[-3:] == list(STEPS)[-3:]
    assert (device.script.registered, open_files(tmp_path)) == ({}, [])


async def test_what_cannot_be_given_back_stops_there(steps: list[str], tmp_path: Path) -> None:
    save_checkpoint(build(), tmp_path)
    device = RegisteringDevice()
    opened = streamflow.open_streamed(build, tmp_path, device=device)
    await opened.__aenter__()
    device.script.num_stuck = 1
    with pytest.raises(streamflow.StreamflowError, match="stay page-locked") as caught:
        await opened.__aexit__(None, None, None)
    assert steps == list(STEPS)[:-1]
    caught.value.retry()  # type: ignore[attr-defined]
    assert steps == [*list(STEPS)[:-1], *list(STEPS)[-3:]]
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("at_range", [0, 2])
async def test_an_opening_that_is_cancelled_while_it_registers(at_range: int, tmp_path: Path) -> None:
    save_checkpoint(build(), tmp_path)
    device = RegisteringDevice()
    with anyio.CancelScope() as scope:

        def cancel() -> None:
            if device.script.num_registers == at_range:
                anyio.from_thread.run_sync(scope.cancel)

        device.script.before_register = cancel
        options = {"registration_piece_bytes": 4096}
        async with streamflow.open_streamed(build, tmp_path, options, device=device):
            raise AssertionError("it was opened")
    assert scope.cancelled_caught
    assert device.script.num_registers == at_range + 1
    assert (device.script.registered, open_files(tmp_path)) == ({}, [])


async def test_a_closed_file_is_closed_for_good(tmp_path: Path) -> None:
    """What the fixture above counts as the last step is where a checkpoint's files end."""
    save_checkpoint(build(), tmp_path)
    closed: list[CheckpointFile] = []
    original = CheckpointFile.close

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFile, "close", lambda file: (closed.append(file), original(file))[1])
        async with streamflow.open_streamed(build, tmp_path, device=RegisteringDevice()):
            assert closed == []
    assert [file.closed for file in closed] == [True]
