"""Which filesystem a folder is on, and whether a store may live there."""

from __future__ import annotations

import os
import re

import attrs

from streamflow.store.errors import UnsupportedFilesystemError

#: Filesystems that other machines write to: locks and mappings of this machine do not reach those.
NETWORK_FILESYSTEMS = frozenset(
    {
        "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre",
        "mfs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
    }
)  # fmt: skip
#: What follows ``fuse.`` in the names of network filesystems that are programs.
NETWORK_FUSE = frozenset(
    {
        "alluxio", "beegfs", "blobfuse", "blobfuse2", "ceph", "ceph-fuse", "cernvm", "curlftpfs", "davfs", "davfs2",
        "gcsfuse", "geesefs", "glusterfs", "goofys", "httpdirfs", "juicefs", "mfs", "moosefs", "mount-s3",
        "mountpoint-s3", "nfs", "rclone", "s3fs", "s3ql", "seaweedfs", "smbnetfs", "sshfs", "weed",
    }
)  # fmt: skip
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})
_ESCAPE = re.compile(r"\\([0-7]{3})")


@attrs.frozen
class Filesystem:
    """A mounted filesystem. ``kind`` is the kernel's name for it; ``unknown`` where the kernel does not tell."""

    kind: str
    mount_point: str

    @property
    def is_memory(self) -> bool:
        """Whether what is stored there takes memory, and is gone after a restart of the machine."""
        return self.kind in MEMORY_FILESYSTEMS

    @property
    def is_network(self) -> bool:
        """Whether it is known to be shared with other machines."""
        prefix, _, program = self.kind.partition(".")
        return self.kind in NETWORK_FILESYSTEMS or (prefix == "fuse" and program.lower() in NETWORK_FUSE)


def filesystem_of(fd: int) -> Filesystem:
    """The filesystem of an open file or folder."""
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as info:
            described = info.read()
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as info:
            return parse_mounts(described, info.read())
    except OSError:  # no /proc here
        return Filesystem("unknown", "")


def parse_mounts(fdinfo: str, mountinfo: str) -> Filesystem:
    """The line of ``mountinfo`` that the mount id in ``fdinfo`` speaks of (texts as in /proc, see proc(5))."""
    ids = [line.split()[1] for line in fdinfo.splitlines() if line.startswith("mnt_id:")]
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if ids and fields[0] == ids[0] and after:
            return Filesystem(after.split(" ")[0], _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
    return Filesystem("unknown", "")


def check_filesystem(path: str, fd: int) -> Filesystem:
    """The filesystem of the folder ``path``, open as ``fd``; it is not known to be shared with other machines.

    :raises UnsupportedFilesystemError: if it is.
    """
    found = filesystem_of(fd)
    if found.is_network:
        reason = "it is shared with other machines, whose locks and mappings this one does not see"
        raise UnsupportedFilesystemError(os.fspath(path), found.kind, reason)
    return found
