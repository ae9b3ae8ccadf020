"""A small pipeline's directory, and a reader in a folder where it lies as ``my-pipeline``."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.blocks import ROOT, Reader

ReaderFor = Callable[..., Reader]


@pytest.fixture(scope="session")
def saved_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pipeline")
    small = runpy.run_path(str(ROOT / "examples" / "text_to_image.py"))["small_pipeline"]()
    small.to(dtype=torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture
def reader_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReaderFor:
    """Makes a reader whose folder is current, with the examples in it; the user's cache is in there, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def make(pipeline: Path | None = None, **names: Any) -> Reader:
        if pipeline is not None:
            (tmp_path / "my-pipeline").symlink_to(pipeline)
        return Reader(tmp_path, names)

    return make
