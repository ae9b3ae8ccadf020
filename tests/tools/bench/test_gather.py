"""``streamflow bench gather``: ranks measure the same things, prove the bytes, and say why they could not go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import attrs
import pytest
from click.testing import CliRunner, Result

from streamflow.tools.bench import gather, gather_rank, rank_processes
from streamflow.tools.bench.children import ChildAnswer
from streamflow.tools.bench.gather_rank import GatherQuestion, measure_rank
from streamflow.tools.bench.rank_processes import RankPlace
from streamflow.tools.cli import main
from tests.ranks import Rank, run_ranks

MIB = 1 << 20
SMALL = GatherQuestion("cpu", MIB, [64 << 10, MIB], num_fetches=3, step_limit_s=20)


def measured_on(rank: Rank, question: GatherQuestion = SMALL) -> dict[str, Any]:
    """The report of one forked rank."""
    place = RankPlace(rank.rank, rank.size, rank.rank, store=str(rank.folder / "store"))
    return anyio.run(measure_rank, question, place)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_on_readings_with_right_bytes(size: int) -> None:
    reports = run_ranks(size, measured_on)
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert (report["ranks"], report["nbytes"], report["problem"]) == (size, MIB, None)
    assert [reading["chunk_bytes"] for reading in report["readings"]] == [64 << 10, MIB]
    for reading in report["readings"]:
        assert reading["equal"]
        assert reading["ratio_to_whole"] == reading["both_bytes_per_s"] / report["whole_bytes_per_s"]
        assert min(reading["link_bytes_per_s"], reading["gather_bytes_per_s"]) > 0
        assert reading["slice_bytes"] <= reading["chunk_bytes"] // size
    assert report["gather_latency_s"] > 0


def test_wrong_bytes_are_noticed_and_told_to_all() -> None:
    def work(rank: Rank) -> dict[str, Any]:
        if rank.rank == 1:
            fetches = gather_rank._fetches

            def spoiled(bench: Any, transfer: Any) -> Callable[[int], Any]:
                if transfer.name == "gathered":
                    bench.memory[-1] ^= 1  # for the first chunk size only, the last rank brings other bytes
                return fetches(bench, transfer)

            gather_rank._fetches = spoiled
        return measured_on(rank)

    for report in run_ranks(2, work):
        assert [reading["equal"] for reading in report["readings"]] == [False, True]


def test_a_rank_that_fails_ends_the_benchmark_of_all_in_time() -> None:
    def work(rank: Rank) -> dict[str, Any]:
        if rank.rank == 1:

            def fail(bench: object) -> float:
                raise RuntimeError("the test wants it so")

            gather_rank._small_gather_s = fail
        return measured_on(rank, attrs.evolve(SMALL, step_limit_s=1.0))

    first, second = run_ranks(2, work, patience_s=20)
    assert second["problem"] == "the test wants it so"
    assert first["problem"]
    assert first["readings"] == second["readings"] == []
    assert first["whole_bytes_per_s"] > 0


# The command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "gather", "--device", "cpu", *arguments])


@pytest.mark.slow
def test_the_command_starts_ranks_of_its_own() -> None:
    result = run("--ranks", "2", "--size-mib", "1", "--chunk-mib", "1", "--fetches", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["ranks"], len(report["readings"]), report["problem"]) == (2, 1, None)
    assert report["readings"][0]["equal"]


READING = {
    "chunk_bytes": 4 * MIB,
    "slice_bytes": 2 * MIB,
    "link_bytes_per_s": 50e9,
    "gather_bytes_per_s": 300e9,
    "both_bytes_per_s": 99e9,
    "ratio_to_whole": 1.98,
    "equal": True,
}
REPORT = {
    "benchmark": "gather",
    "ranks": 2,
    "nbytes": 512 * MIB,
    "whole_bytes_per_s": 50e9,
    "gather_latency_s": 30e-6,
    "readings": [READING],
    "problem": None,
    "environment": {"device": "cuda:0"},
}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[int, ChildAnswer]:
    """What the ranks answer that the command starts."""
    scripted = {rank: ChildAnswer(REPORT, None) for rank in range(4)}

    async def ask(module: str, asked: dict[str, Any], timeout_s: float) -> ChildAnswer:
        assert module == "streamflow.tools.bench.gather_rank"
        return scripted[asked["place"]["rank"]]

    monkeypatch.setattr(rank_processes, "ask_child", ask)
    return scripted


def test_readings_as_a_table(answers: dict[int, ChildAnswer]) -> None:
    result = run()
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "2 ranks, 512 MiB, cuda:0" in text
    assert "4 MiB 50.00 GB/s 300.00 GB/s 99.00 GB/s 1.980 yes" in text
    assert "whole images: 50.00 GB/s; a small gather: 0.0 ms" in text


def test_wrong_bytes_are_an_error(answers: dict[int, ChildAnswer]) -> None:
    answers[0] = ChildAnswer({**REPORT, "readings": [{**READING, "equal": False}]}, None)
    result = run()
    assert (result.exit_code, " NO" in result.stdout) == (1, True)


def test_a_rank_without_an_answer_is_named(answers: dict[int, ChildAnswer]) -> None:
    answers[1] = ChildAnswer(None, "it was not done after 240 s")
    result = run("--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problem"] == "rank 1: it was not done after 240 s"
    answers[0] = ChildAnswer(None, "it ended without an answer, with status -6")
    result = run()
    assert result.exit_code == 1
    assert "not done: rank 0: it ended without an answer, with status -6; rank 1:" in " ".join(result.stdout.split())


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets the environment of a rank that torchrun started, which measures nothing."""

    def set_place(rank: int, size: int) -> None:
        for name, value in {
            "TORCHELASTIC_RUN_ID": "none",
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
        }.items():
            monkeypatch.setenv(name, value)

    async def measure(size: int, question: GatherQuestion, place: RankPlace) -> dict[str, Any]:
        return {**REPORT, "ranks": place.size}

    monkeypatch.setattr(gather, "measure_rank", partial(measure, 0))
    return set_place


def test_under_torchrun_the_first_rank_prints(torchrun: Callable[[int, int], None]) -> None:
    torchrun(0, 4)
    assert json.loads(run("--json").stdout)["ranks"] == 4
    torchrun(3, 4)
    result = run("--json")
    assert (result.exit_code, result.stdout) == (0, "")


def test_under_torchrun_ranks_are_not_asked_for_again(torchrun: Callable[[int, int], None]) -> None:
    torchrun(0, 4)
    assert run("--ranks", "4").exit_code == 0
    result = run("--ranks", "2")
    assert result.exit_code == 2
    assert "beside torchrun, which started 4 ranks; leave --ranks out" in result.stderr
