"""The server of the example in the test's own process and loop, and a model that does what a test wants."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import attrs
import httpx2
import hypercorn
import hypercorn.trio
import sniffio
import uvicorn
from starlette.applications import Starlette

import streamflow
from serve.app import create_app
from serve.errors import UnsuitableInputsError
from serve.inputs import Inputs
from serve.model import OnStep, Opened
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.stages.threads import open_tasks
from tests.streamflow.runtime.kit import PATIENCE_S, Subject

PATH = "/v1/generations"
EVENTS = {"accept": "text/event-stream"}
#: How long a server that closes may let those be served who are; longer than any of them takes.
GRACE_S = 30


@attrs.frozen(eq=False)
class SubjectModel:
    """A served model over a subject: the picture is the digest of its output, ``num_steps`` forwards long.

    The prompt ``fail`` makes it raise.
    """

    subject: Subject
    name: str = "subject"

    def check(self, inputs: Inputs) -> None:
        if inputs.width is not None:
            raise UnsuitableInputsError({"width": "has none"})

    def draw(self, inputs: Inputs, on_step: OnStep) -> bytes:
        if inputs.prompt == "fail":
            raise LookupError("a secret of the server")
        digests = []
        for step in range(inputs.num_steps):
            digests.append(self.subject.forward())
            on_step(step + 1, inputs.num_steps)
        assert set(digests) == {digests[0]}
        return digests[0].encode()


@attrs.define(eq=False)
class Server:
    """A server under way: its client, and the offload once it is open."""

    client: httpx2.AsyncClient
    offloads: list[streamflow.Offload]

    @property
    def offload(self) -> streamflow.Offload:
        return self.offloads[-1]

    async def draw(self, *, events: bool = False, **inputs: Any) -> httpx2.Response:
        """The answer to a POST of these inputs, all of it."""
        headers = EVENTS if events else {}
        return await self.client.post(PATH, json={"prompt": "p", "num_steps": 1, **inputs}, headers=headers)

    async def until_ready(self) -> None:
        """Return when it serves; fail at once if it never will."""
        with anyio.fail_after(PATIENCE_S):
            while (answer := await self.client.get("/readyz")).status_code != 200:
                assert answer.json()["state"] == "opening"
                await anyio.sleep(0.01)


def error_of(response: httpx2.Response) -> tuple[int, str]:
    """The status and the code of an answer that is an error; fails unless it has a message, too."""
    error = response.json()["error"]
    assert error["message"]
    return response.status_code, error["code"]


def events_of(response: httpx2.Response) -> list[tuple[str, dict[str, Any]]]:
    """The server-sent events of an answer."""
    assert response.headers["content-type"] == "text/event-stream"
    found = []
    for text in response.text.removesuffix("\n\n").split("\n\n"):
        kind, data = text.split("\n")
        found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[str]:
    """The address of ``app``, served on this loop: by uvicorn on asyncio, by Hypercorn on trio. Leaving stops it as a
    signal would.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    run, stop = (_hypercorn if sniffio.current_async_library() == "trio" else _uvicorn)(app, listener)
    async with open_tasks() as tasks:
        tasks.start_soon(run)
        try:
            yield url
        finally:
            stop()


Runner = tuple[Callable[[], Awaitable[None]], Callable[[], None]]


def _uvicorn(app: Starlette, listener: socket.socket) -> Runner:
    options = uvicorn.Config(app, lifespan="on", log_config=None, timeout_graceful_shutdown=GRACE_S)
    server = uvicorn.Server(options)

    def stop() -> None:
        server.should_exit = True

    return lambda: server.serve(sockets=[listener]), stop


def _hypercorn(app: Starlette, listener: socket.socket) -> Runner:
    options = hypercorn.Config()
    options.bind = [f"fd://{listener.detach()}"]
    options.errorlog = logging.getLogger("hypercorn.error")
    options.graceful_timeout = options.shutdown_timeout = GRACE_S
    stopped = anyio.Event()
    return lambda: hypercorn.trio.serve(app, options, shutdown_trigger=stopped.wait), stopped.set  # type: ignore[arg-type]


@asynccontextmanager
async def serving_subject(
    subject: Subject, config: dict[str, Any] | None = None, device: CpuDevice | None = None
) -> AsyncIterator[Server]:
    """A server of ``subject``, ready. Fails unless its model is as it was before when the server has stopped."""
    backend = device if device is not None else CpuDevice()
    offloads: list[streamflow.Offload] = []

    @asynccontextmanager
    async def open_model() -> AsyncIterator[Opened]:
        async with streamflow.open_offload(subject.model, config, device=backend) as offload:
            offloads.append(offload)
            yield Opened(offload, SubjectModel(subject))

    with anyio.fail_after(2 * PATIENCE_S):
        async with serving(create_app(open_model)) as url, client_of(url) as client:
            server = Server(client, offloads)
            await server.until_ready()
            yield server
    assert server.offload.state == "closed"
    subject.check_restored(backend)


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False) as client:
        yield client
