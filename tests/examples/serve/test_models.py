"""The two kinds of models that the example serves draw, streamed, what they draw resident."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import torch

import streamflow
from serve.app import create_app
from serve.digits import DigitModel, load_digits, open_digits
from serve.errors import UnsuitableInputsError
from serve.inputs import Inputs
from serve.model import OpenModel, ServedModel
from serve.pipelines import PipelineModel, another_pipeline, open_pipeline
from tests.examples.serve.kit import PATH, Server, client_of, error_of, events_of, serving
from tests.streamflow.kit import aligned_reference, in_worker
from tests.streamflow.pipelines.families.family import modules_of
from tests.streamflow.pipelines.families.flux import FLUX
from tests.streamflow.pipelines.families.wan import WAN

pytestmark = pytest.mark.anyio

CONFIG = streamflow.OffloadConfig(device="cpu")


def drawn(model: ServedModel, inputs: Inputs) -> bytes:
    """What the resident model draws."""
    return in_worker(lambda: model.draw(inputs, lambda num_done, num_steps: None))


async def check_served(open_model: OpenModel, expected: dict[Inputs, bytes]) -> None:
    """Fail unless all these, asked for at once, are drawn as expected, and something was streamed for it."""
    pictures = {}
    async with serving(create_app(open_model)) as url, client_of(url) as client:
        await Server(client, []).until_ready()

        async def ask(inputs: Inputs) -> None:
            answer = await client.post(PATH, json=inputs.model_dump(exclude_none=True))
            assert answer.status_code == 200, answer.text
            pictures[inputs] = answer.content

        async with anyio.create_task_group() as tasks:
            for inputs in expected:
                tasks.start_soon(ask, inputs)
        metrics = (await client.get("/metrics")).text
    assert pictures == expected
    streamed = next(line for line in metrics.splitlines() if line.startswith("streamflow_streamed_bytes_total{"))
    assert float(streamed.rpartition(" ")[2]) > 0


async def test_digits() -> None:
    model = DigitModel(load_digits())
    asked = [Inputs(prompt=prompt, seed=seed, num_steps=2 + seed) for seed, prompt in enumerate(["7", "2026", "31"])]
    await check_served(lambda: open_digits(CONFIG), {inputs: drawn(model, inputs) for inputs in asked})


@pytest.mark.parametrize("prompt", ["seven", "1 2", "١", "1" * 17])
async def test_digits_are_all_that_the_tiny_model_draws(prompt: str) -> None:
    with pytest.raises(UnsuitableInputsError) as failure:
        DigitModel(load_digits()).check(Inputs(prompt=prompt, width=64))
    assert set(failure.value.problems) == {"prompt", "width"}


async def test_a_pipeline_from_its_directory(tmp_path: Path) -> None:
    pipeline = FLUX.build()
    pipeline.save_pretrained(tmp_path / "small")
    for name, module in modules_of(pipeline).items():
        setattr(pipeline, name, aligned_reference(module))
    model = PipelineModel("small", pipeline)
    asked = [Inputs(prompt="a red fox", seed=seed, num_steps=1 + seed, width=32, height=32) for seed in (0, 1)]
    expected = {inputs: drawn(model, inputs) for inputs in asked}
    await check_served(lambda: open_pipeline(tmp_path / "small", torch.float32, CONFIG), expected)


def test_a_picture_has_all_but_the_models_of_its_own() -> None:
    """Also the options: without its boundary, a pipeline of two experts would use one of them."""
    pipeline = WAN.build()
    another = another_pipeline(pipeline)
    assert another.config.boundary_ratio == pipeline.config.boundary_ratio is not None
    shared = {name for name, part in another.components.items() if part is pipeline.components[name]}
    assert shared == set(modules_of(pipeline))


async def test_every_step_of_a_pipeline_is_told(tmp_path: Path) -> None:
    FLUX.build().save_pretrained(tmp_path)
    app = create_app(lambda: open_pipeline(tmp_path, torch.float32, CONFIG))
    async with serving(app) as url, client_of(url) as client:
        server = Server(client, [])
        await server.until_ready()
        answer = await server.draw(events=True, num_steps=3, width=32, height=32)
        told = [data["num_done"] for kind, data in events_of(answer) if kind == "progress"]
        assert told == [1, 2, 3]
        assert error_of(await server.draw(width=33)) == (422, "unsuitable_inputs")
