"""Streaming from a registered artifact: one copy for each block image, and the lease goes last."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest

from streamflow.stages.devices.cpu import CpuCopyStream
from streamflow.stages.errors import StillRegisteredError
from streamflow.store.errors import LeaseInUseError
from streamflow.store.lease import Lease
from tests.streamflow.devices import RegisteringDevice
from tests.streamflow.host_weights.kit import CASE, Stored
from tests.streamflow.kit import compare, resident_digests
from tests.streamflow.test_failed_opening import open_files

pytestmark = pytest.mark.anyio


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    found = Stored(tmp_path)
    found.save()
    return found


@pytest.mark.parametrize("load", [False, True], ids=["skeleton", "remapped"])
@pytest.mark.parametrize("max_file_bytes", [1 << 30, 40_000])
async def test_each_image_is_one_copy_from_where_it_lies(
    stored: Stored, load: bool, max_file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    original = CpuCopyStream.copy

    def copy(stream: CpuCopyStream, target: Any, source: Any) -> None:
        copies.append(source.numel())
        original(stream, target, source)

    monkeypatch.setattr(CpuCopyStream, "copy", copy)
    expected, device = resident_digests(CASE.build(), CASE.calls), RegisteringDevice()
    options: dict[str, Any] = {"store": {"max_file_bytes": max_file_bytes}}
    async with stored.streamed("preferred", load=load, device=device, **options) as (offload, model):
        await compare(offload, model, CASE.calls, expected)
        statistics = offload.statistics()
    assert (statistics.choice.source, statistics.choice.transfer) == ("artifact", "direct")
    assert (statistics.engine.staging_bytes, statistics.host_image_bytes) == (0, 0)
    engine = offload.statistics().engine  # after the last fetch
    assert (len(copies), sum(copies)) == (engine.num_fetches, engine.streamed_bytes)
    registered = [nbytes for call, _, nbytes in device.script.calls if call == "register read-only"]
    assert statistics.registration.registered_bytes == sum(registered) >= statistics.block_bytes
    assert device.script.registered == {}
    assert open_files(stored.root) == []


async def test_without_registration_it_is_staged_and_says_why(stored: Stored) -> None:
    expected = resident_digests(CASE.build(), CASE.calls)
    device = RegisteringDevice(fails_at=0)
    device.script.before_register = lambda: setattr(
        device.script, "fails_at", None if device.script.num_registers else 0
    )
    async with stored.streamed("preferred", device=device, packing_threads=2) as (offload, model):
        await compare(offload, model, CASE.calls, expected)
        statistics = offload.statistics()
    assert (statistics.choice.source, statistics.choice.transfer) == ("artifact", "staged")
    problem = statistics.registration.problem
    assert problem is not None
    assert "the test wants it so" in problem
    assert statistics.choice.transfer_reason == f"the artifact source is pageable memory ({problem})"


@pytest.mark.parametrize("load", [False, True], ids=["skeleton", "remapped"])
async def test_what_cannot_be_given_back_keeps_the_lease_until_a_retry(
    stored: Stored, load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases: list[Lease] = []
    original = Lease.mapping

    def mapping(lease: Lease, file: int) -> Any:
        leases.append(lease)
        return original(lease, file)

    monkeypatch.setattr(Lease, "mapping", mapping)
    device = RegisteringDevice()
    opened = stored.streamed("preferred", load=load, device=device, registration_piece_bytes=4 * mmap.PAGESIZE)
    await opened.__aenter__()
    device.script.num_stuck = 1
    with pytest.raises(StillRegisteredError) as caught:
        await opened.__aexit__(None, None, None)
    (lease,) = set(leases)
    assert not lease.closed
    with pytest.raises(LeaseInUseError, match="views of its mapping are alive"):
        lease.close()
    caught.value.retry()
    assert lease.closed
    assert device.script.registered == {}
