"""The pieces of block images that a checkpoint holds: ranges of its files, and tensors that an adapter makes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import attrs
import torch

from streamflow.stages.images import Piece
from streamflow.stages.layout import ImageLayout, Region, TensorView
from streamflow.weights.adapters import TransformAdapter
from streamflow.weights.checkpoint import Checkpoint, CheckpointTensor
from streamflow.weights.checkpoint_file import CheckpointFile
from streamflow.weights.checkpoint_plan import SourceAssignment
from streamflow.weights.errors import CheckpointRegionError
from streamflow.weights.strides import is_overlapping, is_row_major
from streamflow.weights.tensor_reading import read_tensor
from streamflow.weights.torch_dtypes import as_bits


class PieceInFile:
    """What pieces that lie in a file as they will lie in the slot have in common.

    ``registered`` is where a piece lies in a registered mapping of the file, in runs that can be copied at once. The
    list is its owner's, who empties it before the registration ends; None if there never was one.
    """

    __slots__ = ()
    nbytes: int
    registered: list[torch.Tensor] | None

    @property
    def stored_bytes(self) -> int:
        return self.nbytes

    @property
    def splittable(self) -> bool:
        return True

    @property
    def runs(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.registered or ())

    @property
    def page_locked(self) -> bool:
        return bool(self.registered)


@attrs.frozen
class FilePiece(PieceInFile):
    """A piece of a checkpoint's file; read with ``preadv``, any part of it."""

    offset_bytes: int
    nbytes: int
    file: CheckpointFile
    file_offset: int
    registered: list[torch.Tensor] | None = attrs.field(default=None, eq=False, repr=False)

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        """Put bytes ``start`` to ``start + nbytes`` of the piece at ``address``. Blocks; for worker threads.

        :raises SourceReadError: if the file shrank or cannot be read.
        :raises CheckpointClosedError: if the file is closed.
        :raises ValueError: if the range is not inside the piece.
        """
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} are not inside a piece of {self.nbytes}")
        self.file.pread_into(address, self.file_offset + start, nbytes)


@attrs.frozen
class AdaptedPiece:
    """A tensor that ``adapter`` makes whenever it is read.

    A read holds the adapter's sources and its result in pageable host memory, besides where it writes.
    """

    offset_bytes: int
    nbytes: int
    view: TensorView
    sources: tuple[CheckpointTensor, ...]
    adapter: TransformAdapter

    @property
    def stored_bytes(self) -> int:
        return sum(source.entry.nbytes for source in self.sources)

    @property
    def splittable(self) -> bool:
        return False

    runs = ()
    page_locked = False

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        """Put the whole piece at ``address``; holes between strided elements become zeros. Blocks; for worker threads.

        :raises AdapterError: if the adapter fails or makes another kind of tensor than the module needs.
        :raises SourceReadError: if a file shrank or cannot be read.
        :raises CheckpointClosedError: if a file is closed.
        :raises ValueError: if less than the whole piece is asked for.
        """
        if (start, nbytes) != (0, self.nbytes):
            raise ValueError(f"a piece made by an adapter is read whole: {self.nbytes} bytes, not {nbytes} at {start}")
        tensors = [read_tensor(source.file, source.entry) for source in self.sources]
        made = self.adapter.make(self.view.name, tensors, self.view.dtype, self.view.shape)
        laid_out = _with_strides(made, self.view.stride, self.nbytes)
        ctypes.memmove(address, laid_out.data_ptr(), self.nbytes)


def checkpoint_block_pieces(
    layout: ImageLayout, checkpoint: Checkpoint, assignments: Mapping[str, SourceAssignment], prefix: str = ""
) -> tuple[Piece, ...]:
    """The pieces of one block, one for each region of its layout that has bytes, in the layout's order.

    ``prefix`` and a name of the layout together are a name of ``assignments``. The pieces read from ``checkpoint`` and
    are valid until it is closed.

    :raises CheckpointRegionError: if a region is not exactly one tensor of the checkpoint, perhaps under several names.
    """
    views = {view.name: view for view in layout.views}
    return tuple(
        _piece(region, [views[name] for name in region.names], checkpoint, assignments, prefix)
        for region in layout.regions
        if region.nbytes
    )


def _piece(
    region: Region,
    views: list[TensorView],
    checkpoint: Checkpoint,
    assignments: Mapping[str, SourceAssignment],
    prefix: str,
) -> Piece:
    view = views[0]
    names = tuple(prefix + name for name in region.names)
    if any(attrs.evolve(other, name=view.name) != view for other in views):
        raise CheckpointRegionError(names, "these tensors share memory without being the same tensor")
    missing = [name for name in names if name not in assignments]
    if missing:
        raise CheckpointRegionError(names, f"the checkpoint plan has no source for {', '.join(missing)}")
    assignment = assignments[names[0]]
    if any(assignments[name] != assignment for name in names):
        raise CheckpointRegionError(names, "these are one tensor, but the checkpoint plan gives them different sources")
    sources = tuple(checkpoint.tensors[source] for source in assignment.sources)
    if assignment.adapter is not None:
        if is_overlapping(view.shape, view.stride):
            raise CheckpointRegionError(names, f"the strides {view.stride} lay elements over each other")
        adapted = attrs.evolve(view, name=names[0])
        return AdaptedPiece(region.offset_bytes, region.nbytes, adapted, sources, assignment.adapter)
    return _file_piece(region, view, sources, names)


def _file_piece(
    region: Region, view: TensorView, sources: tuple[CheckpointTensor, ...], names: tuple[str, ...]
) -> FilePiece:
    (source,) = sources
    entry = source.entry
    found = (entry.dtype, entry.shape, entry.nbytes)
    if found != (view.dtype, view.shape, region.nbytes) or not is_row_major(view.shape, view.stride):
        raise CheckpointRegionError(
            names,
            f"the block needs {view.dtype} {list(view.shape)} with strides {list(view.stride)}, "
            f"but the file holds {entry.dtype} {list(entry.shape)}, row by row",
        )
    return FilePiece(region.offset_bytes, region.nbytes, source.file, entry.offset_bytes)


def _with_strides(tensor: torch.Tensor, stride: tuple[int, ...], nbytes: int) -> torch.Tensor:
    """A tensor over exactly ``nbytes`` of its own in which ``tensor``'s elements lie with these strides."""
    values = as_bits(tensor.resolve_conj().resolve_neg())  # lazy bits are not in the bytes
    if is_row_major(values.shape, stride):
        return values.contiguous()
    memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    memory.view(values.dtype).as_strided(values.shape, stride).copy_(values)
    return memory
