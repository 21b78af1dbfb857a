"""Early processes of a node: each was started to replace the trainer of a rank before the driver ordered it.

An early process loads its modules and waits for the order. With resilience.standby_processes every rank has an early
process from its first step on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection

from megascale.resilience.protocol.fork_messages import Ended

log = logging.getLogger("megascale.agent")
EARLY_SECONDS = 120.0  # until an unused early process is ended, unless it stays as a standby process


class EarlyProcesses:
    """Early processes by rank.

    Args:
        are_standby: resilience.standby_processes.
        kill: kills a process, whose end the fork server then reports.

    Attributes:
        pids: process id by rank, 0 while the fork server forks the process.
        failed_ranks: ranks whose early process has ended in the present attempt.
    """

    def __init__(self, are_standby: bool, kill: Callable[[int], None]) -> None:
        self.pids: dict[int, int] = {}
        self.failed_ranks: set[int] = set()
        self._abandoned: Counter[int] = Counter()  # by rank: processes that end as soon as they are forked
        self._are_standby = are_standby
        self._kill = kill

    def reserve(self, rank: int) -> bool:
        """Return whether the caller shall fork an early process for a rank, which has none."""
        if rank in self.pids:
            return False
        self.pids[rank] = 0
        return True

    def add(self, rank: int, pid: int) -> None:
        """Store the id of an early process that was forked, or end the process if no rank waits for it any more."""
        if self._abandoned[rank]:
            # The fork server forks in the order of the requests, so a later request has a later process.
            self._abandoned[rank] -= 1
            self._kill(pid)
        elif self.pids.get(rank) == 0:
            self.pids[rank] = pid
            if not self._are_standby:
                asyncio.get_running_loop().call_later(EARLY_SECONDS, self._end_unused, rank, pid)
        else:
            self._kill(pid)

    def fail(self, rank: int, error: str) -> None:
        """Record that the process of a request could not be created. The rank gets no standby process as in `drop`."""
        log.warning("no process could be created to replace rank %d: %s", rank, error)
        if self._abandoned[rank]:
            self._abandoned[rank] -= 1
        elif self.pids.get(rank) == 0:
            del self.pids[rank]
            self.failed_ranks.add(rank)

    def drop(self, message: Ended) -> None:
        """Forget an early process that has ended. Its rank gets no standby process until the next attempt.

        A process that ends during its warm-up would otherwise be started again and again, and each would take memory.
        """
        for rank, pid in list(self.pids.items()):
            if pid == message.pid:
                del self.pids[rank]
                self.failed_ranks.add(rank)
                reason = message.error or f"wait status {message.status}"
                log.warning("the process that waits to replace rank %d has ended: %s", rank, reason)

    def take(self, usable_ranks: Collection[int], parked_ranks: Collection[int]) -> dict[int, int]:
        """Return the process ids of early processes that the next attempt uses, by rank.

        End the other early processes, except those of parked ranks if they are standby processes.

        Args:
            usable_ranks: ranks for which the next attempt could use an early process.
            parked_ranks: ranks of the next attempt that continue in their parked processes.
        """
        early_pids = self.pids
        self.pids = {}
        used_pids = {}
        for rank, pid in early_pids.items():
            if not pid or rank not in usable_ranks:
                self._end(rank, pid)
            elif rank not in parked_ranks:
                used_pids[rank] = pid
            elif self._are_standby:
                self.pids[rank] = pid
            else:
                self._end(rank, pid)
        return used_pids

    def end(self, rank: int) -> None:
        """End the early process of a rank, if it has one."""
        if rank in self.pids:
            self._end(rank, self.pids.pop(rank))

    def end_all(self) -> None:
        """End all early processes."""
        for rank, pid in self.pids.items():
            self._end(rank, pid)
        self.pids = {}

    def forget(self) -> None:
        """Forget all early processes, which end with the fork server."""
        self.pids = {}
        self._abandoned.clear()

    def _end_unused(self, rank: int, pid: int) -> None:
        """End an early process that no attempt has used in EARLY_SECONDS, because it occupies device memory."""
        if self.pids.get(rank) == pid:
            del self.pids[rank]
            self._kill(pid)

    def _end(self, rank: int, pid: int) -> None:
        """End an early process. If it is still being forked (pid 0), `add` ends it later."""
        if pid:
            self._kill(pid)
        else:
            self._abandoned[rank] += 1
