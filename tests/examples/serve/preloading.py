"""A parent that loads the model and then forks workers, each of which serves it on the parent's socket.

The parent never computes: MKL spins for ever in a child whose parent has multiplied matrices in other threads.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import click

import streamflow
from serve.__main__ import open_listener, serve_on_asyncio, serve_on_trio
from serve.app import create_app
from serve.digits import DigitModel, load_digits
from serve.model import Opened
from streamflow.tools.demo.model import DigitTransformer

SERVERS = {"asyncio": serve_on_asyncio, "trio": serve_on_trio}
NUM_WORKERS = 2


def fork_worker(model: DigitTransformer, listener: socket.socket, loop: str) -> int:
    """The process of a worker that serves until SIGTERM, with an offload of its own."""

    @asynccontextmanager
    async def open_model() -> AsyncIterator[Opened]:
        async with streamflow.open_offload(model, {"device": "cpu"}) as offload:
            yield Opened(offload, DigitModel(model))

    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        anyio.run(SERVERS[loop], create_app(open_model), listener, 5.0, backend=loop)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@click.command()
@click.option("--port", type=int)
@click.option("--loop", type=click.Choice(list(SERVERS)))
def main(port: int, loop: str) -> None:
    """Serve until SIGTERM comes, which the workers get, too; the exit status is 0 if all of theirs are."""
    model = load_digits()
    with open_listener("127.0.0.1", port) as listener:
        workers = [fork_worker(model, listener, loop) for _ in range(NUM_WORKERS)]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.sigwait([signal.SIGTERM])
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    statuses = [os.waitpid(pid, 0)[1] for pid in workers]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
