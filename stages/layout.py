"""Where each tensor of a block lies in its image. Pure: no torch, no clock.

A block image is the run of bytes that a device slot holds: every tensor at a 256-byte-aligned offset, with the
strides it had in the module. Tensors that overlap in one storage share one region, so aliases stay aliases.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import attrs

from streamflow.stages.dtypes import DTYPE_BYTES

#: Offset alignment of tensors in an image; also what CUDA kernels and torch's caching allocator assume.
ALIGNMENT_BYTES = 256


def align_up(value: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """The smallest multiple of ``alignment`` that is not below ``value``."""
    return -(-value // alignment) * alignment


@attrs.frozen
class TensorSpec:
    """One tensor of a block, before it has a place in the image.

    Shapes and strides are in elements, offsets in bytes. ``storage`` names the storage the tensor is a view of
    (anything hashable); None means that it shares with nobody. ``storage_offset_bytes`` is where the tensor's first
    element lies in that storage.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: Hashable = None
    storage_offset_bytes: int = 0

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last one, holes included; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * DTYPE_BYTES[self.dtype]


@attrs.frozen
class TensorView:
    """One tensor of an image: ``as_strided`` of the bytes at ``offset_bytes``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int


@attrs.frozen
class Region:
    """A run of an image that one or several tensors share.

    ``storage`` and ``storage_start_bytes`` say which bytes of the source's storage belong here.
    """

    offset_bytes: int
    nbytes: int
    storage: Hashable
    storage_start_bytes: int
    names: tuple[str, ...]


@attrs.frozen
class ImageLayout:
    """The places of all tensors of one block; ``nbytes`` is a multiple of 256 (0 for a block without tensors)."""

    views: tuple[TensorView, ...]
    regions: tuple[Region, ...]
    nbytes: int


def contiguous_stride(shape: Iterable[int]) -> tuple[int, ...]:
    """Row-major strides, in elements, as torch reports them (an empty dimension counts as one)."""
    stride: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@attrs.define
class _Group:
    """Specs of one storage whose byte spans overlap."""

    start: int
    end: int
    specs: list[TensorSpec]


def plan_layout(specs: Iterable[TensorSpec]) -> ImageLayout:
    """Give every tensor a place, in the order given; overlapping views of one storage keep their overlap.

    :raises ValueError: if a name comes twice.
    """
    specs = list(specs)
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"tensor names must be distinct within a block image; repeated: {repeated}")
    offset = 0
    views: dict[str, TensorView] = {}
    regions: list[Region] = []
    for group in _overlapping_groups(specs):
        regions.append(
            Region(
                offset_bytes=offset,
                nbytes=group.end - group.start,
                storage=group.specs[0].storage,
                storage_start_bytes=group.start,
                names=tuple(spec.name for spec in group.specs),
            )
        )
        for spec in group.specs:
            place = offset + spec.storage_offset_bytes - group.start
            views[spec.name] = TensorView(spec.name, spec.dtype, spec.shape, spec.stride, place)
        offset = align_up(offset + group.end - group.start)
    return ImageLayout(views=tuple(views[name] for name in names), regions=tuple(regions), nbytes=offset)


def _overlapping_groups(specs: list[TensorSpec]) -> list[_Group]:
    """Connected runs of overlapping spans, per storage, ordered by their first spec."""
    rank = {spec.name: i for i, spec in enumerate(specs)}
    groups: list[_Group] = []
    by_storage: dict[Hashable, list[TensorSpec]] = {}
    for spec in specs:
        if spec.storage is None or spec.span_bytes == 0:
            start = spec.storage_offset_bytes
            groups.append(_Group(start, start + spec.span_bytes, [spec]))
        else:
            by_storage.setdefault(spec.storage, []).append(spec)
    for members in by_storage.values():
        current: _Group | None = None
        for spec in sorted(members, key=lambda s: (s.storage_offset_bytes, rank[s.name])):
            start = spec.storage_offset_bytes
            end = start + spec.span_bytes
            if current is not None and start < current.end:
                current.end = max(current.end, end)
                current.specs.append(spec)
            else:
                current = _Group(start, end, [spec])
                groups.append(current)
    for group in groups:  # views of several dtypes: each must stay aligned to its own elements
        group.start -= group.start % max(DTYPE_BYTES[spec.dtype] for spec in group.specs)
    return sorted(groups, key=lambda group: min(rank[spec.name] for spec in group.specs))
