"""What the demo found out, for people and as JSON, and what of it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from streamflow.config import OffloadConfig
from streamflow.stages.statistics import EngineStatistics
from streamflow.tools.demo.generation import Drawing, DrawingOptions, StreamedDrawing
from streamflow.tools.demo.reading import Reading
from streamflow.tools.terminal import fact_table, format_bytes, format_seconds, format_share


@attrs.frozen(eq=False, kw_only=True)
class DemoReport:
    """Everything of one run. ``reading`` is a text where there is no classifier: why, and what to do."""

    options: DrawingOptions
    config: OffloadConfig
    resident: Drawing
    streamed: StreamedDrawing
    reading: Reading | str
    picture: Path
    event_log: Path

    @property
    def is_equal(self) -> bool:
        """Whether both models drew the same bytes."""
        return self.resident.sha256 == self.streamed.drawing.sha256

    @property
    def waited_s(self) -> float:
        """Host time for which the compute thread stood before a block that was not there yet.

        An accelerator waits by itself where a copy is queued but not done: there only the two times tell.
        """
        return self._engine.mailbox_wait_s + self._engine.event_wait_s

    @property
    def problems(self) -> list[str]:
        """What is not as it must be; empty if the demo succeeded."""
        engine, lost = self._engine, self.streamed.num_lost_events
        num_steps, num_threads = self.options.num_steps, (self.resident.num_threads, self.streamed.drawing.num_threads)
        found = {
            "the streamed model drew other bytes than the resident one": not self.is_equal,
            "nothing was streamed": engine.streamed_bytes == 0,
            f"{engine.num_passes} passes were made for {num_steps} steps": engine.num_passes != num_steps,
            f"{lost} events of the engine are not in {self.event_log}": lost > 0,
            f"the two ran with different numbers of compute threads: {num_threads}": len(set(num_threads)) > 1,
        }
        return [problem for problem, is_true in found.items() if is_true]

    @property
    def _engine(self) -> EngineStatistics:
        return self.streamed.statistics.engine

    def as_json(self) -> dict[str, Any]:
        """All figures, in plain values; bytes are bytes and times seconds."""
        statistics, drawing = self.streamed.statistics, self.streamed.drawing
        return {
            "equal": self.is_equal,
            "problems": self.problems,
            "resident_sha256": self.resident.sha256,
            "streamed_sha256": drawing.sha256,
            "resident_s": self.resident.seconds,
            "streamed_s": drawing.seconds,
            "waited_s": self.waited_s,
            "waited_share": self.waited_s / drawing.seconds,
            "num_digits": len(self.resident.images),
            **attrs.asdict(self.options),
            "num_threads": drawing.num_threads,
            "reading": self.reading if isinstance(self.reading, str) else attrs.asdict(self.reading),
            "picture": str(self.picture),
            "event_log": str(self.event_log),
            "num_events": self.streamed.num_events,
            "num_lost_events": self.streamed.num_lost_events,
            "statistics": attrs.asdict(statistics),
            "config": self.config.effective(),
        }

    def print(self, console: Console) -> None:
        """All figures for people."""
        facts = fact_table()
        for name, value in self._facts().items():
            facts.add_row(name, value)
        console.print(facts)
        for problem in self.problems:
            console.print(Text(f"FAILED: {problem}", style="bold red"))

    def _facts(self) -> dict[str, str | Text]:
        statistics, engine, drawing = self.streamed.statistics, self._engine, self.streamed.drawing
        choice = statistics.choice
        return {
            "equal": Text("yes, byte for byte", style="bold green") if self.is_equal else Text("NO", style="bold red"),
            "SHA-256": f"{self.resident.sha256} resident\n{drawing.sha256} streamed",
            "streamed": (
                f"{format_bytes(engine.streamed_bytes)} in {engine.num_fetches} fetches, "
                f"{engine.num_on_demand_fetches} of them on demand"
            ),
            "model": f"{format_bytes(statistics.model_bytes)}, {statistics.num_blocks} blocks",
            "device peak": (
                f"{format_bytes(engine.device_peak_bytes)} on {statistics.device}, "
                f"{format_share(engine.device_peak_bytes, statistics.model_bytes)} of the model; "
                f"a window of {_count(self.config.window_blocks, 'block')}"
            ),
            "walks": f"{engine.num_walks}, for {_count(engine.num_passes, 'pass', 'passes')}",
            "transfer": f"{choice.transfer} from the {choice.source}: {choice.transfer_reason}",
            "time": f"{format_seconds(self.resident.seconds)} resident, {format_seconds(drawing.seconds)} streamed",
            "waiting": (
                f"{format_seconds(self.waited_s)} lost to waiting for blocks, "
                f"{format_share(self.waited_s, drawing.seconds)} of the streamed time"
            ),
            "digits": self._reading_text(),
            "written": f"{self.picture}\n{self.event_log}, {_count(self.streamed.num_events, 'event')}",
        }

    def _reading_text(self) -> str:
        reading = self.reading
        if isinstance(reading, str):
            return reading
        return (
            f"{reading.num_drawn_right} of {reading.num_drawn} read as the class asked for, by a classifier that reads "
            f"{reading.num_real_right} of {reading.num_real} real held-out digits right "
            f"({format_share(reading.num_real_right, reading.num_real)})"
        )


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
