"""Descriptors set aside, so that what must be written can be written when a flood or a leak has taken all others."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import weakref
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")
MOST = 65_536  # open files: agents of the largest job, and as many strangers again
_SPARE = 8  # SQLite opens up to three files for a write, a line of events one
_FULL = (errno.EMFILE, errno.ENFILE)


def raise_limit() -> int:
    """Let this process have more open files, up to MOST, where the machine allows it; how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


class SpareDescriptors:
    """Open files that stand for those which a write will need."""

    def __init__(self) -> None:
        self._held: list[int] = []
        weakref.finalize(self, _close, self._held)
        self._fill()

    def lend(self, write: Callable[[], Made]) -> Made:
        """What `write` returns. Where no descriptor is left for it, it is called again with the spare ones free."""
        try:
            return write()
        except (OSError, sqlite3.OperationalError) as error:
            if not self._is_full(error):
                raise
            self.close()
            try:
                return write()
            finally:
                self._fill()

    def close(self) -> None:
        """Give them up."""
        _close(self._held)

    def _is_full(self, error: Exception) -> bool:
        if isinstance(error, OSError):
            return error.errno in _FULL
        # SQLite says only that it cannot open a file.
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as why:
            return why.errno in _FULL
        return False

    def _fill(self) -> None:
        """As many as there are; the rest at the next time."""
        try:
            while len(self._held) < _SPARE:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in _FULL:
                raise


def _close(held: list[int]) -> None:
    while held:
        os.close(held.pop())
