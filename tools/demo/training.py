"""Trains the digit model: rectified flow, seeded, with a moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from streamflow.tools.demo.digits import DigitSet
from streamflow.tools.demo.errors import DemoValueError
from streamflow.tools.demo.model import DigitTransformer, DigitTransformerConfig

#: The part of the steps in which the learning rate rises.
WARMUP_FRACTION = 0.1


@attrs.frozen(kw_only=True)
class TrainingOptions:
    """How to train; the defaults are those of the checkpoint that ships with the package.

    :raises DemoValueError: if a number is out of range.
    """

    seed: int = 0
    #: Optimiser steps.
    num_steps: int = 1500
    #: Digits per step, drawn with replacement.
    batch_size: int = 128
    #: Reached after the first ``WARMUP_FRACTION`` of the steps, then lowered towards zero along a cosine.
    peak_learning_rate: float = 2e-3
    weight_decay: float = 0.01
    #: The averaged weights keep this much of themselves at every step.
    ema_decay: float = 0.995
    #: How often a label is replaced by the null class, which teaches the model what guidance compares with.
    null_class_rate: float = 0.1

    def __attrs_post_init__(self) -> None:
        for name in ("num_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise DemoValueError(name, getattr(self, name), "at least 1")
        for name in ("peak_learning_rate", "weight_decay"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise DemoValueError(name, getattr(self, name), "a finite number of at least 0")
        for name in ("ema_decay", "null_class_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise DemoValueError(name, getattr(self, name), "at least 0 and below 1")


@attrs.frozen(eq=False)
class TrainedModel:
    """The averaged model, in eval mode, and the loss of every step."""

    model: DigitTransformer
    losses: list[float]


def train(
    digits: DigitSet,
    options: TrainingOptions,
    config: DigitTransformerConfig | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> TrainedModel:
    """Trains on the CPU; the same digits, options and number of torch threads give the same weights.

    :param digits: what to learn.
    :param config: the model's sizes; None for the defaults.
    :param on_step: called after each step with the steps done and that step's loss; None to call nothing.
    """
    generator = torch.Generator().manual_seed(options.seed)
    model = _new_model(config or DigitTransformerConfig(), options.seed)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(options.ema_decay))
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.peak_learning_rate, weight_decay=options.weight_decay)
    schedule = LambdaLR(optimiser, lambda step: learning_rate_factor(step, options.num_steps))
    losses: list[float] = []
    for step in range(options.num_steps):
        optimiser.zero_grad()
        loss = flow_loss(model, *_draw_batch(digits, options, generator, model.config.null_class), generator)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        averaged.update_parameters(model)
        losses.append(loss.item())
        if on_step is not None:
            on_step(step + 1, losses[-1])
    return TrainedModel(cast(DigitTransformer, averaged.module.eval()), losses)


def flow_loss(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """The squared error of the velocity at one random time per image, more of them in the middle than at the ends."""
    noise = torch.randn(images.shape, generator=generator)
    times = torch.randn(len(images), generator=generator).sigmoid()
    mixed = torch.lerp(images, noise, times[:, None, None, None])
    return functional.mse_loss(model(mixed, times, labels), noise - images)


def learning_rate_factor(step: int, num_steps: int) -> float:
    """The part of the peak rate that step ``step``, from 0, uses: up in a line, then down along half a cosine."""
    num_warmup = max(1, round(WARMUP_FRACTION * num_steps))
    if step < num_warmup:
        return (step + 1) / num_warmup
    return (1 + math.cos(math.pi * (step - num_warmup) / max(1, num_steps - num_warmup))) / 2


def _new_model(config: DigitTransformerConfig, seed: int) -> DigitTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DigitTransformer(config).train()


def _draw_batch(
    digits: DigitSet, options: TrainingOptions, generator: torch.Generator, null_class: int
) -> tuple[Tensor, Tensor]:
    rows = torch.randint(len(digits.labels), (options.batch_size,), generator=generator)
    is_null = torch.rand(options.batch_size, generator=generator) < options.null_class_rate
    return digits.images[rows], digits.labels[rows].masked_fill(is_null, null_class)
