"""Communicators: how ranks gather a block from each other.

A communicator is the transfer's own: collectives of a model run from other threads, in another order on each rank, and
two orders on one communicator hang. This one is used from one communication stream only, so its order is that stream's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

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
    """A communicator over a process group of torch.distributed: NCCL or gloo.

    It owns ``group``, which nobody else may use. The group's timeout bounds a gather under gloo. ``blame``: what makes
    of a `GatherError` the error to raise; None: it is raised as it is.
    """

    def __init__(self, group: dist.ProcessGroup, blame: Blame | None = None) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group: dist.ProcessGroup | None = group
        self._blame = blame
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._aborted = False

    def gather(self, target: torch.Tensor, slice_bytes: int) -> None:
        group = self._usable_group()
        own = target[self.rank * slice_bytes : (self.rank + 1) * slice_bytes]
        try:
            _all_gather(target[: self.size * slice_bytes], own, group)
        except Exception as failure:  # RuntimeError, and torch.distributed's own, by backend and version
            self._failure = self._blamed(failure)
            raise self._failure from failure

    def _usable_group(self) -> dist.ProcessGroup:
        if self._failure is not None:
            raise self._failure
        if self._aborted or self._group is None:
            raise GatherError(self.rank, self.size, "it was given up here before")
        return self._group

    def _blamed(self, failure: Exception) -> Exception:
        error = GatherError(self.rank, self.size, f"{type(failure).__name__}: {failure}")
        return error if self._blame is None else self._blame(error)

    def abort(self) -> None:
        with self._lock:
            group, first = self._group, not self._aborted
            self._aborted = True
        if group is not None and first:
            _abort(group)

    def close(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def new_communicator(
    ranks: Sequence[int], device: torch.device, *, timeout_s: float, blame: Blame | None = None
) -> TorchCommunicator:
    """A communicator over global ``ranks``, which all have to make it; torch.distributed is initialised. Blocks.

    NCCL where ``device`` is CUDA, else gloo. ``timeout_s``: when ranks give up on one that does not come. Under NCCL
    that is when torch's watchdog ends the process: `abort` has to come first.

    :raises GatherError: if the ranks cannot meet.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        group: Any = dist.new_group(
            list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend, use_local_synchronization=True
        )
    except RuntimeError as failure:  # dist.DistError and the store's errors are of this kind
        reason = f"the group could not be made: {failure}"
        raise GatherError(list(ranks).index(dist.get_rank()), len(ranks), reason) from failure
    return TorchCommunicator(group, blame)


def _all_gather(target: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    # torch 2.13 has a new name for it and warns of the old one, which is all that older versions have
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(target, own, group=group)


def _abort(group: dist.ProcessGroup) -> None:
    # a method of every group since torch 2.8, of NCCL's backend before; gloo can do nothing: its timeout ends a gather
    abort = getattr(group, "abort", None)
    if abort is None:
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # it has none for CUDA
            return
        abort = getattr(backend, "_abort", None)
    if abort is not None:
        with suppress(RuntimeError):  # of a backend that failed already
            abort()
