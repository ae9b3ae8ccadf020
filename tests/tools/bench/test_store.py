"""The benchmark of the store measures what it says, and judges by its limits."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from streamflow.tools.bench.store import StoreReading
from streamflow.tools.cli import main

READING = StoreReading(
    num_cores=2,
    num_rounds=1,
    nbytes=2_000_000_000,
    sha256_bytes_per_s=1e9,
    copy_s=1.0,
    publish_s=1.4,
    load_s=2.0,
    hit_s=0.08,
)


def test_publishing_is_held_against_the_slower_of_copying_and_hashing() -> None:
    assert READING.publish_limit_s == 1.5
    assert attrs.evolve(READING, num_cores=1).publish_limit_s == pytest.approx(2.5)
    assert READING.as_dict()["is_met"]
    assert not attrs.evolve(READING, publish_s=1.6).as_dict()["is_met"]


def test_a_hit_is_held_against_loading() -> None:
    assert READING.hit_limit_s == pytest.approx(0.09)
    assert not attrs.evolve(READING, hit_s=0.1).as_dict()["is_met"]


@pytest.mark.slow
def test_a_small_run_tells_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = CliRunner().invoke(main, ["bench", "store", "--size-mb", "64", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["nbytes"] > 60_000_000
    assert all(found[name] > 0 for name in ("sha256_bytes_per_s", "copy_s", "publish_s", "load_s", "hit_s"))
    assert found["hit_s"] < found["publish_s"] + found["load_s"]
    assert list(tmp_path.iterdir()) == []
