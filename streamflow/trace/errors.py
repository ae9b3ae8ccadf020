"""Errors of traces."""

from __future__ import annotations

from collections.abc import Sequence

from streamflow.stages.errors import StreamflowError


class TraceOffError(StreamflowError, RuntimeError):
    """A trace was asked for, but none is recorded."""

    def __init__(self) -> None:
        super().__init__(
            "this offload records no trace; open it with trace_path='trace.json' (written on closing) "
            "or trace_events=100_000 (kept, for offload.write_trace)"
        )


class TraceWriteError(StreamflowError, OSError):
    """A trace could not be written; ``__cause__`` says why."""

    def __init__(self, path: str, cause: OSError) -> None:
        self.path = path
        super().__init__(f"the trace could not be written to {path} ({cause.strerror or cause}); choose another place")


class TraceFormatError(StreamflowError, ValueError):
    """A file is no trace of this schema. ``problems`` says where it differs."""

    def __init__(self, path: str, problems: Sequence[str]) -> None:
        self.path, self.problems = path, tuple(problems)
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        super().__init__(f"{path} is no readable trace of streamflow: {'; '.join(problems[:3])}{more}")
