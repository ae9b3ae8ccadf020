"""What every test of the store gets: a root of its own, and a check that nothing of the store stays open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from streamflow.store.descriptors import num_open


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder for a store, not there yet."""
    return tmp_path / "store"


@pytest.fixture
def quick_root(tmp_path: Path) -> Iterator[Path]:
    """The same in memory, where there is such a filesystem, for tests that open hundreds of stores."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path / "store"
        return
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder, "store")


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Every descriptor that the store opened for the test was closed by its end."""
    before = num_open()
    yield
    assert num_open() == before
