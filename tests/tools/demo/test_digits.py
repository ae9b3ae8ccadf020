"""Who sees which of the real digits."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits

from streamflow.tools.demo.digits import DigitSplit, load_split


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_sample_is_in_two_parts_and_none_is_lost(seed: int) -> None:
    split = load_split(seed)
    parts = [set(part.sample_ids) for part in (split.generator, split.classifier, split.held_out)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(load_digits().target)


def test_the_parts_are_a_half_a_third_and_a_sixth_of_every_class(split: DigitSplit) -> None:
    counts = [part.labels.bincount(minlength=10) for part in (split.generator, split.classifier, split.held_out)]
    for part, share in zip(counts, (1 / 2, 1 / 3, 1 / 6), strict=True):
        assert ((part - share * sum(counts)).abs() <= 1).all()


def test_the_seed_decides_and_nothing_else(split: DigitSplit) -> None:
    torch.rand(1)
    again = load_split()
    assert again.generator.digest == split.generator.digest
    assert again.held_out.digest == split.held_out.digest
    assert load_split(1).generator.digest != split.generator.digest


def test_images_are_the_tables_rows_scaled_to_one(split: DigitSplit) -> None:
    table = load_digits()
    for part in (split.generator, split.classifier, split.held_out):
        assert part.images.shape == (len(part.sample_ids), 1, 8, 8)
        assert part.images.dtype == torch.float32
        assert (part.images.min().item(), part.images.max().item()) == (-1.0, 1.0)
        raw = torch.from_numpy(table.images[list(part.sample_ids)])
        assert torch.equal((part.images[:, 0].double() + 1) * 8, raw)
        assert part.labels.tolist() == table.target[list(part.sample_ids)].tolist()
