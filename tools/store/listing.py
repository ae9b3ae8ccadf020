"""``streamflow store ls``: what the store holds, and who uses it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import click

from streamflow.stages.threads import open_threads
from streamflow.store.inventory import EntryInfo
from streamflow.store.options import StoreOptions
from streamflow.store.store import open_store
from streamflow.tools.store.options import options_at, store_command
from streamflow.tools.terminal import format_bytes, plain_table, print_json, result_console

#: Digits of an identity that a table shows.
SHORT = 16


@click.command("ls")
@store_command
def ls(root: Path | None, as_json: bool) -> None:
    """List the entries of the store: content, size, when each was last used, and whether it is in use."""
    options = options_at(root)
    filesystem, entries = anyio.run(list_store, options)
    values = [entry_values(entry) for entry in entries]
    if as_json:
        print_json({"root": options.root, "filesystem": filesystem, "entries": values})
    else:
        _print(options.root, filesystem, values)


async def list_store(options: StoreOptions) -> tuple[str, tuple[EntryInfo, ...]]:
    """The kind of filesystem that the store is on, and its entries."""
    async with open_threads() as crew, open_store(options, crew) as store:
        kind = store.filesystem
        return f"{kind.kind}, which is memory" if kind.is_memory else kind.kind, await store.entries()


def entry_values(entry: EntryInfo) -> dict[str, Any]:
    """An entry as plain values."""
    manifest = entry.manifest
    return {
        "content_id": entry.content_id,
        "generation": entry.generation,
        "nbytes": entry.nbytes,
        "model": None if manifest is None else manifest.metadata.get("model"),
        "num_images": None if manifest is None else len(manifest.images),
        "created_s": None if manifest is None else manifest.created_s,
        "last_used_s": entry.last_used_s,
        "state": _state(entry),
        "source_ids": list(entry.source_ids),
        "problem": entry.problem,
    }


def _state(entry: EntryInfo) -> str:
    if entry.is_denied or entry.problem is not None:
        return "damaged"
    return "in use" if entry.is_leased else "free"


def _print(root: str, filesystem: str, values: list[dict[str, Any]]) -> None:
    console = result_console()
    if not values:
        console.print(f"{root} ({filesystem}) holds no entries")
        return
    table = plain_table("content", "model", "state", "last used", "generation", "size", num_left=4, title=root)
    for entry in values:
        used = datetime.fromtimestamp(entry["last_used_s"], UTC).strftime("%Y-%m-%d %H:%M UTC")
        name = str(entry["model"] or entry["problem"] or "?").rpartition(".")[2]
        table.add_row(
            entry["content_id"][:SHORT],
            name,
            entry["state"],
            used,
            str(entry["generation"]),
            format_bytes(entry["nbytes"]),
        )
    console.print(table)
    console.print(f"{format_bytes(sum(entry['nbytes'] for entry in values))} on {filesystem}")
