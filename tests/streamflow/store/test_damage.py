"""Every kind of damage is noticed when the table says, taken out of use, and repaired by publishing again."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from streamflow.canonical_json import canonical_json
from streamflow.store.content import sha256
from streamflow.store.damage import DETECTION, Damage
from streamflow.store.errors import EntryRejectedError, StoreCode, StoreOperationError
from streamflow.store.options import Verification
from streamflow.store.packing import file_name
from streamflow.store.store import HostWeightStore
from tests.streamflow.store.kit import model, opened, tree

pytestmark = pytest.mark.anyio

#: Two files, the first with two images and padding between them.
MODEL = model(image_bytes=(3 << 10, 70 << 10, 512, 3 << 10))
LIMIT = 290_000


def flip(path: Path, offset: int) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    path.chmod(0o444)


def damage_manifest(entry: Path) -> None:
    flip(entry / "manifest.json", 100)


def lose_a_file(entry: Path) -> None:
    (entry / file_name(1)).unlink()


def lose_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def lose_the_lease_file(entry: Path) -> None:
    (entry / "lease").unlink()


def add_a_file(entry: Path) -> None:
    (entry / "weights-00003.safetensors").write_bytes(b"")


def add_a_folder(entry: Path) -> None:
    (entry / "more").mkdir()


def truncate_a_file(entry: Path) -> None:
    os.truncate(entry / file_name(1), 70_000)


def lengthen_a_file(entry: Path) -> None:
    os.truncate(entry / file_name(0), 400_000)


def swap_files(entry: Path) -> None:
    (entry / file_name(0)).rename(entry / "aside")
    (entry / file_name(1)).rename(entry / file_name(0))
    (entry / "aside").rename(entry / file_name(1))


def link_a_file(entry: Path) -> None:
    (entry / file_name(0)).rename(entry.parent.parent / "elsewhere")
    (entry / file_name(0)).symlink_to(entry.parent.parent / "elsewhere")


def link_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").rename(entry.parent.parent / "elsewhere")
    (entry / "manifest.json").symlink_to(entry.parent.parent / "elsewhere")


def link_the_folder(entry: Path) -> None:
    entry.rename(entry.parent.parent / "elsewhere")
    entry.symlink_to(entry.parent.parent / "elsewhere")


def name_a_file_outside(entry: Path) -> None:
    """By somebody who knows how the manifest's own digest is made."""
    path = entry / "manifest.json"
    fields = json.loads(path.read_bytes())
    del fields["sha256"]
    fields["files"][0]["name"] = f"../{file_name(0)}"
    path.chmod(0o644)
    path.write_bytes(canonical_json({**fields, "sha256": sha256(canonical_json(fields))}))


def damage_a_header(entry: Path) -> None:
    flip(entry / file_name(1), 40)


def damage_a_header_length(entry: Path) -> None:
    flip(entry / file_name(0), 3)


def damage_the_first_file(entry: Path) -> None:
    flip(entry / file_name(0), 65_536 + 7)


def damage_the_last_file(entry: Path) -> None:
    flip(entry / file_name(1), 65_536 + 300)


def damage_a_hole_in_an_image(entry: Path) -> None:
    flip(entry / file_name(0), 65_536 + (3 << 10) - 3)


def damage_padding(entry: Path) -> None:
    flip(entry / file_name(0), 65_536 + (3 << 10) + 10)


def let_others_write(entry: Path) -> None:
    (entry / file_name(0)).chmod(0o466)


def let_others_add(entry: Path) -> None:
    entry.chmod(0o777)


WAYS: dict[Callable[[Path], None], Damage] = {
    damage_manifest: Damage.MANIFEST,
    lose_a_file: Damage.MISSING,
    lose_the_manifest: Damage.MISSING,
    lose_the_lease_file: Damage.MISSING,
    add_a_file: Damage.EXTRA,
    add_a_folder: Damage.EXTRA,
    truncate_a_file: Damage.TRUNCATED,
    lengthen_a_file: Damage.TRUNCATED,
    swap_files: Damage.SWAPPED,
    link_a_file: Damage.SYMLINK,
    link_the_manifest: Damage.SYMLINK,
    link_the_folder: Damage.SYMLINK,
    name_a_file_outside: Damage.TRAVERSAL,
    damage_a_header: Damage.HEADER,
    damage_a_header_length: Damage.HEADER,
    damage_the_first_file: Damage.PAYLOAD,
    damage_the_last_file: Damage.PAYLOAD,
    damage_a_hole_in_an_image: Damage.PAYLOAD,
    damage_padding: Damage.PADDING,
    let_others_write: Damage.WRITABLE,
    let_others_add: Damage.WRITABLE,
}


async def notice(store: HostWeightStore, content_id: str) -> tuple[str, EntryRejectedError | None]:
    """What an opening with this store's verification level does, and when it meets the damage."""
    try:
        lease = await store.lease(content_id)
    except EntryRejectedError as rejected:
        return "at leasing", rejected
    assert lease is not None
    with lease:
        if store.options.verification == "background":
            try:
                await store.verify(lease)
            except EntryRejectedError as rejected:
                return "after opening", rejected
    return "never", None


def test_the_table_is_whole() -> None:
    assert DETECTION.keys() == set(Damage) == set(WAYS.values())
    assert all(row.keys() == set(get_args(Verification)) for row in DETECTION.values())


@pytest.mark.parametrize("level", get_args(Verification))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_damage_is_noticed_when_the_table_says(root: Path, way: Callable[[Path], None], level: str) -> None:
    async with opened(root, verification=level, max_file_bytes=LIMIT) as store:
        published = await store.publish(MODEL.draft(), source_id="source")
        entry = root / "entries" / published.content_id / "g1"
        assert len(list(entry.glob("*.safetensors"))) == 2
        assert await notice(store, published.content_id) == ("never", None)
        entry.chmod(0o755)
        way(entry)
        when, rejected = await notice(store, published.content_id)
        assert when == DETECTION[WAYS[way]][level]  # type: ignore[index]
        if rejected is None:
            return
        assert (rejected.code, rejected.disposition) == (StoreCode.ENTRY_REJECTED, "quarantined")
        assert await store.lease(published.content_id) is None
        again = await store.publish(MODEL.draft(), source_id="source")
        assert (again.generation, again.was_present) == (2, False)
        assert await notice(store, published.content_id) == ("never", None)


async def test_damage_that_is_met_while_publishing_is_repaired_at_once(root: Path) -> None:
    async with opened(root, verification="digest", max_file_bytes=LIMIT) as store:
        published = await store.publish(MODEL.draft(), source_id="source")
        entry = root / "entries" / published.content_id / "g1"
        damage_the_last_file(entry)
        again = await store.publish(MODEL.draft(), source_id="source", content_id=published.content_id)
        assert (again.generation, again.was_present) == (2, False)
    assert any(path.startswith(f"quarantine/{published.content_id}.g1.") for path in tree(root))


async def test_the_report_of_a_quarantined_generation_says_why(root: Path) -> None:
    async with opened(root, verification="digest", max_file_bytes=LIMIT) as store:
        published = await store.publish(MODEL.draft(), source_id=None)
        damage_the_last_file(root / "entries" / published.content_id / "g1")
        with pytest.raises(EntryRejectedError, match=r"image 'block\.3' in weights-00002") as caught:
            await store.lease(published.content_id)
    (report,) = (root / "quarantine").glob("*.json")
    assert json.loads(report.read_text())["reason"] == caught.value.reason


async def test_a_rebuild_leaves_leases_of_the_damaged_generation_alone(root: Path) -> None:
    async with opened(root, max_file_bytes=LIMIT) as store, opened(root, max_file_bytes=LIMIT) as other:
        content_id = (await store.publish(MODEL.draft(), source_id=None)).content_id
        old, theirs = await store.lease(content_id), await other.lease(content_id)
        assert old is not None
        assert theirs is not None
        with old, theirs:
            inode = os.fstat(old.fileno(0)).st_ino
            damage_the_last_file(root / "entries" / content_id / "g1")
            for lease, its in ((old, store), (theirs, other)):  # both notice; the second finds it moved already
                with pytest.raises(EntryRejectedError):
                    await its.verify(lease)
            assert (await other.publish(MODEL.draft(), source_id=None)).generation == 2
            new = await store.lease(content_id)
            assert new is not None
            with new:
                assert new.generation == 2
                assert os.fstat(new.fileno(0)).st_ino != inode
                await store.verify(new)
                with pytest.raises(EntryRejectedError):  # the old one is still the old one, and the new one untouched
                    await store.verify(old)
                await store.verify(new)
            found = bytearray(len(MODEL.data[0]))
            old.fill(0, memoryview(found), 0)
            assert found == MODEL.data[0]
        again = await store.lease(content_id)
        assert again is not None
        with again:
            assert again.generation == 2


async def test_too_many_open_files_are_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(root, max_file_bytes=LIMIT) as store:
        content_id = (await store.publish(MODEL.draft(), source_id=None)).content_id
        real = os.open

        def failing(path: str, *arguments: object, **options: object) -> int:
            if path == file_name(1):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real(path, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", failing)
        with pytest.raises(StoreOperationError, match="Too many open files"):
            await store.lease(content_id)
        monkeypatch.undo()
        lease = await store.lease(content_id)
        assert lease is not None
        lease.close()
