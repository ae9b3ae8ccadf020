"""Block images: a layout, and the pieces of the source that fill it.

The layout is the slot form. The stored form (what the pieces read: a file, coded bytes, tensors before an adapter) may
have another size, so each piece states both.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import attrs
import torch

from streamflow.stages.layout import ImageLayout, TensorView


class Piece(Protocol):
    """A run of a block image and how to read it.

    Made when a source is opened, used by transfers until the source is closed. ``read_into`` is called from worker
    threads, several at once, each for another part.
    """

    @property
    def offset_bytes(self) -> int:
        """Where the piece begins in the image."""

    @property
    def nbytes(self) -> int:
        """Size in the slot form."""

    @property
    def stored_bytes(self) -> int:
        """Size in the stored form: what one read of the whole piece costs its source."""

    @property
    def splittable(self) -> bool:
        """Whether ``read_into`` may be asked for less than the whole piece."""

    @property
    def runs(self) -> tuple[torch.Tensor, ...]:
        """Where the piece lies in host memory as it will lie in the slot: flat uint8 CPU tensors, one after the other.

        Each may be copied at once. Empty where the piece has to be read.
        """

    @property
    def page_locked(self) -> bool:
        """Whether a device may read `runs` without a host pass."""

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        """Put bytes ``start`` to ``start + nbytes`` of the piece at ``address``. Blocks; for worker threads.

        :raises SourceReadError: if the source no longer holds them.
        """


@attrs.frozen
class MemoryPiece:
    """A piece that lies in host memory as it will lie in the slot.

    ``data`` is a flat uint8 CPU tensor; it keeps the memory alive. ``page_locked`` says that a device may read it
    without a host pass.
    """

    offset_bytes: int
    data: torch.Tensor
    page_locked: bool = False
    _address: int = attrs.field(init=False, eq=False, repr=False)

    @_address.default
    def _address_of_data(self) -> int:
        return self.data.data_ptr()  # asked once: with cold caches that takes longer than it seems

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def stored_bytes(self) -> int:
        return self.data.numel()

    @property
    def splittable(self) -> bool:
        return True

    @property
    def runs(self) -> tuple[torch.Tensor, ...]:
        return (self.data,)

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        # Not Tensor.copy_: that would run on the intra-op pool, which belongs to the model.
        ctypes.memmove(address, self._address + start, nbytes)


@attrs.frozen(eq=False)
class BlockImage:
    """One block's bytes: where they go (``layout``) and where they come from.

    ``pieces`` cover every region of the layout; the holes between them hold nothing.
    """

    name: str
    layout: ImageLayout
    pieces: tuple[Piece, ...]

    @property
    def memory(self) -> torch.Tensor | None:
        """The whole image as one flat uint8 CPU tensor where it lies so; then one copy moves it. Else None."""
        runs = self.pieces[0].runs if len(self.pieces) == 1 else ()
        return runs[0] if len(runs) == 1 and runs[0].numel() == self.nbytes else None

    @property
    def page_locked(self) -> bool:
        """Whether a device may read all of it without a host pass."""
        return all(piece.page_locked for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Size in the slot form, and of the device copy."""
        return self.layout.nbytes

    @property
    def stored_bytes(self) -> int:
        """Size in the stored form."""
        return sum(piece.stored_bytes for piece in self.pieces)


def memory_image(name: str, layout: ImageLayout, memory: torch.Tensor, *, page_locked: bool = False) -> BlockImage:
    """The image that lies whole in ``memory`` (flat uint8, CPU, exactly ``layout.nbytes``).

    :raises ValueError: if ``memory`` has another size.
    """
    if memory.numel() != layout.nbytes:
        raise ValueError(f"{name}: the image has {layout.nbytes} bytes but the memory given has {memory.numel()}")
    pieces = (MemoryPiece(0, memory, page_locked),) if layout.nbytes else ()
    return BlockImage(name, layout, pieces)


def view_of(buffer: torch.Tensor, view: TensorView) -> torch.Tensor:
    """The tensor that ``view`` describes, over ``buffer`` (flat uint8, at least the image's size); it owns nothing.

    Valid while ``buffer`` holds this image.
    """
    dtype = getattr(torch, view.dtype)
    if 0 in view.shape:
        return torch.empty_strided(view.shape, view.stride, dtype=dtype, device=buffer.device)
    span = 1 + sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    raw = buffer[view.offset_bytes : view.offset_bytes + span * dtype.itemsize]
    return raw.view(dtype).as_strided(view.shape, view.stride)
