"""Registered mappings: page-locked all or not at all, by an owner that gives them back."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from streamflow.stages.devices.base import Registrar
from streamflow.stages.errors import HostRegistrationError, StillRegisteredError
from streamflow.stages.registration.mappings import HostMapping, why_not_registrable
from streamflow.stages.registration.plan import Extent, RegistrationPlan, plan_registration
from streamflow.stages.threads import ThreadCrew

#: Told the bytes that are registered so far, and those of all.
Progress = Callable[[int, int], object]

#: Registrations that could not be given back whole: their mappings must stay for as long as the process lives.
_UNFINISHED: set[Registration] = set()


class Registration:
    """Extents of mappings that a device reads without a host pass, from `open` until `close`.

    Holds what keeps the mappings mapped for as long as anything of them is registered. The caller copies from `runs`
    only, and closes it after all device work that reads them.
    """

    def __init__(
        self, registrar: Registrar, mappings: Sequence[HostMapping], extents: Sequence[Extent], *, piece_bytes: int
    ) -> None:
        self._registrar = registrar
        self._mappings = tuple(mappings)
        self._extents = tuple(extents)
        self._plan = plan_registration(extents, piece_bytes=piece_bytes, page_bytes=mmap.PAGESIZE)
        self._registered: list[tuple[int, int]] = []

    @property
    def plan(self) -> RegistrationPlan:
        """What is registered when it is open."""
        return self._plan

    @property
    def names(self) -> str:
        """The files that are mapped."""
        return ", ".join(mapping.name for mapping in self._mappings)

    @property
    def registered_bytes(self) -> int:
        """Bytes that are page-locked now."""
        return sum(nbytes for _, nbytes in self._registered)

    def __repr__(self) -> str:
        return (
            f"<Registration of {self.registered_bytes:,} of {self._plan.nbytes:,} bytes "
            f"in {len(self._plan.ranges)} ranges of {len(self._mappings)} mappings>"
        )

    async def open(self, crew: ThreadCrew, progress: Progress | None = None) -> None:
        """Register everything, range by range, and see that the device takes all of it for page-locked.

        Mappings that are not shared and read-only are refused before the first call. A cancellation takes effect
        between two ranges. Unless this returns, everything has been given back, or `close` can be called again.

        :raises HostRegistrationError: if it is refused; nothing is registered then.
        :raises StillRegisteredError: if it failed, and what had been registered could not all be given back.
        """
        try:
            await crew.call(self._check_mappings, name="registration")
            for index in range(len(self._plan.ranges)):
                await crew.call(partial(self._register, index), name="registration")
                if progress is not None:
                    progress(self.registered_bytes, self._plan.nbytes)
            await crew.call(self._verify, name="registration")
        except BaseException as failure:
            errors = await crew.call_through(self.close)
            if errors and isinstance(failure, Exception):
                raise StillRegisteredError(self.names, errors, self.release) from failure
            raise

    def runs(self, extent: Extent) -> tuple[Extent, ...]:
        """``extent``, cut so that each part can be copied at once."""
        return self._plan.runs(extent)

    def close(self) -> tuple[HostRegistrationError, ...]:
        """Give everything back, the last first, and return an error for each range that stays. Blocks.

        May be called again, to try again with those; without any it does nothing.
        """
        errors = []
        for address, nbytes in reversed(tuple(self._registered)):
            try:
                self._registrar.unregister(address)
            except Exception as failure:
                errors.append(_as_error("host unregistration", nbytes, failure))
            else:
                self._registered.remove((address, nbytes))
        if errors:
            _UNFINISHED.add(self)
        else:
            _UNFINISHED.discard(self)
            self._mappings = ()
        return tuple(errors)

    def release(self) -> None:
        """`close`, with an error.

        :raises StillRegisteredError: if a range stays.
        """
        errors = self.close()
        if errors:
            raise StillRegisteredError(self.names, errors, self.release)

    def _check_mappings(self) -> None:
        maps = Path("/proc/self/maps").read_text()
        for mapping in self._mappings:
            problem = why_not_registrable(mapping, maps)
            if problem is not None:
                raise HostRegistrationError("host registration", self._plan.nbytes, f"is refused: {problem}")

    def _register(self, index: int) -> None:
        pages = self._plan.ranges[index]
        address = self._mappings[pages.mapping].address + pages.offset_bytes
        try:
            self._registrar.register(address, pages.nbytes, read_only=True)
        except Exception as failure:
            if not isinstance(failure, HostRegistrationError) and self._registrar.is_page_locked(address):
                self._registered.append((address, pages.nbytes))  # it failed after the driver had done it
            raise _as_error("host registration", pages.nbytes, failure) from failure
        self._registered.append((address, pages.nbytes))

    def _verify(self) -> None:
        for extent in self._extents:
            for run in self.runs(extent):
                first = self._mappings[run.mapping].address + run.offset_bytes
                if not all(self._registrar.is_page_locked(at) for at in (first, first + run.nbytes - 1)):
                    reason = f"had no effect: the device takes {run.nbytes:,} bytes of it for pageable memory"
                    raise HostRegistrationError("host registration", self._plan.nbytes, reason)


def _as_error(call: str, nbytes: int, failure: Exception) -> HostRegistrationError:
    if isinstance(failure, HostRegistrationError):
        return failure
    return HostRegistrationError(call, nbytes, f"failed: {failure!r}")
