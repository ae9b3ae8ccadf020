"""Trace files: written whole or not at all, compressed where the name ends with ``.gz``. No torch."""

from __future__ import annotations

import errno
import gzip
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from streamflow.trace.errors import TraceFormatError


def check_writable(path: Path) -> None:
    """Return if a file can be made at ``path``, as far as can be told; nothing is left there.

    :raises OSError: if not.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        return
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` to ``path`` in place of the file that is there, or into what else is there (a device, a pipe).

    :raises OSError: if that fails; a file that was there is there still.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as other:
            _dump(value, other, compressed=path.suffix == ".gz")
        return
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _dump(value, file, compressed=path.suffix == ".gz")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _dump(value: Mapping[str, Any], file: IO[bytes], *, compressed: bool) -> None:
    text = json.dumps(value, separators=(",", ":")).encode()
    file.write(gzip.compress(text, 6, mtime=0) if compressed else text)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, compressed or not.

    :raises TraceFormatError: if it holds none.
    :raises OSError: if it cannot be read.
    """
    raw = path.read_bytes()
    try:
        value = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (ValueError, EOFError, gzip.BadGzipFile) as failure:
        raise TraceFormatError(str(path), [f"it holds no JSON ({failure})"]) from failure
    if isinstance(value, list):  # the short form of the format: events only
        value = {"traceEvents": value}
    if not isinstance(value, dict):
        raise TraceFormatError(str(path), [f"it holds no JSON object but a {type(value).__name__}"])
    return value
