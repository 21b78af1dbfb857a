"""What runs beside the driver's loop, on the same thread, and what wakes the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("megascale.driver")


class LoopTasks:
    """Tasks of the driver's loop.

    Attributes:
        wake: set when something happened that is worth a look at once.
    """

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task of the loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the driver failed", exc_info=task.exception())
        self.wake.set()

    def cancel(self) -> None:
        """End them all."""
        for task in self._tasks:
            task.cancel()
