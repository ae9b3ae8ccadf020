"""Registering the files that a source streams from: whether, how much, and what came of it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import attrs
import torch

from streamflow.host_limits import pinnable_host_bytes
from streamflow.stages.devices.base import Device
from streamflow.stages.errors import HostRegistrationError, StillRegisteredError
from streamflow.stages.registration.mappings import HostMapping
from streamflow.stages.registration.plan import Extent
from streamflow.stages.registration.probe import VERDICTS, probe
from streamflow.stages.registration.registration import Progress, Registration
from streamflow.stages.threads import ThreadCrew
from streamflow.transfer_choice import StreamingOptions, why_not_registered_by_options, why_too_much
from streamflow.weights.file_mapping import FileMapping

#: What a probe registers: a little.
PROBE_BYTES = 64 << 10

_log = logging.getLogger(__name__)


class RegistrationOptions(StreamingOptions, Protocol):
    """The options that say how to register; `OffloadConfig` has them."""

    @property
    def registration_piece_bytes(self) -> int: ...
    @property
    def probe_deadline_s(self) -> float: ...


@attrs.frozen
class RegistrationReport:
    """What came of registering the mapped files of a source.

    ``registered_bytes`` of them are page-locked, in ``num_ranges`` ranges; that took ``seconds``, probe included.
    ``problem`` is why none are; None if they are, or if the source has no files to register.
    """

    registered_bytes: int = 0
    num_ranges: int = 0
    seconds: float = 0.0
    problem: str | None = None


class RegisteredFiles:
    """Extents of mapped files, registered for a device from `open` until `close`.

    ``owner`` is kept alive for as long as anything of them is registered: it owns the mappings. ``in_memory``: every
    page of them is in memory already and has nowhere else to go, so that locking it takes no more.
    """

    def __init__(self, options: RegistrationOptions, owner: object, *, in_memory: bool = False) -> None:
        self._options = options
        self._owner = owner
        self._in_memory = in_memory
        self._mappings: tuple[FileMapping, ...] = ()
        self._registration: Registration | None = None
        self._handed_out: list[list[torch.Tensor]] = []
        # views that make closing a mapping an error for as long as something of it is registered
        self._holds: list[memoryview] = []

    async def open(
        self,
        mappings: Sequence[FileMapping],
        extents: Sequence[Extent],
        device: Device,
        crew: ThreadCrew,
        progress: Progress | None = None,
    ) -> RegistrationReport:
        """Register ``extents`` of ``mappings``, or say why not: then nothing is registered. Cancellable.

        :raises StillRegisteredError: if registering failed, and so did giving back what had been registered.
        """
        problem = why_not_registered_by_options(self._options, device_is_host=device.is_host)
        if problem is not None:
            return RegistrationReport(problem=problem)
        started = time.perf_counter()
        held = [HostMapping(m.path, m.address, m.nbytes, self) for m in mappings]
        registration = Registration(device.registrar, held, extents, piece_bytes=self._options.registration_piece_bytes)
        problem = await self._why_not(registration, mappings, device, crew)
        if problem is None:
            problem = await self._register(registration, tuple(mappings), crew, progress)
        seconds = time.perf_counter() - started
        if problem is not None:
            _log.warning("blocks will be packed before they are copied, because files are not registered: %s", problem)
            return RegistrationReport(seconds=seconds, problem=problem)
        return RegistrationReport(registration.plan.nbytes, len(registration.plan.ranges), seconds)

    async def _why_not(
        self, registration: Registration, mappings: Sequence[FileMapping], device: Device, crew: ThreadCrew
    ) -> str | None:
        """What is against it before anything is registered."""

        def check() -> str | None:
            return device.registrar.why_not_mappings() or why_too_much(
                registration.plan.nbytes,
                limit_bytes=self._options.host_registration_limit_bytes,
                available_bytes=None if self._in_memory else pinnable_host_bytes(),
            )

        problem = await crew.call(check, name="registration")
        for mapping in mappings:
            problem = problem or await probe_file(mapping.path, device, crew, self._options.probe_deadline_s)
        return problem

    async def _register(
        self,
        registration: Registration,
        mappings: tuple[FileMapping, ...],
        crew: ThreadCrew,
        progress: Progress | None,
    ) -> str | None:
        """Register; returns why it was refused, with nothing registered then."""
        self._mappings, self._registration = mappings, registration  # from here on there may be something to close
        self._holds = [mapping.memory(0, mapping.nbytes) for mapping in mappings]
        try:
            await registration.open(crew, progress)
        except HostRegistrationError as refusal:
            return str(refusal)
        return None

    def runs(self, extent: Extent) -> list[torch.Tensor]:
        """``extent`` as flat uint8 CPU tensors, one after the other, each of which a device copies at once.

        They must not be written to. `close` empties the list, so that images that are still held (by a traceback, say)
        do not hold the mapping; no other reference may outlive it.

        :raises ValueError: if it is not registered.
        """
        if self._registration is None:
            raise ValueError(f"{extent} is not registered")
        found = [
            torch.frombuffer(self._mappings[run.mapping].buffer(run.offset_bytes, run.nbytes), dtype=torch.uint8)
            for run in self._registration.runs(extent)
        ]
        self._handed_out.append(found)
        return found

    def close(self, retry: Callable[[], None]) -> None:
        """Give everything back. Blocks; idempotent. ``retry`` is what the error does to try again.

        :raises StillRegisteredError: if the device refuses; the files then stay mapped.
        """
        for views in self._handed_out:
            views.clear()
        errors = () if self._registration is None else self._registration.close()
        if errors:
            raise StillRegisteredError(", ".join(mapping.path for mapping in self._mappings), errors, retry)
        self._registration = None
        for hold in self._holds:
            hold.release()


async def probe_file(path: str, device: Device, crew: ThreadCrew, deadline_s: float) -> str | None:
    """Why mappings of files like the one at ``path`` are not to be registered; None if a probe found nothing.

    The verdict is kept for the process, for each filesystem and device.
    """
    try:
        status = await crew.call(partial(os.stat, path), name="probe")
    except OSError as failure:
        return f"{path} cannot be probed: {failure.strerror}"
    command = device.registrar.probe_command(path, min(PROBE_BYTES, status.st_size))
    if command is None:
        return None
    kind = (status.st_dev, str(device.torch_device))
    return (await VERDICTS.of(kind, lambda: probe(command, deadline_s))).problem


async def probe_ahead(paths: Iterable[str], options: RegistrationOptions, device: Device, crew: ThreadCrew) -> None:
    """Let the verdicts on files at ``paths`` be there when they are needed; for doing it beside something else."""
    if why_not_registered_by_options(options, device_is_host=device.is_host) is not None:
        return
    if await crew.call(device.registrar.why_not_mappings, name="probe") is not None:
        return
    for path in paths:
        if await probe_file(path, device, crew, options.probe_deadline_s) is not None:
            return
