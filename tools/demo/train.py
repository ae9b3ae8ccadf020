"""Trains the demo's model: ``python -m streamflow.tools.demo.train --out DIR --seed 0``; minutes on two cores.

Who sees which of the 1,797 digits (``streamflow.tools.demo.digits`` draws the parts, seeded, class by class):

* one half trains the generator, and nothing else;
* two thirds of the other half train the classifier, which the generator never sees;
* the last third is held out from both, and says how good the classifier is on real digits.

At the end the program draws ten digits of each class with the averaged weights and says how many the classifier reads
as the class that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from streamflow.tools.demo.checkpoint import WEIGHTS_NAME, save_checkpoint
from streamflow.tools.demo.classifier import fit_classifier
from streamflow.tools.demo.digits import SPLIT_SEED, DigitSplit, load_split
from streamflow.tools.demo.errors import DemoValueError
from streamflow.tools.demo.model import DigitTransformer
from streamflow.tools.demo.picture import draw_grid
from streamflow.tools.demo.sampling import sample
from streamflow.tools.demo.training import TrainedModel, TrainingOptions, train

DEFAULTS = TrainingOptions()
DIGITS_PER_CLASS = 10
PICTURE_NAME = "digits.png"


@click.command()
@click.option(
    "--out", "directory", type=click.Path(file_okay=False, path_type=Path), required=True, help="Output folder."
)
@click.option(
    "--seed", default=DEFAULTS.seed, show_default=True, help="Of the first weights, the batches and the noise."
)
@click.option("--split-seed", default=SPLIT_SEED, show_default=True, help="Of who sees which digits.")
@click.option("--steps", "num_steps", default=DEFAULTS.num_steps, show_default=True, help="Optimiser steps.")
@click.option("--batch-size", default=DEFAULTS.batch_size, show_default=True, help="Digits per step.")
@click.option("--learning-rate", default=DEFAULTS.peak_learning_rate, show_default=True, help="At its peak.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="For torch's arithmetic.")
def main(
    directory: Path, seed: int, split_seed: int, num_steps: int, batch_size: int, learning_rate: float, threads: int
) -> None:
    """Train the digit model and write its checkpoint, and a picture of what it draws, into the output folder."""
    try:
        options = TrainingOptions(
            seed=seed, num_steps=num_steps, batch_size=batch_size, peak_learning_rate=learning_rate
        )
    except DemoValueError as error:
        raise click.BadParameter(str(error)) from error
    console = Console()
    split = load_split(split_seed)
    with torch_threads(threads):
        trained = _train_with_progress(split, options, console)
        save_checkpoint(trained.model, _describe(options, split, split_seed, threads), directory)
        _report(trained.model, split, directory, console)


def _train_with_progress(split: DigitSplit, options: TrainingOptions, console: Console) -> TrainedModel:
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=options.num_steps, loss=float("nan"))
        return train(
            split.generator, options, on_step=lambda step, loss: progress.update(task, completed=step, loss=loss)
        )


def _describe(options: TrainingOptions, split: DigitSplit, split_seed: int, threads: int) -> dict[str, object]:
    """What a reader of the checkpoint needs to train it again, and to know which digits it has seen."""
    return {
        **attrs.asdict(options),
        "threads": threads,
        "torch": str(torch.__version__),
        "split_seed": split_seed,
        "seen_samples_sha256": split.generator.digest,
    }


def _report(model: DigitTransformer, split: DigitSplit, directory: Path, console: Console) -> None:
    labels = [label for label in range(model.config.num_classes) for _ in range(DIGITS_PER_CLASS)]
    images = sample(model, labels, seed=0)
    draw_grid(images, num_columns=DIGITS_PER_CLASS).save(directory / PICTURE_NAME)
    classifier = fit_classifier(split)
    console.print(f"real held-out digits read right: {classifier.measure_real(split.held_out)}")
    console.print(f"generated digits read as asked:  {classifier.measure(images, labels)}")
    console.print(f"written: {directory / WEIGHTS_NAME}, {(directory / WEIGHTS_NAME).stat().st_size:,} bytes")


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Within it torch computes with ``num_threads`` threads; afterwards with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    main()
