"""Processor time, bytes read and memory of processes, from /proc; dropping files from the page cache."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def drop(path: Path) -> None:
    """Take a file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def children(pid: int) -> list[int]:
    """Process ids of all threads' children."""
    result = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            result += [int(word) for word in (task / "children").read_text().split()]
    return result


def cpu(pid: int) -> float:
    """Processor seconds so far, its own."""
    arguments = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(arguments[11]) + int(arguments[12])) / os.sysconf("SC_CLK_TCK")


def read(pid: int) -> int:
    """Bytes that read() has returned to it, pipes and sockets included; maps are not in it."""
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])


def memory(pid: int) -> int:
    """Proportional set size in bytes: shared pages by the share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0
