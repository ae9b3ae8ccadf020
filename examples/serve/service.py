"""The model of a server, from its opening to its closing, and the generations that are under way."""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from prometheus_client import CollectorRegistry, ProcessCollector

from serve.errors import IdTakenError, NotReadyError, UnknownIdError
from serve.generation import Generation
from serve.inputs import Inputs
from serve.model import Opened, OpenModel
from streamflow.metrics.collector import OffloadCollector

LOG = logging.getLogger(__name__)

#: States in which only a new process helps.
HOPELESS = ("failed", "broken")
#: Generations whose durations tell how long the next ones will take.
NUM_REMEMBERED = 32


class Service:
    """Answers from the beginning; draws once the model is open. Made on the server's loop."""

    def __init__(self, open_model: OpenModel) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._open_model = open_model
        self._opened: Opened | None = None
        self._failure: Exception | None = None
        self._closing = anyio.Event()
        self._opening = anyio.CancelScope()
        self._generations: dict[str, Generation] = {}
        self._durations_s: deque[float] = deque(maxlen=NUM_REMEMBERED)

    @property
    def state(self) -> str:
        """``opening``, ``failed`` (it could not be opened), or that of the offload."""
        if self._failure is not None:
            return "failed"
        if self._opened is None:
            return "opening"
        return "draining" if self._closing.is_set() else self._opened.offload.state

    @property
    def retry_after_s(self) -> float:
        """When, about, a request that finds no room now would find some."""
        if self._opened is None or not self._durations_s:
            return 1.0
        mean_s = sum(self._durations_s) / len(self._durations_s)
        return max(1.0, mean_s / self._opened.offload.config.max_running_requests)

    async def serve(self) -> None:
        """Open the model, and close it after `close`. What keeps it from opening is told by `state` and the log."""
        collector = OffloadCollector()
        self.registry.register(collector)
        try:
            with self._opening:
                async with self._open_model() as opened, collector.watching(opened.offload, opened.model.name):
                    self._opened = opened
                    LOG.info("ready: %r", opened.offload)
                    await self._closing.wait()
        except Exception as failure:
            LOG.exception("the model is gone")
            self._failure = failure

    def close(self) -> None:
        """Close the model, or stop opening it."""
        self._closing.set()
        if self._opened is None:
            self._opening.cancel()

    @contextmanager
    def generation(self, inputs: Inputs) -> Iterator[Generation]:
        """A generation of these inputs, known by its id while this is entered.

        :raises NotReadyError: if the model is not open.
        :raises UnsuitableInputsError: if the model cannot draw this.
        :raises IdTakenError: if a generation of the same id is under way.
        """
        if self._opened is None or self.state != "ready":
            raise NotReadyError(self.state)
        offload, model = self._opened
        model.check(inputs)
        request_id = inputs.request_id or uuid.uuid4().hex
        if request_id in self._generations:
            raise IdTakenError(request_id)
        request = offload.request(priority=inputs.priority, deadline_s=inputs.deadline_s, request_id=request_id)
        generation = self._generations[request_id] = Generation(request, model, inputs)
        began = time.monotonic()
        try:
            yield generation
            self._durations_s.append(time.monotonic() - began)
        finally:
            del self._generations[request_id]
            generation.ended.set()

    def find(self, request_id: str) -> Generation:
        """The generation of this id.

        :raises UnknownIdError: if none is under way.
        """
        if request_id not in self._generations:
            raise UnknownIdError(request_id)
        return self._generations[request_id]
