"""What the demo's tests share: the real digits, the shipped model, the fitted classifier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from streamflow.tools.demo.checkpoint import load_demo_model
from streamflow.tools.demo.classifier import DigitClassifier, fit_classifier
from streamflow.tools.demo.digits import DigitSplit, load_split
from streamflow.tools.demo.model import DigitTransformer, DigitTransformerConfig


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Equality to the bit needs a fixed number of threads, and the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def split() -> DigitSplit:
    return load_split()


@pytest.fixture(scope="session")
def classifier(split: DigitSplit) -> DigitClassifier:
    return fit_classifier(split)


@pytest.fixture(scope="module")
def model() -> DigitTransformer:
    """The model that ships with the package."""
    return load_demo_model()


@pytest.fixture
def small_config() -> DigitTransformerConfig:
    return DigitTransformerConfig(width=16, num_blocks=2, num_heads=2)
