"""The birth of a process, which tells processes with the same process id apart."""

from __future__ import annotations


def read_birth_time(pid: int) -> int:
    """Return when a process started, in clock ticks since the boot; 0 if it has ended.

    The kernel gives a process id again, but never with the same birth.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields_after_name = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    has_ended = fields_after_name[0] in (b"Z", b"X")
    return 0 if has_ended else int(fields_after_name[19])  # `starttime` of proc(5)
