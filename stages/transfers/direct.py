"""Direct transfer: one asynchronous copy per block image (or per piece), with no host pass.

For memory that the device reads at full speed: page-locked images, and any memory where the device is the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from streamflow.stages.devices.base import Event, Stream
from streamflow.stages.images import BlockImage, MemoryPiece, Piece
from streamflow.stages.transfers.base import Issued


class DirectTransfer:
    """Copies on one stream, in order; the copy stream belongs to the caller."""

    name = "direct"
    scratch_bytes = 0
    staging_bytes = 0

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def fetch(self, image: BlockImage, slot: torch.Tensor, after: Sequence[Event]) -> Issued:
        for event in after:
            self._stream.wait(event)
        if image.memory is not None:
            self._stream.copy(slot[: image.nbytes], image.memory)
        else:
            for piece in image.pieces:
                self._copy_piece(piece, slot)
        return Issued(self._stream.record())

    def _copy_piece(self, piece: Piece, slot: torch.Tensor) -> None:
        target = slot[piece.offset_bytes : piece.offset_bytes + piece.nbytes]
        if isinstance(piece, MemoryPiece):
            self._stream.copy(target, piece.data)
        else:  # a file, on a host device: read straight into the slot, in the stream's turn
            self._stream.submit(lambda: piece.read_into(target.data_ptr(), 0, piece.nbytes), piece.nbytes)

    def close(self) -> None:
        pass
