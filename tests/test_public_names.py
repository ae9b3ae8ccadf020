"""The public surface: every name is there, is documented, and comes without torch until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import streamflow


@pytest.mark.parametrize("name", [name for name in streamflow.__all__ if name != "__version__"])
def test_a_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(streamflow, name).__doc__
    assert name in dir(streamflow)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(streamflow, "no_such_name")  # noqa: B009 - the point is that it is not there


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, streamflow; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
