"""Spans of requests and passes, where the API of OpenTelemetry is installed; elsewhere nothing.

``streamflow.request`` spans `OffloadRequest.run`, as a child of the span that its caller is in. It is the current span
in the request's thread: ``streamflow.pass``, and the spans of a pipeline's own callbacks, lie in it. streamflow sets
up no provider and no exporter; without those of the program a span costs a few microseconds.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from streamflow._version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def _find_tracer() -> Tracer | None:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("streamflow", __version__)  # it follows whatever provider the program sets, also later


_tracer = _find_tracer()


def request_span(request_id: str, priority: int, deadline_s: float | None) -> AbstractContextManager[object]:
    """A span around a request. An error that leaves it, and nothing else, gives it an error status."""
    attributes: dict[str, str | int | float] = {"streamflow.request_id": request_id, "streamflow.priority": priority}
    if deadline_s is not None:
        attributes["streamflow.deadline_s"] = deadline_s
    return _span("streamflow.request", attributes)


def pass_span(component: str, request_id: str | None) -> AbstractContextManager[object]:
    """A span around a pass of ``component``. ``request_id`` None: the model was called directly."""
    attributes: dict[str, str | int | float] = {"streamflow.component": component}
    if request_id is not None:
        attributes["streamflow.request_id"] = request_id
    return _span("streamflow.pass", attributes)


def _span(name: str, attributes: dict[str, str | int | float]) -> AbstractContextManager[object]:
    if _tracer is None:
        return nullcontext()
    return _tracer.start_as_current_span(name, attributes=attributes)
