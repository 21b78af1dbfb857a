"""The offset between two clocks, bounded by observations: times before and after which an event happened.

Each observation gives a lower or an upper bound of the offset. Between observations the clocks drift at a rate that is
known only as far as the observations allow (at first MOST_DRIFT). The estimate therefore has an error that bounds it,
unless a clock is set. An observation that contradicts the bounds resets them.
"""

from __future__ import annotations

MOST_DRIFT = 100e-6  # largest relative rate of two oscillators before it is measured
_RATE_CHANGE = 2e-6  # by which a measured rate may change, for example with the temperature
_ANCHOR_NS = 5_000_000_000  # shortest time between the observations that measure a rate
_MAX_ANCHORS = 8


class ClockBounds:
    """The offset of another clock: other = own + offset. All times are nanoseconds.

    Attributes:
        resets: number of observations that contradicted the earlier ones, because a clock was set.
    """

    def __init__(self, drift: float = MOST_DRIFT) -> None:
        self._drift = drift
        self._reset()
        self.resets = 0

    def _reset(self) -> None:
        self._least: tuple[float, float] | None = None  # (time, offset)
        self._most: tuple[float, float] | None = None
        self._slowest, self._fastest = -self._drift, self._drift
        self._anchors: list[tuple[float, float, float]] = []  # (time, least, most) at the time of the observation

    def add_lower_bound(self, time: float, offset: float) -> None:
        """Observe that the offset at `now` (own clock) was at least `offset`."""
        least = self._least_at(time)
        if least is None or offset > least:
            self._least = (time, offset)
            self._check(time, is_lower=True)

    def add_upper_bound(self, time: float, offset: float) -> None:
        """Observe that the offset at `now` was at most `offset`."""
        most = self._most_at(time)
        if most is None or offset < most:
            self._most = (time, offset)
            self._check(time, is_lower=False)

    def estimate(self, time: float) -> tuple[float, float] | None:
        """Return the offset at `now` and its largest error; None before there are bounds on both sides."""
        least, most = self._least_at(time), self._most_at(time)
        if least is None or most is None:
            return None
        return (least + most) / 2, (most - least) / 2

    @property
    def rate(self) -> tuple[float, float]:
        """Lower and upper bound of the rate at which the other clock gains on this one (seconds per second)."""
        return self._slowest, self._fastest

    def _least_at(self, now: float) -> float | None:
        if self._least is None:
            return None
        time, offset = self._least
        return offset + (now - time) * (self._slowest if now >= time else self._fastest)

    def _most_at(self, now: float) -> float | None:
        if self._most is None:
            return None
        time, offset = self._most
        return offset + (now - time) * (self._fastest if now >= time else self._slowest)

    def _check(self, time: float, is_lower: bool) -> None:
        """Reset contradicting bounds, or measure the rate."""
        low, high = self._least_at(time), self._most_at(time)
        if low is None or high is None:
            return
        if low <= high:
            self._measure_rate(time, low, high)
            return
        least, most = self._least, self._most
        self._reset()
        if is_lower:
            self._least = least
        else:
            self._most = most
        self.resets += 1

    def _measure_rate(self, now: float, low: float, high: float) -> None:
        slowest, fastest = -self._drift, self._drift
        for time, least, most in self._anchors:
            elapsed = now - time
            if elapsed >= _ANCHOR_NS:
                slowest = max(slowest, (low - most) / elapsed - _RATE_CHANGE)
                fastest = min(fastest, (high - least) / elapsed + _RATE_CHANGE)
        if slowest <= fastest:
            self._slowest, self._fastest = slowest, fastest
        if not self._anchors or now - self._anchors[-1][0] >= _ANCHOR_NS:
            self._anchors = self._anchors[-_MAX_ANCHORS + 1 :] + [(now, low, high)]
        elif high - low < self._anchors[-1][2] - self._anchors[-1][1]:
            self._anchors[-1] = (now, low, high)
