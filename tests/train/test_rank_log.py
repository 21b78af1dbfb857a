"""Headers of a rank's log and a run's events: date, attempt, rank. Groups of metrics in TensorBoard."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from megascale.core.events import format_time
from megascale.observe.metrics import get_metric_tag
from tests.conftest import lines


def test_logs_and_events_carry_date_attempt_and_rank(megascale, tiny, tmp_path):
    arguments = ["train", tiny, "--train.device=cpu", "--parallel.data=2", "--checkpoint.interval=1"]
    for steps in (2, 3):
        result = megascale(*arguments, f"--train.steps={steps}", "--train.eval_interval=0")
        assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    events = lines(run / "events.jsonl")
    assert {event["attempt"] for event in events if event["event"] == "resumed"} == {1}
    assert {event["attempt"] for event in events if event["event"] == "run_started"} == {0}
    for event in events:
        assert datetime.fromisoformat(event["date"]).timestamp() == pytest.approx(event["time"], abs=2e-3)
        assert event["rank"] == 0
    report = (run / "logs" / "rank-1.log").read_text()
    begins = re.findall(
        r"^(\S+)Z attempt (\d+) rank 1 INFO megascale\.train: process \d+ on .*, one of 2", report, re.M
    )
    assert [attempt for _, attempt in begins] == ["0", "1"]
    assert all(datetime.fromisoformat(date) for date, _ in begins)
    assert "rank 0 INFO" not in result.stdout + result.stderr


def test_dates_are_read_back():
    assert format_time(0.0) == "1970-01-01T00:00:00.000Z"
    assert datetime.fromisoformat(format_time(1795443007.0704)).timestamp() == pytest.approx(1795443007.070)


def test_metrics_are_grouped_and_none_is_without_a_group():
    keys = ("loss", "valid_loss", "mfu", "wait_tensor_seconds", "loader_ring_fill", "new")
    assert [get_metric_tag(key) for key in keys] == [
        "train/loss", "valid/loss", "speed/mfu", "waits/tensor_seconds", "data/loader_ring_fill".replace("loader_", ""),
        "other/new",
    ]  # fmt: skip
