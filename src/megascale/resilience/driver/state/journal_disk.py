"""The disk under the driver's journal: whether it is full, and whether other machines share its file system."""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
from pathlib import Path

from megascale.core.failure import DISK_FULL_ERRNOS, MIN_FREE_BYTES, find_errno
from megascale.errors import TrainingError

MOUNTS = Path("/proc/self/mountinfo")
# File systems that machines share: memory mappings and locks of two machines may differ there.
# fmt: off
_NETWORK_FILESYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "mfs",
    "ncpfs", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "virtiofs",
    "wekafs",
})
# fmt: on


def is_full_disk_error(error: BaseException, folder: Path) -> bool:
    """Return True if an error of SQLite or the system is due to a full disk, quota or file size in `folder`."""
    if not isinstance(error, sqlite3.Error):
        return find_errno(error) in DISK_FULL_ERRNOS
    # SQLite has an error code for a full disk. For an exceeded quota or file size it reports only that a write or the
    # opening of a file failed, so a trial write determines the cause.
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF  # primary code of an extended error code
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return _probe_write(folder) in DISK_FULL_ERRNOS
    return code == sqlite3.SQLITE_FULL


def make_full_disk_error(folder: Path) -> TrainingError:
    """Return the error for a journal on a full disk."""
    try:
        disk = os.statvfs(folder)
        space = f"{disk.f_bavail * disk.f_frsize:,} bytes are left"
    except OSError:
        space = "the disk is not writable"
    return TrainingError(
        f"the disk of {str(folder)!r} has no room for the driver's journal ({space}): make room, or put train.runs on "
        "another disk, and run the same command again; committed checkpoints are not affected"
    )


def _probe_write(folder: Path) -> int:
    """Create a temporary file of MIN_FREE_BYTES in `folder`; return the errno of a failure, 0 if that succeeds."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, MIN_FREE_BYTES)
    except OSError as error:
        return error.errno or 0
    return 0


def find_filesystem_type(path: Path, mounts: Path | None = None) -> str:
    """Return the type of the file system that holds `path` now or once it is created, such as ext4; "" if unknown.

    Args:
        path: a file or folder.
        mounts: a table in place of MOUNTS. Of several mounts at one point the last one counts.
    """
    target = os.path.realpath(path)
    type_name = ""
    longest = -1  # length of the longest mount point above the target so far
    try:
        text = (mounts or MOUNTS).read_text(errors="surrogateescape")
    except OSError:
        return ""
    for line in text.splitlines():
        # 36 35 98:0 /root /mount/point rw,noatime master:1 - ext3 /dev/root rw
        mount_text, _, source_text = line.partition(" - ")
        mount_columns = mount_text.split(" ")
        if len(mount_columns) < 5 or not source_text:
            continue
        # The kernel writes spaces and backslashes in the path as octal numbers, such as \040.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount_columns[4])
        length = len(point.rstrip("/"))
        holds_target = point == "/" or target == point or target.startswith(point + "/")
        if holds_target and length >= longest:
            type_name = source_text.split(" ")[0]
            longest = length
    return type_name


def find_network_filesystem(path: Path) -> str:
    """Return the type of the network file system that holds `path`, "" if it is local."""
    type_name = find_filesystem_type(path)
    return type_name if is_network_filesystem(type_name) else ""


def is_network_filesystem(type_name: str) -> bool:
    """Return True for a type that machines share, and for FUSE, whose programs may share files as well."""
    return type_name in _NETWORK_FILESYSTEMS or type_name == "fuse" or type_name.startswith("fuse.")
