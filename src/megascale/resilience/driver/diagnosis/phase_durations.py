"""How long phases of trainers last without any change, learned from the run itself, robust against single outliers."""

from __future__ import annotations

from bisect import insort

KEPT = 20
_SINGLE = 0.3  # part of the longest duration of all that always counts


class PhaseDurations:
    """The longest durations of each phase.

    A duration that came `KEPT` times (one in twenty while few were seen) is usual, so that a pause every hundred steps
    is never a hang; a single one, such as a host that was busy for a moment, counts with less weight.
    """

    def __init__(self) -> None:
        self._longest: dict[str, list[float]] = {}
        self._seen: dict[str, int] = {}

    def add(self, phase: str, seconds: float) -> None:
        """A trainer was in a phase for this long and then went on."""
        kept = self._longest.setdefault(phase, [])
        self._seen[phase] = self._seen.get(phase, 0) + 1
        if len(kept) < KEPT or seconds > kept[0]:
            insort(kept, seconds)
            del kept[:-KEPT]

    def usual(self) -> dict[str, float]:
        """phase -> the longest duration that is usual, seconds."""
        found = {}
        for phase, kept in self._longest.items():
            index = min(KEPT, max(1, self._seen[phase] // 20), len(kept))
            found[phase] = max(kept[-index], _SINGLE * kept[-1])
        return found
