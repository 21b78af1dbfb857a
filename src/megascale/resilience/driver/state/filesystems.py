"""What file system a path lies on: a network file system does not keep what SQLite's write-ahead log needs of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
# Shared by machines: memory that two of them map is not the same memory, and locks may not hold between them.
# fmt: off
_NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "mfs",
    "ncpfs", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "virtiofs",
    "wekafs",
})
# fmt: on


def kind(path: Path, mounts: Path | None = None) -> str:
    """The type of the file system that holds `path` (or will, once it is made), such as ext4; "" if that is unknown.

    `mounts`: in place of MOUNTS. Of mounts upon one another the last one counts.
    """
    wanted = os.path.realpath(path)
    found, depth = "", -1
    try:
        text = (mounts or MOUNTS).read_text(errors="surrogateescape")
    except OSError:
        return ""
    for line in text.splitlines():
        # 36 35 98:0 /root /mount/point rw,noatime master:1 - ext3 /dev/root rw
        fields, _, rest = line.partition(" - ")
        parts = fields.split(" ")
        if len(parts) < 5 or not rest:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), parts[4])
        if point == "/" or wanted == point or wanted.startswith(point + "/"):
            length = len(point.rstrip("/"))
            if length >= depth:
                found, depth = rest.split(" ")[0], length
    return found


def shared(kind: str) -> bool:
    """Whether a type of file system is one that machines share over a network, or one of a program (fuse), of which
    nothing is known."""
    return kind in _NETWORK or kind == "fuse" or kind.startswith("fuse.")
