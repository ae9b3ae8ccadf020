"""What one rank cannot register no rank keeps registered: every source gives it back, and its blocks are staged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import streamflow
from streamflow import Offload
from streamflow.errors import ConfigurationError
from streamflow.host_weights.restorer import ArtifactSource
from streamflow.ranks.shared_source import SharedModuleSource
from streamflow.stages.devices.base import Device
from streamflow.stages.errors import HostRegistrationError, StillRegisteredError
from streamflow.stages.threads import ThreadCrew
from streamflow.weights.source import CheckpointSource, ModuleSource
from tests.streamflow.devices import RegisteringDevice
from tests.streamflow.host_weights.kit import CASE, Stored
from tests.streamflow.kit import compare, resident_digests
from tests.streamflow.ranks.agreeing import AgreeingRank, AgreeingRanks
from tests.streamflow.ranks.kit import opened

pytestmark = pytest.mark.anyio

REASON = "rank 3: the test wants it so"

#: Opens the case's model for a device.
Opening = AbstractAsyncContextManager[tuple[Offload, nn.Module]]


@asynccontextmanager
async def from_module(folder: Path, device: Device, **options: Any) -> AsyncIterator[tuple[Offload, nn.Module]]:
    model = CASE.build()
    async with streamflow.open_offload(model, options, device=device) as offload:
        yield offload, model


@asynccontextmanager
async def from_shared(folder: Path, device: Device, **options: Any) -> AsyncIterator[tuple[Offload, nn.Module]]:
    model = CASE.build()
    async with opened(model, AgreeingRank(0, 1, AgreeingRanks(1)), options, device) as (offload, _):
        yield offload, model


def from_checkpoint(folder: Path, device: Device, **options: Any) -> Opening:
    stored = Stored(folder)
    stored.save()
    return streamflow.open_streamed(CASE.build, stored.checkpoint, options, device=device)


def from_artifact(folder: Path, device: RegisteringDevice, **options: Any) -> Opening:
    stored = Stored(folder)
    stored.save()
    return stored.streamed("preferred", device=device, **options)


SOURCES: dict[type[Any], Callable[..., Opening]] = {
    ModuleSource: from_module,
    SharedModuleSource: from_shared,
    CheckpointSource: from_checkpoint,
    ArtifactSource: from_artifact,
}


@pytest.fixture(params=SOURCES)
def open_source(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Opening]:
    """Opens from a source that another rank keeps from being registered; ``num_stuck`` ranges do not go at first."""
    source = request.param
    prepare = source.prepare

    def open_it(device: RegisteringDevice, num_stuck: int = 0, **options: Any) -> Opening:
        async def prepare_and_unregister(self: Any, given: Device, crew: ThreadCrew) -> None:
            await prepare(self, given, crew)
            assert device.script.registered
            device.script.num_stuck = num_stuck
            await crew.call(lambda: self.unregister(REASON))
            assert device.script.registered == {}

        monkeypatch.setattr(source, "prepare", prepare_and_unregister)
        return SOURCES[source](tmp_path, device, **options)

    return open_it


async def test_blocks_are_staged_for_the_reason_given_and_exact(open_source: Callable[..., Opening]) -> None:
    device = RegisteringDevice()
    expected = resident_digests(CASE.build(), CASE.calls)
    async with open_source(device, resident_blocks=1) as (offload, model):
        await compare(offload, model, CASE.calls, expected)
        statistics = offload.statistics()
        assert len(device.script.registered) == 1, "staging chunks alone are page-locked"
    assert statistics.choice.transfer == "staged"
    assert REASON in statistics.choice.transfer_reason
    assert statistics.registration.registered_bytes == 0
    assert device.script.registered == {}


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_direct_transfer_that_was_asked_for_is_refused(open_source: Callable[..., Opening]) -> None:
    device = RegisteringDevice()
    with pytest.raises(ConfigurationError, match=REASON):
        async with open_source(device, transfer="direct"):
            raise AssertionError("it was opened")
    assert device.script.registered == {}


async def test_what_the_device_does_not_give_back_ends_the_opening(open_source: Callable[..., Opening]) -> None:
    device = RegisteringDevice()
    with pytest.raises((StillRegisteredError, HostRegistrationError)):
        async with open_source(device, num_stuck=1):
            raise AssertionError("it was opened")
    assert device.script.registered == {}, "the way back tries again"
