"""The device protocol: buffers, streams, events, copies, page-locking, memory telemetry.

A backend is used in this order: construct it, `open` it with a crew of threads, open streams and allocate buffers, free
them, close it. Work on one stream happens in order; only events order streams among each other. Everything but
`Event.wait` and a compute stream's `wait` on a host device returns at once, so that the loop may call it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import attrs
import torch

from streamflow.stages.threads import ThreadCrew


@attrs.frozen(eq=False)
class Located:
    """A flat uint8 tensor, and where it begins.

    For whoever queues many copies. With cold caches, which whoever has just read megabytes has, asking a tensor for its
    address or for a slice takes longer than queuing the copy.
    """

    tensor: torch.Tensor
    address: int = attrs.field(init=False)

    @address.default
    def _address_of_tensor(self) -> int:
        return self.tensor.data_ptr()

    def part(self, start: int, nbytes: int) -> torch.Tensor:
        """Bytes ``start`` to ``start + nbytes``."""
        return self.tensor[start : start + nbytes]


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """Whether everything before it has happened; never, if some of it failed: `wait` says why."""

    def wait(self) -> None:
        """Block the calling thread, never the loop, until it has happened.

        :raises DeviceStreamError: if work before it failed.
        """


class Stream(Protocol):
    """A queue of device work. Its methods may be called from any thread."""

    @property
    def name(self) -> str:
        """For traces and errors."""

    def wait(self, event: Event) -> None:
        """Let work queued from here on start only after ``event``.

        :raises DeviceStreamError: on a host device's compute stream, if work before the event failed.
        """

    def record(self, reuse: Event | None = None) -> Event:
        """The event that happens when all work queued so far is done.

        ``reuse`` is an event of this stream that nobody needs any more; it may become the new one.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between flat uint8 tensors of one size; both must outlive it."""

    def copy_part(self, target: Located, start: int, source: Located, nbytes: int) -> None:
        """Queue a copy of the first ``nbytes`` of ``source``, which is page-locked, to ``target`` from ``start`` on."""

    def submit(self, work: Callable[[], None], nbytes: int = 0) -> None:
        """Queue ``work``: on an accelerator it launches kernels on this stream, on a host device it runs in turn.

        ``nbytes`` counts towards a modelled link.
        """

    def activate(self) -> AbstractContextManager[object]:
        """Within it, what the calling thread computes goes to this stream."""

    def begin_block(self) -> None:
        """A block is about to compute here (a host device may limit how many do)."""

    def end_block(self) -> None:
        """The block has issued its work."""


class Registrar(Protocol):
    """Page-locks host memory, so that the device reads it without a host pass. Its calls block: for worker threads.

    1. For mappings of files, `why_not_mappings` and a run of `probe_command` come first.
    2. `register` locks a range of whole pages, which shares none with another range.
    3. `unregister` gives each back by its exact base, before its memory goes.
    """

    def why_not_mappings(self) -> str | None:
        """Why shared read-only mappings cannot be registered; None if the device says that they can."""

    def probe_command(self, path: str, nbytes: int) -> Sequence[str] | None:
        """A program that registers the first ``nbytes`` of the file at ``path`` in a process of its own.

        Its answer is what `streamflow.stages.registration.probe` expects. None where nothing can go wrong.
        """

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        """Lock ``nbytes`` from ``address`` on; ``read_only`` for memory that may not be written to.

        :raises HostRegistrationError: if the device refuses; nothing is locked then.
        """

    def unregister(self, address: int) -> None:
        """Give back the range that begins at ``address``.

        :raises HostRegistrationError: if the device refuses; it then stays locked.
        """

    def is_page_locked(self, address: int) -> bool:
        """Whether the device takes the byte at ``address`` for page-locked."""


@attrs.frozen
class MemoryReading:
    """Device memory in bytes: what streamflow allocated now and at most, and what the whole device has free.

    ``cached`` is what the allocator holds without using it. ``num_retries``: how often it had to give that back to the
    driver, which stalls the device, because an allocation failed. None where the backend cannot tell.
    """

    in_use: int
    peak: int
    cached: int | None
    free: int | None
    total: int | None
    num_retries: int | None = None


class Device(Protocol):
    """One accelerator, or what stands for it."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors must be to compute here."""

    @property
    def is_host(self) -> bool:
        """Whether slots are ordinary host memory, which reads may fill directly."""

    @property
    def registrar(self) -> Registrar:
        """What makes host memory readable by it."""

    @property
    def link(self) -> Hashable:
        """The host link that copies to it go over: devices with an equal one share it."""

    async def open(self, crew: ThreadCrew) -> None:
        """Make the device usable; its threads, if any, belong to ``crew``."""

    def open_copy_stream(self, name: str) -> Stream:
        """A stream for copies and unpacking steps."""

    def open_communication_stream(self, name: str) -> Stream:
        """A stream for what ranks send each other, which goes over a link of its own, beside the copy streams."""

    def open_compute_stream(self, name: str) -> Stream:
        """A stream for one place. Never one of the copy or communication streams."""

    def caller_stream(self) -> Stream:
        """The stream that the calling thread computes on now, outside streamflow."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 device tensor at a 256-byte-aligned address; counted until `free`. Contents are undefined.

        :raises DeviceMemoryError: if it does not fit.
        """

    def free(self, buffer: torch.Tensor) -> None:
        """Uncount a buffer from `allocate`; its memory goes when the last view does. No work may use it any more."""

    def memory(self) -> MemoryReading:
        """The memory telemetry; the peak is since opening."""

    def release_cache(self) -> None:
        """Give back what the allocator holds without using it. Waits for the whole device; never on the loop."""

    def close(self) -> None:
        """Release what the device holds itself. All streams must be drained. Idempotent."""
