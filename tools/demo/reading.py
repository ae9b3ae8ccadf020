"""Reads the drawn digits with a classifier that the generator has nothing to do with, where its library is there."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import Tensor

from streamflow.tools.demo.errors import ClassifierUnavailableError

#: What the classifier and its data stand on, and what a plain installation need not have.
_LIBRARIES = ("sklearn", "scipy", "numpy")


@attrs.frozen
class Reading:
    """How many drawn digits were read as the class that was asked for, and how many real ones as what they are.

    The real ones are held out: neither the generator nor the classifier has seen them.
    """

    num_drawn_right: int
    num_drawn: int
    num_real_right: int
    num_real: int


def read_digits(images: Tensor, labels: Sequence[int]) -> Reading:
    """How well ``images``, float[N, 1, 8, 8] in [-1, 1], can be read as ``labels``. Fits the classifier: a moment.

    :raises ClassifierUnavailableError: if a library that it needs is not installed.
    """
    try:
        from streamflow.tools.demo.classifier import fit_classifier
        from streamflow.tools.demo.digits import load_split
    except ModuleNotFoundError as failure:
        library = str(failure.name).partition(".")[0]
        if library not in _LIBRARIES:
            raise
        raise ClassifierUnavailableError(library) from failure
    split = load_split()
    classifier = fit_classifier(split)
    drawn, real = classifier.measure(images, labels), classifier.measure_real(split.held_out)
    return Reading(drawn.num_right, drawn.num_total, real.num_right, real.num_total)
