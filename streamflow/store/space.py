"""Whether the disk has room for an entry. Pure: no torch."""

from __future__ import annotations

from streamflow.store.errors import InsufficientDiskError
from streamflow.store.options import StoreOptions


def check_space(path: str, wanted: int, available: int, disk_bytes: int, options: StoreOptions) -> None:
    """Nothing, if ``wanted`` bytes leave the headroom of the options free. Sizes in bytes; a disk of 0 is unlimited.

    :raises InsufficientDiskError: if they do not.
    """
    headroom = max(options.free_space_headroom_bytes, int(disk_bytes * options.free_space_headroom_fraction))
    if disk_bytes == 0:  # a filesystem without a limit of its own, which says nothing
        return
    if wanted + headroom > available:
        raise InsufficientDiskError(path, wanted, available, headroom)
