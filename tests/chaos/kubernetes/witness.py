"""Witness of every trainer of a run on this kernel, in any container, and of its own records.

A trainer keeps its status file mapped (core/status.py): who has it mapped is a trainer of that rank, and what stands in
it is the trainer's own record. Neither agents nor the cluster are asked.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_LOOK = 0.1  # seconds between looks
_PART = b"fork_server"  # of command lines of trainers and of what forks them


@dataclass
class Trainer:
    """A trainer's process.

    Attributes:
        rank, pid: as the host counts; born: when it was forked, in the kernel's ticks.
        first, last: when it was seen, seconds since 1970.
        file: its status file, as the host sees it; own: process id that it has in its container.
        step: the last that it wrote; at: when it wrote that, seconds since 1970.
        begun: when it wrote of its first step.
    """

    rank: int
    pid: int
    born: int
    first: float
    last: float
    file: str
    own: int
    step: int = 0
    at: float = 0.0
    begun: float = 0.0


class Witness:
    """`with Witness("job-0") as witness: ...; witness.doubles()`; looks ten times a second.

    Args:
        run: name of the run, as it stands in the path of its status files.
    """

    def __init__(self, run: str) -> None:
        self._mark = f"/{run}/status/rank-"
        self._trainers: dict[tuple[int, int], Trainer] = {}
        self._other_processes: dict[int, int] = {}  # processes other than trainers, and when they were forked
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_LOOK):
            self.look()

    def look(self) -> None:
        """Note who is there now."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                self._look_at(folder)

    def _look_at(self, process: Path) -> None:
        pid, current = int(process.name), time.time()
        try:
            stat = (process / "stat").read_bytes().rsplit(b")", 1)[1].split()
            born, state = int(stat[19]), stat[0]
            if self._other_processes.get(pid) == born or state == b"Z":
                return
            observed = self._trainers.get((pid, born))
            if observed is None:
                if _PART not in (process / "cmdline").read_bytes():
                    self._other_processes[pid] = born
                    return
                file = self._file(process)
                if not file:  # what forks them, or one that has not opened its file yet
                    return
                rank = int(file.rsplit("rank-", 1)[1].split(".status")[0])
                local = int((process / "status").read_text().split("NSpid:")[1].split("\n")[0].split()[-1])
                observed = self._trainers[pid, born] = Trainer(
                    rank, pid, born, current, current, f"{process}/root{file}", local
                )
            observed.last = current
            self._record(observed)
        except (OSError, ValueError, IndexError):
            return  # it has ended meanwhile

    def _file(self, process: Path) -> str:
        """Path of the status file that it has mapped, as it sees it; "" for none."""
        for line in (process / "maps").read_text(errors="replace").splitlines():
            if self._mark in line:
                return line.split(None, 5)[5]
        return ""

    def _record(self, observed: Trainer) -> None:
        from megascale.core.status import read_status

        status = read_status(Path(observed.file))
        if status is not None and status.pid == observed.own and status.step != observed.step:
            observed.step, observed.at = status.step, status.time_ns / 1e9
            observed.begun = observed.begun or observed.at

    # what follows from it ---------------------------------------------------------------------------------------------

    def trainers(self, rank: int | None = None) -> list[Trainer]:
        """All that were seen, oldest first."""
        result = [each for each in list(self._trainers.values()) if rank is None or each.rank == rank]
        return sorted(result, key=lambda each: each.born)

    def doubles(self) -> list[str]:
        """Each pair of trainers of one rank that were there at a time, in words."""
        result = []
        for rank in sorted({each.rank for each in self.trainers()}):
            all_of_it = self.trainers(rank)
            for older, newer in itertools.pairwise(all_of_it):
                overlap = older.last - newer.first
                if overlap > 0:
                    result.append(f"rank {rank}: {older.pid} was there for {overlap:.1f} s with {newer.pid}")
        return result
