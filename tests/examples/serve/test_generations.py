"""Generations over HTTP: the picture, its progress, and every way in which one ends; under both servers."""

from __future__ import annotations

import base64
import logging
import threading
from typing import Any

import anyio
import pytest

from tests.examples.serve.kit import EVENTS, PATH, Server, error_of, events_of, serving_subject
from tests.streamflow.runtime.kit import PATIENCE_S, Stops, Subject, make_subject, until, until_so, wait_for

pytestmark = pytest.mark.anyio


class Gate:
    """The subject's blocks wait in block 2 until the gate is opened; ``reached`` tells that one does."""

    def __init__(self, subject: Subject) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        subject.script.inside = self.inside

    def inside(self, index: int) -> None:
        if index == 2:
            self.reached.set()
            wait_for(self.opened)


async def check_next(server: Server, subject: Subject) -> None:
    """Fail unless the next generation is exact, and leaves every slot, place and pass accounted for."""
    subject.script.reset()
    answer = await server.draw(num_steps=2)
    assert (answer.status_code, answer.text) == (200, subject.expected)
    await subject.check_next(server.offload)


async def test_a_picture_is_what_the_model_gives_alone() -> None:
    subject = make_subject()
    async with serving_subject(subject) as server:
        answer = await server.draw(num_steps=3, request_id="mine")
        assert (answer.status_code, answer.text) == (200, subject.expected)
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["x-request-id"] == "mine"
        assert server.offload.statistics().engine.streamed_bytes > 0
        await check_next(server, subject)


async def test_the_progress_of_every_step_and_then_the_picture_are_sent() -> None:
    subject = make_subject()
    async with serving_subject(subject) as server:
        answer = await server.draw(events=True, num_steps=3)
        assert answer.headers["x-request-id"]
        events = [event for event in events_of(answer) if event[0] != "running"]
        assert events[:-1] == [("progress", {"num_done": done, "num_steps": 3}) for done in (1, 2, 3)]
        assert events[-1] == ("image", {"png": base64.b64encode(subject.expected.encode()).decode()})
        await check_next(server, subject)


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "no prompt": ({"json": {"seed": 1}}, 422, "unsuitable_inputs"),
    "an unknown field": ({"json": {"prompt": "p", "sed": 1}}, 422, "unsuitable_inputs"),
    "a number in quotes": ({"json": {"prompt": "p", "seed": "1"}}, 422, "unsuitable_inputs"),
    "no steps": ({"json": {"prompt": "p", "num_steps": 0}}, 422, "unsuitable_inputs"),
    "a deadline in the past": ({"json": {"prompt": "p", "deadline_s": 0}}, 422, "unsuitable_inputs"),
    "an id that is no name": ({"json": {"prompt": "p", "request_id": "a b"}}, 422, "unsuitable_inputs"),
    "what the model cannot draw": ({"json": {"prompt": "p", "width": 64}}, 422, "unsuitable_inputs"),
    "a list": ({"json": []}, 422, "unsuitable_inputs"),
    "no JSON": ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "malformed_json"),
    "a form": ({"data": {"prompt": "p"}}, 415, "not_json"),
    "a long body": ({"json": {"prompt": "p" * 70_000}}, 413, "too_long"),
}


async def test_what_cannot_be_drawn_is_refused_with_the_reason() -> None:
    subject = make_subject()
    async with serving_subject(subject) as server:
        for name, (request, status, code) in BAD.items():
            answer = await server.client.post(PATH, **request)
            assert error_of(answer) == (status, code), name
        problems = (await server.client.post(PATH, json={"sed": 1, "num_steps": 0})).json()["error"]["problems"]
        assert set(problems) == {"prompt", "sed", "num_steps"}
        assert error_of(await server.client.get("/v1/nothing")) == (404, "http_error")
        assert error_of(await server.client.get(PATH)) == (405, "http_error")
        assert subject.script.entered == []
        await check_next(server, subject)


@pytest.mark.parametrize("events", [False, True])
async def test_one_too_many_is_told_to_come_again(events: bool) -> None:
    subject = make_subject()
    gate = Gate(subject)
    async with serving_subject(subject, {"max_running_requests": 1, "max_waiting_requests": 0}) as server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.draw)
            await until(gate.reached)
            answer = await server.draw(events=events)
            assert error_of(answer) == (503, "overloaded")
            assert int(answer.headers["retry-after"]) >= 1
            gate.opened.set()
        await check_next(server, subject)


@pytest.mark.parametrize("events", [False, True])
async def test_who_waits_and_who_runs_are_ended_at_their_deadline(events: bool, stops: Stops) -> None:
    subject = make_subject()
    gate = Gate(subject)
    stops.action = gate.opened.set
    answers = {}
    async with serving_subject(subject, {"max_running_requests": 1}) as server:

        async def ask(name: str, deadline_s: float) -> None:
            answers[name] = await server.draw(deadline_s=deadline_s, events=events and name == "waiting")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "running", 1.0)
            await until(gate.reached)
            tasks.start_soon(ask, "waiting", 0.02)
        assert error_of(answers["running"]) == (504, "deadline_exceeded")
        assert answers["running"].json()["error"]["phase"] == "running"
        if events and answers["waiting"].status_code == 200:  # it was told its position before
            kind, data = events_of(answers["waiting"])[-1]
            assert (kind, data["error"]["code"]) == ("error", "deadline_exceeded")
        else:
            assert error_of(answers["waiting"]) == (504, "deadline_exceeded")
        await check_next(server, subject)


async def test_a_generation_is_cancelled_by_its_id_whether_it_runs_or_waits(stops: Stops) -> None:
    subject = make_subject()
    gate = Gate(subject)
    stops.action = gate.opened.set
    answers = {}
    async with serving_subject(subject, {"max_running_requests": 1}) as server:

        async def ask(name: str) -> None:
            answers[name] = await server.draw(request_id=name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "runs")
            await until(gate.reached)
            tasks.start_soon(ask, "waits")
            await until_so(lambda: server.offload.statistics().num_waiting == 1)
            for name in ("waits", "runs"):
                assert (await server.client.delete(f"{PATH}/{name}")).status_code == 204
                assert name not in server.offload.statistics().occupancy.running
        assert {name: error_of(answer) for name, answer in answers.items()} == {
            "runs": (409, "cancelled"),
            "waits": (409, "cancelled"),
        }
        assert subject.script.entered == [0, 1, 2], "it went on after the block in which it was cancelled"
        assert error_of(await server.client.delete(f"{PATH}/runs")) == (404, "unknown_id")
        await check_next(server, subject)


@pytest.mark.parametrize("headers", [{}, EVENTS], ids=["picture", "events"])
async def test_a_client_that_disconnects_frees_its_place_at_the_next_block(
    headers: dict[str, str], stops: Stops
) -> None:
    subject = make_subject()
    gate = Gate(subject)
    stops.action = gate.opened.set
    async with serving_subject(subject, {"max_running_requests": 1}) as server:

        async def ask() -> None:
            await server.client.post(PATH, json={"prompt": "p"}, headers=headers)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(gate.reached)
            tasks.cancel_scope.cancel()  # the client closes its connection then
        await until(stops.told)
        await until_so(lambda: server.offload.statistics().num_running == 0)
        assert subject.script.entered == [0, 1, 2]
        await until_so(lambda: server.offload.statistics().outcomes.cancelled == 1)
        await check_next(server, subject)


async def test_a_client_that_disconnects_while_it_waits_leaves_the_queue() -> None:
    subject = make_subject()
    gate = Gate(subject)
    async with serving_subject(subject, {"max_running_requests": 1}) as server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.draw)
            await until(gate.reached)
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(server.draw)
                await until_so(lambda: server.offload.statistics().num_waiting == 1)
                waiting.cancel_scope.cancel()
            await until_so(lambda: server.offload.statistics().num_waiting == 0)
            gate.opened.set()
        await check_next(server, subject)


@pytest.mark.parametrize("events", [False, True])
async def test_a_model_that_fails_is_a_typed_error_and_its_message_stays_here(
    events: bool, caplog: pytest.LogCaptureFixture
) -> None:
    subject = make_subject()
    async with serving_subject(subject) as server:
        with caplog.at_level(logging.ERROR, "serve"):
            answer = await server.draw(prompt="fail", request_id="bad-one", events=events)
        assert error_of(answer) == (500, "failed")
        assert answer.json()["error"]["request_id"] == "bad-one"
        assert "secret" not in answer.text
        (record,) = [record for record in caplog.records if record.name.startswith("serve")]
        assert "bad-one" in record.getMessage()
        assert record.exc_info is not None
        assert isinstance(getattr(record.exc_info[1], "__cause__", None), LookupError)
        await check_next(server, subject)


async def test_an_id_names_one_generation_at_a_time() -> None:
    subject = make_subject()
    gate = Gate(subject)
    async with serving_subject(subject) as server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: server.draw(request_id="one"))
            await until(gate.reached)
            assert error_of(await server.draw(request_id="one")) == (409, "id_taken")
            gate.opened.set()
        assert (await server.draw(request_id="one")).status_code == 200
        await check_next(server, subject)


async def test_who_waits_is_told_the_position_and_served_in_turn() -> None:
    subject = make_subject()
    gate = Gate(subject)
    async with serving_subject(subject, {"max_running_requests": 1}) as server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.draw)
            await until(gate.reached)
            request = {"prompt": "p", "num_steps": 1}
            with anyio.fail_after(PATIENCE_S):
                async with server.client.stream("POST", PATH, json=request, headers=EVENTS) as answer:
                    lines = answer.aiter_lines()
                    assert [await anext(lines), await anext(lines)] == ["event: waiting", 'data: {"position": 0}']
                    gate.opened.set()
                    rest = [line async for line in lines]
            assert "event: image" in rest
        await check_next(server, subject)
