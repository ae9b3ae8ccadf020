"""Errors of the server itself, each with its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class AnsweredError(Exception):
    """An error that has an answer: ``status``, ``code`` for programs, its message, and ``details``.

    ``request_id`` None: there is no generation yet.
    """

    status: ClassVar[int]
    code: ClassVar[str]

    def __init__(self, message: str, request_id: str | None = None, **details: Any) -> None:
        self.request_id = request_id
        self.details: Mapping[str, Any] = details
        super().__init__(message)


class NotJsonError(AnsweredError):
    """The body's media type is not JSON."""

    status, code = 415, "not_json"

    def __init__(self, media_type: str) -> None:
        said = repr(media_type) if media_type else "missing"
        super().__init__(f"the content type is {said}; send application/json")


class TooLongError(AnsweredError):
    """The body is longer than any request need be."""

    status, code = 413, "too_long"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the body is longer than {limit_bytes:,} bytes; shorten the prompt")


class MalformedError(AnsweredError):
    """The body is not JSON."""

    status, code = 400, "malformed_json"


class UnsuitableInputsError(AnsweredError):
    """Fields are missing, unknown, or not what the model can draw; ``problems`` are by field."""

    status, code = 422, "unsuitable_inputs"

    def __init__(self, problems: Mapping[str, str]) -> None:
        self.problems = dict(problems)
        listed = "; ".join(f"{field}: {problem}" for field, problem in problems.items())
        super().__init__(f"the inputs cannot be drawn: {listed}", problems=self.problems)


class IdTakenError(AnsweredError):
    """Another generation of this id is under way."""

    status, code = 409, "id_taken"

    def __init__(self, request_id: str) -> None:
        message = f"a generation {request_id!r} is under way; wait for its end, or choose another request_id"
        super().__init__(message, request_id)


class UnknownIdError(AnsweredError):
    """No generation of this id is under way."""

    status, code = 404, "unknown_id"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"no generation {request_id!r} is under way; it may have ended", request_id)


class CancelledByClientError(AnsweredError):
    """The generation was cancelled by a DELETE."""

    status, code = 409, "cancelled"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"generation {request_id!r} was cancelled", request_id)


class GenerationFailedError(AnsweredError):
    """The model raised an error, which is the cause of this one. A client learns no more than that."""

    status, code = 500, "failed"

    def __init__(self, request_id: str) -> None:
        super().__init__("the generation failed; the server's log says why", request_id)


class NotReadyError(AnsweredError):
    """The model is not open (any more); ``state`` says what it is."""

    status, code = 503, "not_ready"

    def __init__(self, state: str) -> None:
        super().__init__(f"the model is {state}; ask again later", state=state)
