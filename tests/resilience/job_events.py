"""A launched job as its journal tells of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megascale.resilience.driver.state.journal import Entry
from megascale.resilience.driver.state.journal_reader import JOURNAL_FILE, read_journal_events

SETTLED_NS = 100_000_000  # a change of a file within this time of the last one may leave its time of change as it is


class JobEvents:
    """Events that tests of launched jobs wait for. The subclass has the job's address and the time limit.

    Attributes:
        run: its run folder.
        seen: number of the event that was waited for last.
    """

    run: Path
    seen: int = 0
    _signature: tuple[tuple[int, int], ...] = ()  # of the journal's files when they were read last
    _entries: tuple[Entry, ...] = ()

    def wait(self, find: Callable[[], Any], subject: str) -> Any:
        raise NotImplementedError

    def events(self, after: int = 0) -> list[Entry]:
        """Return the events with an id above `after`. Tests ask often, so the journal is read if its files changed."""
        signature = self._read_signature()
        latest = max((changed for _, changed in signature), default=0)
        if signature != self._signature or time.time_ns() - latest < SETTLED_NS:
            self._entries = tuple(read_journal_events(self.run))
            self._signature = signature
        return [entry for entry in self._entries if entry.id > after]

    def _read_signature(self) -> tuple[tuple[int, int], ...]:
        """Return (size, time of change) of the journal and of its write-ahead log."""
        result = []
        for name in (JOURNAL_FILE, f"{JOURNAL_FILE}-wal"):
            try:
                status = (self.run / name).stat()
            except OSError:
                result.append((0, 0))
            else:
                result.append((status.st_size, status.st_mtime_ns))
        return tuple(result)

    def until(self, kind: str, **details: object) -> Entry:
        """The next event of a kind (after the one waited for before) whose fields are as given."""

        def find() -> Entry | None:
            for entry in self.events(self.seen):
                if entry.kind == kind and all(getattr(entry, name) == value for name, value in details.items()):
                    self.seen = entry.id
                    return entry
            return None

        return self.wait(find, f"{kind} {details}")
