"""The command: which model is served, where, and on which event loop."""

from __future__ import annotations

import logging
import signal
import socket
from functools import partial
from pathlib import Path

import anyio
import click
import hypercorn
import hypercorn.trio
import torch
import trio
import uvicorn
from starlette.applications import Starlette

import streamflow
from serve.app import create_app
from serve.digits import open_digits
from serve.model import OpenModel
from streamflow.request_ids import RequestIdFilter

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LOOPBACK = "127.0.0.1"


@click.command(help="Serve a model that streams; POST to /v1/generations. There is no authentication.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Directory of a text-to-image pipeline, as diffusers saved it.  [default: a tiny model that draws digits]",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True, help="Of --model.")
@click.option("--device", help="cpu, cuda or cuda:N.  [default: cuda where there is one]")
@click.option("--window", default=2, show_default=True, help="Blocks that the device holds at a time.")
@click.option("--running", default=4, show_default=True, help="Pictures that are drawn at once.")
@click.option("--waiting", default=64, show_default=True, help="Requests that may wait; one more is answered with 503.")
@click.option("--host", default=LOOPBACK, show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="0: any that is free.")
@click.option("--loop", type=click.Choice(["asyncio", "trio"]), default="asyncio", show_default=True)
@click.option("--grace", default=25.0, show_default=True, help="Seconds that SIGTERM leaves to those who are served.")
def main(
    model: Path | None,
    dtype: str,
    device: str | None,
    window: int,
    running: int,
    waiting: int,
    host: str,
    port: int,
    loop: str,
    grace: float,
) -> None:
    """Open the socket, say where, and serve until a signal comes."""
    config = streamflow.OffloadConfig(
        device=device,
        window_blocks=window,
        max_running_requests=running,
        max_waiting_requests=waiting,
        close_mode="drain",
        close_deadline_s=grace,
    )
    log_with_request_ids()
    app = create_app(_opener(model, DTYPES[dtype], config))
    listener = open_listener(host, port)
    if host not in (LOOPBACK, "::1", "localhost"):
        logging.getLogger(__name__).warning("whoever reaches %s may use this server: it has no authentication", host)
    serve = serve_on_trio if loop == "trio" else serve_on_asyncio
    anyio.run(serve, app, listener, grace, backend=loop)


def open_listener(host: str, port: int) -> socket.socket:
    """A socket that listens there, and a line that says where."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    click.echo(f"listening on http://{host}:{listener.getsockname()[1]}")
    return listener


def log_with_request_ids() -> None:
    """Let every record say which request it belongs to."""
    handler = logging.StreamHandler()
    handler.addFilter(RequestIdFilter())
    logging.basicConfig(
        level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"
    )


def _opener(directory: Path | None, dtype: torch.dtype, config: streamflow.OffloadConfig) -> OpenModel:
    if directory is None:
        return partial(open_digits, config)
    from serve.pipelines import open_pipeline  # diffusers takes seconds to import

    return partial(open_pipeline, directory, dtype, config)


async def serve_on_asyncio(app: Starlette, listener: socket.socket, grace_s: float) -> None:
    """uvicorn, until SIGINT or SIGTERM: then no connection is accepted any more, and requests have ``grace_s``."""
    options = uvicorn.Config(app, lifespan="on", log_config=None, timeout_graceful_shutdown=max(1, int(grace_s)))
    server = uvicorn.Server(options)
    # uvicorn takes signals while it serves, and raises them anew when it has ended, for whoever took them before: us
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:

            async def stop_when_signalled() -> None:
                async for _ in signals:
                    server.should_exit = True

            tasks.start_soon(stop_when_signalled)
            await server.serve(sockets=[listener])
            tasks.cancel_scope.cancel()


async def serve_on_trio(app: Starlette, listener: socket.socket, grace_s: float) -> None:
    """Hypercorn, likewise."""
    options = hypercorn.Config()
    options.bind = [f"fd://{listener.detach()}"]
    options.errorlog = logging.getLogger("hypercorn.error")
    options.graceful_timeout = options.shutdown_timeout = grace_s
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:

        async def until_signalled() -> None:
            async for _ in signals:
                return

        await hypercorn.trio.serve(app, options, shutdown_trigger=until_signalled)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
