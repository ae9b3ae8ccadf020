"""``streamflow demo``: a small diffusion transformer draws digits, resident and streamed; the bytes must be equal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import click
import torch
from rich.progress import Progress, TaskID
from torch import Tensor

from streamflow.config import OffloadConfig
from streamflow.tools.demo.checkpoint import load_demo_model
from streamflow.tools.demo.errors import ClassifierUnavailableError
from streamflow.tools.demo.generation import (
    Drawing,
    DrawingOptions,
    OnStep,
    StreamedDrawing,
    draw_resident,
    draw_streamed,
)
from streamflow.tools.demo.model import DigitTransformer
from streamflow.tools.demo.picture import draw_grid
from streamflow.tools.demo.reading import Reading, read_digits
from streamflow.tools.demo.report import DemoReport
from streamflow.tools.demo.sampling import DEFAULT_NUM_STEPS
from streamflow.tools.terminal import print_json, result_console, shown_progress

PICTURE_NAME = "digits.png"
EVENT_LOG_NAME = "events.jsonl"
TRACE_NAME = "trace.json"


def default_threads() -> int:
    """Torch's own number of compute threads, but a core is left to the thread that copies blocks."""
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - 1))


@click.command()
@click.option("--seed", default=0, show_default=True, help="Of the noise that the digits are drawn from.")
@click.option("--window", "window_blocks", default=2, show_default=True, help="Blocks that the device holds at a time.")
@click.option("--device", help="cpu, cuda or cuda:N.  [default: cuda where there is one]")
@click.option("--steps", "num_steps", default=DEFAULT_NUM_STEPS, show_default=True, help="Calls of the model.")
@click.option(
    "--digits", "digits_per_class", type=click.IntRange(1), default=10, show_default=True, help="Drawn of each class."
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Compute threads of both runs.  [default: as many as torch takes, a core left free]",
)
@click.option(
    "--out",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default="demo-out",
    show_default=True,
    help=f"Folder for {PICTURE_NAME} and {EVENT_LOG_NAME}.",
)
@click.option("--trace", "with_trace", is_flag=True, help=f"Also write {TRACE_NAME}, for `streamflow trace`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def demo(
    seed: int,
    window_blocks: int,
    device: str | None,
    num_steps: int,
    digits_per_class: int,
    threads: int | None,
    directory: Path,
    with_trace: bool,
    as_json: bool,
) -> None:
    """Draw digits with a resident and a streamed model, and compare.

    A small diffusion transformer draws the same handwritten digits twice: once whole on the device, once with its
    blocks streaming through a window. The exit status is 0 only if both drew the same bytes and blocks were streamed.
    """
    trace_path = directory / TRACE_NAME if with_trace else None
    config = OffloadConfig(window_blocks=window_blocks, device=device, trace_path=trace_path)
    options = DrawingOptions(seed=seed, num_steps=num_steps, digits_per_class=digits_per_class)
    model = load_demo_model()
    directory.mkdir(parents=True, exist_ok=True)
    picture, event_log = directory / PICTURE_NAME, directory / EVENT_LOG_NAME
    with _torch_threads(threads or default_threads()):
        resident, streamed = anyio.run(_draw_both, model, options, config, event_log)
    draw_grid(streamed.drawing.images, num_columns=digits_per_class).save(picture)
    reading = _read(streamed.drawing.images, options.labels(model))
    report = DemoReport(
        options=options,
        config=config,
        resident=resident,
        streamed=streamed,
        reading=reading,
        picture=picture,
        event_log=event_log,
    )
    if as_json:
        print_json(report.as_json())
    else:
        report.print(result_console())
    if report.problems:
        raise click.exceptions.Exit(1)


async def _draw_both(
    model: DigitTransformer, options: DrawingOptions, config: OffloadConfig, event_log: Path
) -> tuple[Drawing, StreamedDrawing]:
    with shown_progress() as progress:
        resident_bar, streamed_bar = (
            progress.add_task(name, total=options.num_steps, start=False) for name in ("resident", "streamed")
        )
        resident = await draw_resident(model, options, config, _starting(progress, resident_bar))
        streamed = await draw_streamed(model, options, config, _starting(progress, streamed_bar), event_log)
    return resident, streamed


def _starting(progress: Progress, bar: TaskID) -> OnStep:
    """Starts the bar's clock, and gives what moves it."""
    progress.start_task(bar)
    return lambda num_done, num_steps: progress.update(bar, completed=num_done, total=num_steps)


def _read(images: Tensor, labels: Sequence[int]) -> Reading | str:
    """How well the digits can be read; why nobody can tell, where the classifier's library is missing."""
    try:
        return read_digits(images, labels)
    except ClassifierUnavailableError as failure:
        return str(failure)


@contextmanager
def _torch_threads(num_threads: int) -> Iterator[None]:
    """Within it torch computes with ``num_threads`` threads; afterwards with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
