"""The options of a host weight store: each validated, all problems in one error."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Literal, get_args

import attrs

from streamflow.store.errors import StoreOptionsError

Verification = Literal["size", "background", "digest"]


def default_root() -> str:
    """The user's own cache folder, shared by all replicas of that user on the node."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the specification: a relative path is to be ignored
        cache = os.path.expanduser("~/.cache")
    return os.path.join(cache, "streamflow", "store")


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


@attrs.frozen(kw_only=True)
class StoreOptions:
    """Where a store is and how it behaves. Frozen; every field is an option.

    Attributes:
        root: the store's folder, on a local filesystem; made if it is not there.
        publication_wait_s: how long to wait for another process that publishes the same entry, in seconds.
        lock_wait_s: how long to wait for locks that are held for moments only, in seconds.
        verification: what is checked of an entry, and when: ``"size"`` everything but the images' bytes, at leasing;
            ``"background"`` these too, after opening; ``"digest"`` these too, at leasing.
        dir_mode: permissions of the store's folders. Write bits for the group, or for everybody, say who else is
            trusted with weights. Entries are hardened: they have these permissions without the write bits.
        file_mode: permissions of the store's files, likewise.
        free_space_headroom_bytes: how many bytes of the disk a publication leaves free.
        free_space_headroom_fraction: how much of the whole disk it leaves free; the larger of the two counts.
        max_file_bytes: the largest file of an entry; an image that is larger has a larger file of its own.
        num_threads: how many threads hash and write; None: one for each core that this process may use.

    :raises StoreOptionsError: if an option is not usable; it lists every problem.
    """

    root: str = attrs.field(factory=default_root, converter=_absolute)
    publication_wait_s: float = 600.0
    lock_wait_s: float = 10.0
    verification: Verification = "background"
    dir_mode: int = 0o755
    file_mode: int = 0o644
    free_space_headroom_bytes: int = 1 << 30
    free_space_headroom_fraction: float = 0.01
    max_file_bytes: int = 5 << 30
    num_threads: int | None = None

    def __attrs_post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise StoreOptionsError(problems)

    @property
    def effective_num_threads(self) -> int:
        """``num_threads`` with its default filled in."""
        return self.num_threads or len(os.sched_getaffinity(0))


def _problems(options: StoreOptions) -> Iterator[str]:
    for name in ("publication_wait_s", "lock_wait_s"):
        value = getattr(options, name)
        if not _is_number(value) or not math.isfinite(value) or value <= 0:
            yield f"{name} must be a positive, finite number of seconds, not {value!r}"
    if options.verification not in get_args(Verification):
        yield f"verification must be one of {', '.join(get_args(Verification))}, not {options.verification!r}"
    yield from _mode_problems(options)
    if not _is_integer(options.free_space_headroom_bytes) or options.free_space_headroom_bytes < 0:
        yield f"free_space_headroom_bytes must be 0 or more, not {options.free_space_headroom_bytes!r}"
    fraction = options.free_space_headroom_fraction
    if not _is_number(fraction) or not 0 <= fraction < 1:
        yield f"free_space_headroom_fraction must be from 0 to below 1, not {fraction!r}"
    if not _is_integer(options.max_file_bytes) or options.max_file_bytes < 1:
        yield f"max_file_bytes must be 1 or more, not {options.max_file_bytes!r}"
    if options.num_threads is not None and (not _is_integer(options.num_threads) or options.num_threads < 1):
        yield f"num_threads must be None or 1 or more, not {options.num_threads!r}"


def _mode_problems(options: StoreOptions) -> Iterator[str]:
    if not _is_integer(options.dir_mode) or options.dir_mode & ~0o7777 or options.dir_mode & 0o700 != 0o700:
        yield f"dir_mode must be a mode that gives the owner all rights, such as 0o755, not {options.dir_mode!r}"
    if not _is_integer(options.file_mode) or options.file_mode & ~0o666 or options.file_mode & 0o600 != 0o600:
        yield f"file_mode must be a mode that lets the owner read and write, such as 0o644, not {options.file_mode!r}"


def _is_integer(value: object) -> bool:
    return type(value) is int  # bool is an int to Python


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
