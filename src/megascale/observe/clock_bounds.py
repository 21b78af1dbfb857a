"""The offset between two clocks, from what is known for certain: times before which and after which something was.

Each observation says that the offset was at least, or at most, so much. Between observations the clocks may drift, at a
rate that is known no better than the observations allow (at first MOST_DRIFT). So the estimate always comes with an
error that bounds it, as long as no clock is set: an offset that contradicts what was known makes it begin anew.
"""

from __future__ import annotations

MOST_DRIFT = 100e-6  # of two oscillators, either way: what a rate is taken for before it is known
_WANDER = 2e-6  # by which a measured rate may change, as temperatures do
_APART = 5_000_000_000  # ns between the observations that a rate is measured with, at least
_KEEP = 8  # of those


class ClockBounds:
    """How far another clock is ahead of this one: other = own + offset. All times in nanoseconds.

    Attributes:
        resets: how often an observation contradicted those before it (somebody set a clock).
    """

    def __init__(self, drift: float = MOST_DRIFT) -> None:
        self._drift = drift
        self._forget()
        self.resets = 0

    def _forget(self) -> None:
        self._least: tuple[float, float] | None = None  # (when, offset)
        self._most: tuple[float, float] | None = None
        self._slow, self._fast = -self._drift, self._drift
        self._anchors: list[tuple[float, float, float]] = []  # (when, least, most), as tight as they were then

    def add_lower_bound(self, now: float, offset: float) -> None:
        """At `now` (own clock) the offset was no smaller."""
        known = self._least_at(now)
        if known is None or offset > known:
            self._least = (now, offset)
            self._check(now, least=True)

    def add_upper_bound(self, now: float, offset: float) -> None:
        """At `now` the offset was no larger."""
        known = self._most_at(now)
        if known is None or offset < known:
            self._most = (now, offset)
            self._check(now, least=False)

    def estimate(self, now: float) -> tuple[float, float] | None:
        """(offset, the most by which it may be wrong) at `now`; None before there is a bound on both sides."""
        least, most = self._least_at(now), self._most_at(now)
        if least is None or most is None:
            return None
        return (least + most) / 2, (most - least) / 2

    @property
    def rate(self) -> tuple[float, float]:
        """Between which two rates the other clock gains on this one (seconds a second)."""
        return self._slow, self._fast

    def _least_at(self, now: float) -> float | None:
        if self._least is None:
            return None
        when, offset = self._least
        return offset + (now - when) * (self._slow if now >= when else self._fast)

    def _most_at(self, now: float) -> float | None:
        if self._most is None:
            return None
        when, offset = self._most
        return offset + (now - when) * (self._fast if now >= when else self._slow)

    def _check(self, now: float, least: bool) -> None:
        low, high = self._least_at(now), self._most_at(now)
        if low is None or high is None:
            return
        if low > high:
            kept = self._least if least else self._most
            self._forget()
            self._least, self._most = (kept, None) if least else (None, kept)
            self.resets += 1
            return
        self._measure_rate(now, low, high)

    def _measure_rate(self, now: float, low: float, high: float) -> None:
        slow, fast = -self._drift, self._drift
        for when, least, most in self._anchors:
            if now - when >= _APART:
                slow = max(slow, (low - most) / (now - when) - _WANDER)
                fast = min(fast, (high - least) / (now - when) + _WANDER)
        if slow <= fast:
            self._slow, self._fast = slow, fast
        if not self._anchors or now - self._anchors[-1][0] >= _APART:
            self._anchors = [*self._anchors[-_KEEP + 1 :], (now, low, high)]
        elif high - low < self._anchors[-1][2] - self._anchors[-1][1]:
            self._anchors[-1] = (now, low, high)
