"""The generation endpoint: the picture itself, or its progress and then the picture as server-sent events."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.from_thread
import attrs
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.answers import problem_of
from serve.generation import Generation
from serve.inputs import read_inputs
from serve.service import Service

Result = TypeVar("Result")

#: How long a client waits for its first event, and then for a sign of life, if nothing happens.
FIRST_EVENT_S, NEXT_EVENT_S = 0.05, 5.0
EVENT_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]


@attrs.frozen
class Event:
    """A server-sent event. ``failure``: what the generation ended by; it is the last one then, and so is ``image``."""

    kind: str
    data: dict[str, Any] = attrs.field(factory=dict)
    failure: Exception | None = None

    @property
    def is_last(self) -> bool:
        return self.kind in ("image", "error")

    def encode(self) -> bytes:
        return f"event: {self.kind}\ndata: {json.dumps(self.data)}\n\n".encode()


class GenerationEndpoint:
    """POST: draws one picture for a client, for as long as the client stays."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        service: Service = request.state.service
        inputs = await read_inputs(request)
        with service.generation(inputs) as generation:
            if "text/event-stream" in request.headers.get("accept", ""):
                await _unless_disconnected(receive, partial(_send_events, service, generation, send))
                return
            picture = await _unless_disconnected(receive, generation.run)
        if picture is not None:
            headers = {"x-request-id": generation.request_id}
            await Response(picture, media_type="image/png", headers=headers)(scope, receive, send)


async def _unless_disconnected(receive: Receive, work: Callable[[], Awaitable[Result]]) -> Result | None:
    """What ``work`` returns or raises; it is cancelled, and None returned, if the client goes before."""
    result, failure = None, None
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            result = await work()
        except Exception as error:
            failure = error  # raised below, so that it leaves as it is and not in a group
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


async def _send_events(service: Service, generation: Generation, send: Send) -> None:
    """Send what happens to the generation until its end.

    A failure that comes before anything was sent is raised: it can still have an answer with a status of its own.
    """
    channel, events = anyio.create_memory_object_stream[Event](generation.inputs.num_steps + 1)
    async with channel, events, anyio.create_task_group() as tasks:
        tasks.start_soon(_follow, generation, channel)
        first = await _next_event(events, generation, FIRST_EVENT_S)
        if first.failure is None:
            headers = [*EVENT_HEADERS, (b"x-request-id", generation.request_id.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            last = await _send_from(first, events, generation, send)
            if last.failure is not None:
                last = Event("error", problem_of(last.failure, service.retry_after_s).body())
            await send({"type": "http.response.body", "body": last.encode()})
    if first.failure is not None:
        raise first.failure


async def _send_from(
    event: Event, events: MemoryObjectReceiveStream[Event], generation: Generation, send: Send
) -> Event:
    """Send ``event`` and what follows it; returns the last one, unsent."""
    while not event.is_last:
        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        event = await _next_event(events, generation, NEXT_EVENT_S)
    return event


async def _next_event(events: MemoryObjectReceiveStream[Event], generation: Generation, patience_s: float) -> Event:
    """The next event; if nothing happens for so long, the generation's place in the queue."""
    with anyio.move_on_after(patience_s):
        return await events.receive()
    position = generation.position
    return Event("running") if position is None else Event("waiting", {"position": position})


async def _follow(generation: Generation, channel: MemoryObjectSendStream[Event]) -> None:
    """Run the generation; ``channel``, which has room for all of it, gets every step and the end."""

    def on_step(num_done: int, num_steps: int) -> None:  # in the thread that draws
        event = Event("progress", {"num_done": num_done, "num_steps": num_steps})
        anyio.from_thread.run_sync(channel.send_nowait, event)

    try:
        picture = await generation.run(on_step)
    except Exception as failure:
        channel.send_nowait(Event("error", failure=failure))
    else:
        channel.send_nowait(Event("image", {"png": base64.b64encode(picture).decode()}))
