"""Reading images from pieces in any runs gives their bytes, with zeros where nothing is."""

from __future__ import annotations

import ctypes

import attrs
from hypothesis import given
from hypothesis import strategies as st

from streamflow.host_weights.producer import ImageReader


@attrs.frozen
class BytesPiece:
    """A piece over bytes that counts how often it is read whole."""

    offset_bytes: int
    data: bytes
    splittable: bool
    reads: list[tuple[int, int]] = attrs.field(factory=list)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    stored_bytes = nbytes

    def read_into(self, address: int, start: int, nbytes: int) -> None:
        assert self.splittable or (start, nbytes) == (0, self.nbytes)
        self.reads.append((start, nbytes))
        ctypes.memmove(address, self.data[start : start + nbytes], nbytes)


@st.composite
def images(draw: st.DrawFn) -> tuple[bytes, list[BytesPiece]]:
    """An image with holes, and its pieces."""
    whole, pieces = b"", []
    for _ in range(draw(st.integers(0, 5))):
        whole += bytes(draw(st.integers(0, 7)))
        data = draw(st.binary(min_size=1, max_size=40))
        pieces.append(BytesPiece(len(whole), data, draw(st.booleans())))
        whole += data
    return whole + bytes(draw(st.integers(0, 7))), pieces


@given(images(), st.integers(1, 50))
def test_any_run_length_gives_the_same_image(image: tuple[bytes, list[BytesPiece]], run: int) -> None:
    whole, pieces = image
    reader = ImageReader([[], pieces])
    found = bytearray()
    for start in range(0, len(whole), run):
        target = bytearray(b"\xaa" * min(run, len(whole) - start))
        reader(1, memoryview(target), start)
        found += target
    assert bytes(found) == whole
    assert all(len(piece.reads) == 1 for piece in pieces if not piece.splittable), "made more than once"
