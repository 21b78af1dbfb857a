"""Processes that ranks of a foreign trainer have started, and that outlive their rank.

The kernel ends a rank with its fork server, but not the child processes of the rank: the trainer that a wrapper script
has started, or a writer of checkpoints. They would use GPUs and write checkpoints next to those of the next attempt.
All of them have the environment of their rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from megascale.resilience.process_birth import read_birth_time

_KILL_TIMEOUT = 5.0  # seconds within which killed processes must end
_POLL_SECONDS = 0.01  # between checks of killed processes


def end_leftover_processes(run: Path, job: str, node: str) -> list[int]:
    """Kill the processes of a node's ranks of a foreign trainer, and return their process ids.

    Only processes of this user are killed. Call it while the node should run no ranks. It waits a few seconds at most
    until the processes have ended, because the next ranks need their GPU memory.

    Args:
        run: run folder to which the node writes.
        job: name of the job.
        node: name of the node.
    """
    births: dict[int, int] = {}  # of all killed processes, by process id
    deadline = time.monotonic() + _KILL_TIMEOUT
    while True:
        # A process may have started another one before it was killed, so the search is repeated until it is empty.
        killed = kill_rank_processes(run, job, node)
        births |= killed
        are_running = any(read_birth_time(pid) == birth for pid, birth in births.items())
        if not (killed or are_running) or time.monotonic() > deadline:
            return sorted(births)
        time.sleep(_POLL_SECONDS)


def kill_rank_processes(run: Path, job: str, node: str) -> dict[int, int]:
    """Kill the processes that exist now as `end_leftover_processes` does. Return their birth times by process id."""
    killed = {}
    for pid, birth in _find_processes(run, job, node):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            killed[pid] = birth
    return killed


def find_rank_processes(run: Path, job: str, node: str) -> list[int]:
    """Return the process ids of a node's ranks of a foreign trainer, and of all processes that they have started."""
    return [pid for pid, _ in _find_processes(run, job, node)]


def _find_processes(run: Path, job: str, node: str) -> Iterator[tuple[int, int]]:
    """Yield the process id and the birth time of each process of this user with the markers in its environment."""
    # Jobs of the same name have different run folders.
    variables = {"MEGASCALE_JOB": job, "MEGASCALE_NODE": node, "MEGASCALE_STATUS": str(run / "status")}
    markers = {os.fsencode(f"{name}={value}") for name, value in variables.items()}
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        birth = read_birth_time(pid)
        if not birth or pid == os.getpid():
            continue
        with contextlib.suppress(OSError):  # the process has ended
            is_permitted = process.stat().st_uid == os.geteuid()
            if is_permitted and markers <= set((process / "environ").read_bytes().split(b"\0")):
                yield pid, birth
