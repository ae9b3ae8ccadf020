"""When a checkpoint may be the source of a module, and what is said when it may not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamflow.stages.dtypes import DTYPE_BYTES
from streamflow.stages.layout import contiguous_stride
from streamflow.weights.adapters import CheckpointAdapter, GroupedQKVAdapter, RenameAdapter, TensorAdapter
from streamflow.weights.checkpoint_plan import (
    CheckpointFallback,
    CheckpointPlan,
    FallbackCode,
    Needed,
    SourceAssignment,
)
from streamflow.weights.preflight import preflight
from streamflow.weights.safetensors_header import TensorEntry
from streamflow.weights.topology import WeightTopology


def need(name: str, dtype: str = "float32", shape: tuple[int, ...] = (2, 3), **more: Any) -> Needed:
    return Needed(name, dtype, shape, more.pop("stride", contiguous_stride(shape)), **more)


def entries(*specs: str | tuple[str, str] | tuple[str, str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    """Tensors of a checkpoint: names, perhaps with a dtype and a shape."""
    return {entry.name: entry for entry in (entry_of(*([spec] if isinstance(spec, str) else spec)) for spec in specs)}


def entry_of(name: str, dtype: str = "float32", shape: tuple[int, ...] = (2, 3)) -> TensorEntry:
    return TensorEntry(name, dtype, shape, 0, torch.Size(shape).numel() * DTYPE_BYTES[dtype])


def plan_of(found: CheckpointPlan | CheckpointFallback) -> CheckpointPlan:
    assert isinstance(found, CheckpointPlan), found
    return found


def incompatible(found: CheckpointPlan | CheckpointFallback, *words: str) -> CheckpointFallback:
    assert isinstance(found, CheckpointFallback), found
    assert found.code == "checkpoint_plan_incompatible"
    for word in words:
        assert word in found.reason
    return found


def test_equal_names_shapes_and_dtypes_are_a_plan() -> None:
    found = plan_of(preflight([need("a"), need("b", "int64", (), kind="buffer")], entries("a", ("b", "int64", ()))))
    assert dict(found.assignments) == {"a": SourceAssignment(("a",)), "b": SourceAssignment(("b",))}
    assert not found.has_adapters


def test_a_module_without_weights_and_an_empty_file_agree() -> None:
    assert dict(plan_of(preflight([], {})).assignments) == {}


def test_a_bfloat16_file_never_replaces_a_float32_parameter_silently() -> None:
    found = incompatible(preflight([need("norm.weight", "float32")], entries(("norm.weight", "bfloat16"))))
    assert "parameter 'norm.weight' is float32 in the module" in found.reason
    assert "the checkpoint's 'norm.weight' is bfloat16" in found.reason
    assert "never converts" in found.reason
    incompatible(preflight([need("n", "bfloat16")], entries(("n", "float32"))), "bfloat16", "float32")
    incompatible(preflight([need("n", "float8_e4m3fn")], entries(("n", "float8_e4m3fnuz"))), "float8_e4m3fnuz")


def test_another_shape_is_incompatible() -> None:
    found = preflight([need("a", shape=(3, 2))], entries("a"))
    incompatible(found, "parameter 'a' has the shape [3, 2] in the module, but the checkpoint's 'a' has [2, 3]")
    incompatible(preflight([need("a", shape=())], entries(("a", "float32", (1,)))), "has the shape []")


def test_a_tensor_without_a_source_is_incompatible() -> None:
    found = preflight([need("a"), need("position_ids", kind="buffer")], entries("a"))
    incompatible(found, "buffer 'position_ids' is not in the checkpoint")


def test_a_missing_prefix_is_pointed_out() -> None:
    found = preflight([need("a.weight")], entries("model.a.weight"))
    incompatible(found, "RenameAdapter(prefixes={'model.': ''})", "'model.a.weight'")


def test_names_that_nothing_needs_are_never_counted_as_loaded() -> None:
    found = preflight([need("a")], entries("a", "vae.x"))
    incompatible(found, "1 tensors of the checkpoint match nothing in the module: 'vae.x'")
    found = incompatible(preflight([need("a")], entries("a", *(f"other.{i}" for i in range(20)))))
    assert "20 tensors" in found.reason
    assert "'other.7'" in found.reason
    assert "'other.8'" not in found.reason
    assert "and 12 more" in found.reason


def test_every_problem_is_kept_and_the_reason_shows_the_first() -> None:
    found = incompatible(preflight([need(f"n{i}") for i in range(20)], {}))
    assert len(found.problems) == 20
    assert found.reason.count("is not in the checkpoint") == 8
    assert found.reason.endswith("and 12 more")


@pytest.mark.parametrize(
    ("shape", "stride"), [((2, 3), (1, 2)), ((2, 3), (6, 1)), ((2, 3), (0, 1)), ((2, 3, 2, 2), (12, 1, 6, 3))]
)
def test_strides_that_a_file_does_not_have_are_incompatible(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    found = preflight([need("a", shape=shape, stride=stride)], entries(("a", "float32", shape)))
    incompatible(found, f"'a' has the strides {stride}, but files hold tensors row by row")


def test_strides_of_single_elements_and_of_nothing_do_not_matter() -> None:
    plan_of(preflight([need("a", shape=(1, 3), stride=(99, 1))], entries(("a", "float32", (1, 3)))))
    plan_of(preflight([need("a", shape=(0, 3), stride=(1, 7))], entries(("a", "float32", (0, 3)))))


def test_memory_that_is_shared_in_part_is_incompatible() -> None:
    found = preflight([need("a", overlaps=("b",)), need("b", overlaps=("a",))], entries("a", "b"))
    incompatible(found, "parameter 'a' shares memory with b", "parameter 'b' shares memory with a")


def test_a_name_that_is_listed_twice_is_the_callers_mistake() -> None:
    for needed in ([need("a"), need("a")], [need("a", aliases=("b",)), need("b")]):
        with pytest.raises(ValueError, match="is listed twice; list tied names once, as aliases"):
            preflight(needed, entries("a"))


# topology


@pytest.mark.parametrize(
    ("topology", "code", "words"),
    [
        (WeightTopology(tensor_parallel_size=2), "unsupported_tp", "2 tensor-parallel ranks"),
        (WeightTopology(hsdp=True), "unsupported_hsdp", "HSDP"),
        (WeightTopology(online_quantization="fp8"), "unsupported_online_quantization", "'fp8'"),
        (WeightTopology(tensor_parallel_size=2, hsdp=True, online_quantization="fp8"), "unsupported_tp", "ranks"),
    ],
)
def test_what_changes_weights_after_loading_is_a_fallback(topology: WeightTopology, code: str, words: str) -> None:
    found = preflight([need("a")], entries("a"), topology=topology)
    assert isinstance(found, CheckpointFallback)
    assert found.code == code
    assert found.code is FallbackCode(code)
    assert words in found.reason
    plan_of(preflight([need("a")], entries("a"), topology=WeightTopology()))


@pytest.mark.parametrize("size", [0, -1, 1.0, True])
def test_a_rank_count_that_cannot_be_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size must be a whole number of at least 1"):
        WeightTopology(tensor_parallel_size=size)


# tied weights

TIED = need("embed.weight", aliases=("head.weight",))


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_one_name_in_the_file_serves_both_names_of_the_module(name: str) -> None:
    found = plan_of(preflight([TIED, need("a")], entries(name, "a")))
    assert found.assignments["embed.weight"] == found.assignments["head.weight"] == SourceAssignment((name,))


def test_two_names_in_the_file_need_proof_that_they_are_equal() -> None:
    both = entries("embed.weight", "head.weight")
    incompatible(
        preflight([TIED], both), "'embed.weight' has two sources, 'embed.weight' and 'head.weight', that nothing proves"
    )
    asked: list[tuple[str, str]] = []

    def differ(first: str, second: str) -> bool:
        asked.append((first, second))
        return False

    incompatible(preflight([TIED], both, same_bytes=differ), "two sources", "that differ")
    assert asked == [("embed.weight", "head.weight")]
    found = plan_of(preflight([TIED], both, same_bytes=lambda first, second: True))
    assert found.assignments["head.weight"] == SourceAssignment(("embed.weight",))


def test_a_tied_weight_without_any_name_in_the_file_is_missing() -> None:
    incompatible(preflight([TIED], {}), "parameter 'embed.weight' is not in the checkpoint")


# adapters


def test_renamed_tensors_are_found() -> None:
    adapters = [RenameAdapter(prefixes={"model.": ""}), RenameAdapter(names={"a": "b"})]
    found = plan_of(preflight([need("b"), need("c")], entries("model.a", "model.c"), adapters))
    assert found.assignments["b"] == SourceAssignment(("model.a",))
    assert not found.has_adapters


def test_two_names_renamed_to_one_need_proof() -> None:
    adapters = [RenameAdapter(prefixes={"x.": "", "y.": ""})]
    incompatible(preflight([need("a")], entries("x.a", "y.a"), adapters), "two sources, 'x.a' and 'y.a'")


def test_a_transform_is_the_source_of_its_target() -> None:
    adapter = TensorAdapter("*.qkv", ("*.q", "*.k"), transform=torch.cat)
    found = plan_of(preflight([need("b.0.qkv", shape=(4, 3)), need("a")], entries("b.0.q", "b.0.k", "a"), [adapter]))
    assert found.assignments["b.0.qkv"] == SourceAssignment(("b.0.q", "b.0.k"), adapter)
    assert found.has_adapters


def test_one_tensor_of_the_file_may_be_split_among_several_targets() -> None:
    adapters = [
        TensorAdapter("q", ("qk",), transform=lambda tensors: tensors[0][:1]),
        TensorAdapter("k", ("qk",), transform=lambda tensors: tensors[0][1:]),
    ]
    found = plan_of(preflight([need("q", shape=(1, 3)), need("k", shape=(1, 3))], entries("qk"), adapters))
    assert {name: assignment.sources for name, assignment in found.assignments.items()} == {"q": ("qk",), "k": ("qk",)}


def test_an_adapter_converts_where_a_raw_source_would_not() -> None:
    adapter = TensorAdapter("norm.*", transform=lambda tensors: tensors[0].float())
    plan_of(preflight([need("norm.weight")], entries(("norm.weight", "bfloat16")), [adapter]))


def test_an_adapter_may_have_other_strides_but_no_overlap() -> None:
    adapter = GroupedQKVAdapter("qkv", num_heads=1, num_kv_groups=1)
    qkv = entries(("qkv", "float32", (3, 4)))
    plan_of(preflight([need("qkv", shape=(3, 4), stride=(1, 3))], qkv, [adapter]))
    plan_of(preflight([need("qkv", shape=(3, 4), stride=(20, 2))], qkv, [adapter]))
    incompatible(preflight([need("qkv", shape=(3, 4), stride=(0, 1))], qkv, [adapter]), "is expanded")


def first(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def broken_sources(name: str) -> list[str]:
    raise LookupError(name)


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ([TensorAdapter("a", ("x", "z"), transform=first)], ["the checkpoint lacks: 'z'"]),
        ([TensorAdapter("a", ("x",), transform=lambda tensors: tensors[0].t())], ["what TensorAdapter('a') makes"]),
        ([TensorAdapter("a", ("x",), transform=lambda tensors: tensors[0].half())], ["float16"]),
        ([TensorAdapter("a", ("x",), transform=lambda tensors: tensors[1])], ["cannot be proven", "IndexError"]),
        ([TensorAdapter("a", broken_sources, transform=first)], ["failed to name its sources: LookupError('a')"]),
        (
            [TensorAdapter("a", ("x",), transform=first), TensorAdapter("?", ("x",), transform=first)],
            ["can be made in several ways: TensorAdapter('a') from x, TensorAdapter('?') from x"],
        ),
        (
            [TensorAdapter("a", ("x",), transform=first), TensorAdapter("typo", ("x",), transform=first)],
            ["the adapter TensorAdapter('typo') matches no tensor of the module"],
        ),
    ],
)
def test_an_adapter_that_cannot_be_proven_is_incompatible(adapters: list[CheckpointAdapter], words: list[str]) -> None:
    incompatible(preflight([need("a")], entries("x"), adapters), *words)


def test_a_raw_tensor_under_the_targets_name_is_left_over() -> None:
    adapter = TensorAdapter("a", ("x",), transform=first)
    incompatible(preflight([need("a")], entries("a", "x"), [adapter]), "match nothing in the module: 'a'")


def test_a_tied_target_is_made_once() -> None:
    adapter = TensorAdapter("*.weight", transform=first)
    found = plan_of(preflight([TIED], entries("head.weight"), [adapter]))
    assert found.assignments["embed.weight"] == SourceAssignment(("head.weight",), adapter)
    both = preflight([TIED], entries("embed.weight", "head.weight"), [adapter])
    incompatible(both, "'embed.weight' can be made in several ways")


def test_anything_but_an_adapter_is_refused() -> None:
    with pytest.raises(TypeError, match="a RenameAdapter, a DropAdapter or a TransformAdapter is expected"):
        preflight([need("a")], entries("a"), [first])  # type: ignore[list-item]


# properties

SPECS = st.dictionaries(
    st.text(min_size=1, max_size=4),
    st.tuples(st.sampled_from(["float32", "bfloat16", "int8"]), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
    min_size=1,
    max_size=6,
)


def module_of(specs: Iterable[tuple[str, tuple[str, tuple[int, ...]]]]) -> list[Needed]:
    return [need(name, dtype, shape) for name, (dtype, shape) in specs]


def file_of(specs: Iterable[tuple[str, tuple[str, tuple[int, ...]]]]) -> dict[str, TensorEntry]:
    return entries(*((name, dtype, shape) for name, (dtype, shape) in specs))


@given(SPECS, SPECS)
def test_only_an_exact_match_is_a_plan(
    module: dict[str, tuple[str, tuple[int, ...]]], file: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    found = preflight(module_of(module.items()), file_of(file.items()))
    assert isinstance(found, CheckpointPlan) == (module == file)


@given(SPECS, st.data())
def test_one_difference_anywhere_is_no_plan(
    module: dict[str, tuple[str, tuple[int, ...]]], data: st.DataObject
) -> None:
    plan_of(preflight(module_of(module.items()), file_of(reversed(module.items()))))
    file = dict(module)
    name = data.draw(st.sampled_from(sorted(file)))
    dtype, shape = file.pop(name)
    change = data.draw(st.sampled_from(["gone", "dtype", "shape", "name"]))
    if change == "dtype":
        file[name] = ("float64", shape)
    elif change == "shape":
        file[name] = (dtype, (*shape, 2))
    elif change == "name":
        file[name + "-"] = (dtype, shape)
    incompatible(preflight(module_of(module.items()), file_of(file.items())), repr(name))
