"""Opening trace files for the programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamflow.trace.errors import TraceFormatError
from streamflow.trace.file import read_json
from streamflow.trace.schema import problems_of


def read_trace(path: Path) -> dict[str, Any]:
    """The trace in ``path``, which is of the schema.

    :raises TraceFormatError: if it is not.
    :raises OSError: if it cannot be read.
    """
    return checked(read_json(path), path)


def checked(trace: dict[str, Any], path: Path) -> dict[str, Any]:
    """``trace``, which was read from ``path``, if it is of the schema.

    :raises TraceFormatError: if it is not.
    """
    problems = problems_of(trace)
    if problems:
        raise TraceFormatError(str(path), problems)
    return trace
