"""Ranks that SIGKILL does not end, because a device or a disk blocks them in the kernel."""

from __future__ import annotations

import time
from collections.abc import Iterable

from megascale.resilience.agent.process_usage import is_ending
from megascale.resilience.agent.rank_programs import TrainerProcess


def explain_blocked_ranks(trainers: Iterable[TrainerProcess], kill_start: float, window: float) -> str:
    """Return why some of the ranks do not end, or an empty text while all of them may still end.

    A process has `resilience.window` seconds to begin its end after SIGKILL. The kernel needs more time to free a
    large memory, and the fork server to create a process. Both have two windows, as the driver waits no longer.

    Args:
        kill_start: when the agent began to kill ranks, on the monotonic clock.
        window: seconds of resilience.window.
    """
    current_time = time.monotonic()
    limit = window
    is_late = current_time - kill_start > 2 * limit
    if is_late:
        limit *= 2
    blocked = []
    for trainer in trainers:
        may_end = trainer.kill_time == 0 or current_time - trainer.kill_time <= limit
        if is_late or not (may_end or is_ending(trainer.pid)):
            blocked.append(f"rank {trainer.rank} (process {trainer.pid or 'not created yet'})")
    if not blocked:
        return ""
    return (
        f"SIGKILL has not ended {', '.join(blocked)} within {limit:g} s: a device or disk blocks them, or their "
        "fork server is stopped; see the kernel's log of this node"
    )
