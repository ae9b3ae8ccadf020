"""The id of a request is in what its thread logs, in its errors and events, and in the spans around it."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import streamflow
from streamflow import spans
from streamflow.errors import DeadlineExceededError
from streamflow.request_ids import NO_REQUEST, RequestIdFilter, current_request_id
from streamflow.stages.events import PassStarted, RequestEnded, RequestStarted
from tests.streamflow.runtime.kit import make_subject

pytestmark = pytest.mark.anyio

LOG = logging.getLogger("tests.request_ids")


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """What the logger above says, each line beginning with the request's id."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(request_id)s %(message)s"))
    handler.addFilter(RequestIdFilter())
    LOG.addHandler(handler)
    try:
        yield text
    finally:
        LOG.removeHandler(handler)


async def test_records_of_requests_that_run_together_have_their_own_ids() -> None:
    subject = make_subject()
    gate = anyio.Event()

    def work(name: str) -> None:
        LOG.warning("begins %s", name)
        subject.forward()
        LOG.warning("ends %s", name)

    async def ask(name: str) -> None:
        await gate.wait()
        await offload.request(request_id=f"id-{name}").run(work, name)

    with logged() as text:
        async with streamflow.open_offload(subject.model) as offload, anyio.create_task_group() as tasks:
            for name in "abc":
                tasks.start_soon(ask, name)
            gate.set()
        LOG.warning("outside")
    lines = text.getvalue().splitlines()
    assert sorted(lines[:-1]) == sorted(f"id-{name} {what} {name}" for name in "abc" for what in ("begins", "ends"))
    assert lines[-1] == f"{NO_REQUEST} outside"
    assert current_request_id() is None


async def test_a_record_that_has_an_id_keeps_it() -> None:
    with logged() as text:
        LOG.warning("said", extra={"request_id": "own"})
    assert text.getvalue() == "own said\n"


async def test_events_and_errors_name_the_request() -> None:
    subject = make_subject()
    async with streamflow.open_offload(subject.model) as offload:
        with offload.observe() as events:
            await offload.request(request_id="named").run(subject.forward)
            named = []
            while not any(isinstance(event, RequestEnded) for event in named):
                named.append(await events.receive())
        kinds = (RequestStarted, PassStarted, RequestEnded)
        assert [event.request_id for event in named if isinstance(event, kinds)] == ["named"] * 3
        subject.script.inside = lambda index: LOG.debug("slow") or anyio.from_thread.run(anyio.sleep, 0.05)
        with pytest.raises(DeadlineExceededError) as failure:
            await offload.request(request_id="late", deadline_s=0.02).run(subject.forward)
        assert failure.value.request_id == "late"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Gets every span that ends, as a program's own provider would hand it on."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(spans, "_tracer", provider.get_tracer("tests"))
    return exporter


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


async def test_a_requests_span_lies_in_its_callers_and_its_passes_lie_in_it(exported: InMemorySpanExporter) -> None:
    subject = make_subject()

    def two_passes() -> None:
        subject.forward()
        subject.forward()

    async with streamflow.open_offload(subject.model) as offload:
        assert spans._tracer is not None
        with spans._tracer.start_as_current_span("caller"):
            await offload.request(request_id="named", priority=2).run(two_passes)
    (caller,), (request,) = named(exported, "caller"), named(exported, "streamflow.request")
    passes = named(exported, "streamflow.pass")
    assert request.parent is not None
    assert caller.context is not None
    assert request.context is not None
    assert request.parent.span_id == caller.context.span_id
    assert [span.parent.span_id for span in passes if span.parent] == [request.context.span_id] * 2
    assert request.attributes == {"streamflow.request_id": "named", "streamflow.priority": 2}
    assert [span.attributes for span in passes] == [
        {"streamflow.component": "Scripted", "streamflow.request_id": "named"}
    ] * 2


async def test_a_failed_request_has_an_error_status_and_a_cancelled_one_has_none(
    exported: InMemorySpanExporter,
) -> None:
    subject = make_subject()

    def fail() -> None:
        raise LookupError("nothing there")

    async with streamflow.open_offload(subject.model) as offload:
        with pytest.raises(LookupError):
            await offload.run(fail)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await offload.run(subject.forward)
        await subject.check_next(offload)
    statuses = [span.status.status_code for span in named(exported, "streamflow.request")]
    assert statuses == [StatusCode.ERROR, StatusCode.UNSET, StatusCode.UNSET]


def test_without_opentelemetry_there_are_no_spans() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
import torch, streamflow
from streamflow import spans
model = torch.nn.Sequential(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))))
config = streamflow.OffloadConfig(device="cpu", plan=streamflow.OffloadPlan(stacks=("0",)))
with torch.no_grad(), streamflow.offload(model, config):
    model(torch.ones(1, 4))
assert spans._tracer is None
print("ran")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "ran\n", done.stderr
