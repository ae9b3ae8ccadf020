"""A real SIGINT, wherever it comes: KeyboardInterrupt reaches the program, and what follows is exact and clean."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

import streamflow
from streamflow.binding.blocks import BlockBinder
from streamflow.runtime.admission import Admission
from streamflow.stages.engine import Engine
from streamflow.stages.threads import ThreadCrew
from tests.streamflow.runtime import interrupted_loop, interrupted_plain
from tests.streamflow.runtime.kit import make_subject

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = {
    "plain": ("interrupted_plain", "main()", interrupted_plain.SCENARIOS),
    "asyncio": ("interrupted_loop", "main('asyncio')", interrupted_loop.SCENARIOS),
    "trio": ("interrupted_loop", "main('trio')", interrupted_loop.SCENARIOS),
}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "call", "scenarios"), PROGRAMS.values(), ids=PROGRAMS)
def test_interrupted(module: str, call: str, scenarios: Sequence[Callable[..., None]]) -> None:
    """All scenarios of a kind, in a process of their own, where interrupts belong to them; it ends well."""
    # at the end: the package under test is the installed one
    code = f"import sys; sys.path.append({str(ROOT)!r}); from tests.streamflow.runtime import {module} as m; m.{call}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    outcomes = dict(line.split(" ", 1) for line in ended.stdout.splitlines())
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome != "ok"}
    assert not wrong, "\n".join(f"{name}: {outcome}" for name, outcome in wrong.items())
    assert list(outcomes) == [scenario.__name__ for scenario in scenarios], ended.stderr
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"], indirect=True)
async def test_under_trio_an_interrupt_tears_the_body_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever our code runs on the loop, trio keeps an interrupt for the main task's next checkpoint."""
    subject = make_subject()
    seen: dict[str, set[bool]] = {}

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                seen.setdefault(name, set()).add(trio.lowlevel.currently_ki_protected())
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(Engine, "_act")
    watch(Engine, "stop_serving")
    watch(Admission, "enter")
    watch(ThreadCrew, "start")
    watch(BlockBinder, "show_host")
    async with streamflow.open_offload(subject.model, {"transfer": "staged"}) as offload:
        assert not trio.lowlevel.currently_ki_protected()
        await subject.check_next(offload)
    assert seen == {name: {True} for name in ("_act", "stop_serving", "enter", "start", "show_host")}
