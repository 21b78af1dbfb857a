"""Usual durations of phases: repeated durations count, single ones hardly."""

from __future__ import annotations

import random
from types import SimpleNamespace

from megascale.resilience.driver.diagnosis.observations import Observations, PhaseDurations
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker
from megascale.resilience.rules.silence import FIRST_STEP


def test_a_pause_that_recurs_is_usual_and_a_single_one_is_not():
    phase_durations, dice = PhaseDurations(), random.Random(0)
    for i in range(3000):
        phase_durations.add("train", 4.0 if i % 100 == 99 else dice.uniform(0.1, 0.3))
    assert phase_durations.compute_usual()["train"] == 4.0
    phase_durations.add("train", 60.0)
    assert phase_durations.compute_usual()["train"] == 0.3 * 60.0
    calm = PhaseDurations()
    for _ in range(3000):
        calm.add("train", 0.2)
    calm.add("train", 12.0)
    assert abs(calm.compute_usual()["train"] - 3.6) < 1e-9


def test_while_little_was_seen_the_longest_counts():
    phase_durations = PhaseDurations()
    for seconds in (0.1, 7.0, 0.2):
        phase_durations.add("save", seconds)
    assert phase_durations.compute_usual() == {"save": 7.0}
    assert PhaseDurations().compute_usual() == {}


def test_first_steps_are_learnt_apart_from_others():
    """A first step is longer than any other: with it among the others a hang would be known late."""

    def beat(step: int, standing: float, phase: str = "train") -> Heartbeat:
        worker = Worker(0, 100, "running", 0, phase, step, status_age=standing)
        return Heartbeat("job", 1, "n0", 1, 0, workers=(worker,))

    job = SimpleNamespace(phase=Phase.STARTING, is_at_work=True)
    parts = dict.fromkeys(("nodes", "attempts", "response", "settings", "record_event"))
    observed = Observations(job=job, **parts)
    observed.learn_durations(beat(1, 40.0, "load"), beat(1, 0.0))
    observed.learn_durations(beat(1, 7.0), beat(2, 0.0))
    job.phase = Phase.RUNNING
    observed.learn_durations(beat(2, 0.5), beat(3, 0.0))
    assert observed._durations.compute_usual() == {FIRST_STEP: 7.0, "train": 0.5}
