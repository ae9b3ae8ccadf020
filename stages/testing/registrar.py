"""A scripted registrar: it keeps count like the driver, and refuses where a test wants it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from streamflow.stages.errors import HostRegistrationError
from streamflow.stages.host_memory import page_align


def refused() -> Exception:
    """What the driver says when it refuses."""
    return HostRegistrationError("register", 0, "was refused: the test wants it so")


@attrs.define(eq=False)
class ScriptedRegistrar:
    """Registers nothing, but behaves like the driver: ranges must not share a page, and go by their exact base.

    ``refusal``: why mappings cannot be registered. ``fails_at``: the `register` call (from 0) that fails, as all after
    it do, with what ``failure`` makes. ``num_stuck``: so many `unregister` calls fail before one succeeds.
    ``pins``: whether memory is page-locked once it is registered. ``before_register`` is called before each range.
    """

    refusal: str | None = None
    fails_at: int | None = None
    failure: Callable[[], BaseException] = refused
    num_stuck: int = 0
    pins: bool = True
    command: Sequence[str] | None = None
    before_register: Callable[[], object] = lambda: None
    calls: list[tuple[str, int, int]] = attrs.field(factory=list)
    registered: dict[int, int] = attrs.field(factory=dict)
    num_registers: int = 0

    def why_not_mappings(self) -> str | None:
        return self.refusal

    def probe_command(self, path: str, nbytes: int) -> Sequence[str] | None:
        return self.command

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        self.before_register()
        call, self.num_registers = self.num_registers, self.num_registers + 1
        if self.fails_at is not None and call >= self.fails_at:
            raise self.failure()
        end = address + page_align(nbytes)
        if any(address < base + page_align(size) and base < end for base, size in self.registered.items()):
            raise HostRegistrationError("register", nbytes, "failed: some of its pages are registered already")
        self.calls.append(("register read-only" if read_only else "register", address, nbytes))
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        nbytes = self.registered.get(address, 0)
        if not nbytes or self.num_stuck:
            self.num_stuck = max(0, self.num_stuck - 1)
            raise HostRegistrationError("unregister", nbytes, "failed" if nbytes else "failed: it is not registered")
        self.calls.append(("unregister", address, nbytes))
        del self.registered[address]

    def is_page_locked(self, address: int) -> bool:
        return self.pins and any(base <= address < base + size for base, size in self.registered.items())
