"""Block images of real tensors: every dtype and stride goes in and comes out bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch

from streamflow.stages.dtypes import DTYPE_BYTES
from streamflow.stages.images import BlockImage, MemoryPiece, memory_image, view_of
from streamflow.stages.layout import ImageLayout, TensorSpec, plan_layout

#: Dtypes that a torch older than 2.8 lacks.
YOUNG_DTYPES = {"float8_e8m0fnu", "float4_e2m1fn_x2"}
DTYPES = [name for name in DTYPE_BYTES if hasattr(torch, name)]

SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda flat: flat.as_strided((4, 6), (6, 1)),
    "transposed": lambda flat: flat.as_strided((6, 4), (1, 6)),
    "channels last": lambda flat: flat.as_strided((2, 3, 2, 2), (12, 1, 6, 3)),
    "sliced": lambda flat: flat.as_strided((3, 2), (6, 2), 7),
    "expanded": lambda flat: flat.as_strided((5, 4), (0, 1), 3),
    "zero-dimensional": lambda flat: flat.as_strided((), (), 5),
    "empty": lambda flat: flat.as_strided((0, 3), (3, 1), 2),
}


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def flat_tensor(dtype: str, num_elements: int = 24) -> torch.Tensor:
    return random_bytes(num_elements * DTYPE_BYTES[dtype]).view(getattr(torch, dtype))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element: equal bits are equal, NaN or not, and no dtype needs an operator for it."""
    size = tensor.element_size()
    stride = (*(step * size for step in tensor.stride()), 1)
    return bytes_under(tensor).as_strided((*tensor.shape, size), stride, tensor.storage_offset() * size)


def bytes_under(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage that the tensor is a view of, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        storage=storage_id(tensor),
        storage_offset_bytes=int(tensor.storage_offset()) * tensor.element_size(),
    )


def filled(layout: ImageLayout, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The memory of an image, filled region by region from the storages of the tensors."""
    storages: dict[object, torch.Tensor] = {storage_id(tensor): bytes_under(tensor) for tensor in tensors}
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for region in layout.regions:
        start = region.storage_start_bytes
        source = storages[region.storage][start : start + region.nbytes]
        memory[region.offset_bytes : region.offset_bytes + region.nbytes] = source
    return memory


def through_an_image(*tensors: torch.Tensor) -> list[torch.Tensor]:
    layout = plan_layout(spec_of(f"t{index}", tensor) for index, tensor in enumerate(tensors))
    memory = filled(layout, tensors)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental", UserWarning)
        return [view_of(memory, view) for view in layout.views]


def test_only_young_dtypes_are_missing_from_torch() -> None:
    assert set(DTYPE_BYTES) - set(DTYPES) <= YOUNG_DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_size_of_an_element_is_torchs(dtype: str) -> None:
    assert getattr(torch, dtype).itemsize == DTYPE_BYTES[dtype]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_comes_back_bit_for_bit_with_its_strides(dtype: str, shape: str) -> None:
    tensor = SHAPES[shape](flat_tensor(dtype))
    other = flat_tensor("float32")
    (first, view) = through_an_image(other, tensor)
    assert (view.dtype, view.shape, view.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(raw(view), raw(tensor))
    assert torch.equal(raw(first), raw(other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_one_storage_in_two_dtypes_share_bytes_in_the_image_too(dtype: str) -> None:
    storage = random_bytes(128)
    packed = storage[3:70]
    wide = storage[16:64].view(getattr(torch, dtype))
    (packed_view, wide_view) = through_an_image(packed, wide)
    assert torch.equal(raw(packed_view), raw(packed))
    assert torch.equal(raw(wide_view), raw(wide))
    packed_view[13:61] = 0
    assert not raw(wide_view).any()


def test_a_view_is_a_view_of_the_buffer() -> None:
    layout = plan_layout([TensorSpec("a", "uint8", (3,), (1,)), TensorSpec("b", "float32", (2, 2), (1, 2))])
    buffer = torch.zeros(1024, dtype=torch.uint8)
    view_of(buffer, layout.views[1]).fill_(1.0)
    assert int(buffer[:256].count_nonzero()) == 0
    assert torch.equal(buffer[256:272].view(torch.float32), torch.ones(4))


# Pieces


def test_a_memory_piece_reads_any_part_of_itself() -> None:
    piece = MemoryPiece(256, random_bytes(100))
    assert (piece.nbytes, piece.stored_bytes, piece.splittable) == (100, 100, True)
    target = torch.zeros(50, dtype=torch.uint8)
    piece.read_into(target.data_ptr() + 5, 30, 40)
    assert torch.equal(target[5:45], piece.data[30:70])
    assert not target[:5].any()
    assert not target[45:].any()


def test_an_image_in_memory_is_one_piece_of_exactly_its_layout() -> None:
    layout = plan_layout([TensorSpec("a", "uint8", (3,), (1,))])
    image = memory_image("blocks.0", layout, random_bytes(256), page_locked=True)
    assert (image.nbytes, image.stored_bytes, image.page_locked) == (256, 256, True)
    assert [(piece.offset_bytes, piece.nbytes) for piece in image.pieces] == [(0, 256)]


def test_an_image_without_bytes_has_no_pieces() -> None:
    image = memory_image("blocks.0", plan_layout([]), random_bytes(0))
    assert (image.nbytes, image.stored_bytes, image.pieces) == (0, 0, ())


def test_memory_of_another_size_is_refused_with_both_sizes() -> None:
    layout = plan_layout([TensorSpec("a", "uint8", (3,), (1,))])
    with pytest.raises(ValueError, match=r"blocks\.0: the image has 256 bytes but the memory given has 255"):
        memory_image("blocks.0", layout, random_bytes(255))


def test_the_stored_form_may_have_another_size() -> None:
    class Coded(MemoryPiece):
        @property
        def stored_bytes(self) -> int:
            return 10

    layout = plan_layout([TensorSpec("a", "uint8", (3,), (1,)), TensorSpec("b", "uint8", (3,), (1,))])
    image = BlockImage("blocks.0", layout, (Coded(0, random_bytes(3)), MemoryPiece(256, random_bytes(3))))
    assert (image.nbytes, image.stored_bytes) == (512, 13)
