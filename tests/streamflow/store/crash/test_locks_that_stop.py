"""Locks that locked when the store was opened, and later do not: right bytes or a typed refusal."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from streamflow.store.errors import StoreError
from tests.streamflow.store.crash.kit import Quick, opened, publish_source, tiny, unfinished


class UnlockedLater(Quick):
    """Locks that everybody gets, once the store has looked whether they lock."""

    is_checked = False

    def flock(self, fd: int, operation: int) -> None:
        if self.is_checked:
            os.fstat(fd)
        else:
            super().flock(fd, operation)


@pytest.mark.anyio
async def test_publishers_that_do_not_exclude_each_other_get_right_bytes_or_a_typed_refusal(tmp_path: Path) -> None:
    """Names are given in one step, whoever else is at it."""
    files, root, model = UnlockedLater(), tmp_path / "store", tiny()
    results: list[bool | StoreError] = []
    async with opened(root, files) as store:
        files.is_checked = True

        async def publish() -> None:
            try:
                with await publish_source(store, model) as lease:
                    results.append(model.is_in(lease))
            except StoreError as failure:
                results.append(failure)

        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(publish)
    assert len(results) == 6
    assert False not in results
    async with opened(root) as store:
        with await publish_source(store, model) as lease:
            assert model.is_in(lease)
        (await publish_source(store, tiny(seed=5), "other")).close()
    assert unfinished(root) == []
