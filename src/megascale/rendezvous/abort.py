"""Abort of all NCCL communicators of this process, so that no kernel on the device waits for a dead peer.

`ncclCommAbort` first sets the flag that the communicator's kernels poll, then waits for the device and frees memory.
The wait ends only if the kernels of all other communicators end too. Aborting one communicator after the other would
therefore wait forever, so each has its own thread. NCCL also waits until no CUDA graph holds the communicator. Captured
graphs must therefore be destroyed between `start` and `finish`. The module inprocess.abort of `nvidia-resiliency-ext`
aborts in the same way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from megascale import torch_private
from megascale.core.group_names import remove_attempt
from megascale.errors import TrainingError

log = logging.getLogger("megascale.train")  # whose records are in the logs of ranks
_MAX_ERROR_LENGTH = 400  # characters


class GroupAbort:
    """Abort of all process groups of this process. Several threads may start it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}  # by group name
        self._errors: dict[str, str] = {}  # error text by group name
        self._seconds: dict[str, float] = {}  # duration of each abort by group name
        self._has_started = False

    def start(self, groups: Sequence[tuple[str, Any]] | None = None) -> None:
        """Start to abort process groups. Only the first call has an effect.

        Args:
            groups: pairs of a name and a process group. Default: all groups that torch knows.
        """
        with self._lock:
            if self._has_started:
                return
            self._has_started = True
            if groups is None:
                groups = list_groups()
            for name, group in groups:
                thread = threading.Thread(target=self._abort, args=(name, group), name=f"abort {name}", daemon=True)
                self._threads[name] = thread
                thread.start()

    def _abort(self, name: str, group: Any) -> None:
        """Abort a group and record its duration and its error, in a thread of its own."""
        start_time = time.monotonic()
        try:
            group.abort()
        except Exception as error:
            self._errors[name] = f"{type(error).__name__}: {error}"
        self._seconds[name] = time.monotonic() - start_time

    def finish(self, seconds: float) -> None:
        """Wait at most `seconds` for the aborts that were started.

        Raises:
            TrainingError: an abort failed or takes longer. The message names the groups.
        """
        deadline = time.monotonic() + seconds
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        unfinished = [name for name, thread in self._threads.items() if thread.is_alive()]
        if unfinished:
            raise TrainingError(f"the communicators {', '.join(sorted(unfinished))} did not abort within {seconds:g} s")
        if self._errors:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(self._errors.items()))
            raise TrainingError(f"communicators could not be aborted: {reasons}"[:_MAX_ERROR_LENGTH])
        if self._seconds:
            slowest = max(self._seconds, key=self._seconds.__getitem__)
            log.info("communicators were aborted within %.2f s (the last: %s)", self._seconds[slowest], slowest)


def list_groups() -> list[tuple[str, Any]]:
    """Return all process groups that torch knows, as pairs of a name and a group."""
    world = torch_private.c10d_world
    return [(remove_attempt(name), group) for group, name in list(world.pg_names.items())]
