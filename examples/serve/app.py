"""The application: its addresses, and its life with the model's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypedDict

import anyio
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve.answers import ANSWERED, answer_failure
from serve.endpoints import GenerationEndpoint
from serve.model import OpenModel
from serve.service import HOPELESS, Service


class State(TypedDict):
    """What every request finds in ``request.state``."""

    service: Service


async def healthz(request: Request) -> Response:
    """Whether the process can go on: if not, a new one helps. It answers while the model opens and runs, too."""
    state = request.state.service.state
    return JSONResponse({"state": state}, 503 if state in HOPELESS else 200)


async def readyz(request: Request) -> Response:
    """Whether generations are served now."""
    state = request.state.service.state
    return JSONResponse({"state": state}, 200 if state == "ready" else 503)


async def metrics(request: Request) -> Response:
    """For Prometheus."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(request.state.service.registry), headers={"content-type": media_type})


async def cancel(request: Request) -> Response:
    """End a generation; the answer comes when its place is free."""
    await request.state.service.find(request.path_params["request_id"]).cancel()
    return Response(status_code=204)


def create_app(open_model: OpenModel) -> Starlette:
    """The application for any ASGI server, on asyncio or trio. It opens the model when the server starts it, and
    answers meanwhile; it closes the model, and waits for that, when the server has sent its last answer.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[State]:
        service = Service(open_model)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.serve, name="service")
            try:
                yield {"service": service}
            finally:
                service.close()

    generations = "/v1/generations"
    return Starlette(
        routes=[
            Route(generations, GenerationEndpoint(), methods=["POST"]),
            Route(f"{generations}/{{request_id}}", cancel, methods=["DELETE"]),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
        ],
        exception_handlers=dict.fromkeys(ANSWERED, answer_failure),
        lifespan=lifespan,
    )
