"""A generation: one request of the offload, that clients can follow and cancel."""

from __future__ import annotations

import anyio

from serve.errors import CancelledByClientError, GenerationFailedError
from serve.inputs import Inputs
from serve.model import OnStep, ServedModel
from streamflow import StreamflowError
from streamflow.runtime.offload_request import OffloadRequest


def _ignore(num_done: int, num_steps: int) -> None:
    """Progress that nobody asked for."""


class Generation:
    """One picture, to be drawn once. Its place is free when `run` has returned, however it does."""

    def __init__(self, request: OffloadRequest, model: ServedModel, inputs: Inputs) -> None:
        self.inputs = inputs
        self.ended = anyio.Event()
        self._request = request
        self._model = model
        self._scope = anyio.CancelScope()

    @property
    def request_id(self) -> str:
        """Its name in the URL, in logs, errors and metrics."""
        return self._request.request_id

    @property
    def position(self) -> int | None:
        """How many come before it, 0 for the next one; None unless it waits."""
        return self._request.position

    async def run(self, on_step: OnStep = _ignore) -> bytes:
        """The picture, as PNG. A cancelled call ends at the next block.

        :raises CancelledByClientError: if `cancel` is called.
        :raises GenerationFailedError: if the model raises an error.
        :raises StreamflowError: what `OffloadRequest.run` raises of its own.
        """
        with self._scope:
            try:
                return await self._request.run(self._model.draw, self.inputs, on_step)
            except StreamflowError:
                raise
            except Exception as failure:
                raise GenerationFailedError(self.request_id) from failure
        raise CancelledByClientError(self.request_id)

    async def cancel(self) -> None:
        """End it; returns when its place is free."""
        self._scope.cancel()
        await self.ended.wait()
