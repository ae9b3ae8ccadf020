"""What the server needs of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

import streamflow
from serve.inputs import Inputs

#: Called in the thread that draws, with the steps done and the number of steps.
OnStep = Callable[[int, int], None]


class ServedModel(Protocol):
    """A model that draws pictures; `draw` may run in several threads at once."""

    @property
    def name(self) -> str:
        """For metrics."""

    def check(self, inputs: Inputs) -> None:
        """Return at once if it can draw this.

        :raises UnsuitableInputsError: if it cannot.
        """

    def draw(self, inputs: Inputs, on_step: OnStep) -> bytes:
        """A PNG. In a thread of the offload's own."""


class Opened(NamedTuple):
    """A model that streams, and its offload."""

    offload: streamflow.Offload
    model: ServedModel


#: Opens a model; leaving closes it.
OpenModel = Callable[[], AbstractAsyncContextManager[Opened]]
