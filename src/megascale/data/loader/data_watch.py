"""Names the cause of a loader that is too slow: disk, CPU or decompression. No torch."""

from __future__ import annotations

from collections import deque
from typing import Any

from megascale.core.events import Event

SHARE = 0.02  # of the steps' time spent waiting for data is worth telling
_STEPS = 10  # looked at together
_QUIET = 100  # steps between two words on it, unless the cause is another
_REMEDY = {
    "disk": "put the data on a faster disk, or as token files (`megascale data build`), which are smaller than text",
    "decompression": "store the data less compressed or as token files (`megascale data build`), or raise "
    "data.loader_threads",
    "CPU": "raise data.loader_threads if cores are free, or tokenise beforehand with `megascale data build`",
    "other processes on the CPU": "leave the loader a core: lower train.threads or stop what else runs on this host",
}


class DataWatch:
    """Looks at the waiting of a step and at the loader's counters."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_STEPS)
        self._counters: deque[dict[str, float]] = deque(maxlen=_STEPS + 1)
        self._wait = 0.0
        self._generation: int | None = None
        self._told: tuple[str, int] = ("", 0)
        self._count = 0

    def note(self, waited: float, counters: dict[str, float]) -> None:
        """A step waited so many seconds; the loader's counters stand so."""
        self._wait = waited
        self._counters.append(counters)

    def loader_events(self, seconds: float, generation: int) -> list[tuple[Event, dict[str, Any]]]:
        """Events to record after a step of `seconds`."""
        found: list[tuple[Event, dict[str, Any]]] = []
        self._count += 1
        if self._count > 1:  # the first step of a start waits for the loader to come up
            self._steps.append((self._wait, seconds))
        if self._generation is not None and generation != self._generation:
            found.append((Event.LOADER_RESTARTED, {"generation": generation}))
        self._generation = generation
        waited, took = (sum(column) for column in zip(*self._steps, strict=True)) if self._steps else (0.0, 0.0)
        if len(self._steps) == _STEPS and waited > SHARE * took:
            why = find_cause(self._counters[0], self._counters[-1])
            if why != self._told[0] or self._count - self._told[1] >= _QUIET:
                self._told = (why, self._count)
                share = round(waited / took, 4)
                found.append((Event.LOADER_SLOW, {"waiting": share, "cause": why, "remedy": _REMEDY[why]}))
        return found


def find_cause(before: dict[str, float], now: dict[str, float]) -> str:
    """What took most of the loader's time between two states of its counters."""
    spent = {name: now[name] - before[name] for name in now}
    parts = {
        "disk": spent["read_seconds"],
        "decompression": spent["unpack_seconds"],
        "CPU": spent["encode_seconds"],
    }
    why = max(parts, key=lambda name: parts[name])
    if why == "CPU" and spent["encode_cpu_seconds"] < 0.6 * spent["encode_seconds"]:
        return "other processes on the CPU"
    return why
