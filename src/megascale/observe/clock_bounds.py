"""Bounds of the offset between two clocks, from events whose time is known on one clock and bounded on the other.

An event happened before (or after) a known time of the other clock, which gives a lower (or an upper) bound of the
offset. Between events the clocks drift apart. The rate of the drift is bounded by earlier events, at first by
MAX_DRIFT. The bounds therefore hold at any time, unless a clock is set. A bound that contradicts the others resets
them.
"""

from __future__ import annotations

MAX_DRIFT = 100e-6  # largest relative rate of two oscillators before the rate is measured
_RATE_CHANGE = 2e-6  # change of the rate since its measurement, for example with the temperature
_ANCHOR_NS = 5_000_000_000  # shortest time between two anchors that measure the rate
_MAX_ANCHORS = 8


class ClockBounds:
    """The offset of another clock: other = own + offset. All times are nanoseconds.

    Args:
        drift: largest relative rate of the clocks.

    Attributes:
        resets: number of bounds that contradicted earlier bounds, because a clock was set.
    """

    def __init__(self, drift: float = MAX_DRIFT) -> None:
        self._drift = drift
        self._reset()
        self.resets = 0

    def _reset(self) -> None:
        self._lower: tuple[float, float] | None = None  # time and bound
        self._upper: tuple[float, float] | None = None
        self._slowest, self._fastest = -self._drift, self._drift  # bounds of the rate
        self._anchors: list[tuple[float, float, float]] = []  # time, and lower and upper bound at that time

    def add_lower_bound(self, time: float, offset: float) -> None:
        """Add the bound that the offset at `time` (own clock) was at least `offset`."""
        lower = self._compute_lower(time)
        if lower is None or offset > lower:
            self._lower = (time, offset)
            self._update_bounds(time, is_lower=True)

    def add_upper_bound(self, time: float, offset: float) -> None:
        """Add the bound that the offset at `time` was at most `offset`."""
        upper = self._compute_upper(time)
        if upper is None or offset < upper:
            self._upper = (time, offset)
            self._update_bounds(time, is_lower=False)

    def estimate(self, time: float) -> tuple[float, float] | None:
        """Return the offset at `time` and its largest error; None before there is a bound on each side."""
        lower, upper = self._compute_lower(time), self._compute_upper(time)
        if lower is None or upper is None:
            return None
        return (lower + upper) / 2, (upper - lower) / 2

    @property
    def rate(self) -> tuple[float, float]:
        """Lower and upper bound of the rate at which the other clock gains on this one (seconds per second)."""
        return self._slowest, self._fastest

    def _compute_lower(self, time: float) -> float | None:
        """Return the lower bound at `time`: the stored bound, changed by the slowest possible drift since then."""
        if self._lower is None:
            return None
        bound_time, bound = self._lower
        rate = self._slowest if time >= bound_time else self._fastest
        return bound + (time - bound_time) * rate

    def _compute_upper(self, time: float) -> float | None:
        """Return the upper bound at `time`: the stored bound, changed by the fastest possible drift since then."""
        if self._upper is None:
            return None
        bound_time, bound = self._upper
        rate = self._fastest if time >= bound_time else self._slowest
        return bound + (time - bound_time) * rate

    def _update_bounds(self, time: float, is_lower: bool) -> None:
        """Measure the rate after a new lower or upper bound; if the bounds contradict, keep only the new one."""
        lower, upper = self._compute_lower(time), self._compute_upper(time)
        if lower is None or upper is None:
            return
        if lower <= upper:
            self._measure_rate(time, lower, upper)
            return
        stored_lower, stored_upper = self._lower, self._upper
        self._reset()
        if is_lower:
            self._lower = stored_lower
        else:
            self._upper = stored_upper
        self.resets += 1

    def _measure_rate(self, time: float, lower: float, upper: float) -> None:
        """Narrow the bounds of the rate by the change of the offset since each anchor, and update the anchors.

        Args:
            lower, upper: bounds of the offset at `time`.
        """
        slowest, fastest = -self._drift, self._drift
        for anchor_time, anchor_lower, anchor_upper in self._anchors:
            elapsed = time - anchor_time
            if elapsed >= _ANCHOR_NS:
                slowest = max(slowest, (lower - anchor_upper) / elapsed - _RATE_CHANGE)
                fastest = min(fastest, (upper - anchor_lower) / elapsed + _RATE_CHANGE)
        if slowest <= fastest:
            self._slowest, self._fastest = slowest, fastest
        if not self._anchors:
            self._anchors = [(time, lower, upper)]
            return
        newest_time, newest_lower, newest_upper = self._anchors[-1]
        if time - newest_time >= _ANCHOR_NS:
            self._anchors = self._anchors[-_MAX_ANCHORS + 1 :] + [(time, lower, upper)]
        elif upper - lower < newest_upper - newest_lower:
            self._anchors[-1] = (time, lower, upper)
