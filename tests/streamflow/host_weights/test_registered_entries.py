"""Entries whose mappings a device has registered: copied from where they lie, and let go in the right order."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

import streamflow
from streamflow.stages.errors import StillRegisteredError
from streamflow.stages.registration.probe import Verdicts
from streamflow.store.reports import StoreOutcome
from streamflow.weights import registering
from tests.streamflow.devices import RegisteringDevice
from tests.streamflow.host_weights.kit import CASE, Stored, report_of
from tests.streamflow.kit import check_statistics, compare, resident_digests

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Verdicts:
    """Verdicts of one test alone."""
    own = Verdicts()
    monkeypatch.setattr(registering, "VERDICTS", own)
    return own


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    found = Stored(tmp_path)
    found.save()
    return found


def is_leased(stored: Stored) -> bool:
    """Whether somebody holds the only entry's lock."""
    (entry,) = stored.entries
    with (entry / "lease").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def test_a_block_is_one_copy_from_the_registered_entry(stored: Stored) -> None:
    expected = resident_digests(CASE.build(), CASE.calls)
    for outcome in (StoreOutcome.PUBLISHED, StoreOutcome.LOCAL_HIT):
        device = RegisteringDevice()
        async with stored.streamed("preferred", device=device, resident_blocks=2) as (offload, model):
            await compare(offload, model, CASE.calls, expected)
            statistics = offload.statistics()
            assert len(device.script.registered) == statistics.registration.num_ranges > 0
        check_statistics(statistics, streams=True)
        assert report_of(offload).outcome is outcome
        assert (statistics.choice.source, statistics.choice.transfer) == ("artifact", "direct")
        assert (statistics.engine.staging_bytes, statistics.host_image_bytes) == (0, 0)
        assert statistics.registration.registered_bytes >= statistics.block_bytes
        assert device.script.registered == {}
        assert not is_leased(stored)


async def test_a_remapped_model_streams_from_the_registered_entry_too(stored: Stored) -> None:
    model, device = CASE.build(), RegisteringDevice()
    expected = resident_digests(model, CASE.calls)
    async with streamflow.open_offload(model, stored.config("preferred"), device=device) as offload:
        await compare(offload, model, CASE.calls, expected)
        assert offload.statistics().choice.transfer == "direct"
        assert offload.statistics().host_image_bytes == 0
    assert device.script.registered == {}


async def test_a_refused_registration_streams_the_entry_staged_and_says_why(stored: Stored) -> None:
    device = RegisteringDevice(refusal="the test wants it so")
    expected = resident_digests(CASE.build(), CASE.calls)
    async with stored.streamed("preferred", device=device) as (offload, model):
        await compare(offload, model, CASE.calls, expected)
        statistics = offload.statistics()
    assert (statistics.choice.source, statistics.choice.transfer) == ("artifact", "staged")
    assert "the test wants it so" in statistics.choice.transfer_reason


@pytest.mark.parametrize("options", [{"pin_host_memory": False}, {"host_registration_limit_bytes": 0}], ids=str)
async def test_with_registration_off_the_checkpoint_is_the_cheaper_start(
    stored: Stored, options: dict[str, int]
) -> None:
    async with stored.streamed("preferred", device=RegisteringDevice(), **options) as (offload, _):
        assert offload.statistics().choice.source == "checkpoint"
        report = report_of(offload)
    assert report.outcome is StoreOutcome.CANONICAL_FALLBACK
    assert next(iter(options)) in report.reason
    assert stored.entries == []
    await stored.stream_and_compare("preferred")  # a host device needs no registration: published
    async with stored.streamed("preferred", device=RegisteringDevice(), **options) as (offload, _):
        assert offload.statistics().choice.source == "artifact"  # now that it is there, it costs nothing more


async def test_what_the_device_does_not_give_back_keeps_the_lease_until_it_does(stored: Stored) -> None:
    device = RegisteringDevice()
    opened = stored.streamed("preferred", device=device)
    await opened.__aenter__()
    device.script.num_stuck = 1
    with pytest.raises(StillRegisteredError) as caught:
        await opened.__aexit__(None, None, None)
    assert device.script.registered
    assert is_leased(stored)
    caught.value.retry()
    assert device.script.registered == {}
    assert not is_leased(stored)
