"""The file layer needs no torch: programs that only look at a store start without it."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import streamflow.store


def test_importing_every_module_of_the_store_does_not_import_torch() -> None:
    modules = [f"streamflow.store.{found.name}" for found in pkgutil.iter_modules(streamflow.store.__path__)]
    assert "streamflow.store.store" in modules
    code = f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
