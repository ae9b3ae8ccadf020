"""Registered mappings on a real CUDA device: exact and fast, nothing pinned is left, private memory is never tried."""

from __future__ import annotations

import gc
import mmap
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import streamflow
from streamflow.stages.devices.cuda import CudaDevice
from streamflow.stages.devices.cuda_driver import probe_command
from streamflow.stages.errors import HostRegistrationError
from streamflow.stages.host_memory import allocate_host
from streamflow.stages.registration.mappings import HostMapping
from streamflow.stages.registration.page_lock import PageLock
from streamflow.stages.registration.plan import Extent
from streamflow.stages.registration.probe import Verdict, probe
from streamflow.stages.registration.registration import Registration
from streamflow.stages.testing.walker import open_device
from streamflow.tools.bench.pinned_pages import quiet_pinned_pages
from streamflow.tools.bench.rates import copy_rate
from streamflow.weights.file_mapping import FileMapping
from tests.gpu.test_cuda_equality import digest, make, walks

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

MIB = 1 << 20
FILE_BYTES = 512 * MIB


def pinned() -> int:
    """Pages that the kernel counts as pinned, once nothing is on its way any more."""
    gc.collect()
    pages = quiet_pinned_pages()
    assert pages is not None, "this kernel does not count pinned pages"
    return pages


async def pinned_before_and_after(work: Callable[[], Awaitable[None]]) -> tuple[int, int]:
    """Pinned pages before and after ``work``, done once before that: the driver keeps what it pins at first use."""
    await work()
    before = pinned()
    await work()
    return before, pinned()


@pytest.fixture
def mapping(tmp_path: Path) -> Iterator[FileMapping]:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        for part in range(FILE_BYTES // MIB):
            file.write(bytes([part % 251]) * MIB)
    with path.open("rb") as file:
        found = FileMapping(str(path), file.fileno(), FILE_BYTES)
    yield found
    found.close()


def bytes_in(path: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)


def registration_of(device: CudaDevice, mapping: FileMapping, piece_bytes: int = 128 * MIB) -> Registration:
    held = HostMapping(mapping.path, mapping.address, mapping.nbytes)
    return Registration(device.registrar, [held], [Extent(0, 0, mapping.nbytes)], piece_bytes=piece_bytes)


def view(mapping: FileMapping, run: Extent) -> torch.Tensor:
    return torch.frombuffer(mapping.buffer(run.offset_bytes, run.nbytes), dtype=torch.uint8)


async def test_the_device_registers_read_only_memory_and_the_probe_agrees(mapping: FileMapping) -> None:
    device = CudaDevice()
    assert device.registrar.why_not_mappings() is None
    started = time.perf_counter()
    verdict = await probe(probe_command(mapping.path, 64 << 10, device.torch_device.index), 60.0)
    assert verdict == Verdict(None)
    assert time.perf_counter() - started < 20


async def test_a_registered_mapping_is_pinned_exact_and_given_back(mapping: FileMapping) -> None:
    before, after = await pinned_before_and_after(lambda: register_and_copy(mapping))
    assert after == before


async def register_and_copy(mapping: FileMapping) -> None:
    device, before = CudaDevice(), pinned()
    async with open_device(device) as crew:
        registration = registration_of(device, mapping)
        started = time.perf_counter()
        await registration.open(crew)
        registering_s = time.perf_counter() - started
        runs = registration.runs(Extent(0, 0, mapping.nbytes))
        assert len(runs) == FILE_BYTES // (128 * MIB)
        assert pinned() - before >= FILE_BYTES // mmap.PAGESIZE
        buffer, stream = device.allocate(FILE_BYTES), device.open_copy_stream("copy")
        for run in runs:
            source = view(mapping, run)
            assert source.is_pinned()
            stream.copy(buffer[run.offset_bytes : run.end_bytes], source)
        await crew.call(stream.record().wait)
        assert torch.equal(buffer.cpu(), bytes_in(mapping.path))
        assert registering_s < 1.0, "0.04 s are expected with warm page cache"
        del source
        assert await crew.call(registration.close) == ()
        device.free(buffer)
    assert registration.registered_bytes == 0


async def test_it_is_copied_at_the_speed_of_page_locked_memory(mapping: FileMapping) -> None:
    device = CudaDevice()
    async with open_device(device) as crew:
        registration = registration_of(device, mapping, piece_bytes=FILE_BYTES)
        await registration.open(crew)
        (run,) = registration.runs(Extent(0, 0, mapping.nbytes))
        stream = device.open_copy_stream("copy")
        private = allocate_host(FILE_BYTES)
        lock = PageLock(device.registrar, private)
        rates: dict[str, list[float]] = {"registered": [], "private": []}
        for _ in range(3):
            rates["registered"].append(
                await crew.call(lambda: copy_rate(device, stream, view(mapping, run), FILE_BYTES))
            )
            rates["private"].append(await crew.call(lambda: copy_rate(device, stream, private, FILE_BYTES)))
        lock.release()
        assert registration.close() == ()
    registered, pinned = (statistics.median(rates[kind]) for kind in ("registered", "private"))
    assert registered > 0.97 * pinned, f"{registered / 1e9:.1f} of {pinned / 1e9:.1f} GB/s"


async def test_private_writable_mappings_are_never_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering one does not return, so that a call of the driver at all would be the fault."""
    calls: list[str] = []
    device = CudaDevice()
    monkeypatch.setattr(device.registrar, "register", lambda *args, **kwargs: calls.append("register"))
    path = tmp_path / "weights"
    path.write_bytes(bytes(MIB))
    with path.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), MIB, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    memory = torch.frombuffer(memoryview(pages), dtype=torch.uint8)
    held = HostMapping(str(path), memory.data_ptr(), MIB)
    registration = Registration(device.registrar, [held], [Extent(0, 0, MIB)], piece_bytes=MIB)
    async with open_device(device) as crew:
        with pytest.raises(HostRegistrationError, match="is mapped rw-p, and only shared read-only mappings"):
            await registration.open(crew)
    assert calls == []


def build() -> nn.Module:
    return make(7)


CONFIGS: list[dict[str, Any]] = [
    {},
    {"registration_piece_bytes": 64 << 10},
    {"resident_blocks": 3},
    {"resident_blocks": "all"},
    {"store_mode": "preferred"},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
async def test_streaming_from_registered_files_is_byte_equal(config: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_file(build().state_dict(), checkpoint / "model.safetensors")
    x = torch.randn(64, 16, device="cuda")
    expected = [digest(y) for y in walks(build().cuda(), x)]
    options = {"device": "cuda", "poison_freed_slots": True, "store": {"root": str(tmp_path / "store")}, **config}

    async def stream() -> None:
        start = pinned()
        async with streamflow.open_streamed(build, checkpoint, options) as (offload, model):
            assert [digest(y) for y in await offload.run(walks, model, x)] == expected
            found = offload.statistics()
            assert (found.registration.problem, found.choice.transfer) == (None, "direct")
            assert found.choice.source == ("artifact" if "store_mode" in config else "checkpoint")
            assert (found.engine.staging_bytes, found.host_image_bytes) == (0, 0)
            assert pinned() - start >= found.registration.registered_bytes // mmap.PAGESIZE
            assert registered_in_maps(tmp_path) == {"r--s"}
        assert registered_in_maps(tmp_path) == set()

    before, after = await pinned_before_and_after(stream)
    assert after == before


def registered_in_maps(folder: Path) -> set[str]:
    """How this process has files of ``folder`` mapped."""
    pattern = re.compile(rf"^\S+ (\S+) .* {re.escape(str(folder))}/\S*safetensors$", re.MULTILINE)
    return set(pattern.findall(Path("/proc/self/maps").read_text()))


async def test_a_range_that_the_driver_refuses_makes_it_staged_and_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last range is registered already: the others are given back, and the device stays usable in every thread."""
    save_file(build().state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(64, 16, device="cuda")
    expected = [digest(y) for y in walks(build().cuda(), x)]
    original = Registration.open

    async def refused_in_the_end(registration: Registration, crew: Any, progress: Any = None) -> None:
        pages = registration.plan.ranges[-1]
        base = registration._mappings[pages.mapping].address + pages.offset_bytes
        registration._registrar.register(base, mmap.PAGESIZE, read_only=True)
        try:
            await original(registration, crew, progress)
        finally:
            registration._registrar.unregister(base)

    monkeypatch.setattr(Registration, "open", refused_in_the_end)
    options = {"device": "cuda", "registration_piece_bytes": 64 << 10}

    async def stream() -> None:
        async with streamflow.open_streamed(build, tmp_path, options) as (offload, model):
            assert [digest(y) for y in await offload.run(walks, model, x)] == expected
            found = offload.statistics()
        assert found.choice.transfer == "staged"
        assert "cudaHostRegister of" in (found.registration.problem or "")

    before, after = await pinned_before_and_after(stream)
    assert after == before
