"""Imports every module of an installed streamflow: ``use_wheel.py CHECKOUT ENVIRONMENT [--with-demo]``.

Without ``--with-demo`` only the library and the command line are imported, since their requirements are all there is.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import streamflow


def _ignore(package: str) -> None:
    """A package that cannot be imported without its extra is told by `import_all`, unless it is skipped."""


def import_all(with_demo: bool) -> int:
    """Import every module but those of the extra ``serve``, the demo's only if its requirements are installed; returns
    how many.
    """
    skipped = ("streamflow.metrics", *(() if with_demo else ("streamflow.tools.demo",)))
    names = [module.name for module in pkgutil.walk_packages(streamflow.__path__, "streamflow.", onerror=_ignore)]
    wanted = [name for name in names if not name.startswith(skipped)]
    for name in wanted:
        importlib.import_module(name)
    return len(wanted)


def strays(checkout: Path, environment: Path) -> list[str]:
    """Loaded modules of ours that come from anywhere but the environment, and paths that lead into the checkout."""
    found = [entry for entry in sys.path if Path(entry).resolve().is_relative_to(checkout)]
    for name, module in sorted(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or environment).resolve()
        ours = name.partition(".")[0] == "streamflow"
        if file.is_relative_to(checkout) or (ours and not file.is_relative_to(environment)):
            found.append(f"{name} from {file}")
    return found


if __name__ == "__main__":
    count = import_all("--with-demo" in sys.argv[3:])
    wrong = strays(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
    print(f"{count} modules imported;", f"wrong places: {wrong}" if wrong else "all from the environment")
    sys.exit(bool(wrong))
