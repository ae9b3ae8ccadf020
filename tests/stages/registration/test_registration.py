"""Registrations against a scripted registrar: all or nothing, undone in reverse, kept where that fails."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.from_thread
import attrs
import pytest

from streamflow.stages.errors import HostRegistrationError, StillRegisteredError
from streamflow.stages.registration import registration as module
from streamflow.stages.registration.mappings import HostMapping
from streamflow.stages.registration.plan import Extent
from streamflow.stages.registration.registration import Registration
from streamflow.stages.testing.registrar import ScriptedRegistrar
from streamflow.stages.threads import open_threads
from streamflow.weights.file_mapping import FileMapping

pytestmark = pytest.mark.anyio

PAGE = mmap.PAGESIZE
NUM_PAGES = 8


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[FileMapping]]:
    mappings = []
    for name in ("a", "b"):
        path = tmp_path / name
        path.write_bytes(b"x" * (NUM_PAGES * PAGE - 100))
        with path.open("rb") as file:
            mappings.append(FileMapping(str(path), file.fileno(), path.stat().st_size))
    yield mappings
    for mapping in mappings:
        mapping.close()


def registration_of(files: list[FileMapping], registrar: ScriptedRegistrar, piece_pages: int = 3) -> Registration:
    """Two extents of the first file, and all of the second."""
    held = [HostMapping(Path(file.path).name, file.address, file.nbytes, file) for file in files]
    extents = [Extent(0, 10, PAGE), Extent(0, 4 * PAGE, 2 * PAGE), Extent(1, 0, files[1].nbytes)]
    return Registration(registrar, held, extents, piece_bytes=piece_pages * PAGE)


def ranges_of(files: list[FileMapping]) -> list[tuple[int, int]]:
    """What is registered of `registration_of`, in order."""
    a, b = files[0].address, files[1].address
    return [(a, 2 * PAGE), (a + 4 * PAGE, 2 * PAGE), *((b + i * PAGE, min(3, NUM_PAGES - i) * PAGE) for i in (0, 3, 6))]


def calls(registrar: ScriptedRegistrar, name: str) -> list[tuple[int, int]]:
    return [(address, nbytes) for call, address, nbytes in registrar.calls if call == name]


async def test_everything_is_registered_in_pieces_and_given_back_in_reverse(files: list[FileMapping]) -> None:
    registrar = ScriptedRegistrar()
    registration = registration_of(files, registrar)
    told: list[tuple[int, int]] = []
    async with open_threads() as crew:
        await registration.open(crew, lambda done, total: told.append((done, total)))
        expected = ranges_of(files)
        assert calls(registrar, "register read-only") == expected
        assert [total for _, total in told] == [registration.plan.nbytes] * len(expected)
        assert [done for done, _ in told] == [sum(n for _, n in expected[: i + 1]) for i in range(len(expected))]
        assert registration.registered_bytes == registration.plan.nbytes == 12 * PAGE
        assert registration.close() == ()
        assert calls(registrar, "unregister") == expected[::-1]
        assert registration.close() == ()
    assert registrar.registered == {}
    assert repr(registration) == f"<Registration of 0 of {12 * PAGE:,} bytes in 5 ranges of 0 mappings>"


@pytest.mark.parametrize("fails_at", range(5))
@pytest.mark.parametrize("failure", [None, RuntimeError("CUDA error: unknown"), MemoryError()], ids=repr)
async def test_a_failure_at_any_range_gives_back_all_before_it(
    files: list[FileMapping], fails_at: int, failure: Exception | None
) -> None:
    registrar = ScriptedRegistrar(fails_at=fails_at)
    if failure is not None:
        registrar.failure = lambda: failure
    registration = registration_of(files, registrar)
    async with open_threads() as crew:
        with pytest.raises(HostRegistrationError) as caught:
            await registration.open(crew)
    assert (failure is None) or caught.value.__cause__ is failure
    assert calls(registrar, "unregister") == ranges_of(files)[:fails_at][::-1]
    assert registrar.registered == {}
    assert registration.registered_bytes == 0


async def test_a_range_that_failed_after_it_was_registered_is_given_back_too(files: list[FileMapping]) -> None:
    class FailsLate(ScriptedRegistrar):
        def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
            super().register(address, nbytes, read_only=read_only)
            raise RuntimeError("no answer")

    registrar = FailsLate()
    async with open_threads() as crew:
        with pytest.raises(HostRegistrationError, match="no answer"):
            await registration_of(files, registrar).open(crew)
    assert registrar.registered == {}
    assert calls(registrar, "unregister") == ranges_of(files)[:1]


async def test_memory_that_is_not_page_locked_afterwards_is_a_failure(files: list[FileMapping]) -> None:
    registrar = ScriptedRegistrar(pins=False)
    async with open_threads() as crew:
        with pytest.raises(HostRegistrationError, match=r"had no effect: the device takes .* for pageable memory"):
            await registration_of(files, registrar).open(crew)
    assert registrar.registered == {}


async def test_a_mapping_that_is_writable_or_private_is_refused_before_any_call(files: list[FileMapping]) -> None:
    registrar = ScriptedRegistrar()
    with mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        held = HostMapping("private", address_of(pages), 2 * PAGE)
        registration = Registration(registrar, [held], [Extent(0, 0, PAGE)], piece_bytes=PAGE)
        async with open_threads() as crew:
            with pytest.raises(HostRegistrationError, match="private is mapped rw-p, and only shared read-only"):
                await registration.open(crew)
    assert (registrar.calls, registrar.num_registers) == ([], 0)


def address_of(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


@attrs.define
class CancelAt:
    """Cancels ``scope`` from the registering thread before range number ``index``."""

    index: int
    scope: anyio.CancelScope
    num_ranges: int = 0

    def __call__(self) -> None:
        if self.num_ranges == self.index:
            anyio.from_thread.run_sync(self.scope.cancel)
        self.num_ranges += 1


@pytest.mark.parametrize("index", range(4))
async def test_a_cancellation_takes_effect_after_the_range_under_way(files: list[FileMapping], index: int) -> None:
    registrar = ScriptedRegistrar()
    async with open_threads() as crew:
        with anyio.CancelScope() as scope:
            registrar.before_register = CancelAt(index, scope)
            await registration_of(files, registrar).open(crew)
        assert scope.cancelled_caught
    assert calls(registrar, "register read-only") == ranges_of(files)[: index + 1]
    assert calls(registrar, "unregister") == ranges_of(files)[: index + 1][::-1]
    assert registrar.registered == {}


async def test_a_rollback_that_fails_is_another_error_and_keeps_the_mapping_until_a_retry(
    files: list[FileMapping],
) -> None:
    registrar = ScriptedRegistrar(fails_at=3, num_stuck=2)
    registration = registration_of(files, registrar)
    async with open_threads() as crew:
        with pytest.raises(StillRegisteredError) as caught:
            await registration.open(crew)
    failure = caught.value
    assert [error.nbytes for error in failure.failures] == [3 * PAGE, 2 * PAGE]
    assert isinstance(failure.__cause__, HostRegistrationError)
    assert "a, b stay page-locked, and mapped" in str(failure)
    assert "retry()" in str(failure)
    assert registration.registered_bytes == 5 * PAGE
    kept = weakref.ref(registration)
    registrar.num_stuck = 1
    with pytest.raises(StillRegisteredError) as again:
        failure.retry()
    retry = again.value.retry
    del registration, caught, failure, again
    gc.collect()
    assert kept() in module._UNFINISHED
    retry()
    assert (registrar.registered, module._UNFINISHED) == ({}, set())


async def test_a_rollback_that_fails_under_a_cancellation_is_left_for_closing(files: list[FileMapping]) -> None:
    registrar = ScriptedRegistrar(num_stuck=1)
    registration = registration_of(files, registrar)
    async with open_threads() as crew:
        with anyio.CancelScope() as scope:
            registrar.before_register = CancelAt(2, scope)
            await registration.open(crew)
        assert scope.cancelled_caught
    assert registration.registered_bytes == 3 * PAGE
    assert registration.close() == ()
    assert (registrar.registered, module._UNFINISHED) == ({}, set())


async def test_closing_returns_an_error_for_each_range_that_stays_and_goes_on(files: list[FileMapping]) -> None:
    registrar = ScriptedRegistrar()
    registration = registration_of(files, registrar)
    async with open_threads() as crew:
        await registration.open(crew)
    registrar.num_stuck = 2
    errors = registration.close()
    assert [error.nbytes for error in errors] == [2 * PAGE, 3 * PAGE]
    assert registration.registered_bytes == 5 * PAGE
    assert registration in module._UNFINISHED
    assert registration.close() == ()
    assert (registrar.registered, module._UNFINISHED) == ({}, set())


async def test_the_mapping_is_held_exactly_as_long_as_something_is_registered(
    files: list[FileMapping], tmp_path: Path
) -> None:
    class Owner:
        pass

    owner = Owner()
    held = [HostMapping(file.path, file.address, file.nbytes, owner) for file in files]
    registrar = ScriptedRegistrar()
    registration = Registration(registrar, held, [Extent(0, 0, PAGE)], piece_bytes=PAGE)
    gone: Callable[[], Owner | None] = weakref.ref(owner)
    async with open_threads() as crew:
        await registration.open(crew)
    del owner, held
    registrar.num_stuck = 1
    assert len(registration.close()) == 1
    gc.collect()
    assert gone() is not None
    assert registration.close() == ()
    gc.collect()
    assert gone() is None
