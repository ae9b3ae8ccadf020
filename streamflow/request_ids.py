"""The id of the request that the current code works for: in a thread of a place, and in the task that awaits it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: What a record says that was logged outside of any request.
NO_REQUEST = "-"

_current: ContextVar[str | None] = ContextVar("streamflow_request_id", default=None)


def current_request_id() -> str | None:
    """The id of the request that the caller works for; None outside of one. From any thread or task."""
    return _current.get()


@contextmanager
def working_for(request_id: str) -> Iterator[None]:
    """Within it, and in what takes its context along, the caller works for this request."""
    token = _current.set(request_id)
    try:
        yield
    finally:
        _current.reset(token)


class RequestIdFilter(logging.Filter):
    """Gives every record that passes a ``request_id``, for formats such as ``"%(request_id)s %(message)s"``.

    It is `NO_REQUEST` outside of a request. Add it to a handler, so that records of all loggers get one; a record that
    has one already keeps it. streamflow itself adds it nowhere.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = current_request_id() or NO_REQUEST
        return True
