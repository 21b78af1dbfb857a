"""How long phases last: what recurs is usual, what came once hardly counts."""

from __future__ import annotations

import random

from megascale.resilience.driver.phase_durations import PhaseDurations


def test_a_pause_that_recurs_is_usual_and_a_single_one_is_not():
    phase_durations, dice = PhaseDurations(), random.Random(0)
    for i in range(3000):
        phase_durations.add("train", 4.0 if i % 100 == 99 else dice.uniform(0.1, 0.3))
    assert phase_durations.usual()["train"] == 4.0
    phase_durations.add("train", 60.0)
    assert phase_durations.usual()["train"] == 0.3 * 60.0
    calm = PhaseDurations()
    for _ in range(3000):
        calm.add("train", 0.2)
    calm.add("train", 12.0)
    assert abs(calm.usual()["train"] - 3.6) < 1e-9


def test_while_little_was_seen_the_longest_counts():
    phase_durations = PhaseDurations()
    for seconds in (0.1, 7.0, 0.2):
        phase_durations.add("save", seconds)
    assert phase_durations.usual() == {"save": 7.0}
    assert PhaseDurations().usual() == {}
