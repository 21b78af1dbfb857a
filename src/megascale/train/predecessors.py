"""Killed processes of this node whose memory the kernel still frees when the next attempt begins.

The kernel takes seconds to free the context of a GPU and tens of gigabytes of page-locked memory. The process that
replaces a killed rank needs this memory, and on rank 0 the lock of the run. It meets the other ranks before it waits.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from megascale.core.process_orders import DYING_VARIABLE
from megascale.parallel.peer_watch import has_ended

log = logging.getLogger("megascale.train")
_LIMIT_SECONDS = 60.0  # after which the start goes on, since another process may have the process id by then
_POLL_SECONDS = 0.01


def await_predecessors(check: Callable[[], None], limit_seconds: float = _LIMIT_SECONDS) -> float:
    """Wait until the killed processes that the agent has named have ended, and return the seconds of the wait.

    Only the first call of an attempt waits.

    Args:
        check: called during the wait. It raises an error if the start must end.
    """
    pids = [int(pid) for pid in os.environ.pop(DYING_VARIABLE, "").split(",") if pid]
    start_time = time.monotonic()
    remaining = [pid for pid in pids if not has_ended(pid)]
    while remaining and time.monotonic() - start_time < limit_seconds:
        check()
        time.sleep(_POLL_SECONDS)
        remaining = [pid for pid in remaining if not has_ended(pid)]
    seconds = time.monotonic() - start_time
    if remaining:
        log.warning("processes %s, which were killed, have not ended within %.0f s", remaining, limit_seconds)
    elif pids:
        log.info("waited %.2f s until the kernel had freed the memory of the killed processes %s", seconds, pids)
    return seconds
