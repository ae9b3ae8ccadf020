"""A load of all that clients do: most wait for their picture, others cancel, leave, are impatient, or meet failures."""

from __future__ import annotations

import base64
import random
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, get_args

import anyio
import attrs
import httpx2

from tests.examples.serve.kit import EVENTS, PATH, error_of, events_of
from tests.examples.serve.load_server import FAILING_SEEDS

Kind = Literal["picture", "events", "cancelled", "disconnected", "deadline", "failing"]
#: Of a hundred requests, so many are of each kind.
SHARES: Mapping[Kind, int] = {
    "picture": 56,
    "events": 12,
    "cancelled": 8,
    "disconnected": 10,
    "deadline": 8,
    "failing": 6,
}
#: The pictures that are asked for, again and again.
PICTURES = [
    {"prompt": prompt, "seed": seed, "num_steps": num_steps}
    for seed, (prompt, num_steps) in enumerate([("7", 1), ("42", 2), ("2026", 1), ("905", 2), ("31", 1), ("6", 1)])
]
#: Answers that a request of a kind may get beside the right picture.
MAY_GET: Mapping[Kind, set[tuple[int, str]]] = {
    "picture": set(),
    "events": set(),
    "cancelled": {(409, "cancelled")},
    "disconnected": set(),
    "deadline": {(504, "deadline_exceeded")},
    "failing": {(500, "failed")},
}
#: Every kind may find too many waiting: those who left may not be gone yet.
OVERLOADED = (503, "overloaded")


@attrs.frozen
class Step:
    """One request: which picture, of which kind, and after how long the client does what is its kind's."""

    kind: Kind
    picture: int
    after_s: float


def script(num_requests: int, seed: int) -> list[Step]:
    """A load that is the same every time."""
    random_ = random.Random(seed)
    kinds = random_.choices(get_args(Kind), [SHARES[kind] for kind in get_args(Kind)], k=num_requests)
    return [Step(kind, random_.randrange(len(PICTURES)), random_.uniform(0.001, 0.06)) for kind in kinds]


@attrs.define(eq=False)
class Load:
    """Runs a script against a server, so many requests at once.

    ``right``, ``errors`` and ``left`` count what came of the requests of each kind, ``wrong`` tells of those that got
    something else, and ``health_s`` are the times that the health endpoint took meanwhile.
    """

    client: httpx2.AsyncClient
    expected: list[bytes]
    right: Counter[Kind] = attrs.field(factory=Counter)
    errors: Counter[tuple[int, str]] = attrs.field(factory=Counter)
    left: int = 0
    wrong: list[str] = attrs.field(factory=list)
    health_s: list[float] = attrs.field(factory=list)

    async def run(self, steps: list[Step], num_at_once: int) -> None:
        rest = iter(enumerate(steps))

        async def one_after_the_other() -> None:
            for number, step in rest:
                await self._ask(number, step)

        async with anyio.create_task_group() as watching:
            watching.start_soon(self._watch)
            async with anyio.create_task_group() as clients:
                for _ in range(num_at_once):
                    clients.start_soon(one_after_the_other)
            watching.cancel_scope.cancel()

    async def _watch(self) -> None:
        while True:
            began = time.perf_counter()
            answer = await self.client.get("/healthz")
            self.health_s.append(time.perf_counter() - began)
            if answer.status_code != 200:
                self.wrong.append(f"/healthz: {answer.status_code} {answer.text}")
            await anyio.sleep(0.02)

    async def _ask(self, number: int, step: Step) -> None:
        request: dict[str, Any] = {**PICTURES[step.picture], "request_id": f"n{number}"}
        match step.kind:
            case "failing":
                request["seed"] += FAILING_SEEDS
            case "deadline":
                request["deadline_s"] = step.after_s / 2
            case "cancelled":
                await self._cancelled(step, request)
                return
            case "disconnected":
                with anyio.move_on_after(step.after_s) as scope:
                    await self._judge(step, await self.client.post(PATH, json=request))
                self.left += scope.cancelled_caught
                return
        headers = EVENTS if step.kind == "events" else {}
        await self._judge(step, await self.client.post(PATH, json=request, headers=headers))

    async def _cancelled(self, step: Step, request: dict[str, Any]) -> None:
        async def cancel() -> None:
            await anyio.sleep(step.after_s)
            answer = await self.client.delete(f"{PATH}/{request['request_id']}")
            if answer.status_code != 204 and error_of(answer) != (404, "unknown_id"):
                self.wrong.append(f"DELETE: {answer.status_code} {answer.text}")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            await self._judge(step, await self.client.post(PATH, json=request))

    async def _judge(self, step: Step, answer: httpx2.Response) -> None:
        picture = answer.content
        if step.kind == "events" and answer.status_code == 200:
            _, last = events_of(answer)[-1]
            picture = base64.b64decode(last["png"]) if "png" in last else answer.content
        if answer.status_code == 200 and step.kind != "failing" and picture == self.expected[step.picture]:
            self.right[step.kind] += 1
        elif answer.status_code != 200 and error_of(answer) in MAY_GET[step.kind] | {OVERLOADED}:
            self.errors[error_of(answer)] += 1
        else:
            self.wrong.append(f"{step}: {answer.status_code} {answer.text[:200]}")


def p99(seconds: list[float]) -> float:
    """The 99th percentile."""
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]
