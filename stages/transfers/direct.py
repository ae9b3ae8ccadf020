"""Direct transfer: one asynchronous copy for each run of a block image in host memory, with no host pass.

For memory that the device reads at full speed: page-locked images, and any memory where the device is the host.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import torch

from streamflow.stages.devices.base import Event, Stream
from streamflow.stages.errors import NotPageLockedError
from streamflow.stages.images import BlockImage, Piece
from streamflow.stages.transfers.base import Issued


class DirectTransfer:
    """Copies on one stream, in order; the copy stream belongs to the caller.

    ``reads_any_memory``: whether the device is the host, so that memory need not be page-locked and files are read
    straight into slots. An accelerator would read the one slowly, holding up the loop, and the other not at all.
    """

    name = "direct"
    scratch_bytes = 0
    staging_bytes = 0

    def __init__(self, stream: Stream, *, reads_any_memory: bool) -> None:
        self._stream = stream
        self._reads_any_memory = reads_any_memory

    def fetch(self, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> Issued:
        """Queue the copies.

        :raises NotPageLockedError: if the device cannot read the image where it lies.
        """
        if not (self._reads_any_memory or image.page_locked):
            raise NotPageLockedError(image.name)
        for event in after:
            self._stream.wait(event)
        try:
            with self._stream.activate():
                for piece in image.pieces:
                    queue_copy(self._stream, piece, slot, 0, piece.nbytes)
        except BaseException as failure:
            # it may be kept for as long as its offload, and the views in its frames would keep the source mapped
            traceback.clear_frames(failure.__traceback__)
            raise
        return Issued(self._stream.record())

    def close(self) -> None:
        pass


def queue_copy(stream: Stream, piece: Piece, slot: torch.Tensor, start: int, nbytes: int) -> None:
    """Queue the copy of bytes ``start`` to ``start + nbytes`` of ``piece`` to their place in ``slot``."""
    place = piece.offset_bytes + start
    if not piece.runs:  # a file: read straight into the slot, in the stream's turn
        target = slot[place : place + nbytes]
        stream.submit(lambda: piece.read_into(target.data_ptr(), start, nbytes), nbytes)
    for run in piece.runs:
        part = run[start : start + nbytes]
        if part.numel():
            stream.copy(slot[place : place + part.numel()], part)
        place, nbytes = place + part.numel(), nbytes - part.numel()
        start = max(0, start - run.numel())
