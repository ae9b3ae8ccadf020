"""What tests of the cuda device share."""

from __future__ import annotations

import pytest

from tests.stages.devices.cuda_script import FakeCuda, installed


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A script, in the place of `torch.cuda`."""
    return installed(monkeypatch)
