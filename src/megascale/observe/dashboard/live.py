"""Live updates: one look at a run every half second for all pages that are open, sent to each as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from megascale.core import strict_json
from megascale.core.background import FailureLog
from megascale.errors import MegascaleError

log = logging.getLogger("megascale.dashboard")
SECONDS = 0.5
_QUIET = 15.0  # seconds after which a stream says that it is still there
_STREAMS = 200
Ask = Callable[[str], Awaitable[bytes]]


class LiveUpdates:
    """Args:
    pulse: asks for what a run, by name, is at.
    """

    def __init__(self, pulse: Ask) -> None:
        self._pulse = pulse
        self._queues: dict[str, set[asyncio.Queue[bytes]]] = {}
        self._last: dict[str, bytes] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def is_full(self) -> bool:
        """Whether no further stream is taken."""
        return sum(len(queues) for queues in self._queues.values()) >= _STREAMS

    async def stream(self, names: list[str]) -> AsyncIterator[bytes]:
        """Server-sent events of these runs: `pulse` with what changed, first as it is."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=64)
        for name in names:
            self._queues.setdefault(name, set()).add(queue)
            if name in self._last:
                queue.put_nowait(self._last[name])
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(self._look(name))
        try:
            yield b": open\n\n"
            while True:
                try:
                    told = await asyncio.wait_for(queue.get(), _QUIET)
                except TimeoutError:
                    told = b": still here\n\n"
                if not told:
                    return
                yield told
        finally:
            for name in names:
                self._queues[name].discard(queue)
                if not self._queues[name]:
                    del self._queues[name]
                    self._last.pop(name, None)
                    self._tasks.pop(name).cancel()

    async def _look(self, name: str) -> None:
        before = b""
        failures = FailureLog(log, f"the look at run {name}")
        while True:
            try:
                told = await self._pulse(name)
            except MegascaleError as error:
                told = strict_json.dumps({"error": str(error)}).encode()
            except Exception as error:
                failures.note(error, "pages are told, and it is tried again")
                told = strict_json.dumps({"error": f"the run cannot be read: {type(error).__name__}"}).encode()
            if told != before:
                before = told
                text = b'event: pulse\ndata: {"run": ' + strict_json.dumps(name).encode() + b', "pulse": '
                self._last[name] = text + told + b"}\n\n"
                for queue in self._queues.get(name, ()):
                    # A page that is slow misses some: the next has all of it.
                    with contextlib.suppress(asyncio.QueueFull):
                        queue.put_nowait(self._last[name])
            await asyncio.sleep(SECONDS)

    def close(self) -> None:
        """End all streams and what looks."""
        for task in self._tasks.values():
            task.cancel()
        for queue in {queue for queues in self._queues.values() for queue in queues}:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(b"")
