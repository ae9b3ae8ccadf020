"""Which image lies where in which file, and the headers that make these files legal safetensors. Pure: no torch.

Each image is one run of its file, at a multiple of 64 KiB, with its tensors at their own offsets; what no tensor covers
is covered by padding tensors. An image never spans two files: one that is larger than the limit has a file of its own,
larger than the limit too, because an image has to be one copy and one range.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import attrs

from streamflow.stages.layout import align_up
from streamflow.store.draft import StoredImage
from streamflow.store.errors import UnsupportedTensorError
from streamflow.store.stored_form import stored_form
from streamflow.weights.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES

#: Images lie at multiples of this in their files: whole pages, of any page size there is.
IMAGE_ALIGNMENT_BYTES = 64 << 10
#: Names of tensors that cover what no tensor of the model does; followed by a number.
PAD_PREFIX = "__streamflow_pad__."
_HEADER_START = '{"__metadata__":{"format":"pt"}'


@attrs.frozen
class ImagePlace:
    """Where an image lies: in file number ``file`` (from 0), ``offset_bytes`` from its beginning."""

    file: int
    offset_bytes: int
    nbytes: int


@attrs.frozen
class FilePlan:
    """One file: its name, everything that comes before the first image, its size, and the images in it."""

    name: str
    header: bytes
    nbytes: int
    images: tuple[int, ...]


@attrs.frozen
class EntryPlan:
    """All files of an entry and the place of each image, in the order of the images."""

    files: tuple[FilePlan, ...]
    places: tuple[ImagePlace, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def plan_entry(images: Sequence[StoredImage], max_file_bytes: int) -> EntryPlan:
    """The files of these images, in their order, each file as full as ``max_file_bytes`` allows.

    :raises UnsupportedTensorError: if a tensor has no form that a file can hold, or shares bytes with another.
    """
    files: list[_File] = []
    for index, image in enumerate(images):
        if not files or not files[-1].has_room(image, max_file_bytes):
            files.append(_File(files[-1].next_pad if files else 0))
        files[-1].add(index, image)
    return _finish(files)


def plan_groups(images: Sequence[StoredImage], groups: Iterable[Sequence[int]]) -> EntryPlan:
    """The plan in which each group of images has a file; for files that exist already.

    :raises UnsupportedTensorError: as `plan_entry` does.
    """
    files: list[_File] = []
    for group in groups:
        files.append(_File(files[-1].next_pad if files else 0))
        for index in group:
            files[-1].add(index, images[index])
    return _finish(files)


@attrs.frozen
class _Run:
    """An image as it would lie in a file: the header's texts for it, where it begins and ends in the data."""

    texts: tuple[str, ...]
    start: int
    end: int
    next_pad: int


class _File:
    """A file that images are added to. Offsets count from the end of the header, whose size does not matter then."""

    def __init__(self, first_pad: int) -> None:
        self.next_pad = first_pad
        self.places: dict[int, tuple[int, int]] = {}
        self._texts: list[str] = []
        self._text_bytes = 0
        self._end = 0

    def has_room(self, image: StoredImage, max_file_bytes: int) -> bool:
        run = self._run(image)
        header_bytes = _header_bytes(self._text_bytes + sum(map(len, run.texts)))
        return header_bytes <= MAX_HEADER_BYTES and header_bytes + run.end <= max_file_bytes

    def add(self, index: int, image: StoredImage) -> None:
        run = self._run(image)
        self._texts += run.texts
        self._text_bytes += sum(map(len, run.texts))
        self._end, self.next_pad = run.end, run.next_pad
        self.places[index] = (run.start, image.nbytes)

    def finish(self, number: int) -> tuple[FilePlan, dict[int, ImagePlace]]:
        header = self._header()
        places = {
            index: ImagePlace(number, len(header) + start, nbytes) for index, (start, nbytes) in self.places.items()
        }
        return FilePlan(file_name(number), header, len(header) + self._end, tuple(places)), places

    def _run(self, image: StoredImage) -> _Run:
        start = align_up(self._end, IMAGE_ALIGNMENT_BYTES)
        texts: list[str] = []
        cursor, pad = self._end, self.next_pad
        for name, file_dtype, file_shape, begin, nbytes in [*_tensors(image), ("", "", (), image.nbytes, 0)]:
            if start + begin < cursor:
                raise UnsupportedTensorError(name, f"it shares bytes of the image {image.name} with another tensor")
            if start + begin > cursor:
                texts.append(_text(f"{PAD_PREFIX}{pad}", "U8", [start + begin - cursor], cursor, start + begin))
                pad += 1
            cursor = start + begin + nbytes
            if name:
                texts.append(_text(name, file_dtype, file_shape, start + begin, cursor))
        return _Run(tuple(texts), start, cursor, pad)

    def _header(self) -> bytes:
        text = (_HEADER_START + "".join(self._texts) + "}").encode("ascii")
        size = _header_bytes(self._text_bytes) - LENGTH_BYTES
        return size.to_bytes(LENGTH_BYTES, "little") + text.ljust(size)


def file_name(number: int) -> str:
    """The name of an entry's file of this number, counted from 0."""
    return f"weights-{number + 1:05d}.safetensors"


def _tensors(image: StoredImage) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """Name, file dtype, file shape, offset in the image and size of each tensor, in the order of the bytes."""
    found = []
    for tensor in image.tensors:
        form = stored_form(tensor)
        if tensor.offset_bytes + form.nbytes > image.nbytes:
            raise UnsupportedTensorError(tensor.name, f"it reaches beyond the {image.nbytes:,} bytes of its image")
        found.append((tensor.name, form.file_dtype, form.file_shape, tensor.offset_bytes, form.nbytes))
    return sorted(found, key=lambda tensor: tensor[3:])


def _text(name: str, file_dtype: str, shape: Iterable[int], begin: int, end: int) -> str:
    sizes = ",".join(map(str, shape))
    return f',{json.dumps(name)}:{{"dtype":"{file_dtype}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}'


def _header_bytes(text_bytes: int) -> int:
    return align_up(LENGTH_BYTES + len(_HEADER_START) + text_bytes + len("}"), IMAGE_ALIGNMENT_BYTES)


def _finish(files: Iterable[_File]) -> EntryPlan:
    plans: list[FilePlan] = []
    places: dict[int, ImagePlace] = {}
    for number, file in enumerate(files):
        plan, its_places = file.finish(number)
        plans.append(plan)
        places |= its_places
    return EntryPlan(tuple(plans), tuple(places[index] for index in sorted(places)))
