"""Progress of long work, for whoever wants to show it; the work itself shows nothing.

The listener goes along with the context: into tasks and threads that are started within it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
#: Told what is being done, and how many of how many pieces are; from any thread. Must neither fail nor block.
ProgressListener = Callable[[str, int, int], None]

_LISTENER: ContextVar[ProgressListener | None] = ContextVar("streamflow progress", default=None)


@contextmanager
def progress_to(listener: ProgressListener) -> Iterator[None]:
    """Within it, ``listener`` is told of the long work that the calling task or thread begins."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def progress(what: str, done: int, total: int) -> None:
    """Tell the listener, if there is one, that ``done`` of ``total`` pieces of ``what`` are done."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(what, done, total)


def tracked(what: str, items: Sequence[Item]) -> Iterator[Item]:
    """The items, telling the listener as each is done."""
    for index, item in enumerate(items):
        progress(what, index, len(items))
        yield item
    if items:
        progress(what, len(items), len(items))
