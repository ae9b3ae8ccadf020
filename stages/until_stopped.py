"""Tasks that end when they are stopped, and not by a cancellation from around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class UntilStopped:
    """Scopes of tasks, all of which `stop` cancels, those to come included. No scope around them does."""

    def __init__(self) -> None:
        self._scopes: set[anyio.CancelScope] = set()
        self._stopped = False

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What a task does within is cancelled by `stop`, and goes on after the ``with`` then."""
        with anyio.CancelScope(shield=True) as scope:
            self._scopes.add(scope)
            if self._stopped:
                scope.cancel()
            try:
                yield
            finally:
                self._scopes.discard(scope)

    def stop(self) -> None:
        """Cancel them. On their loop; idempotent."""
        self._stopped = True
        for scope in self._scopes:
            scope.cancel()
