"""Errors of the trace programs."""

from __future__ import annotations

from streamflow.stages.errors import StreamflowError


class PlottingUnavailableError(StreamflowError, ImportError):
    """The plotting library is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "matplotlib is needed to draw a PNG; pip install 'streamflow-offload[plot]', or draw the page with --html",
            name="matplotlib",
        )


class RankTracesError(StreamflowError, ValueError):
    """A trace cannot be put beside those of other ranks."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"{path} cannot be merged: {problem}; give the traces that ranks wrote of one run, one of each rank"
        )


class ProfilerTraceError(StreamflowError, ValueError):
    """A file is no trace of torch.profiler that can be put beside one of streamflow."""

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path} cannot be merged: {problem}; write it with torch.profiler's export_chrome_trace")
