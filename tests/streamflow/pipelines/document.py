"""The page on pipelines, and what of it is measured."""

from __future__ import annotations

from pathlib import Path

from streamflow import OffloadStatistics
from tests.streamflow.pipelines.families.family import Family

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "pipelines.md"


def table_row(family: Family, statistics: OffloadStatistics, always_bytes: int) -> str:
    """The run as a line of the page's table; ``always_bytes`` are what an accelerator has all the time besides."""
    streamed = [f"{s.name} ({s.num_blocks})" for s in statistics.components if s.behaviour == "streamed"]
    staged = [s.name for s in statistics.components if s.behaviour == "staged"]
    cells = (
        family.name,
        f"`{family.pipeline_class.__name__}`",
        ", ".join(streamed),
        ", ".join(staged),
        f"{statistics.model_bytes:,}",
        f"{statistics.engine.device_peak_bytes:,}",
        f"{always_bytes:,}",
    )
    return f"| {' | '.join(cells)} |"


def documented_rows() -> list[str]:
    """The lines of the page's table, without its head."""
    table = DOCUMENT.read_text(encoding="utf-8").partition("<!-- verified -->\n")[2].partition("<!-- end -->")[0]
    return table.splitlines()[2:]
