"""A launched job as its journal tells of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megascale.resilience.driver.state.journal import Entry
from megascale.resilience.driver.state.journal_reader import read_journal_events


class JobEvents:
    """Events that tests of launched jobs wait for. The subclass has the job's address and the time limit.

    Attributes:
        run: its run folder.
        seen: number of the event that was waited for last.
    """

    run: Path
    seen: int = 0

    def wait(self, find: Callable[[], Any], subject: str) -> Any:
        raise NotImplementedError

    def events(self, after: int = 0) -> list[Entry]:
        return read_journal_events(self.run, after)

    def until(self, kind: str, **details: object) -> Entry:
        """The next event of a kind (after the one waited for before) whose fields are as given."""

        def find() -> Entry | None:
            for entry in self.events(self.seen):
                if entry.kind == kind and all(getattr(entry, name) == value for name, value in details.items()):
                    self.seen = entry.id
                    return entry
            return None

        return self.wait(find, f"{kind} {details}")
