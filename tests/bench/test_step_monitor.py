"""Progress of measured steps."""

from __future__ import annotations

import pytest

from megascale.bench.step_monitor import StepMonitor


def test_lines_have_seconds_per_step_and_load(capsys):
    clock = [100.0]
    monitor = StepMonitor("a", warmup=3, steps=4, prints=True, clock=lambda: clock[0])

    def take_step(seconds: float, load: float | None = None) -> None:
        clock[0] += seconds
        monitor.record_step(load)

    monitor.report_if_due()
    for seconds in (4, 7):
        clock[0] += seconds
        monitor.report_if_due()
    monitor.report_if_due()
    take_step(4, 1.5)
    take_step(5, 1.4)
    take_step(6, 1.3)
    take_step(4)
    clock[0] += 12
    monitor.report_if_due()
    take_step(1, 1.2)
    assert capsys.readouterr().out.splitlines() == [
        "a: the first step is not complete after 4 s",
        "a: warm-up step 1 of 3, 15.0000 s per step, load of the slowest rank 1.50",
        "a: warm-up step 3 of 3, 5.5000 s per step, load of the slowest rank 1.30",
        "a: timed step 1 of 4, 4.0000 s per step, load of the slowest rank 1.30 in step 3, no step has ended for 12 s",
    ]
    assert monitor.describe() == "timed step 2 of 4, 13.0000 s per step, load of the slowest rank 1.20"


def test_a_rank_that_does_not_print_counts_and_checks(capsys):
    """`check` can end a measurement between two steps."""

    def check() -> None:
        raise KeyboardInterrupt

    monitor = StepMonitor("a", warmup=1, steps=1, prints=False, interval=0.0, check=check)
    with pytest.raises(KeyboardInterrupt):
        monitor.record_step()
    assert monitor.completed == 1
    assert capsys.readouterr().out == ""
