"""What is remembered of sources: read without trust, written once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.streamflow.store.kit import model, opened

pytestmark = pytest.mark.anyio
CONTENT = "0" * 64


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"source_id": "source"},
        {"source_id": "other", "content_id": CONTENT},
        {"source_id": "source", "content_id": "../" + "0" * 61},
        {"source_id": "source", "content_id": None},
        {"source_id": "source", "content_id": CONTENT, "more": 1},
    ],
)
async def test_a_record_that_is_not_whole_is_a_miss_and_is_written_again(root: Path, record: dict[str, Any]) -> None:
    async with opened(root) as store:
        path = root / "sources" / "source.json"
        path.write_text(json.dumps(record))
        assert await store.content_of("source") is None
        published = await store.publish(model().draft(), source_id="source")
        assert await store.content_of("source") == published.content_id


async def test_a_record_that_others_could_have_written_is_a_miss(root: Path) -> None:
    async with opened(root) as store:
        await store.publish(model().draft(), source_id="source")
        (root / "sources" / "source.json").chmod(0o666)
        assert await store.content_of("source") is None


async def test_a_source_may_outlive_its_entry(root: Path) -> None:
    """After a quarantine the source is still known: what it gives again has to be the same."""
    async with opened(root) as store:
        content_id = (await store.publish(model().draft(), source_id="source")).content_id
        await store.quarantine(content_id, 1, "a test")
        assert await store.content_of("source") == content_id
        assert await store.lease(content_id) is None
