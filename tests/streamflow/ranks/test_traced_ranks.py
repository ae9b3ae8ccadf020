"""Ranks that trace: their traces in one say which of them the others waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from streamflow.stages.ranks.slices import plan_gather
from streamflow.tools.cli import main
from streamflow.trace.file import read_json, write_json
from streamflow.trace.schema import problems_of
from tests.ranks import Rank, run_ranks
from tests.streamflow.ranks.joint import STEPS, Member, Outcome, alone, asked_of, backend_of, live
from tests.streamflow.trace.kit import spans

#: How long rank 1 does nothing before each block.
PAUSE_S = 0.03
CHUNK_BYTES = 16384


def traced_ranks() -> list[dict[str, Any]]:
    """The traces of two ranks, of which rank 1 dawdles."""

    def work(rank: Rank) -> tuple[Outcome, dict[str, Any]]:
        async def scenario(member: Member) -> Outcome:
            member.model.pause_s = PAUSE_S * rank.rank
            return await member.ask(asked_of(rank.rank))

        path = rank.folder / f"trace-{rank.rank}.json"
        changes = {"trace_path": path, "ranks": {"gather_chunk_bytes": CHUNK_BYTES}, "max_running_requests": 1}
        outcome = live(rank, scenario, backend=backend_of(rank), **changes)
        return outcome, read_json(path)

    answers = run_ranks(2, work)
    assert [outcome.value for outcome, _ in answers] == [alone(asked_of(rank)) for rank in (0, 1)]
    return [trace for _, trace in answers]


def assert_gathers(trace: dict[str, Any], rank: int) -> None:
    """All gathers of all walks are there, after the one in which the ranks met."""
    assert problems_of(trace) == []
    (engine,) = trace["streamflow"]["engines"]
    assert (engine["rank"], trace["streamflow"]["ranks"]["size"]) == (rank, 2)
    gathers = [gather["args"] for gather in spans(trace, "gather")]
    assert [gather["number"] for gather in gathers] == list(range(len(gathers)))
    assert {gather["waited_us"] for gather in gathers} == {gather["last_rank"] for gather in gathers} == {None}
    own = {(block["block"], f["args"]["fetch"]) for f in spans(trace, "slot") for block in engine["blocks"]}
    assert {(gather["block"], gather["fetch"]) for gather in gathers[1:]} <= own
    chunks = {b["block"]: len(plan_gather(b["nbytes"], 2, CHUNK_BYTES).chunks) for b in engine["blocks"]}
    assert len(gathers) == 1 + STEPS * sum(chunks.values())
    assert max(chunks.values()) > 1
    flows = {event["id"] for event in trace["traceEvents"] if event["ph"] == "t" and event["tid"] == _tid(trace)}
    assert flows == {gather["fetch"] for gather in gathers[1:]}


def _tid(trace: dict[str, Any]) -> int:
    (tid,) = {gather["tid"] for gather in spans(trace, "gather")}
    return int(tid)


def report_on(*arguments: object) -> Any:
    result = CliRunner().invoke(main, ["trace", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_merged_report_names_the_rank_that_dawdles(tmp_path: Path) -> None:
    paths = [tmp_path / "trace-0.json", tmp_path / "trace-1.json"]
    for rank, trace in enumerate(traced_ranks()):
        assert_gathers(trace, rank)
        write_json(paths[rank], trace)
    (alone_0,) = report_on("report", paths[0])["components"]
    assert (alone_0["bound_by"], alone_0["slowest_rank"]) == ("gather", None)
    assert "streamflow trace merge" in alone_0["advice"][0]["text"]
    merged = tmp_path / "merged.json"
    report_on("merge", *paths, "--out", merged)
    assert problems_of(read_json(merged)) == []
    fast, slow = report_on("report", merged)["components"]
    assert (fast["title"], slow["title"]) == ("Denoiser, rank 0", "Denoiser, rank 1")
    assert (fast["bound_by"], fast["slowest_rank"]) == ("gather", 1)
    assert "look at rank 1" in fast["advice"][0]["text"]
    assert fast["waited_by_rank"]["1"] > 0.5 * STEPS * 5 * PAUSE_S
    assert slow["bound_by"] != "gather"
    assert slow["seconds_by_cause"]["gather"] < 0.5 * fast["seconds_by_cause"]["gather"]
