"""Measured cost of replay checks: the additional time of checked steps, and the interval that follows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megascale.parallel.collectives import Axis
from megascale.train.check_cost import MEASURED_CHECKS, CheckCost
from tests.conftest import lines
from tests.forked import Forked

# Intervals start at 2, and only the measured cost lengthens them.
SHORT = """
from megascale.core import replay_interval
replay_interval.MIN_INTERVAL, replay_interval.MARGIN = 2, 0.0
"""


def make_cost(times: list[float]) -> CheckCost:
    """Return the cost of checks on one rank whose clock shows `times` in turn."""
    readings: Iterator[float] = iter(times)
    return CheckCost(torch.device("cpu"), Axis(), clock=lambda: next(readings))


def time_check(cost: CheckCost) -> None:
    cost.begin_step()
    cost.end_plain_step()
    cost.end_preparation()
    cost.begin_step()
    cost.end_checked_step()


def test_preparation_counts_and_the_median_of_the_checks_decides():
    plain = 2.0
    preparation = 0.1
    checked = 3.0
    times: list[float] = []
    for start, pause in ((0.0, 0.0), (100.0, 40.0), (200.0, 0.5)):
        times += [start, start + plain, start + plain + preparation, start + 50, start + 50 + checked + pause]
    cost = make_cost(times)
    for number in range(MEASURED_CHECKS):
        assert not cost.is_complete(), number
        time_check(cost)
    assert cost.is_complete()
    assert [round(value, 9) for value in cost.check_times] == [0.55, 20.55, 0.8]
    assert cost.choose_interval(50) == 80
    assert cost.choose_interval(500) == 500


def test_a_check_without_the_step_before_it_is_not_timed():
    cost = make_cost([0.0, 1.0, 1.0, 5.0, 7.0, 9.0])
    cost.begin_step()
    cost.end_plain_step()
    cost.end_preparation()
    cost.forget_step()  # another state has been loaded
    cost.begin_step()
    cost.end_checked_step()
    assert cost.check_times == []


def test_a_run_lengthens_its_interval_on_all_ranks(tiny: Path, tmp_path: Path):
    """The replays of a tiny model take longer than 4% of a step, so that 2 steps are too few."""
    options = ["--parallel.data=2", "--kernels.deterministic=true", "--train.steps=9"]
    process = Forked(["train", tiny, *options], before=SHORT, cwd=tmp_path, env={"COLUMNS": "200"})
    output = " ".join(process.communicate(timeout=240)[0].split())
    assert process.wait() == 0, output
    (active,) = [r for r in lines(tmp_path / "runs" / "tiny" / "events.jsonl") if r["event"] == "active"]
    assert active["replay"].startswith("once per 2 steps")
    assert "resilience.replay_interval=auto" in active["replay"]
    assert output.count("steps from here on: a check takes") == 1
    interval = int(output.partition("replays run once per ")[2].split()[0])
    assert interval > 4
