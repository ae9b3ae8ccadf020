"""What the server says of itself while its model opens, cannot be opened, serves, breaks and closes."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx2
import pytest

import streamflow
from serve.app import create_app
from serve.model import Opened
from tests.examples.serve.kit import PATH, Server, SubjectModel, client_of, error_of, serving, serving_subject
from tests.streamflow.runtime.kit import make_subject, until, wait_for

pytestmark = pytest.mark.anyio


async def states(server: Server) -> dict[str, tuple[int, str]]:
    """The answers of the two endpoints that tell."""
    answers = {path: await server.client.get(path) for path in ("/healthz", "/readyz")}
    return {path: (answer.status_code, answer.json()["state"]) for path, answer in answers.items()}


@pytest.mark.parametrize("outcome", ["opens", "fails", "closes"])
async def test_it_answers_while_the_model_opens(outcome: str) -> None:
    subject = make_subject()
    go_on = anyio.Event()

    @asynccontextmanager
    async def open_model() -> AsyncIterator[Opened]:
        await go_on.wait()
        if outcome == "fails":
            raise OSError("no such disk")
        async with streamflow.open_offload(subject.model) as offload:
            yield Opened(offload, SubjectModel(subject))

    async with serving(create_app(open_model)) as url, client_of(url) as client:
        server = Server(client, [])
        assert await states(server) == {"/healthz": (200, "opening"), "/readyz": (503, "opening")}
        refused = await server.draw()
        assert error_of(refused) == (503, "not_ready")
        assert refused.headers["retry-after"]
        if outcome == "opens":
            go_on.set()
            await server.until_ready()
            assert (await server.draw()).text == subject.expected
        elif outcome == "fails":
            go_on.set()
            while (await client.get("/readyz")).json()["state"] == "opening":  # noqa: ASYNC110 - asked from outside
                await anyio.sleep(0.01)
            assert await states(server) == {"/healthz": (503, "failed"), "/readyz": (503, "failed")}
    # and the server stops, also in the middle of opening


async def test_a_model_that_breaks_is_to_be_replaced() -> None:
    subject = make_subject()
    async with serving_subject(subject) as server:
        assert await states(server) == {"/healthz": (200, "ready"), "/readyz": (200, "ready")}
        server.offload.fail(OSError("the file is gone"))
        assert await states(server) == {"/healthz": (503, "broken"), "/readyz": (503, "broken")}
        assert error_of(await server.draw()) == (503, "not_ready")


async def test_who_is_served_when_it_stops_is_served_to_the_end() -> None:
    """The server lets them finish before the application, and with it the model, closes."""
    subject = make_subject()
    reached, opened = threading.Event(), threading.Event()

    def inside(index: int) -> None:
        if index == 2 and not opened.is_set():
            reached.set()
            wait_for(opened)

    subject.script.inside = inside
    answers = []

    async def ask(url: str) -> None:
        answers.append(await client.post(url + PATH, json={"prompt": "p", "num_steps": 1}))

    async def open_when_refused(url: str) -> None:
        while await answers_at(client, url):
            pass
        opened.set()

    async with client_of("") as client, anyio.create_task_group() as tasks, serving_subject(subject) as server:
        url = str(server.client.base_url).removesuffix("/")
        tasks.start_soon(ask, url)
        await until(reached)
        tasks.start_soon(open_when_refused, url)
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, subject.expected)]


async def answers_at(client: httpx2.AsyncClient, url: str) -> bool:
    """Whether a server accepts connections there."""
    try:
        await client.get(url + "/healthz")
    except httpx2.ConnectError:
        return False
    except httpx2.TransportError:  # it was accepted, and closed without an answer
        return True
    return True


async def test_metrics_are_served_in_both_formats() -> None:
    subject = make_subject()
    async with serving_subject(subject) as server:
        await server.draw(num_steps=2)
        plain = await server.client.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain")
        assert 'streamflow_requests_total{model="subject",outcome="completed"} 1.0' in plain.text
        assert 'streamflow_passes_total{model="subject"} 2.0' in plain.text
        assert "process_open_fds" in plain.text
        accept = {"accept": "application/openmetrics-text"}
        assert (await server.client.get("/metrics", headers=accept)).text.endswith("# EOF\n")
