"""A family of pipelines: how a small one is built, and what it is asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

PROMPT = "a red fox"
NUM_STEPS = 2


@attrs.frozen(eq=False)
class Family:
    """One family, in a small configuration of its own classes.

    ``make`` gives the components of ``pipeline_class``, with random weights. ``inputs`` are the arguments of a call.
    ``streamed`` are the components whose blocks stream, with the number of their blocks; ``staged`` those that move
    as a whole.
    """

    name: str
    pipeline_class: Any
    make: Callable[[], dict[str, Any]]
    inputs: Mapping[str, Any]
    streamed: Mapping[str, int]
    staged: tuple[str, ...]
    output: str = "images"

    def __str__(self) -> str:
        return self.name

    def build(self) -> Any:
        """The pipeline with the same random weights every time, ready for inference."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            pipeline = self.pipeline_class(**self.make())
        for component in modules_of(pipeline).values():
            component.eval().requires_grad_(False)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def generate(self, pipeline: Any, seed: int = 0, **more: Any) -> torch.Tensor:
        """The decoded output of one call."""
        outputs: torch.Tensor = getattr(pipeline(**{**self.arguments(seed), **more}, output_type="pt"), self.output)
        return outputs

    def latents(self, pipeline: Any, seed: int = 0) -> torch.Tensor:
        """The latents of the same call, before the VAE decodes them."""
        outputs: torch.Tensor = getattr(pipeline(**self.arguments(seed), output_type="latent"), self.output)
        return outputs

    def arguments(self, seed: int) -> dict[str, Any]:
        """What the pipeline is called with, but for the type of the output."""
        common = {"prompt": PROMPT, "num_inference_steps": NUM_STEPS}
        return {**common, **copy.deepcopy(dict(self.inputs)), "generator": torch.Generator().manual_seed(seed)}


def modules_of(pipeline: Any) -> dict[str, nn.Module]:
    """The components that hold weights, by name."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
