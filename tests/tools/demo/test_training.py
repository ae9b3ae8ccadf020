"""The training and its program."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from streamflow.tools.demo.checkpoint import demo_checkpoint_dir, load_demo_model, read_description
from streamflow.tools.demo.digits import DigitSplit, load_split
from streamflow.tools.demo.errors import DemoValueError
from streamflow.tools.demo.model import DigitTransformer, DigitTransformerConfig
from streamflow.tools.demo.train import main
from streamflow.tools.demo.training import TrainedModel, TrainingOptions, flow_loss, learning_rate_factor, train

SHORT = TrainingOptions(num_steps=60, batch_size=32, ema_decay=0.8)


def weights_of(trained: TrainedModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trained.model.parameters()])


def held_out_loss(model: DigitTransformer, split: DigitSplit) -> float:
    with torch.no_grad():
        part = split.held_out
        return flow_loss(model, part.images, part.labels, torch.Generator().manual_seed(0)).item()


def test_a_short_training_lowers_the_loss_on_digits_it_has_not_seen(
    split: DigitSplit, small_config: DigitTransformerConfig
) -> None:
    trained = train(split.generator, SHORT, small_config)
    assert len(trained.losses) == 60
    assert sum(trained.losses[-10:]) < 0.8 * sum(trained.losses[:10])
    assert held_out_loss(trained.model, split) < 0.8 * held_out_loss(DigitTransformer(small_config), split)
    assert not trained.model.training


def test_training_repeats_for_its_seed_whatever_the_global_random_state(
    split: DigitSplit, small_config: DigitTransformerConfig
) -> None:
    options = attrs.evolve(SHORT, num_steps=8)
    first = train(split.generator, options, small_config)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again = train(split.generator, options, small_config)
    assert torch.equal(torch.get_rng_state(), before)
    assert again.losses == first.losses
    assert torch.equal(weights_of(again), weights_of(first))
    other = train(split.generator, attrs.evolve(options, seed=1), small_config)
    assert not torch.equal(weights_of(other), weights_of(first))


def test_the_returned_weights_are_an_average(split: DigitSplit, small_config: DigitTransformerConfig) -> None:
    options = attrs.evolve(SHORT, num_steps=8)
    averaged = train(split.generator, options, small_config)
    last = train(split.generator, attrs.evolve(options, ema_decay=0), small_config)
    assert last.losses == averaged.losses
    assert not torch.equal(weights_of(last), weights_of(averaged))


def test_progress_is_told_after_each_step(split: DigitSplit, small_config: DigitTransformerConfig) -> None:
    seen: list[tuple[int, float]] = []
    options = attrs.evolve(SHORT, num_steps=3)
    trained = train(split.generator, options, small_config, on_step=lambda step, loss: seen.append((step, loss)))
    assert seen == list(enumerate(trained.losses, start=1))


@pytest.mark.parametrize("num_steps", [1, 2, 9, 10, 11, 1500])
def test_the_learning_rate_rises_to_its_peak_and_falls_towards_zero(num_steps: int) -> None:
    factors = [learning_rate_factor(step, num_steps) for step in range(num_steps)]
    peak = factors.index(1.0)
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors)
    assert num_steps < 1000 or factors[-1] < 1e-5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_steps", 0),
        ("batch_size", -1),
        ("peak_learning_rate", -0.1),
        ("peak_learning_rate", math.nan),
        ("weight_decay", math.inf),
        ("ema_decay", 1.0),
        ("null_class_rate", -0.1),
    ],
)
def test_options_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(DemoValueError, match=name):
        TrainingOptions(**{name: value})  # type: ignore[arg-type]


def test_the_shipped_checkpoint_was_trained_with_the_default_options() -> None:
    training = read_description(demo_checkpoint_dir()).training
    assert training | attrs.asdict(TrainingOptions()) == training


@pytest.mark.slow
def test_the_program_writes_a_checkpoint_and_a_picture(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--seed", "4", "--split-seed", "2", "--threads", "1"]
    result = CliRunner().invoke(main, [*arguments, "--steps", "2", "--batch-size", "3", "--learning-rate", "0.001"])
    assert result.exit_code == 0, result.output
    assert "of 100" in result.output
    model = load_demo_model(tmp_path)
    training = read_description(tmp_path).training
    options = TrainingOptions(seed=4, num_steps=2, batch_size=3, peak_learning_rate=0.001)
    assert training | attrs.asdict(options) == training
    assert training["seen_samples_sha256"] == load_split(2).generator.digest
    trained = train(load_split(2).generator, options)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.model.parameters(), strict=True))
    with Image.open(tmp_path / "digits.png") as picture:
        assert picture.size[0] == picture.size[1] > 640


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--threads", "0"], ["--learning-rate", "-1"], ["--speed", "3"]]
)
def test_the_program_refuses_bad_options_and_writes_nothing(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()
