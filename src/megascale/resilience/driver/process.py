"""Resources of the driver's process: background tasks, garbage collection, and file descriptors."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import sqlite3
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger("megascale.driver")
Result = TypeVar("Result")

FULL_COLLECTION_INTERVAL = 6 * 3600.0  # seconds: each full collection halts the loop for a second or two
MAX_COLLECTION_SHARE = 1e-3  # largest fraction of the time that full collections may take
_NEVER = 1 << 30  # threshold that the number of collections does not reach

FILE_LIMIT = 65_536  # open files, for the agents of the largest job and as many unauthenticated connections
_RESERVE_SIZE = 8  # descriptors: SQLite opens up to three files for a write, and the audit log one
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)  # no descriptor is free


class LoopTasks:
    """Background tasks on the driver's event loop.

    Attributes:
        wake: set by events that the loop should handle at once.
    """

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task of the loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        """Log the failure of a task that has ended, and wake the loop, since its result may lead to a decision."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the driver failed", exc_info=task.exception())
        self.wake.set()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


class DeferredGarbageCollection:
    """Turns off automatic full garbage collections; `collect_if_due` runs them at fixed intervals instead.

    The history of 1,536 nodes consists of several million objects, and nearly all are freed by their reference counts.
    A search of these objects halts the process for a second. Young objects are collected as usual.
    """

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        young, middle, _ = self._thresholds
        gc.set_threshold(young, middle, _NEVER)
        self._last = time.monotonic()  # end of the last full collection
        self._duration = 0.0  # seconds of the last full collection

    def collect_if_due(self) -> float:
        """Collect all generations if that is due; return the duration in seconds."""
        current_time = time.monotonic()
        if current_time - self._last <= max(FULL_COLLECTION_INTERVAL, self._duration / MAX_COLLECTION_SHARE):
            return 0.0
        gc.collect()
        self._last = time.monotonic()
        self._duration = self._last - current_time
        return self._duration

    def close(self) -> None:
        """Restore Python's own thresholds."""
        gc.set_threshold(*self._thresholds)


def raise_file_limit() -> int:
    """Raise this process's limit of open files up to FILE_LIMIT, as far as the machine allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = FILE_LIMIT if hard == resource.RLIM_INFINITY else min(FILE_LIMIT, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return soft


class SpareDescriptors:
    """Reserved file descriptors, so that important writes succeed when a flood or a leak has taken all others."""

    def __init__(self) -> None:
        self._reserve: list[int] = []
        weakref.finalize(self, _close_all, self._reserve)
        self._fill()

    def call_with_reserve(self, write: Callable[[], Result]) -> Result:
        """Call `write` and return its result. Without a free descriptor, call it again with the reserve released."""
        try:
            return write()
        except (OSError, sqlite3.OperationalError) as error:
            if not self._is_exhausted(error):
                raise
            self.close()
            try:
                return write()
            finally:
                self._fill()

    def close(self) -> None:
        """Release the reserve."""
        _close_all(self._reserve)

    def _is_exhausted(self, error: Exception) -> bool:
        """Return True if an error is due to a lack of free descriptors."""
        if isinstance(error, OSError):
            return error.errno in _EXHAUSTED
        # SQLite reports only that it cannot open a file.
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as reason:
            return reason.errno in _EXHAUSTED
        return False

    def _fill(self) -> None:
        """Fill the reserve up to `_RESERVE_SIZE` descriptors, or as far as free ones allow."""
        try:
            while len(self._reserve) < _RESERVE_SIZE:
                self._reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
