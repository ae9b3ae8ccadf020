"""Two processes stream one stored entry to one device: one copy on the host, page-locked and given back by both."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from streamflow.tools.bench.memory import measure_memory

pytestmark = [pytest.mark.gpu]


def test_two_processes_register_one_copy_and_give_it_back(tmp_path: Path) -> None:
    reading = anyio.run(measure_memory, tmp_path, 512_000_000, 2, "cuda")
    assert reading.is_met, reading
    assert reading.transfers == ("direct", "direct")
    assert sorted(reading.outcomes) == ["local_hit", "published"]
    assert reading.registered_bytes >= 2 * 0.95 * reading.artifact_bytes
    assert reading.pinned_pages is not None
