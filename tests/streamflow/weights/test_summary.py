"""Stacks, from names alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamflow.weights.safetensors_header import TensorEntry
from streamflow.weights.summary import CheckpointSummary, StackSummary, summarize_checkpoint


def summarize(sizes: dict[str, int]) -> CheckpointSummary:
    return summarize_checkpoint({name: TensorEntry(name, "uint8", (size,), 0, size) for name, size in sizes.items()})


def test_stacks_and_the_rest_are_told_apart() -> None:
    found = summarize(
        {
            "x_embedder.weight": 5,
            "transformer_blocks.0.attn.to_out.0.weight": 100,
            "transformer_blocks.0.norm": 3,
            "transformer_blocks.1.attn.to_out.0.weight": 300,
            "single_transformer_blocks.0.mlp": 40,
            "norm_out": 2,
        }
    )
    assert found == CheckpointSummary(
        (
            StackSummary("transformer_blocks", (103, 300), (512, 512), (2, 1)),
            StackSummary("single_transformer_blocks", (40,), (256,), (1,)),
        ),
        7,
    )
    assert [stack.num_blocks for stack in found.stacks] == [2, 1]
    assert [stack.nbytes for stack in found.stacks] == [403, 40]
    assert found.total_bytes == 450


def test_blocks_are_in_the_order_of_their_numbers() -> None:
    sizes = {f"layers.{i}.w": i + 1 for i in range(12)}
    (stack,) = summarize(dict(sorted(sizes.items()))).stacks
    assert stack.block_bytes == tuple(range(1, 13))


def test_lists_with_gaps_are_not_stacks() -> None:
    found = summarize({"time_embed.0.weight": 4, "time_embed.2.weight": 4, "from_one.1.w": 1})
    assert found == CheckpointSummary((), 9)


def test_a_stack_may_lie_inside_a_list_with_gaps() -> None:
    found = summarize({"towers.1.layers.0.w": 1, "towers.1.layers.1.w": 2, "towers.3.x": 4})
    assert [(stack.path, stack.block_bytes) for stack in found.stacks] == [("towers.1.layers", (1, 2))]
    assert found.root_bytes == 4


def test_only_the_outermost_list_counts() -> None:
    found = summarize({"up.0.resnets.0.w": 1, "up.0.resnets.1.w": 2, "up.1.resnets.0.w": 4})
    assert [(stack.path, stack.block_bytes) for stack in found.stacks] == [("up", (3, 4))]


def test_a_model_that_is_a_list_itself() -> None:
    assert [stack.path for stack in summarize({"0.weight": 1, "1.weight": 2}).stacks] == [""]


def test_odd_names_are_no_indices() -> None:
    names = ["a.00.w", "b.01.w", "c.-1.w", "d.٠.w", "e.0", f"f.{'9' * 5000}.w", "g. 0.w", "h.0x.w", ""]
    assert summarize(dict.fromkeys(names, 1)) == CheckpointSummary((), len(names))


def test_nothing_is_nothing() -> None:
    assert summarize({}) == CheckpointSummary((), 0)


@given(st.dictionaries(st.from_regex(r"\A([a-c]|[0-3])(\.([a-c]|[0-3])){0,4}\Z"), st.integers(0, 1000)))
def test_every_byte_is_counted_once(sizes: dict[str, int]) -> None:
    found = summarize(sizes)
    assert found.total_bytes == sum(sizes.values())
    assert found.root_bytes >= 0
    for stack in found.stacks:
        assert stack.num_blocks >= 1
        assert min(stack.block_tensors) >= 1
        assert all(image >= raw for image, raw in zip(stack.block_image_bytes, stack.block_bytes, strict=True))
