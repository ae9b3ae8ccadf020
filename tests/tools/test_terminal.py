"""How numbers are written down, and where text goes."""

from __future__ import annotations

import json

import pytest

from streamflow.stages.progress import progress, tracked
from streamflow.tools.terminal import (
    PLAIN_WIDTH,
    fact_table,
    format_bytes,
    format_seconds,
    format_share,
    plain_table,
    print_json,
    progress_bars,
    progress_console,
    result_console,
    shown_progress,
)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 bytes"), (999, "999 bytes"), (2_868_240, "2.9 MB"), (23_802_816_640, "23.8 GB")]
)
def test_bytes_are_in_powers_of_a_thousand(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.0 ms"), (0.0125, "12.5 ms"), (1.0, "1.00 s"), (83.456, "83.46 s")]
)
def test_seconds_are_in_the_unit_that_reads_better(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_share_of_nothing_is_no_number() -> None:
    assert format_share(1, 8) == "12.5 %"
    assert format_share(0, 0) == "-"


def test_results_and_progress_go_to_different_streams(capsys: pytest.CaptureFixture[str]) -> None:
    result_console().print("result")
    progress_console().print("meanwhile")
    assert capsys.readouterr() == ("result\n", "meanwhile\n")


def test_brackets_are_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    result_console().print("streamflow-offload[demo]")
    assert capsys.readouterr().out == "streamflow-offload[demo]\n"


def test_progress_is_silent_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as progress:
        progress.update(progress.add_task("work", total=2), completed=2)
    assert capsys.readouterr() == ("", "")


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1, None]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None]}


def test_tables_fit_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    table = plain_table("name", "number", title="Title")
    table.add_row("x" * 200, "1")
    facts = fact_table()
    facts.add_row("fact", "y" * 200)
    result_console().print(table, facts)
    out = capsys.readouterr().out
    assert (out.count("x"), out.count("y")) == (200, 200)
    assert max(map(len, out.splitlines())) <= PLAIN_WIDTH


def test_long_work_shows_a_bar_on_a_terminal_and_nothing_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress() as bars:
        assert list(tracked("loading blocks", [1, 2, 3])) == [1, 2, 3]
        (bar,) = bars.tasks
        assert (bar.description, bar.completed, bar.total) == ("loading blocks", 3, 3)
    assert capsys.readouterr() == ("", "")
    progress("loading blocks", 1, 3)  # nobody listens any more
    assert bar.completed == 3


def test_a_terminal_shows_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with shown_progress():
        progress("loading blocks", 2, 3)
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading blocks" in err
    assert "2/3" in err
