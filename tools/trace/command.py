"""``streamflow trace``: its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.text import Text

from streamflow.tools.terminal import format_seconds, plain_table, print_json, result_console
from streamflow.tools.trace.analysis import analyse
from streamflow.tools.trace.comparison import ComponentComparison, Fact, compare, differences
from streamflow.tools.trace.errors import PlottingUnavailableError
from streamflow.tools.trace.merging import with_profile
from streamflow.tools.trace.page import page
from streamflow.tools.trace.picture import draw
from streamflow.tools.trace.rank_merging import merge_ranks
from streamflow.tools.trace.reading import checked, read_trace
from streamflow.tools.trace.report import CAUSE_NAMES, as_plain, print_reports
from streamflow.trace.file import read_json, write_json

TRACE_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)


def json_option(command: Any) -> Any:
    """The option that every program has."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(command)


@click.command("report")
@click.argument("file", type=TRACE_FILE)
@json_option
def report(file: Path, *, as_json: bool) -> None:
    """Say where the time of each walk went, and what would recover it."""
    trace = read_trace(file)
    reports, metadata = analyse(trace), trace["streamflow"]
    if as_json:
        print_json(as_plain(reports, metadata))
    else:
        print_reports(reports, metadata, result_console())


@click.command("plot")
@click.argument("file", type=TRACE_FILE)
@click.option("--html", type=NEW_FILE, help="The page.  [default: beside FILE]")
@click.option("--png", type=NEW_FILE, help="The picture.  [default: beside FILE, if matplotlib is there]")
@click.option("--between", type=float, nargs=2, help="Seconds between which the picture shows the trace.")
@json_option
def plot(
    file: Path, html: Path | None, png: Path | None, between: tuple[float, float] | None, *, as_json: bool
) -> None:
    """Draw a trace: a page to zoom and search in, and a picture.

    The page needs no network and no other file.
    """
    trace = read_trace(file)
    written = {"html": html or beside(file, ".html")}
    written["html"].write_text(page(trace, file.name), encoding="utf-8")
    try:
        draw(trace, png or beside(file, ".png"), file.name, between)
        written["png"] = png or beside(file, ".png")
    except PlottingUnavailableError as failure:
        if png is not None:
            raise
        click.echo(f"streamflow: {failure}", err=True)
    if as_json:
        print_json({kind: str(path) for kind, path in written.items()})
    else:
        for path in written.values():
            click.echo(path)


@click.command("diff")
@click.argument("before", type=TRACE_FILE)
@click.argument("after", type=TRACE_FILE)
@json_option
def diff(before: Path, after: Path, *, as_json: bool) -> None:
    """Say what changed from one trace to another, the most first."""
    one, other = read_trace(before), read_trace(after)
    components = compare(analyse(one), analyse(other))
    settings = differences(one["streamflow"], other["streamflow"])
    if as_json:
        print_json(
            {
                "components": [_plain(component) for component in components],
                "settings": [attrs.asdict(fact) for fact in settings],
            }
        )
    else:
        _print_diff(components, settings, result_console())


@click.command("merge")
@click.argument("file", type=TRACE_FILE)
@click.argument("others", type=TRACE_FILE, nargs=-1, required=True)
@click.option("--out", type=NEW_FILE, required=True, help="The merged trace.")
@json_option
def merge(file: Path, others: tuple[Path, ...], out: Path, *, as_json: bool) -> None:
    """Put traces of one run onto one time axis: FILE, those of other ranks, and torch.profiler's.

    With those of all ranks, it is known which rank each gather waited for. All viewers read the result.
    """
    ranks, profiles = {str(file): read_trace(file)}, {}
    for path in others:
        value = read_json(path)
        if "streamflow" in value:
            ranks[str(path)] = checked(value, path)
        else:
            profiles[str(path)] = value
    whole = merge_ranks(ranks) if len(ranks) > 1 else ranks[str(file)]
    for name, profile in profiles.items():
        whole = with_profile(whole, profile, name)
    write_json(out, whole)
    if as_json:
        print_json({"out": str(out), "num_events": len(whole["traceEvents"])})
    else:
        click.echo(out)


def beside(file: Path, suffix: str) -> Path:
    """A name for what is drawn of ``file``: in its folder, with another ending."""
    stem = file.name.removesuffix(".gz").removesuffix(".json")
    return file.with_name(stem + suffix)


def _plain(component: ComponentComparison) -> dict[str, Any]:
    values = attrs.asdict(component)
    values["changes"] = [{**attrs.asdict(change), "delta_s": change.delta_s} for change in component.changes]
    return values


def _print_diff(components: list[ComponentComparison], settings: list[Fact], console: Console) -> None:
    if not components:
        console.print("No component has walks in both traces.")
    for component in components:
        change = component.walk_after_s / component.walk_before_s - 1
        times = f"{format_seconds(component.walk_before_s)} -> {format_seconds(component.walk_after_s)}"
        console.print(Text(f"{component.name}: a walk {times} ({change:+.1%})", style="bold"))
        if component.bound_before != component.bound_after:
            console.print(
                f"bound by {CAUSE_NAMES[component.bound_before]} before, by {CAUSE_NAMES[component.bound_after]} after"
            )
        table = plain_table("of a walk", "before", "after", "change")
        for each in component.changes:
            sign = "+" if each.delta_s > 0 else "-"
            delta = sign + format_seconds(abs(each.delta_s))
            table.add_row(each.what, format_seconds(each.before_s), format_seconds(each.after_s), delta)
        console.print(table)
        _print_facts("also", component.facts, console)
    _print_facts("settings", settings, console)


def _print_facts(title: str, facts: list[Fact], console: Console) -> None:
    if facts:
        table = plain_table(title, "before", "after")
        for fact in facts:
            table.add_row(fact.what, _short(fact.before), _short(fact.after))
        console.print(table)


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
