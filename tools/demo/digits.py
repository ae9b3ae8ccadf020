"""The real digits: 1,797 handwritten ones of 8x8 pixels, as scikit-learn ships them, and who may see which.

The split, per class and seeded:

* half of them train the generator (``generator``);
* of the other half, which the generator never sees, two thirds train the classifier (``classifier``),
* and one third stays held out from both (``held_out``).

So the classifier that reads the generated digits cannot have learnt them from the same samples. The data does not say
who wrote which digit: one hand may be in all three parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import attrs
import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits
from torch import Tensor

#: The split of the checkpoint that ships with the package; not the seed of the training.
SPLIT_SEED = 0
#: Pixels of the data run from 0 (paper) to this (ink).
MAX_PIXEL = 16.0

Indices = npt.NDArray[np.int64]


@attrs.frozen(eq=False)
class DigitSet:
    """Some of the digits.

    ``images`` is float32[N, 1, 8, 8] in [-1, 1], -1 for paper and 1 for ink; ``labels`` int64[N]; ``sample_ids`` says
    which rows of scikit-learn's table they are, in rising order. All on the CPU.
    """

    images: Tensor
    labels: Tensor
    sample_ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the sample ids, to tell whether two splits gave the same part."""
        return hashlib.sha256(",".join(map(str, self.sample_ids)).encode()).hexdigest()


@attrs.frozen(eq=False)
class DigitSplit:
    """Three parts without a sample in common; together they are all the digits."""

    generator: DigitSet
    classifier: DigitSet
    held_out: DigitSet


def load_split(seed: int = SPLIT_SEED) -> DigitSplit:
    """The digits, split by ``seed``: the same seed gives the same parts, with every version of the libraries."""
    table = load_digits()
    images = torch.from_numpy(table.images / MAX_PIXEL * 2 - 1).float()[:, None]
    labels = torch.from_numpy(table.target).long()
    parts = (_select(images, labels, ids) for ids in _split_ids(labels.numpy(), seed))
    return DigitSplit(*parts)


def _select(images: Tensor, labels: Tensor, ids: Indices) -> DigitSet:
    return DigitSet(images[ids], labels[ids], tuple(ids.tolist()))


def _split_ids(labels: Indices, seed: int) -> Iterator[Indices]:
    """Sample ids of the three parts, each part with its share of every class."""
    # RandomState, not default_rng: numpy promises that its streams never change.
    random = np.random.RandomState(seed)
    by_class = [_split_class(random.permutation(np.flatnonzero(labels == label))) for label in np.unique(labels)]
    return (np.sort(np.concatenate(part)) for part in zip(*by_class, strict=True))


def _split_class(ids: Indices) -> list[Indices]:
    half = len(ids) // 2
    return np.split(ids, [half, half + (len(ids) - half) * 2 // 3])
