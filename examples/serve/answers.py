"""Answers for what went wrong: a status, a code for programs, a message for people, and the request's id."""

from __future__ import annotations

import logging
import math
from typing import Any

import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.errors import AnsweredError
from streamflow import StreamflowError
from streamflow.errors import DeadlineExceededError, OverloadedError
from streamflow.stages.errors import EngineBrokenError, EngineClosedError

LOG = logging.getLogger(__name__)

#: What has an answer of its own. Anything else is a fault of the server.
ANSWERED = (AnsweredError, StreamflowError, HTTPException)


@attrs.frozen
class Problem:
    """What a client is told. ``retry_after_s`` None: trying again is no use, or nobody knows when."""

    status: int
    code: str
    message: str
    request_id: str | None = None
    details: dict[str, Any] = attrs.field(factory=dict)
    retry_after_s: float | None = None

    def body(self) -> dict[str, Any]:
        said = {"code": self.code, "message": self.message, "request_id": self.request_id}
        return {"error": {**said, **self.details}}

    def response(self) -> Response:
        headers = {} if self.retry_after_s is None else {"retry-after": str(math.ceil(self.retry_after_s))}
        return JSONResponse(self.body(), self.status, headers)


def problem_of(failure: Exception, retry_after_s: float) -> Problem:
    """What a client is told of ``failure``; a fault of our own goes to the log."""
    problem = _problem_of(failure, retry_after_s)
    if problem.status == 500:
        LOG.error("generation %s failed", problem.request_id, exc_info=failure)
    return problem


def _problem_of(failure: Exception, retry_after_s: float) -> Problem:
    match failure:
        case AnsweredError(request_id=request_id, details=details):
            retry = retry_after_s if failure.status == 503 else None
            return Problem(failure.status, failure.code, str(failure), request_id, dict(details), retry)
        case OverloadedError(running=running, waiting=waiting, request_id=request_id):
            details = {"running": running, "waiting": waiting}
            return Problem(503, "overloaded", "too many requests wait", request_id, details, retry_after_s)
        case DeadlineExceededError(phase=phase, deadline_s=deadline_s, request_id=request_id):
            message = f"it was still {phase} at its deadline"
            return Problem(504, "deadline_exceeded", message, request_id, {"phase": phase, "deadline_s": deadline_s})
        case EngineClosedError(request_id=request_id):
            return Problem(503, "closing", "the server is closing", request_id, retry_after_s=retry_after_s)
        case EngineBrokenError(request_id=request_id):
            return Problem(503, "broken", "the model cannot go on and has to be opened anew", request_id)
        case HTTPException(status_code=status, detail=detail):
            return Problem(status, "http_error", detail)
        case StreamflowError(request_id=request_id):
            return Problem(500, "failed", "the generation failed; the server's log says why", request_id)
    return Problem(500, "failed", "the server's log says why")


async def answer_failure(request: Request, failure: Exception) -> Response:
    """The answer to a request that ends by ``failure``, for the application's table of exception handlers."""
    return problem_of(failure, request.state.service.retry_after_s).response()
