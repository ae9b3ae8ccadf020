"""What a client may ask for: validated before anything is done."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from serve.errors import MalformedError, NotJsonError, TooLongError, UnsuitableInputsError

#: No request may be longer.
MAX_BODY_BYTES = 64 << 10

Pixels = Annotated[int, Field(ge=16, le=4096, multiple_of=8)]


class Inputs(BaseModel):
    """A picture to draw. Unknown fields are refused, and so are numbers in quotes.

    ``width`` and ``height`` are in pixels; None: the model's own. ``deadline_s`` counts from the request's arrival,
    waiting included; None: it may take as long as it takes. ``request_id`` names it for cancelling, in logs and in
    metrics; None: the server makes one up.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: str = Field(min_length=1, max_length=4000)
    seed: int = Field(0, ge=0, lt=1 << 63)
    num_steps: int = Field(20, ge=1, le=200)
    guidance: float = Field(2.0, ge=0, le=100, allow_inf_nan=False)
    width: Pixels | None = None
    height: Pixels | None = None
    priority: int = Field(0, ge=-10, le=10)
    deadline_s: float | None = Field(None, gt=0, le=3600)
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,64}$")


async def read_inputs(request: Request) -> Inputs:
    """The inputs that the request's body holds.

    :raises NotJsonError: if it does not say that it is JSON.
    :raises TooLongError: if it is longer than any request need be.
    :raises MalformedError: if it is not.
    :raises UnsuitableInputsError: if a field is missing, unknown or not as it has to be; it lists every problem.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise NotJsonError(media_type)
    try:
        return Inputs.model_validate_json(await _read_body(request))
    except ValidationError as failure:
        problems = failure.errors(include_url=False, include_input=False, include_context=False)
        if problems[0]["type"] == "json_invalid":
            raise MalformedError(problems[0]["msg"]) from None
        raise UnsuitableInputsError({".".join(map(str, p["loc"])): p["msg"] for p in problems}) from None


async def _read_body(request: Request) -> bytes:
    body = b""
    async with aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise TooLongError(MAX_BODY_BYTES)
    return body
