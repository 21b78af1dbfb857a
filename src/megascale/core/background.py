"""Background work whose end is read: what fails says so in the log, and lasting work starts again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

PAUSE = 1.0  # seconds before work that failed starts again
_REPEAT = 60.0  # seconds before the same failure is logged again


class FailureLog:
    """Logs the failures of one piece of work with their tracebacks; a repeated failure once per minute.

    Args:
        log: where to.
        name: of the work, as a noun.
        clock: seconds, monotonic.
    """

    def __init__(self, log: logging.Logger, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._name, self._clock = log, name, clock
        self._last, self._logged = "", float("-inf")

    def note(self, error: BaseException, consequence: str) -> None:
        """Log that the work failed and what follows."""
        text = f"{type(error).__name__}: {error}"
        if text == self._last and self._clock() - self._logged < _REPEAT:
            return
        self._last, self._logged = text, self._clock()
        self._log.error("%s failed (%s); %s", self._name, text[:500], consequence, exc_info=error)


async def keep_running(
    work: Callable[[], Awaitable[None]], name: str, log: logging.Logger, pause: float = PAUSE
) -> None:
    """Run `work` until it returns: after a failure, which is logged, it starts again in `pause` seconds."""
    failures = FailureLog(log, name)
    while True:
        try:
            return await work()
        except Exception as error:
            failures.note(error, f"it starts again in {pause:g} s")
        await asyncio.sleep(pause)


def log_failure(task: asyncio.Task[Any], name: str, log: logging.Logger) -> None:
    """Have the failure of a task logged when it ends: asyncio says nothing while somebody holds the task."""

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            FailureLog(log, name).note(error, "it does not start again")

    task.add_done_callback(ended)
