"""Reads digits: a support vector machine, fitted in a moment on samples that the generator never saw."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from sklearn.svm import SVC
from torch import Tensor

from streamflow.tools.demo.digits import DigitSet, DigitSplit


@attrs.frozen
class Accuracy:
    """How many digits were read as what they were meant to be."""

    num_right: int
    num_total: int

    @property
    def fraction(self) -> float:
        """From 0 to 1."""
        return self.num_right / self.num_total

    def __str__(self) -> str:
        return f"{self.num_right} of {self.num_total}"


@attrs.frozen(eq=False)
class DigitClassifier:
    """A fitted reader of digits."""

    machine: SVC

    def read(self, images: Tensor) -> list[int]:
        """The digit in each of ``images``, float[N, 1, 8, 8] in [-1, 1] on any device."""
        return [int(label) for label in self.machine.predict(_flatten(images))]

    def measure(self, images: Tensor, labels: Sequence[int]) -> Accuracy:
        """How many of ``images`` read as ``labels`` says; for generated digits, those are the digits asked for.

        :raises ValueError: if there is not one label per image.
        """
        hits = [read == label for read, label in zip(self.read(images), labels, strict=True)]
        return Accuracy(sum(hits), len(hits))

    def measure_real(self, digits: DigitSet) -> Accuracy:
        """How many real digits it reads right."""
        return self.measure(digits.images, digits.labels.tolist())


def fit_classifier(split: DigitSplit) -> DigitClassifier:
    """A classifier that learnt from ``split.classifier`` alone; the same split gives the same classifier."""
    machine = SVC(C=10.0, gamma="scale")
    machine.fit(_flatten(split.classifier.images), split.classifier.labels.numpy())
    return DigitClassifier(machine)


def _flatten(images: Tensor) -> object:
    return images.detach().flatten(1).double().cpu().numpy()
