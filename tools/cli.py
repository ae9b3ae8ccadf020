"""The command ``streamflow``. Programs are imported when they are run: ``--help`` imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import IO, Any

import attrs
import click

from streamflow._version import __version__
from streamflow.stages.errors import StreamflowError

#: Exit status of a program that could not do what was asked, as for a wrong option.
USER_ERROR = 2


@attrs.frozen
class Program:
    """A command by where it is defined, with the line that describes it in the list of commands."""

    module: str
    attribute: str
    summary: str

    def load(self) -> click.Command:
        """The command itself; imports its module."""
        command = getattr(importlib.import_module(self.module), self.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.module}.{self.attribute} is no click command but {type(command).__name__}")
        return command


class UserError(click.ClickException):
    """An error as its user sees it: what is wrong, on standard error, and exit status 2."""

    exit_code = USER_ERROR

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"streamflow: {self.format_message()}", file=file, err=file is None)


class ProgramGroup(click.Group):
    """A group whose commands are imported when they are called, and whose typed errors become messages."""

    def __init__(self, *args: Any, programs: Mapping[str, Program], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._programs = dict(programs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order in which they are listed."""
        return [*self._programs, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name; None if there is none."""
        program = self._programs.get(cmd_name)
        return super().get_command(ctx, cmd_name) if program is None else program.load()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing them."""
        rows = [(name, program.summary) for name, program in self._programs.items()]
        rows += [(name, command.get_short_help_str()) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        :raises UserError: if it fails with an error of streamflow's own, or one of the file system.
        """
        try:
            return super().invoke(ctx)
        except StreamflowError as failure:
            raise UserError(str(failure)) from failure
        except OSError as failure:
            if failure.filename is None:
                raise
            raise UserError(f"{failure.filename}: {failure.strerror}") from failure


PROGRAMS = {
    "demo": Program(
        "streamflow.tools.demo.command", "demo", "Draw digits with a resident and a streamed model, and compare."
    ),
    "plan": Program("streamflow.tools.plan.command", "plan", "Say what of a model would stream, before it is loaded."),
    "doctor": Program(
        "streamflow.tools.doctor.command",
        "doctor",
        "Say what this machine can do: the link, page-locking of mapped files, limits, the store's filesystem.",
    ),
}
STORE = {
    "publish": Program(
        "streamflow.tools.store.publish",
        "publish",
        "Put a model's final weights into the store, before they are needed.",
    ),
    "ls": Program("streamflow.tools.store.listing", "ls", "What the store holds, and who uses it."),
    "verify": Program("streamflow.tools.store.verify", "verify", "Check every byte of what the store holds."),
    "evict": Program("streamflow.tools.store.evict", "evict", "Remove entries by size and age; never one in use."),
}
BENCHMARKS = {
    "step": Program(
        "streamflow.tools.bench.step",
        "step",
        "One step of a FLUX.1-shaped transformer: streamed against resident and the link limit, in one run.",
    ),
    "link": Program(
        "streamflow.tools.bench.link",
        "link",
        "Copies to the device from page-locked, registered and pageable memory, and packing by threads: rates, ratios.",
    ),
    "gather": Program(
        "streamflow.tools.bench.gather",
        "gather",
        "What ranks gain by bringing slices of a block and gathering the rest: the link, the gather, both overlapped.",
    ),
    "chunk": Program(
        "streamflow.tools.bench.chunk_cost",
        "chunk",
        "Interpreter time that the staged transfer takes for each chunk, with warm and with cold caches.",
    ),
    "startup": Program(
        "streamflow.tools.bench.startup",
        "startup",
        "From opening a FLUX.1-shaped transformer to its first finished step, from the checkpoint and from the store.",
    ),
    "memory": Program(
        "streamflow.tools.bench.memory",
        "memory",
        "Host memory of several processes that stream one model from the store, against the size of its entry.",
    ),
    "store": Program(
        "streamflow.tools.bench.store",
        "store",
        "Publishing into the host weight store against copying and hashing; a hit against ordinary loading.",
    ),
    "overlap": Program(
        "streamflow.tools.bench.overlap",
        "overlap",
        "Overlap of transfer and compute, both modelled on the CPU: walk time over the larger of the two.",
    ),
    "throughput": Program(
        "streamflow.tools.bench.throughput",
        "throughput",
        "Forwards per second against concurrency: streamed together and one by one, resident, in one run.",
    ),
    "trace": Program(
        "streamflow.tools.bench.trace_cost",
        "trace",
        "Cost of recording a trace: CPU time for each event, and a recorded walk over one that is not.",
    ),
}
TRACES = {
    "report": Program(
        "streamflow.tools.trace.command", "report", "Say where the time of each walk went, and what would recover it."
    ),
    "plot": Program(
        "streamflow.tools.trace.command", "plot", "Draw a trace: a page to zoom and search in, and a picture."
    ),
    "diff": Program(
        "streamflow.tools.trace.command", "diff", "Say what changed from one trace to another, the most first."
    ),
    "merge": Program(
        "streamflow.tools.trace.command",
        "merge",
        "Put traces of one run onto one time axis: FILE, those of other ranks, and torch.profiler's.",
    ),
}


@click.group(cls=ProgramGroup, programs=PROGRAMS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="streamflow")
def main() -> None:
    """Run diffusion transformers whose weights do not fit on the accelerator."""


@main.group(cls=ProgramGroup, programs=STORE)
def store() -> None:
    """Look after the host weight store: final weights that the processes of a node share."""


@main.group(cls=ProgramGroup, programs=BENCHMARKS)
def bench() -> None:
    """Measure streamflow on this machine."""


@main.group(cls=ProgramGroup, programs=TRACES)
def trace() -> None:
    """Look into traces: see trace_path of OffloadConfig."""
