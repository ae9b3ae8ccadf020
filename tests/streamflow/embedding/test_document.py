"""The page on embedding: its programs run as it says, and its table of metrics has those that there are."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from prometheus_client import CollectorRegistry

import streamflow
from streamflow.metrics.collector import OffloadCollector
from tests.examples.serve.kit import client_of, serving
from tests.streamflow.runtime.kit import Subject, make_subject

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "embedding.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")


def program(first_line: str, **names: Any) -> dict[str, Any]:
    """What the program of the page that begins so defines; ``names`` are what it takes for granted."""
    (code,) = re.findall(rf"^```python\n({first_line}.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    namespace = dict(names)
    exec(compile(code, "embedding.md", "exec", dont_inherit=True), namespace)
    return namespace


async def test_the_lifespan_serves_and_closes() -> None:
    subject = make_subject()
    used: list[Subject] = []

    def use(model: object) -> str:
        assert model is subject.model
        used.append(subject)
        return subject.forward()

    names = program("from contextlib import", load_model=lambda: subject.model, use=use)
    async with serving(names["app"]) as url, client_of(url) as client:
        answers: list[httpx2.Response] = []

        async def ask() -> None:
            answers.append(await client.get("/"))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, subject.expected)] * 3
    assert len(used) == 3
    assert subject.forward() == subject.expected


async def test_metrics_are_shown_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    subject = make_subject()
    shown: list[float | None] = []

    async def serve() -> None:
        await offload.run(subject.forward)
        shown.append(registry.get_sample_value("streamflow_passes_total", {"model": "flux"}))

    names = program("from prometheus_client import")
    async with streamflow.open_offload(subject.model) as offload:
        await names["serve_with_metrics"](offload, serve)
    assert shown == [1.0]


def test_the_table_names_every_metric_and_no_other() -> None:
    table = TEXT[TEXT.index("| metric (") : TEXT.index("An offload on a loop of its own")]
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line]
    named = {re.sub(r"\{.*\}", "", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    there = {metric.name.removeprefix("streamflow_") for metric in OffloadCollector(link_bytes_per_s=1.0).collect()}
    assert named == {full_name(name) for name in there}


def full_name(name: str) -> str:
    return {**dict.fromkeys(COUNTERS, f"{name}_total"), "offload": "offload_info"}.get(name, name)


COUNTERS = {
    metric.name.removeprefix("streamflow_") for metric in OffloadCollector().collect() if metric.type == "counter"
}


def test_log_records_get_the_id_as_it_says() -> None:
    handler = program("import logging")["handler"]
    record = logging.LogRecord("n", 20, "p", 1, "said", (), None)
    assert handler.filter(record)
    assert handler.format(record) == "INFO [-] said"


def test_every_file_and_module_that_the_page_names_is_there() -> None:
    root = Path(__file__).resolve().parents[3]
    named = set(re.findall(r"`((?:examples|tests)/[\w/.]+)`", TEXT))
    assert named
    missing = [path for path in named if not (root / path).exists()]
    assert not missing
