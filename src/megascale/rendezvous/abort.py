"""The abort of this process's NCCL communicators, all at once, so that no wait for a dead peer is left on the device.

`ncclCommAbort` first raises the flag that its kernels poll, then waits for the device and frees memory. The wait ends
only if the kernels of all other communicators end too. One communicator after the other would therefore wait forever;
each has its own thread here. NCCL also waits until no CUDA graph holds the communicator: destroy captured graphs
between `start` and `finish`. `nvidia-resiliency-ext` aborts in the same way (its module inprocess.abort).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from megascale import torch_private
from megascale.errors import TrainingError


class GroupAbort:
    """Aborts all process groups of this process; safe to start from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._errors: dict[str, str] = {}
        self._has_started = False

    def start(self, groups: Sequence[tuple[str, Any]] | None = None) -> None:
        """Begin to abort (name, group); default: all groups that torch knows. Only the first call has an effect."""
        with self._lock:
            if self._has_started:
                return
            self._has_started = True
            for name, group in list_groups() if groups is None else groups:
                thread = threading.Thread(target=self._abort, args=(name, group), name=f"abort {name}", daemon=True)
                self._threads[name] = thread
                thread.start()

    def _abort(self, name: str, group: Any) -> None:
        try:
            group.abort()
        except Exception as error:
            self._errors[name] = f"{type(error).__name__}: {error}"

    def finish(self, seconds: float) -> None:
        """Wait at most `seconds` for the aborts that were started. TrainingError names the groups that failed."""
        deadline = time.monotonic() + seconds
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [name for name, thread in self._threads.items() if thread.is_alive()]
        if stuck:
            raise TrainingError(f"the communicators {', '.join(sorted(stuck))} did not abort within {seconds:g} s")
        if self._errors:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(self._errors.items()))
            raise TrainingError(f"an error while aborting communicators: {reasons}"[:400])


def list_groups() -> list[tuple[str, Any]]:
    """Return (name, group) of all process groups that torch knows."""
    world = torch_private.c10d_world
    return [(name, group) for group, name in list(world.pg_names.items())]
