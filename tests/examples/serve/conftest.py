"""What tests of the server share."""

from __future__ import annotations

import pytest

from tests.streamflow.runtime.conftest import stops

__all__ = ["stops"]

pytest.register_assert_rewrite("tests.examples.serve.kit")
