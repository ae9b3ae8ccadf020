"""The plan for many nodes is computed: from what the page on measurements says, by formulas that hold together."""

from __future__ import annotations

import math
import re

import pytest

from docsite.many_nodes import Assumed, many_nodes_table, measured
from streamflow import RankOptions
from tests.docs.blocks import DOCS

MEASUREMENTS = (DOCS / "measurements.md").read_text(encoding="utf-8")
PAGE = (DOCS / "many-nodes.md").read_text(encoding="utf-8")


def cells(which: str) -> dict[str, list[str]]:
    rows = (line.strip("|").split(" | ") for line in many_nodes_table(which).splitlines()[2:])
    return {title.strip(): [cell.strip() for cell in rest] for title, *rest in rows}


def number(text: str) -> float:
    return float(re.match(r"[\d.,]+", text)[0].replace(",", ""))  # type: ignore[index]


def test_the_facts_are_those_of_the_page_on_measurements() -> None:
    facts = measured()
    assert f"| store | 1.59 s | {facts.first_step_s:.2f} s |" in MEASUREMENTS
    assert f"| store, first time (publishes) | {facts.publish_s:.1f} s |" in MEASUREMENTS
    assert f"{facts.link_bytes_per_s / 1e9:.1f} GB/s, so one step's bytes take 0.429 s" in MEASUREMENTS
    assert f"| 1024 px | direct, page-locked images | 0.428 s | {facts.compute_1024_s:.3f} s |" in MEASUREMENTS
    assert f"| 2048 px | direct, page-locked images | 0.819 s | {facts.compute_2048_s:.3f} s |" in MEASUREMENTS
    assert f"| 4 at 1024 px | {facts.four_together_per_s:.2f} |" in MEASUREMENTS


def test_what_gathering_saves_is_what_the_ranks_share() -> None:
    rows, num = cells("steps"), Assumed().num_devices
    for title in ("over each host link, for a walk", "which takes"):
        whole, part = map(number, rows[title])
        assert part == pytest.approx(whole / num, rel=0.02)
    own = number(rows["over each host link, for a walk"][1])
    taken_in = number(rows["taken in by each device from the others"][1])
    assert own + taken_in == pytest.approx(number(rows["over each host link, for a walk"][0]), rel=0.01)
    for title in ("forwards of a node, one request a rank, at best", "the same, four requests a rank"):
        assert number(rows[title][1]) >= number(rows[title][0])


def test_the_storage_is_the_limit_where_the_page_says_so() -> None:
    rows, facts, assumed = cells("start"), measured(), Assumed()
    assert len(rows) == 8
    fed = [number(cell) for cell in rows["nodes that it feeds as fast as they publish"]]
    for rate, nodes in zip(assumed.storage_bytes_per_s, fed, strict=True):
        reading_s = assumed.num_nodes * facts.model_bytes / rate
        assert (nodes < assumed.num_nodes) == (reading_s > facts.publish_s)


def test_failures_cost_as_many_ranks_as_a_job_has() -> None:
    rows = cells("failures")
    lost, stopped = (list(map(number, rows[title])) for title in ("of all capacity lost", "ranks that one stops"))
    assert lost[1] / lost[0] == pytest.approx(stopped[1] / stopped[0], rel=0.05)


def test_figures_in_the_text_follow_from_defaults_and_assumptions() -> None:
    assumed = Assumed()
    messages = 2 * (assumed.num_devices - 1) / RankOptions().heartbeat_s
    assert f"that is {messages:.0f} messages a second" in " ".join(PAGE.split())
    assert math.ceil(math.log2(assumed.num_nodes)) == 10
    assert "take ten rounds" in PAGE
    assert measured().model_bytes / assumed.network_bytes_per_s == pytest.approx(0.5, abs=0.05)
    assert "a model takes half a second" in PAGE
    assert f"{assumed.num_nodes:,} nodes of eight devices" in PAGE
