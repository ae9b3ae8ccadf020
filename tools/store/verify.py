"""``streamflow store verify``: check every byte of what the store holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import click

from streamflow.stages.threads import open_threads
from streamflow.store.errors import EntryRejectedError
from streamflow.store.options import StoreOptions
from streamflow.store.store import HostWeightStore, open_store
from streamflow.tools.store.listing import SHORT
from streamflow.tools.store.options import options_at, store_command
from streamflow.tools.terminal import byte_progress, format_bytes, plain_table, print_json, result_console

#: Exit status if something was damaged.
DAMAGED = 1


@click.command("verify")
@click.argument("content", required=False)
@store_command
@click.pass_context
def verify(ctx: click.Context, content: str | None, root: Path | None, as_json: bool) -> None:
    """Read every byte of the entries, or of those whose content begins with CONTENT, and compare the digests.

    A damaged entry is put aside, and made again by whoever needs it next; the exit status is 1 then.
    """
    checked = anyio.run(verify_store, options_at(root, verification="size"), content or "")
    if content and not checked:
        raise click.BadParameter(f"no entry's content begins with {content!r}; see `streamflow store ls`")
    if as_json:
        print_json({"entries": checked})
    else:
        _print(checked)
    if any(entry["problem"] for entry in checked):
        ctx.exit(DAMAGED)


async def verify_store(options: StoreOptions, prefix: str) -> list[dict[str, Any]]:
    """The entries whose content begins with ``prefix``, each with what is wrong with it (None: nothing)."""
    async with open_threads() as crew, open_store(options, crew) as store:
        contents = dict.fromkeys(e.content_id for e in await store.entries() if e.content_id.startswith(prefix))
        return [await _verify(store, content) for content in contents]


async def _verify(store: HostWeightStore, content: str) -> dict[str, Any]:
    nbytes, problem = 0, None
    try:
        lease = await store.lease(content)
        if lease is None:
            return {"content_id": content, "nbytes": 0, "problem": None}  # it went meanwhile
        with lease, byte_progress(f"verifying {content[:SHORT]}") as progress:
            nbytes = lease.manifest.nbytes
            await store.verify(lease, progress)
    except EntryRejectedError as damage:
        problem = str(damage)
    return {"content_id": content, "nbytes": nbytes, "problem": problem}


def _print(checked: list[dict[str, Any]]) -> None:
    table = plain_table("content", "result", "size", num_left=2)
    for entry in checked:
        table.add_row(entry["content_id"][:SHORT], entry["problem"] or "sound", format_bytes(entry["nbytes"]))
    result_console().print(table if checked else "there are no entries")
