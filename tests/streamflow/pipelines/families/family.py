"""A family of pipelines: how a small one is built, and what it is asked for."""

from __future__ import annotations

import copy
import warnings
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
    as a whole. ``output`` is what of the answer is compared, with ``more_outputs``. ``settings`` are attributes that
    the pipeline's class sets for large models. ``warns`` is the pattern of a warning that the family's own code gives
    on the CPU.
    """

    name: str
    pipeline_class: Any
    make: Callable[[], dict[str, Any]]
    inputs: Mapping[str, Any]
    streamed: Mapping[str, int]
    staged: tuple[str, ...]
    output: str = "images"
    more_outputs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    warns: str | None = None

    def __str__(self) -> str:
        return self.name

    def build(self) -> Any:
        """The pipeline with the same random weights every time, ready for inference."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            pipeline = self.pipeline_class(**self.make())
        for component in modules_of(pipeline).values():
            component.eval().requires_grad_(False)
        return self.prepared(pipeline)

    def prepared(self, pipeline: Any) -> Any:
        """The same pipeline, as quiet and as small as this family's are."""
        pipeline.set_progress_bar_config(disable=True)
        for name, value in self.settings.items():
            setattr(pipeline, name, value)
        return pipeline

    def generate(self, pipeline: Any, seed: int = 0, **more: Any) -> torch.Tensor:
        """The decoded output of one call."""
        return self._call(pipeline, {**self.arguments(seed), **more, "output_type": "pt"})

    def latents(self, pipeline: Any, seed: int = 0) -> torch.Tensor:
        """The latents of the same call, before the VAE decodes them."""
        return self._call(pipeline, {**self.arguments(seed), "output_type": "latent"})

    def _call(self, pipeline: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
        with warnings.catch_warnings():
            if self.warns is not None:
                warnings.filterwarnings("ignore", self.warns)
            answer = pipeline(**arguments)
        made: torch.Tensor = getattr(answer, self.output)
        if not self.more_outputs:
            return made
        return torch.cat([part.flatten() for part in (made, *(getattr(answer, name) for name in self.more_outputs))])

    def arguments(self, seed: int) -> dict[str, Any]:
        """What the pipeline is called with, but for the type of the output."""
        common = {"prompt": PROMPT, "num_inference_steps": NUM_STEPS}
        return {**common, **copy.deepcopy(dict(self.inputs)), "generator": torch.Generator().manual_seed(seed)}


def modules_of(pipeline: Any) -> dict[str, nn.Module]:
    """The components that hold weights, by name."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
