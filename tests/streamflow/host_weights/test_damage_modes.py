"""Each kind of damage to an entry: noticed when the table says, rebuilt where the store is preferred, else refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from streamflow.host_weights.load_inputs import LoadInputs
from streamflow.stages.errors import EngineBrokenError
from streamflow.stages.threads import ThreadCrew
from streamflow.store import access
from streamflow.store.damage import DETECTION, Damage
from streamflow.store.errors import EntryRejectedError
from streamflow.store.hashing import Progress
from streamflow.store.lease import Lease
from streamflow.store.manifest import MANIFEST_NAME
from streamflow.store.options import Verification
from streamflow.store.packing import IMAGE_ALIGNMENT_BYTES
from streamflow.store.reports import StoreOutcome
from tests.streamflow.host_weights.kit import CASE, Stored, report_of
from tests.streamflow.kit import compare, resident_digests
from tests.streamflow.runtime.kit import until_so

pytestmark = pytest.mark.anyio


def flip(path: Path, offset: int) -> None:
    """Change one byte; an offset below zero counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(0o444)


def weights(entry: Path) -> list[Path]:
    return sorted(entry.glob("*.safetensors"))


def traverse(entry: Path) -> None:
    path = entry / MANIFEST_NAME
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"weights-00001.safetensors"', b'"../weights-1.safetensors"'))


def swap(entry: Path) -> None:
    first, second = weights(entry)[:2]
    first.rename(entry / "aside")
    second.rename(first)
    (entry / "aside").rename(second)


def link(entry: Path) -> None:
    first = weights(entry)[0]
    first.rename(entry.parent / "elsewhere")
    first.symlink_to(entry.parent / "elsewhere")


def fill_padding(entry: Path) -> None:
    """The first image ends long before the next one begins."""
    flip(weights(entry)[0], 2 * IMAGE_ALIGNMENT_BYTES - 1)


HARM: dict[Damage, Callable[[Path], object]] = {
    Damage.MANIFEST: lambda entry: flip(entry / MANIFEST_NAME, 100),
    Damage.MISSING: lambda entry: weights(entry)[1].unlink(),
    Damage.EXTRA: lambda entry: (entry / "extra").touch(0o444),
    Damage.TRUNCATED: lambda entry: os.truncate(weights(entry)[1], weights(entry)[1].stat().st_size - 1),
    Damage.SWAPPED: swap,
    Damage.SYMLINK: link,
    Damage.TRAVERSAL: traverse,
    Damage.HEADER: lambda entry: flip(weights(entry)[0], 40),
    Damage.PAYLOAD: lambda entry: flip(weights(entry)[-1], -10),
    Damage.PADDING: fill_padding,
    Damage.WRITABLE: lambda entry: weights(entry)[0].chmod(0o666),
}
#: Two images to a file, and several files.
FILES = {"max_file_bytes": 4 * IMAGE_ALIGNMENT_BYTES}
#: The default, and where that notices damage only later, the strictest.
LEVELS: list[tuple[Damage, Verification]] = [(damage, "background") for damage in Damage]
LEVELS += [(damage, "digest") for damage in Damage if DETECTION[damage]["background"] != "at leasing"]


@pytest.fixture
async def stored(tmp_path: Path) -> Stored:
    """A model with a published entry."""
    found = Stored(tmp_path)
    found.save()
    async with found.streamed("preferred", store=FILES):
        pass
    assert len(found.weight_files) >= 3
    return found


def harm(stored: Stored, damage: Damage) -> None:
    (entry,) = stored.entries
    entry.chmod(0o755)
    HARM[damage](entry)


@pytest.mark.parametrize(("damage", "level"), LEVELS)
async def test_preferred_rebuilds_and_streams_exactly(stored: Stored, damage: Damage, level: Verification) -> None:
    harm(stored, damage)
    store = {**FILES, "verification": level}
    if DETECTION[damage][level] == "after opening":
        await is_broken_meanwhile(stored, "preferred", store)
    report = await stored.stream_and_compare("preferred", store=store)
    assert (report.outcome, report.generation) == (StoreOutcome.PUBLISHED, 2)
    assert (await stored.stream_and_compare("required", store=store)).outcome is StoreOutcome.LOCAL_HIT


@pytest.mark.parametrize(("damage", "level"), LEVELS)
async def test_required_refuses(stored: Stored, damage: Damage, level: Verification) -> None:
    harm(stored, damage)
    store = {**FILES, "verification": level}
    if DETECTION[damage][level] == "after opening":
        await is_broken_meanwhile(stored, "required", store)
        return
    with pytest.raises(EntryRejectedError) as caught:
        async with stored.streamed("required", store=store):
            raise AssertionError("it was opened")
    assert caught.value.generation == 1
    assert caught.value.report is not None
    assert caught.value.report.outcome is StoreOutcome.FAILED
    assert stored.calls.num_loads == 0


async def is_broken_meanwhile(stored: Stored, mode: str, store: dict[str, object]) -> None:
    """The offload opens, and is broken by the verification in the background."""
    async with stored.streamed(mode, store=store) as (offload, model):
        assert report_of(offload).outcome is StoreOutcome.LOCAL_HIT
        await until_so(lambda: offload.state == "broken")
        with pytest.raises(EngineBrokenError) as caught:
            await offload.run(model, *CASE.calls[0])
    assert isinstance(caught.value.__cause__, EntryRejectedError)


async def test_by_size_alone_what_only_digests_show_is_served(stored: Stored) -> None:
    """The table says so, and nothing is said about the bytes then."""
    harm(stored, Damage.PADDING)
    async with stored.streamed("required", store={**FILES, "verification": "size"}) as (offload, model):
        assert report_of(offload).outcome is StoreOutcome.LOCAL_HIT
        await compare(offload, model, CASE.calls, resident_digests(CASE.build(), CASE.calls))


@pytest.mark.parametrize("load", [False, True])
async def test_an_entry_that_another_source_finds_is_verified_too(stored: Stored, load: bool) -> None:
    """Its content is published already, so nothing is written; nobody has looked at what lies there."""
    harm(stored, Damage.PAYLOAD)
    inputs = LoadInputs(producer_abi="another")
    async with stored.streamed("preferred", load=load, inputs=inputs, store=FILES) as (offload, _model):
        assert report_of(offload).generation == 1
        await until_so(lambda: offload.state == "broken")
    report = await stored.stream_and_compare("preferred", load=load, inputs=inputs, store=FILES)
    assert report.generation == 2


async def test_one_thread_verifies_while_requests_run(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, verify = list[int](), access.verify_bytes

    async def verify_and_tell(lease: Lease, crew: ThreadCrew, num_threads: int, progress: Progress | None) -> None:
        await verify(lease, crew, num_threads, progress)
        asked.append(num_threads)

    monkeypatch.setattr(access, "verify_bytes", verify_and_tell)
    async with stored.streamed("required", store={**FILES, "num_threads": 3}):
        await until_so(lambda: bool(asked))
    assert asked == [1]
