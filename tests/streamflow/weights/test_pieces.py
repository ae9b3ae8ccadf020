"""Pieces of block images, from real files into memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from streamflow.stages.errors import SourceReadError
from streamflow.stages.images import BlockImage, Piece, view_of
from streamflow.stages.layout import ImageLayout, TensorSpec, contiguous_stride, plan_layout
from streamflow.weights.adapters import CheckpointAdapter, GroupedQKVAdapter, TensorAdapter
from streamflow.weights.checkpoint import Checkpoint, open_checkpoint
from streamflow.weights.checkpoint_plan import CheckpointPlan, Needed, SourceAssignment
from streamflow.weights.errors import AdapterError, CheckpointClosedError, CheckpointRegionError
from streamflow.weights.pieces import AdaptedPiece, FilePiece, checkpoint_block_pieces
from streamflow.weights.preflight import preflight
from streamflow.weights.safetensors_dtypes import TORCH_TO_FILE
from streamflow.weights.strides import is_overlapping

Save = Callable[..., Path]


def spec(name: str, tensor: torch.Tensor, stride: tuple[int, ...] | None = None, **more: Any) -> TensorSpec:
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, shape, stride or contiguous_stride(shape), **more)


def plan_for(
    checkpoint: Checkpoint, specs: Iterable[TensorSpec], adapters: Sequence[CheckpointAdapter] = (), prefix: str = ""
) -> CheckpointPlan:
    needed = [Needed(prefix + s.name, s.dtype, s.shape, s.stride) for s in specs]
    plan = preflight(needed, checkpoint.entries, adapters)
    assert isinstance(plan, CheckpointPlan), plan
    return plan


def read_image(layout: ImageLayout, pieces: Sequence[Piece]) -> torch.Tensor:
    """The whole image over memory that held something else before."""
    memory = torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8)
    for piece in pieces:
        piece.read_into(memory.data_ptr() + piece.offset_bytes, 0, piece.nbytes)
    return memory


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))


def test_a_block_is_read_into_its_image(save: Save) -> None:
    tensors = {"w": torch.randn(5, 7), "b": torch.randn(5).bfloat16(), "n": torch.tensor(3), "e": torch.empty(0, 2)}
    with open_checkpoint(save({f"blocks.4.{name}": tensor for name, tensor in tensors.items()})) as checkpoint:
        specs = [spec(name, tensor) for name, tensor in tensors.items()]
        layout = plan_layout(specs)
        plan = plan_for(checkpoint, specs, prefix="blocks.4.")
        pieces = checkpoint_block_pieces(layout, checkpoint, plan.assignments, "blocks.4.")
        image = BlockImage("blocks.4", layout, pieces)
        assert [piece.offset_bytes for piece in pieces] == [0, 256, 512]
        assert all(isinstance(piece, FilePiece) and piece.splittable for piece in pieces)
        assert image.stored_bytes == sum(tensor.nbytes for tensor in tensors.values()) == 158
        memory = read_image(layout, pieces)
    for view in layout.views:
        assert same_bits(view_of(memory, view), tensors[view.name])


def test_only_the_bytes_of_a_piece_are_written(save: Save) -> None:
    with open_checkpoint(save({"w": torch.ones(3)})) as checkpoint:
        layout = plan_layout([spec("w", torch.ones(3))])
        (piece,) = checkpoint_block_pieces(layout, checkpoint, {"w": SourceAssignment(("w",))})
        memory = read_image(layout, [piece])
    assert bytes(memory[12:].tolist()) == b"\xab" * 244


@pytest.mark.parametrize("dtype", sorted(dtype for dtype in TORCH_TO_FILE if hasattr(torch, dtype)))
def test_every_dtype_reaches_the_image_bit_by_bit(dtype: str, write_raw: Callable[..., Path]) -> None:
    kind = getattr(torch, dtype)
    bits = torch.arange(6 * kind.itemsize, dtype=torch.uint8).reshape(3, -1) + 1
    tensor = bits.view(kind)
    stored = [3, 4] if dtype == "float4_e2m1fn_x2" else [3, 2]
    header = {"t": {"dtype": TORCH_TO_FILE[dtype], "shape": stored, "data_offsets": [0, bits.numel()]}}
    with open_checkpoint(write_raw(header, bytes(bits.flatten().tolist()))) as checkpoint:
        specs = [spec("t", tensor)]
        layout = plan_layout(specs)
        memory = read_image(
            layout, checkpoint_block_pieces(layout, checkpoint, plan_for(checkpoint, specs).assignments)
        )
    assert same_bits(view_of(memory, layout.views[0]), tensor)


def test_parts_of_a_piece_may_be_read_by_several_threads(save: Save) -> None:
    tensor = torch.randn(1000)
    with open_checkpoint(save({"w": tensor})) as checkpoint:
        layout = plan_layout([spec("w", tensor)])
        (piece,) = checkpoint_block_pieces(layout, checkpoint, {"w": SourceAssignment(("w",))})
        memory = torch.zeros(4000, dtype=torch.uint8)

        def read(start: int) -> None:
            piece.read_into(memory.data_ptr() + start, start, min(77, 4000 - start))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(0, 4000, 77)))
        assert same_bits(memory.view(torch.float32), tensor)
        for start, nbytes in [(-1, 2), (0, -1), (3999, 2)]:
            with pytest.raises(ValueError, match="not inside a piece of 4000"):
                piece.read_into(memory.data_ptr(), start, nbytes)


def test_raw_pieces_leave_torch_alone(save: Save) -> None:
    with open_checkpoint(save({"w": torch.ones(1000)})) as checkpoint:
        layout = plan_layout([spec("w", torch.ones(1000))])
        (piece,) = checkpoint_block_pieces(layout, checkpoint, {"w": SourceAssignment(("w",))})
        memory = torch.zeros(4000, dtype=torch.uint8)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            piece.read_into(memory.data_ptr(), 0, 4000)
        assert [event.name for event in profile.events()] == []
        assert torch.equal(memory.view(torch.float32), torch.ones(1000))


def test_a_file_that_shrinks_under_a_piece_is_a_typed_error(save: Save) -> None:
    path = save({"w": torch.ones(1000)})
    with open_checkpoint(path) as checkpoint:
        layout = plan_layout([spec("w", torch.ones(1000))])
        pieces = checkpoint_block_pieces(layout, checkpoint, {"w": SourceAssignment(("w",))})
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(SourceReadError, match=r"3999 of 4000 bytes .*the file shrank from"):
            read_image(layout, pieces)
    with pytest.raises(CheckpointClosedError):
        read_image(layout, pieces)


# tied weights


def test_a_weight_with_two_names_in_the_block_is_one_piece(save: Save) -> None:
    tensor = torch.randn(4, 4)
    with open_checkpoint(save({"a": tensor})) as checkpoint:
        plan = preflight([Needed("a", "float32", (4, 4), (4, 1), aliases=("b",))], checkpoint.entries)
        assert isinstance(plan, CheckpointPlan)
        layout = plan_layout([spec("b", tensor, storage="s"), spec("a", tensor, storage="s")])
        (piece,) = checkpoint_block_pieces(layout, checkpoint, plan.assignments)
        memory = read_image(layout, [piece])
    a, b = (view_of(memory, view) for view in layout.views)
    assert same_bits(a, tensor)
    assert a.data_ptr() == b.data_ptr()


def test_regions_that_are_not_one_tensor_are_refused(save: Save) -> None:
    tensor = torch.randn(4, 4)
    raw = {name: SourceAssignment((name,)) for name in "ab"}
    with open_checkpoint(save({"a": tensor, "b": tensor.clone(), "h": tensor.half()})) as checkpoint:

        def pieces(specs: list[TensorSpec], assignments: dict[str, SourceAssignment]) -> None:
            checkpoint_block_pieces(plan_layout(specs), checkpoint, assignments, "")

        tied = [spec("a", tensor, storage="s"), spec("b", tensor, storage="s")]
        with pytest.raises(CheckpointRegionError, match=r"a, b: .* gives them different sources") as caught:
            pieces(tied, raw)
        assert caught.value.names == ("a", "b")
        parts = [spec("a", tensor, storage="s"), spec("b", tensor, storage="s", storage_offset_bytes=16)]
        with pytest.raises(CheckpointRegionError, match="share memory without being the same tensor"):
            pieces(parts, raw)
        with pytest.raises(CheckpointRegionError, match="a: the checkpoint plan has no source for a"):
            pieces([spec("a", tensor)], {})
        with pytest.raises(CheckpointRegionError, match=r"needs float32 \[4, 4\] .* holds float16 \[4, 4\]"):
            pieces([spec("a", tensor)], {"a": SourceAssignment(("h",))})
        with pytest.raises(CheckpointRegionError, match=r"with strides \[1, 4\].* row by row; use the module source"):
            pieces([spec("a", tensor, (1, 4))], raw)
        adapted = SourceAssignment(("a",), TensorAdapter("a", transform=lambda tensors: tensors[0]))
        with pytest.raises(CheckpointRegionError, match="lay elements over each other"):
            pieces([spec("a", tensor, (0, 1))], {"a": adapted})


# adapters


def test_an_adapted_tensor_is_read_as_the_module_needs_it(save: Save) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 5), torch.randn(3, 5), torch.randn(3, 5)
    groups = [torch.cat([q[2 * i : 2 * i + 2], k[i : i + 1], v[i : i + 1]]) for i in range(3)]
    expected = torch.cat([q, k, v])
    adapter = GroupedQKVAdapter("blocks.*.qkv", num_heads=6, num_kv_groups=3)
    with open_checkpoint(save({"blocks.0.qkv": torch.cat(groups), "blocks.0.o": torch.ones(2)})) as checkpoint:
        specs = [spec("o", torch.ones(2)), spec("qkv", expected)]
        plan = plan_for(checkpoint, specs, [adapter], "blocks.0.")
        layout = plan_layout(specs)
        raw, adapted = checkpoint_block_pieces(layout, checkpoint, plan.assignments, "blocks.0.")
        assert isinstance(adapted, AdaptedPiece)
        assert not adapted.splittable
        assert (adapted.nbytes, adapted.stored_bytes) == (240, 240)
        memory = read_image(layout, [raw, adapted])
        with pytest.raises(ValueError, match="read whole: 240 bytes, not 100 at 0"):
            adapted.read_into(memory.data_ptr(), 0, 100)
        with pytest.raises(ValueError, match="read whole"):
            adapted.read_into(memory.data_ptr(), 1, 239)
    assert same_bits(view_of(memory, layout.views[1]), expected)


def test_the_stored_form_of_an_adapted_tensor_may_have_another_size(save: Save) -> None:
    half = torch.randn(3, 3).half()
    adapter = TensorAdapter("w", ("a", "b"), transform=lambda tensors: torch.cat(tensors).float())
    with open_checkpoint(save({"a": half, "b": half.clone()})) as checkpoint:
        specs = [spec("w", torch.empty(6, 3))]
        layout = plan_layout(specs)
        (piece,) = checkpoint_block_pieces(layout, checkpoint, plan_for(checkpoint, specs, [adapter]).assignments)
        assert (piece.nbytes, piece.stored_bytes) == (72, 36)
        memory = read_image(layout, [piece])
    assert same_bits(view_of(memory, layout.views[0]), torch.cat([half, half]).float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
@pytest.mark.parametrize("stride", [(4, 1), (1, 3), (10, 2)])
def test_an_adapted_tensor_may_have_any_strides(save: Save, dtype: str, stride: tuple[int, int]) -> None:
    tensor = (torch.arange(12) % 2).reshape(3, 4).to(getattr(torch, dtype))
    assert not is_overlapping((3, 4), stride)
    adapter = TensorAdapter("w", transform=lambda tensors: tensors[0])
    with open_checkpoint(save({"w": tensor})) as checkpoint:
        specs = [spec("w", tensor, stride)]
        layout = plan_layout(specs)
        pieces = checkpoint_block_pieces(layout, checkpoint, plan_for(checkpoint, specs, [adapter]).assignments)
        memory = read_image(layout, pieces)
        again = read_image(layout, pieces)
    found = view_of(memory, layout.views[0])
    assert found.stride() == stride
    assert same_bits(found, tensor)
    # holes hold zeros, so that an image has one digest
    assert torch.equal(memory, again)
    assert 0xAB not in memory[: pieces[0].nbytes].tolist()


def test_lazy_conjugation_and_negation_are_carried_out(save: Save) -> None:
    tensor = torch.randn(1, dtype=torch.complex64)  # a single element, whose parts count as contiguous
    adapters = [
        TensorAdapter("conj", ("t",), transform=lambda tensors: tensors[0].conj()),
        TensorAdapter("imag", ("t",), transform=lambda tensors: tensors[0].conj().imag),
    ]
    with open_checkpoint(save({"t": tensor})) as checkpoint:
        specs = [spec("conj", tensor), spec("imag", torch.empty(1))]
        layout = plan_layout(specs)
        plan = plan_for(checkpoint, specs, adapters)
        memory = read_image(layout, checkpoint_block_pieces(layout, checkpoint, plan.assignments))
    assert same_bits(view_of(memory, layout.views[0]), tensor.conj().resolve_conj())
    assert same_bits(view_of(memory, layout.views[1]), -tensor.imag)


def test_an_adapter_that_breaks_its_promise_is_a_typed_error(save: Save) -> None:
    def cheat(tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0] if tensors[0].is_meta else tensors[0].double()

    with open_checkpoint(save({"blocks.0.w": torch.ones(3)})) as checkpoint:
        specs = [spec("w", torch.ones(3))]
        layout = plan_layout(specs)
        plan = plan_for(checkpoint, specs, [TensorAdapter("*.w", transform=cheat)], "blocks.0.")
        pieces = checkpoint_block_pieces(layout, checkpoint, plan.assignments, "blocks.0.")
        with pytest.raises(AdapterError, match=r"make 'blocks\.0\.w': it returned float64 \[3\] on cpu"):
            read_image(layout, pieces)


def test_an_adapter_works_on_its_own_copy(save: Save) -> None:
    def careless(tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0].mul_(2)

    path = save({"w": torch.ones(3)})
    before = path.read_bytes()
    with open_checkpoint(path) as checkpoint:
        specs = [spec("w", torch.ones(3))]
        layout = plan_layout(specs)
        plan = plan_for(checkpoint, specs, [TensorAdapter("w", transform=careless)])
        pieces = checkpoint_block_pieces(layout, checkpoint, plan.assignments)
        first, second = read_image(layout, pieces), read_image(layout, pieces)
    assert torch.equal(first[:12].view(torch.float32), torch.full((3,), 2.0))
    assert torch.equal(first, second)
    assert path.read_bytes() == before
