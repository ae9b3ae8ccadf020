"""Which blocks are fetched whole: those that gathering would not bring earlier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamflow.stages.ranks.local_blocks import choose_local

BLOCKS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 1 << 30), max_size=8)
RATES = st.floats(1e3, 1e12)
LATENCIES = st.floats(0, 10)
SIZES = st.integers(1, 16)


def seconds(
    blocks: dict[str, int], local: frozenset[str], link: float, gather: float, latency: float, size: int
) -> float:
    """What the blocks take one after the other, each as long as the slower of what it needs."""
    return sum(
        nbytes / link if name in local else max(nbytes / size / link, latency + nbytes / gather)
        for name, nbytes in blocks.items()
    )


@given(BLOCKS, RATES, RATES, LATENCIES, SIZES, st.sets(st.sampled_from("abcdefgh")))
def test_no_other_choice_is_faster(
    blocks: dict[str, int], link: float, gather: float, latency: float, size: int, other: set[str]
) -> None:
    rates = {"link_bytes_per_s": link, "gather_bytes_per_s": gather, "gather_latency_s": latency}
    chosen = choose_local(blocks, **rates, size=size)
    assert chosen <= set(blocks)
    best = seconds(blocks, chosen, link, gather, latency, size)
    assert best <= seconds(blocks, frozenset(other), link, gather, latency, size) * (1 + 1e-9)


@given(BLOCKS, RATES, RATES, LATENCIES, LATENCIES, SIZES)
def test_slower_gathers_leave_more_to_each_rank(
    blocks: dict[str, int], link: float, gather: float, latency: float, more: float, size: int
) -> None:
    def chosen(rate: float, seconds: float) -> frozenset[str]:
        return choose_local(blocks, link_bytes_per_s=link, gather_bytes_per_s=rate, gather_latency_s=seconds, size=size)

    assert chosen(gather, latency) <= chosen(gather, latency + more)
    assert chosen(gather, latency) <= chosen(gather / 2, latency)


@given(BLOCKS, RATES, LATENCIES, SIZES)
def test_smaller_blocks_go_first(blocks: dict[str, int], link: float, latency: float, size: int) -> None:
    chosen = choose_local(
        blocks, link_bytes_per_s=link, gather_bytes_per_s=2 * link, gather_latency_s=latency, size=size
    )
    largest_local = max((blocks[name] for name in chosen), default=-1)
    assert all(name in chosen for name, nbytes in blocks.items() if nbytes < largest_local) or size == 1


@given(BLOCKS, RATES, RATES, LATENCIES)
def test_a_rank_alone_fetches_everything_whole(
    blocks: dict[str, int], link: float, gather: float, latency: float
) -> None:
    chosen = choose_local(blocks, link_bytes_per_s=link, gather_bytes_per_s=gather, gather_latency_s=latency, size=1)
    assert chosen == set(blocks)


def test_on_a_node_with_a_fast_device_link_only_small_blocks_are_fetched_whole() -> None:
    blocks = {"modulation": 1 << 20, "double": 650 << 20, "norm": 4096}
    chosen = choose_local(blocks, link_bytes_per_s=55e9, gather_bytes_per_s=400e9, gather_latency_s=30e-6, size=4)
    assert chosen == {"modulation", "norm"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"link_bytes_per_s": 0.0},
        {"gather_bytes_per_s": -1.0},
        {"gather_latency_s": -1e-6},
        {"size": 0},
        {"blocks": {"a": -1}},
        {"link_bytes_per_s": float("nan")},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    right = {"blocks": {"a": 1}, "link_bytes_per_s": 1.0, "gather_bytes_per_s": 1.0, "gather_latency_s": 0.0, "size": 2}
    with pytest.raises(ValueError, match=r"must be above 0|fewer than 0 bytes: a"):
        choose_local(**{**right, **wrong})  # type: ignore[arg-type]
