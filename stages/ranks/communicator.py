"""Communicators: how ranks gather a block from each other.

A communicator is the transfer's own: collectives of a model run from other threads, in another order on each rank, and
two orders on one communicator hang. This one is used from one communication stream only, so its order is that stream's.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from streamflow.stages.ranks.errors import GatherError

#: Turns the error of a gather into the one that says which rank failed. Called where the gather failed; may block.
Blame = Callable[[Exception], Exception]


class Communicator(Protocol):
    """The ranks of a gather group, as one of them sees it.

    1. All ranks make theirs. 2. Each calls `gather` as often as all others, in one order, on its communication stream.
    3. `abort` where that cannot go on. 4. `close`, once the stream is drained.
    """

    @property
    def rank(self) -> int:
        """Which of them this one is, from 0 on."""

    @property
    def size(self) -> int:
        """How many they are."""

    def gather(self, target: torch.Tensor, slice_bytes: int) -> None:
        """Let ``target`` hold the slices of all ranks, one after the other; rank r brings the one at its own place,
        ``r * slice_bytes``.

        ``target`` is flat uint8, contiguous, on the device, of ``size * slice_bytes``; it must outlive the gather. To
        be called in the communication stream's turn (`Stream.submit`): on a host device it blocks until all slices are
        there, on an accelerator it is queued on that stream.

        :raises GatherError: if the ranks cannot, or this was aborted. Then no later gather may be trusted.
        """

    def abort(self) -> None:
        """Give up: gathers from here on fail, and those under way as soon as the backend lets them. From any thread;
        idempotent.

        On an accelerator what is queued then ends without having gathered: whoever calls this tells the passes first.
        """

    def close(self) -> None:
        """Give back what it holds. Blocks; nothing may be under way. Idempotent."""


class TorchCommunicator:
    """A communicator over a backend of torch.distributed: NCCL or gloo.

    It owns ``backend``, which nobody else may use. The backend's timeout bounds a gather under gloo. ``blame``: what
    makes of a `GatherError` the error to raise; None: it is raised as it is.
    """

    def __init__(self, backend: Any, rank: int, size: int, blame: Blame | None = None) -> None:
        self.rank, self.size = rank, size
        self._backend: Any = backend
        self._blame = blame
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._aborted = False

    def gather(self, target: torch.Tensor, slice_bytes: int) -> None:
        backend = self._usable_backend()
        own = target[self.rank * slice_bytes : (self.rank + 1) * slice_bytes]
        try:
            work = backend._allgather_base(target[: self.size * slice_bytes], own, _in_turn())
            if work is not None:  # NCCL gives none where it queued the gather on the current stream itself
                work.wait()  # for the current stream on NCCL, for the thread on gloo
        except Exception as failure:  # RuntimeError, and torch.distributed's own, by backend and version
            self._failure = self._blamed(failure)
            raise self._failure from failure

    def _usable_backend(self) -> Any:
        if self._failure is not None:
            raise self._failure
        if self._aborted or self._backend is None:
            raise GatherError(self.rank, self.size, "it was given up here before")
        return self._backend

    def _blamed(self, failure: Exception) -> Exception:
        error = GatherError(self.rank, self.size, f"{type(failure).__name__}: {failure}")
        return error if self._blame is None else self._blame(error)

    def abort(self) -> None:
        with self._lock:
            backend, first = self._backend, not self._aborted
            self._aborted = True
        if backend is not None and first:
            _call_if_there(backend, "abort", "_abort")  # gloo can do nothing: its timeout ends a gather

    def close(self) -> None:
        with self._lock:
            backend, self._backend = self._backend, None
        if backend is not None and not self._aborted:
            _call_if_there(backend, "shutdown", "_shutdown")
        for failure in _with_causes(self._failure):  # it may be kept for long, with the backend and the slot in frames
            traceback.clear_frames(failure.__traceback__)


def new_communicator(
    store: Store,
    name: str,
    rank: int,
    size: int,
    device: torch.device,
    *,
    timeout_s: float,
    blame: Blame | None = None,
) -> TorchCommunicator:
    """A communicator of ``size`` ranks, which all make it under this ``name``, that nobody ever had. Blocks.

    NCCL where ``device`` is CUDA, else gloo. ``timeout_s``: when ranks give up on one that does not come. Under NCCL
    that is when torch's watchdog ends the process: `abort` has to come first.

    Not by `torch.distributed.new_group`: that names a group of some ranks by them and by how many groups this process
    has made, so that it never meets the others where their numbers differ, and a second group of theirs finds the
    addresses of the first.

    :raises GatherError: if the ranks cannot meet.
    """
    meeting, timeout = PrefixStore(name, store), timedelta(seconds=timeout_s)
    try:
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend: Any = dist.ProcessGroupNCCL(meeting, rank, size, options)
        else:
            backend = dist.ProcessGroupGloo(meeting, rank, size, timeout)
    except RuntimeError as failure:  # dist.DistError and the store's errors are of this kind
        raise GatherError(rank, size, f"the ranks do not meet: {failure}") from failure
    return TorchCommunicator(backend, rank, size, blame)


def _with_causes(failure: BaseException | None) -> list[BaseException]:
    """``failure`` and its causes, each once: who raises it again may have made them a circle."""
    found: list[BaseException] = []
    while failure is not None and failure not in found:
        found.append(failure)
        failure = failure.__cause__
    return found


def _in_turn() -> Any:
    """Options of a gather that is queued on the current stream itself, where torch can do that (since 2.8)."""
    options: Any = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]  # of the module, not of its stub
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _call_if_there(backend: Any, *names: str) -> None:
    """Call the method of the first of ``names`` that this version's backend has."""
    for name in names:
        method = getattr(backend, name, None)
        if method is not None:
            with suppress(RuntimeError):  # of a backend that failed already, or that cannot
                method()
            return
