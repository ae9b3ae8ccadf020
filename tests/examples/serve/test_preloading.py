"""A parent that loads the model and then forks workers, each of which serves it on the socket of the parent's."""

from __future__ import annotations

import os
import signal
import socket
import traceback
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx2
import pytest

import streamflow
from serve.__main__ import serve_on_asyncio, serve_on_trio
from serve.app import create_app
from serve.model import Opened
from tests.examples.serve.kit import PATH, SubjectModel
from tests.streamflow.embedding.test_forks import exit_status
from tests.streamflow.runtime.kit import PATIENCE_S, Subject, make_subject

SERVERS = {"asyncio": serve_on_asyncio, "trio": serve_on_trio}
NUM_WORKERS = 2


def worker(subject: Subject, listener: socket.socket, loop: str) -> int:
    """The process of a worker that serves until SIGTERM."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the parent runs no thread that matters here
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        anyio.run(SERVERS[loop], create_app(opener(subject)), listener, 5.0, backend=loop)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def opener(subject: Subject):  # type: ignore[no-untyped-def]
    """Opens an offload of the process that asks for it."""

    @asynccontextmanager
    async def open_model() -> AsyncIterator[Opened]:
        async with streamflow.open_offload(subject.model) as offload:
            yield Opened(offload, SubjectModel(subject))

    return open_model


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize("loop", SERVERS)
def test_workers_serve_the_model_that_was_loaded_before_they_were_forked(loop: str) -> None:
    subject = make_subject()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        workers = [worker(subject, listener, loop) for _ in range(NUM_WORKERS)]
    try:
        with httpx2.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
            while client.get("/readyz").status_code != 200:
                pass
        for _ in range(3 * NUM_WORKERS):  # whichever of them takes the connection
            with httpx2.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
                while (answer := client.post(PATH, json={"prompt": "p", "num_steps": 2})).status_code == 503:
                    assert answer.json()["error"]["code"] == "not_ready"
                assert (answer.status_code, answer.text) == (200, subject.expected)
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
        statuses = [exit_status(pid) for pid in workers]
    assert statuses == [0] * NUM_WORKERS
