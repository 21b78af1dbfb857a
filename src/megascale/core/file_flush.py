"""Flush of a file to the disk in a thread, for writers that must not wait for a busy disk.

What was written is visible to all processes at once, and outlives its writer. Only a power cut may lose it before the
flush. During a large checkpoint a flush takes seconds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


class FileFlush:
    """Thread that makes what was written to a file outlive a power cut, while its user goes on.

    The thread ends when all requests are carried out.

    Args:
        path: the file. A file that does not exist needs no flush.
        after_flush: called by the thread after each flush.
    """

    def __init__(self, path: Path, after_flush: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._after_flush = after_flush
        self._lock = threading.Lock()
        self._is_due = False
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Flush soon what has been written so far."""
        with self._lock:
            self._is_due = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="megascale-flush", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for the requested flushes."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_due:
                    self._thread = None
                    return
                self._is_due = False
            try:
                flush_file(self._path)
            except OSError as error:
                log.warning("%s was not flushed to the disk: %s", self._path, error)
            self._after_flush()


def flush_file(path: Path) -> None:
    """Wait until a file is on the disk. A file that does not exist needs no flush. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
