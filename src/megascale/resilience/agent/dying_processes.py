"""Processes of ranks that have been killed, and whose memory the kernel still frees.

Their replacements wait for the memory (train/predecessors.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from megascale.resilience.agent.node_folder import read_rank_processes, record_rank_processes
from megascale.resilience.process_birth import read_birth_time


class DyingProcesses:
    """Dying processes of a node.

    Args:
        folder: folder of the node, which names the processes that ended with an earlier agent.

    Attributes:
        pids: processes whose end the present fork server will report.
    """

    def __init__(self, folder: Path) -> None:
        self.pids: set[int] = set()
        self._folder = folder
        # Birth times by process id. The fork server or the agent of these processes no longer reports their end.
        self._unreported_births = read_rank_processes(folder)

    def end_with_server(self, pids: Iterable[int]) -> None:
        """Store running processes that end with their fork server."""
        self._unreported_births |= dict(_list_births(pids))

    def forget_server(self) -> None:
        """Store that the fork server no longer reports ends."""
        self.end_with_server(self.pids)
        self.pids = set()

    def record(self, pids: Iterable[int]) -> None:
        """Write which running processes end with this agent, so that the next agent names them to replacements."""
        with contextlib.suppress(OSError):  # a full disk: replacements then do not wait for free memory
            record_rank_processes(self._folder, dict(_list_births(pids)))

    def list_all(self) -> list[int]:
        """Return the processes whose memory the kernel may still free. Forget those that no fork server reports."""
        pids = set(self.pids)
        for pid, birth in self._unreported_births.items():
            had_ended = birth == 0  # when it was stored; another process may have the process id by now
            if not had_ended and read_birth_time(pid) in (0, birth):
                pids.add(pid)
        self._unreported_births = {}
        return sorted(pids)


def _list_births(pids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the id and the birth time of each process that has an id."""
    for pid in pids:
        if pid > 0:
            yield pid, read_birth_time(pid)
