"""Python's garbage in a process that keeps millions of objects and must answer within a second."""

from __future__ import annotations

import gc
import time

LEAST = 6 * 3600.0  # seconds between full collections: each stands still for a second or two
SHARE = 1000.0  # a full collection may take one in so much of the time
_NEVER = 1 << 30


class OldGarbage:
    """Keeps Python from looking through what lives long whenever its counters say so.

    The history of 1,536 nodes is some millions of objects, nearly all freed by their reference counts; looking
    through them stands still for a second. Young objects are collected as ever, old ones by `tidy`.
    """

    def __init__(self) -> None:
        self._before = gc.get_threshold()
        gc.set_threshold(self._before[0], self._before[1], _NEVER)
        self._last, self._took = time.monotonic(), 0.0

    def tidy(self) -> float:
        """Collect everything if that is due; the seconds that it took."""
        now = time.monotonic()
        if now - self._last <= max(LEAST, SHARE * self._took):
            return 0.0
        gc.collect()
        self._last = time.monotonic()
        self._took = self._last - now
        return self._took

    def close(self) -> None:
        """As it was before."""
        gc.set_threshold(*self._before)
