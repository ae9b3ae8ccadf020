"""Renaming, transforms and the ready-made adapter for grouped QKV."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamflow.stages.errors import StreamflowError
from streamflow.weights.adapters import GroupedQKVAdapter, RenameAdapter, TensorAdapter
from streamflow.weights.errors import AdapterError, DtypeUnavailableError


def test_renaming_takes_whole_names_first_then_the_longest_prefix() -> None:
    adapter = RenameAdapter(names={"old.a": "new"}, prefixes={"old.": "", "old.deep.": "d.", "": "all."})
    assert adapter.rename("old.a") == "new"
    assert adapter.rename("old.b") == "b"
    assert adapter.rename("old.deep.c") == "d.c"
    assert adapter.rename("other") == "all.other"
    assert RenameAdapter().rename("x") == "x"


def test_a_rename_adapter_keeps_its_own_maps() -> None:
    names = {"a": "b"}
    adapter = RenameAdapter(names=names)
    names["a"] = "c"
    assert adapter.rename("a") == "b"
    with pytest.raises(TypeError):
        adapter.names["a"] = "d"  # type: ignore[index]


def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(tensors)


@pytest.mark.parametrize(
    ("target", "sources", "name", "found"),
    [
        ("qkv", ("q", "k"), "qkv", ("q", "k")),
        ("qkv", ("q", "k"), "qkv2", None),
        ("blocks.*.qkv", ("b.*.q", "b.*.k"), "blocks.3.qkv", ("b.3.q", "b.3.k")),
        ("*.qkv.?", ("*.q.?", "*.k.?"), "a.b.c.qkv.w", ("a.b.c.q.w", "a.b.c.k.w")),
        ("*.qkv.?", ("shared",), "a.qkv.w", ("shared",)),
        ("a+b.(c)[0]", (), "a+b.(c)[0]", ("a+b.(c)[0]",)),
        ("axb", (), "a.b", None),
        ("a.b", (), "axb", None),
        ("*", (), "any\nthing", ("any\nthing",)),
        ("*.w", lambda name: [name + ".1", name + ".2"], "x.w", ("x.w.1", "x.w.2")),
    ],
)
def test_the_names_of_sources(target: str, sources: Any, name: str, found: tuple[str, ...] | None) -> None:
    assert TensorAdapter(target, sources, transform=cat).sources_for(name) == found


@given(st.text(), st.text(), st.text())
def test_wildcards_hand_on_whatever_they_matched(before: str, middle: str, after: str) -> None:
    adapter = TensorAdapter(f"{_plain(before)}*{_plain(after)}", ("s.*",), transform=cat)
    assert adapter.sources_for(_plain(before) + middle + _plain(after)) == ("s." + middle,)


def _plain(text: str) -> str:
    return re.sub(r"[*?]", "", text)


@pytest.mark.parametrize(
    ("target", "sources", "words"),
    [("", ("a",), "name of its target"), ("a", ("b.*",), "more wildcards"), ("a", "b", "tuple of names")],
)
def test_an_adapter_that_cannot_mean_anything_is_refused(target: str, sources: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TensorAdapter(target, sources, transform=cat)


def test_what_a_transform_makes_is_known_without_memory() -> None:
    adapter = TensorAdapter("t", ("a", "b"), transform=lambda tensors: cat(tensors).t().to(torch.bfloat16))
    many = 2**40
    assert adapter.output_spec("t", [("float32", (2, many)), ("float32", (3, many))]) == ("bfloat16", (many, 5))


def test_a_transform_that_looks_at_values_cannot_be_proven() -> None:
    adapter = TensorAdapter("t", (), transform=lambda tensors: tensors[0] * tensors[0].max().item())
    with pytest.raises(AdapterError, match=r"TensorAdapter\('t'\) could not make 't'"):
        adapter.output_spec("t", [("float32", (2,))])


def test_a_dtype_that_torch_lacks_is_a_typed_error() -> None:
    with pytest.raises(DtypeUnavailableError, match="no dtype 'float3'") as caught:
        TensorAdapter("t", transform=cat).output_spec("t", [("float3", (2,))])
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, StreamflowError)
    with pytest.raises(DtypeUnavailableError):
        TensorAdapter("t", transform=cat).output_spec("t", [("nn", ())])


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (torch.ones(2, 3), r"returned float32 \[2, 3\] on cpu, but the module needs float32 \[3, 2\]"),
        (torch.ones(3, 2, dtype=torch.float16), r"returned float16 \[3, 2\] on cpu"),
        (torch.ones(3, 2, device="meta"), r"returned float32 \[3, 2\] on meta"),
        (torch.ones(3, 2).to_sparse(), "but the module needs float32"),
        ([1.0], "it returned a list, not a tensor"),
    ],
)
def test_the_result_must_be_what_the_module_needs(result: Any, words: str) -> None:
    adapter = TensorAdapter("t", transform=lambda tensors: result)
    with pytest.raises(AdapterError, match=words) as caught:
        adapter.make("t", [], "float32", (3, 2))
    assert (caught.value.adapter, caught.value.target) == ("TensorAdapter('t')", "t")
    assert isinstance(caught.value, ValueError)


def test_a_transform_that_raises_is_the_cause() -> None:
    def fail(tensors: list[torch.Tensor]) -> torch.Tensor:
        raise ZeroDivisionError("so sorry")

    with pytest.raises(AdapterError, match="ZeroDivisionError: so sorry") as caught:
        TensorAdapter("t", transform=fail).make("t", [], "float32", (1,))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_transform_records_no_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    made = TensorAdapter("t", transform=lambda tensors: weight * 2).make("t", [], "float32", (2,))
    assert not made.requires_grad


# grouped QKV


def reordered_by_hand(fused: torch.Tensor, groups: int, queries: int, head: int) -> torch.Tensor:
    """Row by row: the straightforward way."""
    q, k, v = [], [], []
    row = 0
    for _ in range(groups):
        for _ in range(queries * head):
            q.append(fused[row])
            row += 1
        for _ in range(head):
            k.append(fused[row])
            row += 1
        for _ in range(head):
            v.append(fused[row])
            row += 1
    assert row == len(fused)
    return torch.stack(q + k + v)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("head", [1, 3])
@pytest.mark.parametrize("rest", [(), (5,), (2, 3)])
def test_grouped_qkv_is_reordered_exactly(groups: int, queries: int, head: int, rest: tuple[int, ...]) -> None:
    rows = groups * (queries + 2) * head
    fused = torch.arange(rows * torch.Size(rest).numel(), dtype=torch.int64).reshape(rows, *rest)
    before = fused.clone()
    adapter = GroupedQKVAdapter("*.qkv", num_heads=groups * queries, num_kv_groups=groups)
    assert adapter.sources_for("x.qkv") == ("x.qkv",)
    made = adapter.make("x.qkv", [fused], "int64", (rows, *rest))
    assert torch.equal(made, reordered_by_hand(fused, groups, queries, head))
    assert torch.equal(fused, before)
    assert adapter.output_spec("x.qkv", [("int64", (rows, *rest))]) == ("int64", (rows, *rest))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2fnuz,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.bool,
        torch.uint16,
        torch.complex64,
        torch.complex128,
        torch.int8,
    ],
)
def test_grouped_qkv_moves_the_bits_of_every_dtype(dtype: torch.dtype) -> None:
    rows, columns = 8, 4
    size = dtype.itemsize
    every_byte = torch.arange(rows * columns * size, dtype=torch.int64) % (2 if dtype == torch.bool else 256)
    bits = every_byte.to(torch.uint8).reshape(rows, columns * size)
    adapter = GroupedQKVAdapter("qkv", num_heads=4, num_kv_groups=2)
    name = str(dtype).removeprefix("torch.")
    made = adapter.make("qkv", [bits.view(dtype)], name, (rows, columns))
    assert torch.equal(made.view(torch.uint8), reordered_by_hand(bits, 2, 2, 1))


@pytest.mark.parametrize("shape", [(), (7, 2), (9,)])
def test_grouped_qkv_refuses_a_shape_that_has_no_such_heads(shape: tuple[int, ...]) -> None:
    adapter = GroupedQKVAdapter("qkv", num_heads=4, num_kv_groups=2)
    with pytest.raises(AdapterError, match="cannot be cut into 8 heads"):
        adapter.make("qkv", [torch.zeros(shape)], "float32", shape)


@pytest.mark.parametrize("counts", [(0, 1), (4, 0), (-4, -2), (5, 2), (True, 1), (4.0, 2), (2, 4)])
def test_grouped_qkv_refuses_counts_that_do_not_fit(counts: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="num_"):
        GroupedQKVAdapter("qkv", num_heads=counts[0], num_kv_groups=counts[1])
