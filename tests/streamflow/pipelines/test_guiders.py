"""Guiders keep the step that they are at: requests that share one take turns. What they hook into blocks is run."""

from __future__ import annotations

import copy
import threading
from typing import Any

import anyio
import attrs
import pytest
import torch
from diffusers.guiders import ClassifierFreeGuidance
from torch import nn

from streamflow import Offload
from tests.streamflow.kit import sha256_of
from tests.streamflow.pipelines.families.hunyuan_video_15 import HUNYUAN_VIDEO_15 as FAMILY
from tests.streamflow.pipelines.kit import Ready, open_ready, ready

pytestmark = pytest.mark.anyio


class Hooking(ClassifierFreeGuidance):
    """Has a block give less in every pass but the first of each step, as those do that leave layers out."""

    def prepare_models(self, denoiser: nn.Module) -> None:
        super().prepare_models(denoiser)
        if self._count_prepared > 1:
            self._hook = denoiser.transformer_blocks[1].register_forward_hook(lambda block, args, out: halved(out))

    def cleanup_models(self, denoiser: nn.Module) -> None:
        super().cleanup_models(denoiser)
        if self._count_prepared > 1:
            self._hook.remove()


def halved(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(output / 2 for output in outputs)


def with_guider(guider: Any) -> Ready:
    """The family's pipeline with this guider, and what it gives for two seeds."""
    return ready(attrs.evolve(FAMILY, make=lambda: {**FAMILY.make(), "guider": guider}), num_seeds=2)


def another(given: Ready, *shared: str) -> Any:
    """A pipeline over the same models, with copies of all else but what is ``shared``."""
    parts = given.pipeline.components
    own = {
        name: copy.deepcopy(part)
        for name, part in parts.items()
        if name not in shared and not isinstance(part, nn.Module)
    }
    return FAMILY.prepared(type(given.pipeline)(**{**parts, **own}))


class Together:
    """Requests that say how many of them run at once. Each of them waits until ``meeting`` do."""

    def __init__(self, meeting: int = 1) -> None:
        self._barrier = threading.Barrier(meeting, timeout=60)
        self._lock = threading.Lock()
        self._running = 0
        self.most = 0

    def generate(self, pipeline: Any, seed: int) -> torch.Tensor:
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        try:
            self._barrier.wait()
            return FAMILY.generate(pipeline, seed)
        finally:
            with self._lock:
                self._running -= 1

    async def run(self, offload: Offload, pipelines: list[Any]) -> list[str]:
        """The digests of one request for each pipeline, with its number as the seed."""
        digests = [""] * len(pipelines)

        async def run(seed: int) -> None:
            digests[seed] = sha256_of(await offload.run(self.generate, pipelines[seed], seed))

        async with anyio.create_task_group() as tasks:
            for seed in range(len(pipelines)):
                tasks.start_soon(run, seed)
        return digests


async def test_pipelines_with_guiders_of_their_own_run_side_by_side() -> None:
    given, requests = with_guider(ClassifierFreeGuidance(start=0.5)), Together(meeting=2)
    async with open_ready(given) as offload:
        assert await requests.run(offload, [given.pipeline, another(given)]) == given.images


async def test_pipelines_that_share_a_guider_take_turns() -> None:
    given, requests = with_guider(ClassifierFreeGuidance(start=0.5)), Together()
    async with open_ready(given) as offload:
        assert await requests.run(offload, [given.pipeline, another(given, "guider")]) == given.images
    assert requests.most == 1


async def test_a_guider_that_hooks_into_the_model_has_it_for_itself() -> None:
    given, requests = with_guider(Hooking(guidance_scale=3.0)), Together()
    assert given.images[:1] != ready(FAMILY).images
    async with open_ready(given) as offload:
        assert await requests.run(offload, [given.pipeline, another(given)]) == given.images
    assert requests.most == 1
