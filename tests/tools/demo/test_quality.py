"""Whether the shipped model draws what is asked, judged by a classifier that learnt from other samples."""

from __future__ import annotations

import pytest
import torch

from streamflow.tools.demo.classifier import Accuracy, DigitClassifier, fit_classifier
from streamflow.tools.demo.digits import DigitSplit
from streamflow.tools.demo.model import DigitTransformer
from streamflow.tools.demo.sampling import sample

TEN_OF_EACH = [digit for digit in range(10) for _ in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_generated_digits_read_as_asked_and_are_no_copies(
    model: DigitTransformer, classifier: DigitClassifier, split: DigitSplit, seed: int
) -> None:
    images = sample(model, TEN_OF_EACH, seed=seed)
    accuracy = classifier.measure(images, TEN_OF_EACH)
    assert accuracy.num_total == 100
    assert accuracy.num_right >= 85, f"seed {seed}: {accuracy}"
    # Real held-out digits lie 2.2 from the nearest digit that the generator saw, at the median.
    distances = torch.cdist(images.flatten(1), split.generator.images.flatten(1)).amin(1)
    assert distances.median() > 1.5
    # Digits of one class differ from each other, too.
    assert all(torch.pdist(ten.flatten(1)).median() > 1.5 for ten in images.chunk(10))


def test_the_classifier_reads_real_digits_that_neither_has_seen(classifier: DigitClassifier, split: DigitSplit) -> None:
    accuracy = classifier.measure_real(split.held_out)
    assert accuracy.num_total == len(split.held_out.sample_ids)
    assert accuracy.fraction >= 0.95


def test_the_classifier_is_no_flatterer(classifier: DigitClassifier, split: DigitSplit) -> None:
    """It must not call a wrong digit right, nor noise."""
    held_out = split.held_out
    wrong = [(label + 1) % 10 for label in held_out.labels.tolist()]
    assert classifier.measure(held_out.images, wrong).fraction < 0.05
    noise = torch.rand(100, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert classifier.measure(noise, TEN_OF_EACH).num_right < 40


def test_the_same_split_fits_the_same_classifier(classifier: DigitClassifier, split: DigitSplit) -> None:
    noise = torch.rand(300, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    assert fit_classifier(split).read(noise) == classifier.read(noise)


def test_a_label_for_each_image_is_needed(classifier: DigitClassifier, split: DigitSplit) -> None:
    with pytest.raises(ValueError, match="zip"):
        classifier.measure(split.held_out.images[:3], [1, 2])


def test_an_accuracy_reads_as_a_count() -> None:
    assert str(Accuracy(3, 4)) == "3 of 4"
    assert Accuracy(3, 4).fraction == 0.75
