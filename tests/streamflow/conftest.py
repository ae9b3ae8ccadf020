"""Lets the shared kit explain its failed assertions as test modules do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.streamflow.kit", "tests.streamflow.models")
