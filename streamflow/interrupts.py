"""Interrupts under trio, which raises KeyboardInterrupt between any two instructions of a task in the main thread.

Code that is marked here is not torn by one: trio gives it to the program's main task instead, at its next checkpoint.
Under asyncio the marks mean nothing: there an interrupt cancels the main task.
"""

from __future__ import annotations

from trio.lowlevel import enable_ki_protection

from streamflow.stages import threads
from streamflow.stages.engine import Engine

__all__ = ["uninterrupted"]

#: Marks a function, and what it calls; below ``asynccontextmanager`` it marks entering and leaving, not the body.
uninterrupted = enable_ki_protection

# The engine's own tasks, in which nobody could do anything about an interrupt. The engine itself knows no trio.
for _function in (Engine.serve, Engine._finish_fetch, threads._own):
    uninterrupted(_function)
