"""Search in bounded time for a regular expression that a user has given.

Python's `re` has no time limit, and an expression such as `(a+)+b` takes exponential time on some lines. The process
that reads logs also sends heartbeats, so a search must not block it.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any

from megascale.errors import ConfigError

SEARCH_LIMIT = 0.1  # seconds of processor time per search
# An expression is switched off if it exceeds both limits: of the total time, and of the mean time per line.
TOTAL_LIMIT = 1.0  # seconds of processor time
LINE_LIMIT = 0.005  # seconds of processor time
MAX_CHARACTERS = 4000  # only this many characters of a line are searched

log = logging.getLogger("megascale.agent")


class BoundedPattern:
    """A regular expression that is switched off if it takes more than 5 ms per line.

    Args:
        setting: configuration key of the expression, for messages.
        expression: regular expression in the syntax of Python's `re`.

    Attributes:
        problem: why the expression is switched off, "" while it is on.

    Raises:
        ConfigError: the expression is invalid.
        ModuleNotFoundError: `regex` of the extra `driver` is not installed.
    """

    def __init__(self, setting: str, expression: str) -> None:
        import regex  # only launched jobs need it

        try:
            self._compiled: Any = regex.compile(expression)
        except regex.error as error:
            raise ConfigError(f"{setting} has {expression!r}, which is not a regular expression: {error}") from None
        self._setting = setting
        self.expression = expression
        self.problem = ""
        self._seconds = 0.0
        self._line_count = 0

    def search(self, line: str) -> re.Match[str] | None:
        """Return the match in the first 4000 characters of a line; None if there is none, or at the time limit."""
        if self.problem:
            return None
        start = time.thread_time()
        match: re.Match[str] | None = None
        try:
            match = self._compiled.search(line, endpos=MAX_CHARACTERS, timeout=SEARCH_LIMIT)
        except TimeoutError:
            pass
        except MemoryError:
            # `regex` raises this at its own limit for the backtracking of an expression with many groups.
            self._switch_off("it took all memory on a line")
        self._line_count += 1
        self._seconds += time.thread_time() - start
        if self._seconds > TOTAL_LIMIT and self._seconds > LINE_LIMIT * self._line_count:
            milliseconds = 1000 * self._seconds / self._line_count
            self._switch_off(f"it took {milliseconds:.0f} ms per line, of at most {1000 * LINE_LIMIT:.0f} ms")
        return match

    def _switch_off(self, reason: str) -> None:
        remedy = "anchor it with ^ and avoid nested repetitions such as (a+)+"
        self.problem = f"{self._setting} has {self.expression!r}, which is switched off: {reason}; {remedy}"
        log.warning("%s", self.problem)
