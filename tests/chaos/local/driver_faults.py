"""Faults of the local site that concern the driver, or that come in pairs."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

from benchmarks.harness.launched import Launched
from megascale.core.status import read_status
from megascale.errors import TrainingError
from megascale.resilience.faults.inject import Options, inject

_FAULT_GAP = 0.5  # seconds between two faults
_SEED = 7


def garble_journal(job: Launched) -> None:
    """Kill the driver, overwrite half of its journal's pages with random bytes, and start the driver again."""
    _kill_driver(job)
    rng = random.Random(_SEED)
    for suffix in ("", "-wal"):
        file = job.run / f"journal.sqlite{suffix}"
        if not file.exists():
            continue
        data = bytearray(file.read_bytes())
        for start in range(0, len(data), 8192):
            data[start : start + 4096] = rng.randbytes(len(data[start : start + 4096]))
        file.write_bytes(data)
    job.start()


def kill_node_and_rank(job: Launched) -> None:
    """Lose the node of rank 1 with its memory and, within a second, the process of rank 0."""
    status = read_status(job.run / "status" / "rank-0.status")
    if status is None:
        raise TrainingError("rank 0 has no status")
    inject(job.run, "kill-node", Options(node=_find_node(job, 1)))
    time.sleep(_FAULT_GAP)
    os.kill(status.pid, signal.SIGKILL)  # it may be leaving its attempt, or wait for the next one


def kill_recovering_drivers(job: Launched) -> None:
    """Lose the node of rank 1; kill the driver while it recovers, and its successor once it has taken over."""
    injected = time.time()
    inject(job.run, "kill-node", Options(node=_find_node(job, 1)))
    _await_event(job, injected, "recovery_action")
    _kill_driver(job)
    taken_over = time.time()
    job.start()
    _await_event(job, taken_over, "driver_took_over")
    _kill_driver(job)
    job.start()


def _find_node(job: Launched, rank: int) -> str:
    node: str = next(e for e in reversed(job.events()) if e.kind == "attempt_started").nodes[rank]
    return node


def _await_event(job: Launched, start: float, kind: str) -> None:
    if job.first(lambda event: event.kind == kind and event.time > start) is None:
        raise TrainingError(f"no event {kind} came")


def _kill_driver(job: Launched) -> None:
    job.process.kill()
    job.process.wait()


STRIKES: dict[str, Callable[[Launched], None]] = {
    "garbled-journal": garble_journal,
    "two-faults": kill_node_and_rank,
    "driver-killed-twice": kill_recovering_drivers,
}
