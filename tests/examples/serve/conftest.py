"""What tests of the server share; and it lets the shared kits explain their failed assertions as test modules do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.streamflow.runtime.kit import Stops


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Stops:
    """Tells when a request is told to stop."""
    from tests.streamflow.runtime.kit import Stops  # not before the lines above

    return Stops(monkeypatch)
