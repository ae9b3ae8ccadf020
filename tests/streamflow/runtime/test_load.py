"""Many requests with deadlines, cancellations and failures: each is exact or ends as it should, and nothing is left."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import pytest
import torch

import streamflow
from streamflow import Offload
from streamflow.errors import DeadlineExceededError, OverloadedError
from streamflow.stages.devices.cpu import CpuDevice
from tests.streamflow.runtime.kit import Subject, check_accounts, make_subject

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]

NUM_REQUESTS = 200
NUM_CLIENTS = 8


class Client:
    """Makes requests one after the other, each with a fate drawn from ``seed``."""

    def __init__(self, subject: Subject, seed: int, ends: Counter[str]) -> None:
        self._subject = subject
        self._draw = random.Random(seed)
        self._ends = ends

    def _work(self, fails: bool, num_steps: int) -> str:
        for _ in range(num_steps):
            with torch.no_grad():
                self._subject.model(self._subject.inputs)
        if fails:
            raise ZeroDivisionError
        return self._subject.forward()

    async def run(self, offload: Offload, num_requests: int) -> None:
        for _ in range(num_requests):
            self._ends[await self._one(offload)] += 1

    async def _one(self, offload: Offload) -> str:
        fate = self._draw.choice(("well", "well", "fails", "cancelled", "deadline"))
        short_s = self._draw.choice((0.0005, 0.002, 0.01))
        request = offload.request(priority=self._draw.randrange(3), deadline_s=short_s if fate == "deadline" else None)
        with anyio.move_on_after(short_s if fate == "cancelled" else None):
            try:
                output = await request.run(self._work, fate == "fails", self._draw.randrange(3))
            except (DeadlineExceededError, OverloadedError, ZeroDivisionError) as failure:
                assert not isinstance(failure, DeadlineExceededError) or fate == "deadline"
                assert not isinstance(failure, ZeroDivisionError) or fate == "fails"
                return type(failure).__name__
            assert output == self._subject.expected
            return "exact"
        return "cancelled"


@pytest.mark.parametrize(
    "options",
    [
        {"max_running_requests": 4, "max_passes_per_walk": 3},
        {"max_running_requests": 3, "max_waiting_requests": 3, "transfer": "staged", "packing_threads": 1},
    ],
    ids=["direct", "staged-overloaded"],
)
async def test_under_load_everything_is_exact_or_typed_and_nothing_is_left(options: dict[str, Any]) -> None:
    subject, device, ends = make_subject(), CpuDevice(), Counter[str]()
    async with streamflow.open_offload(
        subject.model, {"poison_freed_slots": True, **options}, device=device
    ) as offload:
        async with anyio.create_task_group() as tasks:
            for seed in range(NUM_CLIENTS):
                tasks.start_soon(Client(subject, seed, ends).run, offload, NUM_REQUESTS // NUM_CLIENTS)
        await check_accounts(offload, subject.model.blocks)  # type: ignore[arg-type]
        await subject.check_next(offload)
        outcomes = offload.statistics().outcomes
    assert ends.total() == NUM_REQUESTS
    assert outcomes.completed == ends["exact"] + 1
    assert outcomes.failed == ends["ZeroDivisionError"] > 0
    assert outcomes.cancelled == ends["cancelled"] > 0
    assert outcomes.deadline_exceeded == ends["DeadlineExceededError"] > 0
    assert (outcomes.overloaded > 0) == ("max_waiting_requests" in options)
    subject.check_restored(device)
