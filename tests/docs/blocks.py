"""The code blocks of a page, and a reader who does what they say, in their order, in a folder of their own."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
from click.testing import CliRunner

from streamflow.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?"
    r'```(?P<language>\w*)(?: title="(?P<title>[^"\n]*)")?\n(?P<code>.*?)^```$',
    flags=re.MULTILINE | re.DOTALL,
)


@attrs.frozen
class Block:
    """``title``: the file that the reader is to write it to. ``reason``: why it is not run; None: it is."""

    language: str
    title: str | None
    code: str
    reason: str | None

    @property
    def lines(self) -> list[str]:
        """The commands of a shell block, without comments."""
        stripped = (line.partition(" #")[0].strip() for line in self.code.splitlines())
        return [line for line in stripped if line]


def blocks_of(page: str) -> list[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [Block(**found.groupdict()) for found in _BLOCK.finditer(text)]


class Reader:
    """Does what a page says, in ``folder``, which is the current one; ``names`` is what its Python knows."""

    def __init__(self, folder: Path, names: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.names = {"__name__": "page", **(names or {})}
        self.printed: list[str] = []
        self.num_run = 0

    def follow(self, page: str) -> None:
        """All blocks of the page but those that say why not."""
        for block in blocks_of(page):
            if block.reason is None and block.language:
                self._do(block, page)
                self.num_run += 1

    def _do(self, block: Block, page: str) -> None:
        if block.language == "sh":
            for line in block.lines:
                self._command(line)
        elif block.title is not None:
            (self.folder / block.title).write_text(block.code, encoding="utf-8")
        else:
            self._python(block.code, page)

    def _python(self, source: str, page: str) -> None:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(source, page, "exec", flags=flags, dont_inherit=True)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, self.names))
        else:
            exec(code, self.names)

    def _command(self, line: str) -> None:
        program, *arguments = shlex.split(line)
        if program == "streamflow":
            done = CliRunner().invoke(main, arguments, catch_exceptions=False)
            assert done.exit_code == 0, f"{line}: {done.output}"
            self.printed.append(done.output)
        elif program == "python":
            with mock.patch.object(sys, "argv", arguments):
                runpy.run_path(arguments[0], run_name="__main__")
        else:
            raise AssertionError(f"nothing here runs {program!r}; say in the page why it is not run")
