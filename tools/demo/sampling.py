"""Draws digits: a few Euler steps along the learnt flow, from noise to a digit, with classifier-free guidance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from streamflow.tools.demo.errors import DemoValueError
from streamflow.tools.demo.model import DigitTransformer

DEFAULT_NUM_STEPS = 30
DEFAULT_GUIDANCE = 2.0


def sample(
    model: DigitTransformer,
    labels: Sequence[int],
    *,
    seed: int,
    num_steps: int = DEFAULT_NUM_STEPS,
    guidance: float = DEFAULT_GUIDANCE,
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor:
    """One digit per label; the same weights, labels, seed and options give the same digits.

    The noise is drawn on the CPU from a generator of its own, so that the seed means the same on every device and the
    caller's random state stays as it was.

    :param model: runs where its parameters say they are, in their dtype.
    :param labels: the digits to draw, each from 0 to ``num_classes - 1``.
    :param seed: seeds the noise.
    :param num_steps: model calls.
    :param guidance: how far to go from "any digit" past "this digit". 1 is the plain class-conditional model and
        costs half, because a call then needs no null-class half of its batch.
    :param on_step: called after each step with the steps done and ``num_steps``; None to call nothing.
    :returns: float32[B, 1, S, S] on the CPU, in [-1, 1]; owned by the caller.
    :raises DemoValueError: if there is no label, a label is no class, or an option is out of range.
    """
    _check(model, labels, num_steps, guidance)
    parameter = model.position
    y = torch.tensor(list(labels), device=parameter.device)
    x = _draw_noise(model, len(labels), seed).to(parameter)
    with torch.no_grad():
        for step in range(num_steps):
            x = x - _velocity(model, x, 1 - step / num_steps, y, guidance) / num_steps
            if on_step is not None:
                on_step(step + 1, num_steps)
    return x.float().clamp(-1, 1).cpu()


def _velocity(model: DigitTransformer, x: Tensor, t: float, y: Tensor, guidance: float) -> Tensor:
    times = torch.full((len(x),), t, device=x.device, dtype=torch.float32)
    if guidance == 1:
        plain: Tensor = model(x, times, y)
        return plain
    null = torch.full_like(y, model.config.null_class)
    guided, unguided = model(torch.cat([x, x]), torch.cat([times, times]), torch.cat([y, null])).chunk(2)
    return torch.lerp(unguided, guided, guidance)


def _draw_noise(model: DigitTransformer, num_images: int, seed: int) -> Tensor:
    size = model.config.image_size
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(num_images, 1, size, size, generator=generator)


def _check(model: DigitTransformer, labels: Sequence[int], num_steps: int, guidance: float) -> None:
    num_classes = model.config.num_classes
    if not labels:
        raise DemoValueError("labels", labels, "at least one digit")
    for label in labels:
        if not 0 <= label < num_classes:
            raise DemoValueError("label", label, f"from 0 to {num_classes - 1}")
    if num_steps < 1:
        raise DemoValueError("num_steps", num_steps, "at least 1")
    if not (math.isfinite(guidance) and guidance >= 0):
        raise DemoValueError("guidance", guidance, "a finite number of at least 0")
