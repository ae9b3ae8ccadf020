"""``streamflow doctor``: what this machine can do, and what would be chosen because of it."""

from __future__ import annotations

import anyio
import attrs
import click

from streamflow.config import OffloadConfig
from streamflow.store.options import StoreOptions
from streamflow.tools.doctor.examination import examine
from streamflow.tools.doctor.report import print_diagnosis
from streamflow.tools.terminal import print_json, result_console


@click.command()
@click.option("--device", help="cuda, cuda:N or cpu.  [default: cuda where there is one]")
@click.option("--store-root", type=click.Path(), help="The folder of the store.  [default: that of this user]")
@click.option(
    "--probe-deadline-s",
    type=float,
    default=OffloadConfig(device="cpu").probe_deadline_s,
    show_default=True,
    help="How long the try to register a file may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def doctor(device: str | None, store_root: str | None, probe_deadline_s: float, as_json: bool) -> None:
    """Say what this machine can do: the link, page-locking of mapped files, limits, the store's filesystem.

    Nothing is changed. A child process tries to register a small file for the device.
    """
    store = StoreOptions() if store_root is None else StoreOptions(root=store_root)
    config = OffloadConfig(device=device, probe_deadline_s=probe_deadline_s, store=store)
    diagnosis = anyio.run(examine, config)
    if as_json:
        print_json(attrs.asdict(diagnosis))
    else:
        print_diagnosis(diagnosis, result_console())
