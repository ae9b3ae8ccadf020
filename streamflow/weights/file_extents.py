"""Which parts of which files block images lie in, for registering them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch

from streamflow.stages.images import BlockImage, Piece
from streamflow.stages.registration.plan import Extent
from streamflow.weights.checkpoint_file import CheckpointFile
from streamflow.weights.file_mapping import FileMapping
from streamflow.weights.pieces import FilePiece


class FileExtents:
    """The extents of block images in files, with the files numbered as they come."""

    def __init__(self) -> None:
        self._files: dict[CheckpointFile, int] = {}
        self.extents: list[Extent] = []

    def add(self, image: BlockImage) -> None:
        """Add every piece of ``image`` that lies in a file."""
        for piece in _file_pieces(image):
            self._files.setdefault(piece.file, len(self._files))
            self.extents.append(self._extent(piece))

    def map(self) -> tuple[FileMapping, ...]:
        """The mappings of the files, in their order. Blocks.

        :raises SourceReadError: if a file shrank or cannot be mapped.
        """
        return tuple(file.map() for file in self._files)

    def registered(self, image: BlockImage, runs: Callable[[Extent], list[torch.Tensor]]) -> BlockImage:
        """``image`` with its pieces where they lie in registered mappings, as ``runs`` has them."""

        def moved(piece: Piece) -> Piece:
            return attrs.evolve(piece, registered=runs(self._extent(piece))) if isinstance(piece, FilePiece) else piece

        return attrs.evolve(image, pieces=tuple(moved(piece) for piece in image.pieces))

    def _extent(self, piece: FilePiece) -> Extent:
        return Extent(self._files[piece.file], piece.file_offset, piece.nbytes)


def _file_pieces(image: BlockImage) -> Iterator[FilePiece]:
    return (piece for piece in image.pieces if isinstance(piece, FilePiece))
