"""How a saved model is streamed and compared with the one that its own library loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import nn

import streamflow
from streamflow import OffloadStatistics
from streamflow.stages.devices.cpu import CpuDevice
from streamflow.weights.adapters import CheckpointAdapter
from tests.streamflow.kit import (
    Options,
    check_statistics,
    compare,
    resident_digests,
    sha256_of,
    streamflow_threads,
)
from tests.streamflow.models import Call

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "real-models.md"


def tensor_digests(model: nn.Module) -> dict[str, str]:
    """A digest of each tensor of the state, dtype and shape included."""
    return {name: sha256_of(tensor) for name, tensor in model.state_dict().items()}


async def stream_directory(
    directory: Path,
    build: Callable[[], nn.Module],
    resident: nn.Module,
    calls: tuple[Call, ...],
    options: Options | None = None,
    *,
    adapters: Iterable[CheckpointAdapter] = (),
    load: Callable[[nn.Module], nn.Module] | None = None,
    device: CpuDevice | None = None,
) -> OffloadStatistics:
    """Stream ``directory``; fail unless each tensor and each output is that of ``resident``.

    Two requests of one walk per call, within the memory declared. Returns the statistics from before closing.
    """
    expected, threads = resident_digests(resident, calls), streamflow_threads()
    backend = device if device is not None else CpuDevice()
    options = {"poison_freed_slots": True, **(options or {})}
    opened = streamflow.open_streamed(build, directory, options, adapters=adapters, load=load, device=backend)
    async with opened as (offload, streamed):
        assert tensor_digests(streamed) == tensor_digests(resident)
        await compare(offload, streamed, calls, expected)
        statistics = offload.statistics()
    check_statistics(statistics, streams=True)
    assert statistics.engine.device_peak_bytes < statistics.model_bytes
    assert offload.state == "closed"
    assert backend.memory().in_use == 0
    assert streamflow_threads() == threads
    return statistics


def table_row(model: str, dtype: str, opened_with: str, statistics: OffloadStatistics) -> str:
    """The run as a line of the document's table."""
    choice, engine = statistics.choice, statistics.engine
    cells = (
        model,
        dtype,
        f"`{opened_with}`",
        f"{choice.source}, {choice.transfer}",
        f"{statistics.num_blocks}",
        f"{statistics.model_bytes:,}",
        f"{engine.device_peak_bytes:,}",
    )
    return f"| {' | '.join(cells)} |"


def documented_rows() -> list[str]:
    """The lines of the document's table, without its head."""
    table = DOCUMENT.read_text(encoding="utf-8").partition("<!-- verified -->\n")[2].partition("<!-- end -->")[0]
    return table.splitlines()[2:]


def check_documented(row: str) -> None:
    """Fail unless the document has this row."""
    assert row in documented_rows(), f"docs/real-models.md lacks this row, or has it with other numbers:\n{row}"
