"""Detection of saves and loads of another trainer's rank while its steps stand still.

The signs are bytes read and written by its processes, and processor time of its child processes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

MIN_BYTES_PER_SECOND = 1 << 20  # file traffic of an active rank; less may be logs of a hanging rank's threads
# Fraction of a core that the young child processes of an active rank use together. Megatron-Core's save starts a
# process that imports modules for many seconds, while the rank only waits for it.
MIN_CHILD_LOAD = 0.2
# Processor time of older child processes is ignored, because they are workers of a data loader or monitors.
YOUNG_SECONDS = 120.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """The usage of a process so far.

    Attributes:
        file_bytes: bytes that the process has read and written.
        seconds: processor time of a young child process, otherwise 0.
        is_runnable: a young child process computes, waits for a core or waits for a disk.
    """

    file_bytes: int
    seconds: float = 0.0
    is_runnable: bool = False


def measure_usage(pid: int) -> dict[int, Usage]:
    """Return the usage of a rank's process and its descendants by process id."""
    usage = {pid: Usage(_count_file_bytes(pid))}
    boot_seconds = time.clock_gettime(time.CLOCK_BOOTTIME)
    for child, state in _list_descendants(pid).items():
        usage[child] = Usage(_count_file_bytes(child))
        if boot_seconds - state.start < YOUNG_SECONDS:
            usage[child] = Usage(_count_file_bytes(child), state.seconds, state.is_runnable)
    return usage


def is_active(before: dict[int, Usage], after: dict[int, Usage], seconds: float) -> bool:
    """Return whether a rank saves, loads or has working child processes.

    Args:
        before, after: usage by process id, `seconds` apart.
    """
    file_bytes = 0
    child_seconds = 0.0
    for pid, usage in after.items():
        previous = before.get(pid, Usage(0))
        if usage.is_runnable and previous.is_runnable:
            return True  # on a busy machine a runnable process may receive no processor time
        file_bytes += max(0, usage.file_bytes - previous.file_bytes)
        child_seconds += max(0.0, usage.seconds - previous.seconds)
    return file_bytes > MIN_BYTES_PER_SECOND * seconds or child_seconds > MIN_CHILD_LOAD * seconds


def _count_file_bytes(pid: int) -> int:
    """Return the bytes that a process has read and written so far, 0 if unknown."""
    try:
        fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return int(fields["rchar"]) + int(fields["wchar"])
    except (OSError, ValueError, KeyError):
        return 0


class _State(NamedTuple):
    """State of a process.

    Attributes:
        start: seconds from the boot of the machine to the start of the process.
        seconds: processor time.
    """

    start: float
    seconds: float
    is_runnable: bool


def _list_descendants(pid: int) -> dict[int, _State]:
    """Return the states of the child processes, their children and so on, by process id."""
    parents: dict[int, int] = {}
    states: dict[int, _State] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            # Fields after the process name (man 5 proc): state, parent, ..., user and system ticks, ..., start tick.
            fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        ticks = int(fields[11]) + int(fields[12])
        parents[int(name)] = int(fields[1])
        start = int(fields[19]) / _TICKS_PER_SECOND
        states[int(name)] = _State(start, ticks / _TICKS_PER_SECOND, fields[0] in ("R", "D"))
    descendants = {pid}
    while True:
        children = {child for child, parent in parents.items() if parent in descendants} - descendants
        if not children:
            return {child: states[child] for child in descendants - {pid}}
        descendants |= children
