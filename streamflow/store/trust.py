"""Who may change what becomes weights: the owner and mode of files and folders of a store."""

from __future__ import annotations

import os
import stat

_OTHER_WRITERS = 0o022


def why_not_trusted(status: os.stat_result, allowed_mode: int) -> str | None:
    """Why a file or folder must not be believed; None: only this user, root, and those whom ``allowed_mode`` lets
    write could have changed it.
    """
    writers = stat.S_IMODE(status.st_mode) & _OTHER_WRITERS & ~allowed_mode
    if writers:
        return f"its mode {stat.S_IMODE(status.st_mode):#o} lets others write to it, {allowed_mode:#o} does not"
    if status.st_uid in (os.geteuid(), 0) or _is_shared_with_me(status, allowed_mode):
        return None
    return f"it belongs to the user {status.st_uid}, this process to {os.geteuid()}"


def _is_shared_with_me(status: os.stat_result, allowed_mode: int) -> bool:
    if allowed_mode & 0o002:
        return True
    return bool(allowed_mode & 0o020) and status.st_gid in {os.getegid(), *os.getgroups()}
