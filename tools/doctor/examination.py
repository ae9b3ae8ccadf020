"""Finding out: each finding by itself, so that one that fails says so and the others are there."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from streamflow.config import OffloadConfig
from streamflow.hardware import make_device
from streamflow.host_limits import available_host_bytes, cgroup_available_bytes, pinnable_host_bytes
from streamflow.stages.devices.base import Device
from streamflow.stages.errors import StreamflowError
from streamflow.stages.threads import ThreadCrew, open_threads
from streamflow.store.errors import UnsupportedFilesystemError
from streamflow.store.filesystems import check_filesystem, filesystem_of
from streamflow.tools.bench.environment import environment
from streamflow.tools.bench.rates import link_rate
from streamflow.tools.doctor.values import DeviceFinding, Diagnosis, LimitsFinding, StoreFinding, TransferFinding
from streamflow.transfer_choice import (
    WITH_REGISTRATION,
    SourceCandidate,
    choose_transfer,
    why_not_registered_by_options,
)
from streamflow.weights.registering import PROBE_BYTES, probe_file

#: Copies that measure the link: large enough to be as fast as it gets, and over in a moment.
LINK_COPY_BYTES = 256 << 20


async def examine(config: OffloadConfig) -> Diagnosis:
    """The diagnosis of this machine for ``config``. A child process is started, which uses the device for a moment.

    :raises DeviceMemoryError: if the device has no room for the buffer that the link is measured with.
    """
    async with open_threads() as crew:
        device = make_device(config)
        await device.open(crew)
        try:
            store = await crew.call(partial(_store, config.store.root), name="store")
            found = await _device(config, device, store, crew)
        finally:
            device.close()
    return Diagnosis(
        environment=environment(device.torch_device),
        device=found,
        limits=_limits(),
        store=store,
        transfers=tuple(_transfers(config, found)),
    )


async def _device(config: OffloadConfig, device: Device, store: StoreFinding, crew: ThreadCrew) -> DeviceFinding:
    why_not = why_not_registered_by_options(config, device_is_host=device.is_host)
    if why_not is None:
        why_not = await crew.call(device.registrar.why_not_mappings, name="registration")
    probed = why_not is None
    if probed:
        why_not = await _probe(config, device, store.folder, crew)
    on_cuda = device.torch_device.type == "cuda"
    return DeviceFinding(
        device=str(device.torch_device),
        is_host=device.is_host,
        name=torch.cuda.get_device_name(device.torch_device) if on_cuda else None,
        memory_bytes=device.memory().total,
        link_bytes_per_s=await crew.call(partial(_link_rate, device), name="link") if on_cuda else None,
        why_not_registered=why_not,
        probed=probed,
    )


async def _probe(config: OffloadConfig, device: Device, folder: str, crew: ThreadCrew) -> str | None:
    try:
        with _nameless_file(folder) as path:
            return await probe_file(path, device, crew, config.probe_deadline_s)
    except OSError as failure:
        return f"it could not be tried: no file can be made in {folder} ({failure.strerror})"


@contextmanager
def _nameless_file(folder: str) -> Iterator[str]:
    """A file on the filesystem of ``folder`` that goes with this process; by a path that works meanwhile."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _link_rate(device: Device) -> float:
    return link_rate(device, device.open_copy_stream("link rate"), LINK_COPY_BYTES)


def _limits() -> LimitsFinding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return LimitsFinding(
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        host_available_bytes=available_host_bytes(),
        cgroup_available_bytes=cgroup_available_bytes(),
        registrable_bytes=pinnable_host_bytes(),
    )


def _store(root: str) -> StoreFinding:
    path = Path(root)
    folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found, problem = filesystem_of(fd), None
        try:
            check_filesystem(root, fd)
        except UnsupportedFilesystemError as refusal:
            problem = str(refusal)
    finally:
        os.close(fd)
    return StoreFinding(root, folder == path, str(folder), found.kind, found.mount_point, found.is_memory, problem)


def _transfers(config: OffloadConfig, found: DeviceFinding) -> Iterator[TransferFinding]:
    for source in WITH_REGISTRATION:
        try:
            transfer, reason = choose_transfer(
                SourceCandidate(source),
                config,
                device_is_host=found.is_host,
                why_not_registered=found.why_not_registered,
            )
        except StreamflowError as refusal:
            transfer, reason = "none", str(refusal)
        yield TransferFinding(source, transfer, reason)
