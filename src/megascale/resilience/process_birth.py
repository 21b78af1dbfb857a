"""Which process a number means: one that was given again has another birth."""

from __future__ import annotations


def read_birth_time(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid it names a process for good. 0: not there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
