"""Those who wait for a state gate come in their order, are rung when it is worth it, and hold up nobody who stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from streamflow.binding.module_state import Stateful
from streamflow.runtime.state_gate import NUM_WATCHED, Holding, StateGate
from streamflow.stages.errors import EngineBrokenError, EngineClosedError, StopForward
from streamflow.stages.mailbox import Mailbox
from tests.streamflow.runtime.kit import PATIENCE_S, wait_for

STATE = Stateful("state", "it is the test's")


def closed_gate(holding: Holding, stateful: tuple[Stateful, ...] = (STATE,)) -> StateGate:
    """One that lets one request in at a time; without ``stateful``: until `NUM_WATCHED` forwards were watched."""
    return StateGate(nn.Module(), stateful, frozenset(), holding, watched=not stateful)


class Visitor(threading.Thread):
    """A request that enters ``gate``, tells ``entered``, stays until it is let go, and leaves."""

    def __init__(self, gate: StateGate, entered: Callable[[Visitor], object] = lambda visitor: None) -> None:
        super().__init__()
        self.mailbox = Mailbox()
        self.is_in, self.let_go = threading.Event(), threading.Event()
        self.outcome: Future[None] = Future()
        self._gate, self._entered = gate, entered
        self.start()

    def run(self) -> None:
        try:
            with self._gate.forward(self.mailbox):
                self._entered(self)
                self.is_in.set()
                wait_for(self.let_go)
        except BaseException as failure:
            self.outcome.set_exception(failure)
        else:
            self.outcome.set_result(None)
        finally:
            self._gate.leave()

    def end(self) -> None:
        """Let it go, and fail if it does not end well."""
        self.let_go.set()
        self.outcome.result(PATIENCE_S)
        self.join()


def until_waiting(holding: Holding, num: int) -> None:
    """Return when so many wait."""
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE_S
    while len(holding._waiting) != num:
        assert time.monotonic() < deadline
        pause.wait(0.001)


@contextmanager
def counted_tries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """What each try to take a gate came to."""
    tries: list[bool] = []
    take = Holding.take

    def take_and_count(holding: Holding, *args: Any) -> bool:
        tries.append(take(holding, *args))
        return tries[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Holding, "take", take_and_count)
        yield tries


def test_who_waits_comes_in_the_order_of_coming() -> None:
    holding, order = Holding(), list[Visitor]()
    gate = closed_gate(holding)
    visitors = []
    for number in range(5):
        visitors.append(Visitor(gate, order.append))
        wait_for(visitors[0].is_in)
        until_waiting(holding, number)
    for visitor in visitors:
        wait_for(visitor.is_in)
        visitor.end()
    assert order == visitors
    assert (holding._holder, holding._gates, holding._waiting) == (None, set(), {})


def test_who_waits_looks_again_only_when_it_is_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = Holding()
    gate = closed_gate(holding)
    with counted_tries(monkeypatch) as tries:
        first = Visitor(gate)
        wait_for(first.is_in)
        second = Visitor(gate)
        until_waiting(holding, 1)
        threading.Event().wait(0.05)  # in which somebody who looks every few milliseconds would look often
        assert tries == [True, False]
        first.end()
        wait_for(second.is_in)
        second.end()
    assert tries == [True, False, True]


ENDS: list[tuple[Callable[[Mailbox], None], type[BaseException]]] = [
    (Mailbox.stop, StopForward),
    (Mailbox.close, EngineClosedError),
    (lambda mailbox: mailbox.break_off(OSError("the link is down")), EngineBrokenError),
]


@pytest.mark.parametrize(("end", "error"), ENDS, ids=["stopped", "closed", "broken"])
def test_who_must_not_wait_any_more_goes_at_once_and_holds_up_nobody(
    end: Callable[[Mailbox], None], error: type[BaseException]
) -> None:
    holding = Holding()
    gate = closed_gate(holding)
    visitors = []
    for number in range(3):
        visitors.append(Visitor(gate))
        wait_for(visitors[0].is_in)
        until_waiting(holding, number)
    end(visitors[1].mailbox)
    with pytest.raises(error):
        visitors[1].outcome.result(PATIENCE_S)
    visitors[0].end()
    wait_for(visitors[2].is_in)
    visitors[2].end()
    visitors[1].join()


def test_the_first_who_goes_although_the_gate_is_free_wakes_the_next() -> None:
    """It was rung, and is stopped before it tries again."""
    holding = Holding()
    gate = closed_gate(holding)
    gate.enter(Mailbox())
    with ThreadPoolExecutor(1) as other:
        assert not other.submit(holding.take, gate, Mailbox()).result()
        visitor = Visitor(gate)
        until_waiting(holding, 2)
        gate.leave()
        assert not visitor.is_in.is_set()
        other.submit(holding.stop_waiting).result()
        wait_for(visitor.is_in)
        visitor.end()


def test_a_gate_that_opens_lets_all_in_at_once() -> None:
    """Each is inside until all are: `NUM_WATCHED` forwards have shown that there is no state."""
    holding = Holding()
    gate = closed_gate(holding, stateful=())
    for _ in range(NUM_WATCHED - 1):
        with gate.forward(Mailbox()):
            pass
    with gate.forward(Mailbox()):
        visitors = [Visitor(gate) for _ in range(3)]
        until_waiting(holding, 3)
    for visitor in visitors:
        wait_for(visitor.is_in)
    for visitor in visitors:
        visitor.end()
    assert holding._waiting == {}


def test_gates_that_are_held_together_are_left_one_by_one() -> None:
    """A request that waits for one gate waits for all that are held with it, and until the last of them is left."""
    holding = Holding()
    gates = [closed_gate(holding) for _ in range(2)]
    for gate in gates:
        gate.enter(Mailbox())
    visitor = Visitor(gates[0])
    until_waiting(holding, 1)
    gates[0].leave()
    assert not visitor.is_in.is_set()
    assert len(holding._waiting) == 1
    gates[1].leave()
    wait_for(visitor.is_in)
    visitor.end()
