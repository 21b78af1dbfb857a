"""The audit log: every event of the driver goes into the journal, the run's events.jsonl, and to the terminal."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megascale.core import json_lines, strict_json
from megascale.core.events import Event, format_time
from megascale.core.failure import DISK_FULL_ERRNOS
from megascale.resilience.driver.process.descriptors import SpareDescriptors
from megascale.resilience.driver.recovery.escalation import RECOVERY_ACTIONS, Use, refund_last_blameless_use
from megascale.resilience.driver.state.journal import Entry, Journal


class AuditLog:
    """Args:
    run: the run folder.
    journal: of the driver that writes.
    say: called with (who, text) for the terminal.
    """

    def __init__(self, run: Path, journal: Journal, say: Callable[[str, str], None]) -> None:
        self._file, self._journal, self._say = run / "events.jsonl", journal, say
        self._late: deque[str] = deque(maxlen=10_000)  # lines that could not be written yet
        self._spare = SpareDescriptors()
        self._said = 0  # number of the last error that was told

    def record(
        self,
        kind: str,
        *,
        attempt: int,
        action: str = "",
        nodes: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        evidence: tuple[str, ...] = (),
        **details: Any,
    ) -> Entry:
        """Write an event; Fenced if another driver has taken over."""
        about: dict[str, Any] = {
            "attempt": attempt,
            "action": action,
            "nodes": nodes,
            "ranks": ranks,
            "evidence": evidence,
        } | details
        entry = self._spare.lend(lambda: self._journal.add(kind, **about))
        record: dict[str, Any] = {"time": entry.time, "date": format_time(entry.time), "event": kind, "by": "driver"}
        record["attempt"] = attempt
        for name, value in (("action", action), ("nodes", nodes), ("ranks", ranks), ("evidence", evidence)):
            if value:
                record[name] = list(value) if isinstance(value, tuple) else value
        self._append(strict_json.dumps(record | details) + "\n")
        self._say("driver", describe(entry))
        return entry

    def _append(self, line: str) -> None:
        """Add a line to the file; one that cannot be written stays for the next time, and ends nothing."""
        self._late.append(line)
        try:
            self._spare.lend(self._write_late)
        except OSError as error:
            if error.errno not in (*DISK_FULL_ERRNOS, self._said):  # of a full disk the journal tells
                self._say("driver", f"{self._file} cannot be written ({error.strerror}); the driver goes on")
            self._said = error.errno or 0
        else:
            self._said = 0

    def _write_late(self) -> None:
        handle = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            while self._late:
                json_lines.append_lines(handle, self._late[0].encode())
                self._late.popleft()
        finally:
            os.close(handle)

    def uses(self) -> list[Use]:
        """Recovery actions taken so far, for their budgets: on the monotonic clock of this process.

        The journal has the time of day. What it says is yet to come was written before the clock was set back: when,
        nobody knows, so it counts as of now, and expires like any other.
        """
        today, now = time.time(), time.monotonic()
        actions = {str(action): action for action in RECOVERY_ACTIONS}
        found: list[Use] = []
        for entry in self._journal.events():
            if entry.kind == Event.RECOVERY_ACTION and entry.action in actions:
                if entry.details.get("explains"):
                    refund_last_blameless_use(found)
                when = now - max(0.0, today - entry.time)
                found.append(Use(when, actions[entry.action], entry.nodes[0] if entry.nodes else ""))
        return found


def describe(entry: Entry) -> str:
    """An event in one line."""
    action = f" -> {entry.action}" if entry.action and entry.action != "none" else ""
    about = f" [{', '.join(entry.nodes)}]" if entry.nodes else ""
    return f"{entry.kind}{about}{action}: {'; '.join(entry.evidence)}"
