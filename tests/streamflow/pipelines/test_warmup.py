"""A warm-up is a request before the first: it settles what the first would pay for, and is counted nowhere."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
import torch

import streamflow
from streamflow import WarmUpRecipe
from streamflow.errors import WarmUpError
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.signals import loop_waker
from streamflow.warmup import call_arguments, is_dummy_run
from tests.streamflow.kit import sha256_of
from tests.streamflow.pipelines.families.all import FAMILIES
from tests.streamflow.pipelines.families.family import Family
from tests.streamflow.pipelines.families.flux import FLUX
from tests.streamflow.pipelines.families.ltx import LTX
from tests.streamflow.pipelines.kit import open_ready, ready
from tests.streamflow.pipelines.test_staged import TOKENS, expected
from tests.streamflow.pipelines.toys import ToyPipeline, toy_pipeline

pytestmark = pytest.mark.anyio

SMALL = WarmUpRecipe(task="text to image", size=32, aspect_ratio=2.0, more={"max_sequence_length": 16})


class Watched(ToyPipeline):
    """Notes what it was called with, and whether that was a dummy run."""

    streamflow_warmup = WarmUpRecipe(steps=2, more={"tokens": [1, 2]})

    def __call__(self, prompt: str = "", num_inference_steps: int = 3, tokens: Any = (), **more: Any) -> torch.Tensor:
        self.__dict__.setdefault("calls", []).append((prompt, num_inference_steps, tuple(tokens), more, is_dummy_run()))
        tokens.append(7)  # a call may change what it is given
        return super().__call__([1, 5, 2], num_inference_steps)


def watched() -> Watched:
    return Watched(**toy_pipeline().components)


async def test_a_declared_recipe_is_run_as_a_copy_and_is_marked_as_a_dummy_run() -> None:
    pipeline = watched()
    for _ in range(2):
        async with streamflow.open_offload(pipeline, warmup=True, device=CpuDevice()) as offload:
            await offload.run(pipeline, tokens=[1])
    assert pipeline.calls == [("", 2, (1, 2), {}, True), ("", 3, (1,), {}, False)] * 2
    assert not is_dummy_run()


async def test_a_warm_up_is_left_out_of_the_statistics_and_learned_from() -> None:
    pipeline = toy_pipeline()
    resident = expected(pipeline)
    async with streamflow.open_offload(pipeline, warmup=lambda: pipeline(TOKENS), device=CpuDevice()) as offload:
        before = offload.statistics()
        assert (before.engine.num_walks, before.engine.streamed_bytes, before.outcomes.completed) == (0, 0, 0)
        assert before.staging is not None
        assert before.staging.staged_peak_bytes > 0
        assert sha256_of(await offload.run(pipeline, TOKENS)) == resident
        after = offload.statistics()
        assert (after.engine.num_walks, after.outcomes.completed) == (3, 1)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_generic_step_is_one_that_every_text_pipeline_can_be_asked_for(family: Family) -> None:
    arguments = call_arguments(family.build(), WarmUpRecipe())
    assert (arguments["prompt"], arguments["num_inference_steps"]) == ("", 1)
    assert set(arguments) <= {"prompt", "num_inference_steps", "generator"}


async def test_a_recipe_of_a_real_pipeline_leaves_it_and_its_pictures_as_they_were() -> None:
    given = ready(FLUX)
    random = torch.random.get_rng_state()
    async with streamflow.open_offload(given.pipeline, warmup=SMALL, device=CpuDevice()) as offload:
        assert offload.statistics().engine.num_walks == 0
        await given.check(offload)
    assert torch.equal(torch.random.get_rng_state(), random)
    async with open_ready(given) as offload:
        await given.check(offload)


def test_a_recipe_speaks_of_every_pipeline_in_its_own_words() -> None:
    flux = call_arguments(FLUX.build(), SMALL)
    assert (flux["width"], flux["height"], flux["max_sequence_length"]) == (32, 16, 16)
    ltx = call_arguments(LTX.build(), WarmUpRecipe(size=96, duration_s=0.5, guidance=3.0, steps=2))
    assert (ltx["width"], ltx["height"], ltx["num_frames"]) == (64, 64, 17)
    assert (ltx["guidance_scale"], ltx["num_inference_steps"]) == (3.0, 2)


async def test_what_the_call_does_not_know_goes_through_where_it_takes_more() -> None:
    pipeline = watched()
    recipe = {"steps": 1, "tokens": [1], "flavour": "sweet"}
    async with streamflow.open_offload(pipeline, warmup=recipe, device=CpuDevice()):
        pass
    assert pipeline.calls == [("", 1, (1,), {"flavour": "sweet"}, True)]


class Editor(ToyPipeline):
    """Needs a picture."""

    def __call__(self, prompt: str, image: torch.Tensor, num_inference_steps: int = 1) -> torch.Tensor:
        return super().__call__([1], num_inference_steps) + image.mean()


@pytest.mark.parametrize(
    ("warmup", "words"),
    [
        (True, "it needs image, too; declare a recipe"),
        ({"image": torch.ones(1), "flavour": "sweet"}, "takes no flavour"),
        ("yes", "warmup must be True"),
        (lambda: 1 / 0, "division by zero"),
    ],
)
async def test_a_warm_up_that_fails_is_a_typed_error_or_a_warning_and_leaves_nothing(
    warmup: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline, device = Editor(**toy_pipeline().components), CpuDevice()
    with pytest.raises(WarmUpError, match=words):
        async with streamflow.open_offload(pipeline, warmup=warmup, device=device):
            pytest.fail("it opened")
    assert device.memory().in_use == 0
    with caplog.at_level(logging.WARNING):
        async with streamflow.open_offload(
            pipeline, {"warmup_failure": "warn"}, warmup=warmup, device=CpuDevice()
        ) as offload:
            assert offload.state == "ready"
    assert "the warm-up of Editor failed" in caplog.text


async def test_a_warm_up_can_be_cancelled() -> None:
    pipeline, device = toy_pipeline(), CpuDevice()
    scope, wake = anyio.CancelScope(), loop_waker()

    def work() -> object:
        wake(scope.cancel)
        return [pipeline(TOKENS) for _ in range(1000)]

    with scope:
        async with streamflow.open_offload(pipeline, warmup=work, device=device):
            pytest.fail("it opened")
    assert scope.cancelled_caught
    assert device.memory().in_use == 0


def test_the_other_ways_to_open_take_a_warm_up_too() -> None:
    pipeline = watched()
    with streamflow.offload(pipeline, warmup=True, device=CpuDevice()):
        pass
    assert [call[-1] for call in pipeline.calls] == [True]
