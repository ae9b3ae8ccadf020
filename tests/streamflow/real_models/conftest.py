"""The saved models, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.streamflow.real_models.models import Variant

Saved = Callable[[Variant], Path]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The directory of a variant, as ``save_pretrained`` leaves it. Not to be changed."""
    directories: dict[Variant, Path] = {}

    def find(variant: Variant) -> Path:
        if variant not in directories:
            directory = tmp_path_factory.mktemp(str(variant).replace(" ", "-"))
            variant.save(directory)
            directories[variant] = directory / "saved"
        return directories[variant]

    return find
