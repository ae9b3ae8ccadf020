"""The example's server with the tiny model, of which some generations fail; it tells what it holds.

``--resident``: the model itself does not stream; everything else is the same.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread
import attrs
import click
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import streamflow
from serve.__main__ import open_listener, serve_on_asyncio
from serve.app import create_app
from serve.digits import DigitModel, load_digits
from serve.inputs import Inputs
from serve.model import OnStep, Opened
from streamflow.tools.demo.model import DigitTransformer
from tests.streamflow.models import Mlp, Stack
from tests.streamflow.runtime.kit import check_accounts

#: Seeds from here on make the model fail after its first step.
FAILING_SEEDS = 1 << 40


class FailingModel(DigitModel):
    """Draws digits, or fails half-way."""

    def draw(self, inputs: Inputs, on_step: OnStep) -> bytes:
        def step(num_done: int, num_steps: int) -> None:
            on_step(num_done, num_steps)
            if inputs.seed >= FAILING_SEEDS:
                raise ArithmeticError("a failure of the model")

        return super().draw(inputs, step)


@attrs.define(eq=False)
class Held:
    """The offload and the streamed module of the server."""

    offload: streamflow.Offload | None = None
    module: torch.nn.Module | None = None

    @asynccontextmanager
    async def open(self, resident: bool, config: streamflow.OffloadConfig) -> AsyncIterator[Opened]:
        model: DigitTransformer = await anyio.to_thread.run_sync(load_digits)
        self.module = Stack([Mlp(16), Mlp(16)]) if resident else model
        async with streamflow.open_offload(self.module, config) as self.offload:
            yield Opened(self.offload, FailingModel(model))

    async def tell(self, request: Request) -> Response:
        """Memory blocks of Python's allocator, after what nobody holds any more is gone. Fails unless every slot,
        place and pass is accounted for.
        """
        assert self.offload is not None
        assert self.module is not None
        await check_accounts(self.offload, self.module.blocks)  # type: ignore[arg-type]
        gc.collect()
        return JSONResponse({"blocks": sys.getallocatedblocks(), "objects": len(gc.get_objects())})


def create(held: Held, resident: bool, config: streamflow.OffloadConfig) -> Starlette:
    app = create_app(partial(held.open, resident, config))
    app.router.routes.append(Route("/held", held.tell))
    return app


@click.command()
@click.option("--port", type=int)
@click.option("--resident", is_flag=True)
def main(port: int, resident: bool) -> None:
    """Serve until a signal comes."""
    config = streamflow.OffloadConfig(device="cpu", max_waiting_requests=4, close_mode="drain")
    listener = open_listener("127.0.0.1", port)
    anyio.run(serve_on_asyncio, create(Held(), resident, config), listener, 25.0)


if __name__ == "__main__":
    main()
