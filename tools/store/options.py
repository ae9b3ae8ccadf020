"""What all programs of the store take: where it is, and how results are printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from streamflow.store.options import StoreOptions, default_root

Command = TypeVar("Command", bound=Callable[..., Any])


def store_command(command: Command) -> Command:
    """Adds ``--root`` and ``--json`` to a command."""
    root = click.option(
        "--root", type=click.Path(path_type=Path), help="The store's folder.  [default: in the user's cache folder]"
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
    return root(as_json(command))


def options_at(root: Path | None, **options: Any) -> StoreOptions:
    """The store's options with this root; None: the default one.

    :raises StoreOptionsError: if an option is not usable.
    """
    return StoreOptions(root=str(root) if root is not None else default_root(), **options)
