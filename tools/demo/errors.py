"""Errors of the demo. Each names the value or the file at fault and what to do about it."""

from __future__ import annotations

from pathlib import Path

from streamflow.stages.errors import StreamflowError


class DemoValueError(StreamflowError, ValueError):
    """A number or a shape given to the demo is outside of what it can work with."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        self.name, self.value, self.expected = name, value, expected
        super().__init__(f"{name} is {value!r}; it must be {expected}")


class DemoCheckpointError(StreamflowError, ValueError):
    """A checkpoint of the demo cannot be read, or is not one that fits this model."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(
            f"{path}: {reason}; reinstall streamflow, or train it anew with `python -m streamflow.tools.demo.train`"
        )


class ClassifierUnavailableError(StreamflowError, ImportError):
    """The classifier that reads the digits needs a library that is not installed; ``library`` is its import name."""

    def __init__(self, library: str) -> None:
        self.library = library
        super().__init__(
            f"{library} is not installed, so nothing can read the digits; "
            "install it with `pip install 'streamflow-offload[demo]'`"
        )
