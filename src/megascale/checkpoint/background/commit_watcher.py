"""Thread of the first process that waits for the commits of saves in the background."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from megascale.checkpoint.background.service_protocol import AwaitCommit, AwaitPruning
from megascale.checkpoint.background.staging import ServiceConnections, SnapshotCopy
from megascale.services.conversation import Conversation


class CommitWatcher:
    """Waits for the result of each save, and reports it.

    Args:
        connect: connects to the service of this host.
        report: called with each save whose result is known, in the thread.
    """

    def __init__(self, connect: Callable[[], Conversation], report: Callable[[SnapshotCopy], None]) -> None:
        self._connections = ServiceConnections(connect)
        self._report = report
        self._saves: queue.SimpleQueue[SnapshotCopy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch_commits, daemon=True)
        self._thread.start()

    def add(self, copy: SnapshotCopy) -> None:
        """Wait for the commit of a save, after those of earlier saves."""
        self._saves.put(copy)

    def end_waits(self, reason: str) -> None:
        """Let all waits for commits fail, now and later. The service still completes the saves."""
        self._connections.end(reason)

    def close(self, seconds: float | None) -> None:
        """Wait until the saves are committed, and end the thread.

        Args:
            seconds: limit of the wait. Default: until the commits have ended.
        """
        self._saves.put(None)
        self._thread.join(seconds)
        self.end_waits("its commit is not known: a host has lost its checkpoint service")
        self._thread.join()

    def _watch_commits(self) -> None:
        """Report the result of each save. Runs in the thread."""
        connection: Conversation | None = None
        while (copy := self._saves.get()) is not None:
            try:
                if connection is None:
                    connection = self._connections.open()
                result = connection.request(AwaitCommit(copy.message.generation))
                copy.outcome.committed = result.committed
                copy.outcome.bytes = result.bytes or copy.outcome.bytes
                copy.outcome.reason = result.reason
                copy.outcome.record = result.record
            except Exception as error:
                copy.outcome.reason = self._connections.end_reason or str(error) or repr(error)
            self._report(copy)
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.request(AwaitPruning())
        if connection is not None:
            connection.close()
