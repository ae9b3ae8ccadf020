"""``streamflow store evict``: remove entries by size and age; never one in use."""

from __future__ import annotations

from pathlib import Path

import anyio
import attrs
import click

from streamflow.stages.threads import open_threads
from streamflow.store.eviction import Evicted
from streamflow.store.eviction_policy import EvictionPolicy
from streamflow.store.options import StoreOptions
from streamflow.store.store import open_store
from streamflow.tools.store.listing import SHORT
from streamflow.tools.store.options import options_at, store_command
from streamflow.tools.terminal import format_bytes, plain_table, print_json, result_console

_DAY_S = 86_400


@click.command("evict")
@click.option("--max-gb", type=float, help="What may stay, in GB; what was not used for longest goes first.")
@click.option("--max-age-days", type=float, help="How long an entry may stay unused.")
@click.option("--all", "everything", is_flag=True, help="All entries that nobody uses.")
@store_command
def evict(max_gb: float | None, max_age_days: float | None, everything: bool, root: Path | None, as_json: bool) -> None:
    """Remove entries that nobody uses. Damaged ones always go; without an option, only these.

    An entry in use is skipped, in whatever process that may be.
    """
    if everything and (max_gb is not None or max_age_days is not None):
        raise click.UsageError("--all leaves nothing for --max-gb or --max-age-days to decide; give one or the other")
    policy = EvictionPolicy(
        max_bytes=0 if everything else None if max_gb is None else round(max_gb * 1e9),
        max_age_s=None if max_age_days is None else max_age_days * _DAY_S,
    )
    evicted = anyio.run(evict_from, options_at(root), policy)
    if as_json:
        print_json({"evicted": [attrs.asdict(entry) for entry in evicted]})
    else:
        _print(evicted)


async def evict_from(options: StoreOptions, policy: EvictionPolicy) -> tuple[Evicted, ...]:
    """What was removed."""
    async with open_threads() as crew, open_store(options, crew) as store:
        return await store.evict(policy)


def _print(evicted: tuple[Evicted, ...]) -> None:
    if not evicted:
        result_console().print("nothing had to go")
        return
    table = plain_table("content", "why", "size", num_left=2)
    for entry in evicted:
        table.add_row(entry.content_id[:SHORT], entry.reason, format_bytes(entry.nbytes))
    result_console().print(table)
