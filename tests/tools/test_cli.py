"""The command itself: what it lists without importing anything, and how errors reach its user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import streamflow
from streamflow.stages.errors import StreamflowError
from streamflow.tools.cli import BENCHMARKS, PROGRAMS, TRACES, Program, ProgramGroup, main

EVERY_PROGRAM = [*PROGRAMS.items(), *BENCHMARKS.items(), *TRACES.items()]

# Stands in for the package's own __init__, which is none of the command's business.
WITHOUT_THE_LIBRARY = """
import sys, types
package = types.ModuleType("streamflow")
package.__path__ = [sys.argv.pop(1)]
sys.modules["streamflow"] = package
from streamflow.tools.cli import main
main(sys.argv[1:], standalone_mode=False)
loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "rich", "PIL", "anyio", "safetensors", "sklearn"}
assert not loaded, loaded
"""


class HostFullError(StreamflowError, MemoryError):
    """An error that a program may end with."""


def group_of(command: click.Command) -> ProgramGroup:
    group = ProgramGroup("group", programs={})
    group.add_command(command)
    return group


def failing(error: Exception) -> ProgramGroup:
    @click.command("fails")
    def fails() -> None:
        """Fail."""
        raise error

    return group_of(fails)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["bench", "--help"], ["--version"]])
def test_help_and_version_import_no_program(arguments: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT_THE_LIBRARY, str(Path(streamflow.__path__[0])), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout


def test_every_program_is_listed_with_its_own_words() -> None:
    for name, program in EVERY_PROGRAM:
        command = program.load()
        assert (command.name, command.get_short_help_str(limit=200)) == (name, program.summary)


def test_the_lists_of_commands_are_complete() -> None:
    top = CliRunner().invoke(main, ["--help"]).stdout
    assert all(f"  {name} " in top for name in ("demo", "plan", "bench"))
    below = CliRunner().invoke(main, ["bench", "--help"]).stdout
    assert all(f"  {name} " in below for name in ("step", "overlap"))


@pytest.mark.parametrize(("name", "program"), EVERY_PROGRAM)
def test_every_program_has_json(name: str, program: Program) -> None:
    assert "--json" in {option for parameter in program.load().params for option in parameter.opts}


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(main, ["--version"]).stdout == f"streamflow, version {streamflow.__version__}\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HostFullError("the host is full; free some of it"), "streamflow: the host is full; free some of it\n"),
        (
            FileNotFoundError(2, "No such file or directory", "gone/x"),
            "streamflow: gone/x: No such file or directory\n",
        ),
    ],
)
def test_an_error_of_the_user_is_one_message(error: Exception, message: str) -> None:
    result = CliRunner().invoke(failing(error), ["fails"])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", message)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError("one that names no file")])
def test_other_errors_are_not_hidden(error: Exception) -> None:
    assert CliRunner().invoke(failing(error), ["fails"]).exception is error


def test_a_typed_error_of_a_command_in_a_group_is_a_message_too() -> None:
    outer = group_of(failing(HostFullError("full")))
    assert CliRunner().invoke(outer, ["group", "fails"]).stderr == "streamflow: full\n"


@pytest.mark.parametrize(
    "arguments", [["dmeo"], ["bench", "stp"], ["demo", "--sed", "1"], ["plan"], ["plan", "x", "y"]]
)
def test_what_is_not_there_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert result.stdout == ""


def test_a_program_that_is_no_command_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Program is no click command but type"):
        Program("streamflow.tools.cli", "Program", "").load()
