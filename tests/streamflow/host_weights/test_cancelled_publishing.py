"""An opening that publishes, cancelled at any checkpoint, leaves no temporary, no lock, and the model as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch import nn

import streamflow
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.store.descriptors import num_open
from streamflow.store.reports import StoreOutcome
from tests.streamflow.host_weights.kit import CASE, Stored, report_of
from tests.streamflow.kit import ModelState, resident_digests, sha256_of, streamflow_threads
from tests.streamflow.runtime.kit import CancelAt
from tests.streamflow.runtime.test_cancelled_steps import WAYS, at_every_step, each_way, open_files
from tests.streamflow.store.crash.kit import locked_files, unfinished

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

#: The two that differ most; these tests take longer.
two_ways = pytest.mark.parametrize(("anyio_backend", "cancel_at"), [WAYS[1], WAYS[3]], indirect=["anyio_backend"])
#: Of so many checkpoints one is followed by an opening that must succeed where the cancelled one was.
OPEN_EVERY = 8


class Attempts:
    """One opening after the other, each of a cold store of its own."""

    def __init__(
        self,
        folder: Path,
        open_it: Callable[[Stored, CpuDevice], Coroutine[Any, Any, StoreOutcome]],
        check_models: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._open, self._check_models = folder, open_it, check_models
        self._device, self._threads, self._descriptors = CpuDevice(), streamflow_threads(), num_open()
        self.num = 0
        self.outcomes: list[StoreOutcome] = []

    @property
    def stored(self) -> Stored:
        """The checkpoint, and the store of this attempt."""
        return Stored(self._folder, store_name=f"store-{self.num}")

    def _files(self) -> list[str]:
        return [path for path in open_files() if str(self._folder) in path]

    async def work(self) -> None:
        self.num += 1
        self.outcomes.append(await self._open(self.stored, self._device))

    async def check(self) -> None:
        """Fail unless nothing is left of the attempt, and now and then unless the next one succeeds."""
        root = self.stored.root
        self._check_models()
        assert streamflow_threads() == self._threads
        assert self._device.memory().in_use == 0
        assert num_open() == self._descriptors
        if self._files():
            gc.collect()  # a remapped model that was dropped shows the entry until then
        assert not self._files()
        if (root / "tmp").exists():
            assert unfinished(root) == []
        assert locked_files(root) == []
        if self.num % OPEN_EVERY == 0:
            assert await self._open(self.stored, self._device) in (StoreOutcome.PUBLISHED, StoreOutcome.LOCAL_HIT)


@each_way
async def test_opening_a_cold_checkpoint_from_its_files(cancel_at: CancelAt, tmp_path: Path) -> None:
    await open_cold(cancel_at, tmp_path, load=False)


@two_ways
async def test_opening_a_cold_checkpoint_by_loading_it(cancel_at: CancelAt, tmp_path: Path) -> None:
    await open_cold(cancel_at, tmp_path, load=True)


async def open_cold(cancel_at: CancelAt, tmp_path: Path, *, load: bool) -> None:
    """Opened from one of two kinds of files, with an output each time."""
    expected = resident_digests(CASE.build(), CASE.calls[:1])
    # files of another dtype cannot be streamed as they lie
    Stored(tmp_path, attrs.evolve(CASE, build=lambda: CASE.build().double()) if load else CASE).save()

    async def open_it(stored: Stored, device: CpuDevice) -> StoreOutcome:
        async with stored.streamed("preferred", load=load, device=device) as (offload, model):
            assert report_of(offload).remapped == (load and report_of(offload).outcome is StoreOutcome.PUBLISHED)
            assert [sha256_of(await offload.run(model, *CASE.calls[0]))] == expected
            return report_of(offload).outcome

    await is_clean_at_every_step(cancel_at, Attempts(tmp_path, open_it))


@two_ways
async def test_sharing_a_loaded_model(cancel_at: CancelAt, tmp_path: Path) -> None:
    """The model keeps its objects, attributes and values, wherever they lie."""
    opened: list[tuple[nn.Module, ModelState]] = []

    async def open_it(stored: Stored, device: CpuDevice) -> StoreOutcome:
        model = CASE.build()
        opened.append((model, ModelState.of(model)))
        async with streamflow.open_offload(model, stored.config("preferred"), device=device) as offload:
            return report_of(offload).outcome

    def check_models() -> None:
        for model, before in opened:
            before.assert_unchanged(model, in_place=False)
        opened.clear()  # with their mappings of the entry

    await is_clean_at_every_step(cancel_at, Attempts(tmp_path, open_it, check_models))


async def is_clean_at_every_step(cancel_at: CancelAt, attempts: Attempts) -> None:
    num_steps = await at_every_step(cancel_at, attempts.work, attempts.check)
    assert num_steps >= 20
    assert attempts.outcomes
    assert set(attempts.outcomes) <= {StoreOutcome.PUBLISHED}
