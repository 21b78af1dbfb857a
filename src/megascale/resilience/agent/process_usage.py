"""Resources and states of processes, read from the kernel's /proc."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Indices of the fields of /proc/PID/stat after the process's name (proc_pid_stat(5)).
_STATE = 0
_FLAGS = 6
_USER_TICKS = 11
_SYSTEM_TICKS = 12
_RESIDENT_PAGES = 21
_EXIT_CODE = 49  # the kernel shows 0 to a process that may not trace this one
_PF_EXITING = 0x4  # flag of a process whose end has begun
_SIGNAL_MASK = 0x7F  # bits of a wait status with the signal that ended the process


class ProcessUsage(NamedTuple):
    """Resources of a process. `stopped` is whether a signal or a debugger has stopped it."""

    resident_bytes: int = 0
    cpu_seconds: float = 0.0
    stopped: bool = False


def read_usage(pid: int) -> ProcessUsage:
    """Return the resources of a process, or zeros if it has ended."""
    fields = _read_stat(pid)
    if not fields:
        return ProcessUsage()
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ProcessUsage(
        resident_bytes=int(fields[_RESIDENT_PAGES]) * _PAGE_BYTES,
        cpu_seconds=ticks / _TICKS_PER_SECOND,
        stopped=fields[_STATE] in (b"T", b"t"),
    )


def is_being_killed(pid: int) -> bool:
    """Return whether SIGKILL has ended a process that its parent may not have reaped yet.

    Return False if the kernel does not show the cause of the end.
    """
    fields = _read_stat(pid)
    if len(fields) <= _EXIT_CODE or not int(fields[_FLAGS]) & _PF_EXITING:
        return False
    return int(fields[_EXIT_CODE]) & _SIGNAL_MASK == signal.SIGKILL


def is_ending(pid: int) -> bool:
    """Return whether a process has ended or its end has begun. The kernel may still free its memory."""
    fields = _read_stat(pid)
    return not fields or bool(int(fields[_FLAGS]) & _PF_EXITING)


def _read_stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name, or an empty list if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()  # the name in brackets may contain spaces and brackets
    except OSError:
        return []
