"""What the programs write with: consoles, progress bars, tables, and the one way to write down bytes and seconds."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import rich.box
import rich.filesize
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from streamflow.stages.progress import progress_to

#: Columns of text that goes to a file or a pipe, which tell no width.
PLAIN_WIDTH = 140


def result_console() -> Console:
    """For results: standard output."""
    return _console(sys.stdout)


def progress_console() -> Console:
    """For what happens meanwhile: standard error, so that results can be piped."""
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    # no markup: texts are paths and messages, where [brackets] are brackets
    return Console(file=stream, markup=False, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)


def progress_bars() -> Progress:
    """Bars on standard error while the context is open; nothing at all where that is no terminal."""
    console = progress_console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Bars as of `progress_bars`, and one more for each kind of long work that streamflow begins meanwhile."""
    with progress_bars() as bars:
        shown: dict[str, TaskID] = {}
        lock = threading.Lock()

        def show(what: str, done: int, total: int) -> None:
            with lock:
                if what not in shown:
                    shown[what] = bars.add_task(what)
            bars.update(shown[what], completed=done, total=total)

        with progress_to(show):
            yield bars


def print_json(value: dict[str, Any]) -> None:
    """``value`` as one JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def plain_table(*columns: str, num_left: int = 1, title: str | None = None) -> Table:
    """A table without a frame; the first ``num_left`` columns are texts, the others numbers."""
    table = Table(box=rich.box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_left else "right", overflow="fold")
    return table


def fact_table() -> Table:
    """A table of names and what they are, without a head."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def format_bytes(nbytes: int) -> str:
    """Bytes in powers of 1,000: ``2.9 MB``."""
    return rich.filesize.decimal(nbytes)


def format_seconds(seconds: float) -> str:
    """Seconds, or milliseconds where that reads better: ``1.25 s``, ``12.5 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def format_share(part: float, whole: float) -> str:
    """``part`` in percent of ``whole``, which may be 0: ``16.2 %``."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


@contextmanager
def byte_progress(task: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on standard error while it is open, moved by what this yields: a function of done and total bytes,
    to be called from the loop. Nothing is shown where that is no terminal.
    """
    console = progress_console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task(task, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
