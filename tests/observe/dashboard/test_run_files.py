"""Metrics and events of a run as they grow, break and are written again; where the time of a run went."""

from __future__ import annotations

import json
import math
import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.core.calls import CallLog
from megascale.core.json_lines import append_record
from megascale.core.recovery_record import RecoveryRecord
from megascale.core.status import StatusFile
from megascale.errors import DataError
from megascale.observe.dashboard.effective_time import TRAINING, measure_effective_time
from megascale.observe.dashboard.metric_columns import MetricColumns, RecordTail, _make_buckets
from megascale.observe.dashboard.run_reader import RunList, RunReader


def add(file, *records):
    with open(file, "a") as out:
        for record in records:
            out.write((record if isinstance(record, str) else json.dumps(record)) + "\n")


def test_each_whole_line_is_read_once_and_damage_is_counted(tmp_path):
    file = tmp_path / "metrics.jsonl"
    tail = RecordTail(file)
    assert tail.read_new_records() == (False, [])
    assert tail.missing
    file.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    assert tail.read_new_records()[1] == [{"a": 1}, {"a": 2}]
    assert tail.read_new_records() == (False, [])
    with open(file, "ab") as out:
        out.write(b": 3}\n\xff\xff\n[1]\n" + b"[" * 5000 + b"\n" + b"x" * (3 << 20) + b'\n{"a": "NaN"}\n')
    (result,) = [record for record in tail.read_new_records()[1] if record["a"] != 3]
    assert math.isnan(result["a"])
    assert tail.damaged == 4
    file.write_text('{"a": 9}\n')  # written anew
    assert tail.read_new_records() == (True, [{"a": 9}])
    os.unlink(file)
    assert tail.read_new_records() == (True, [])
    assert tail.missing
    os.mkfifo(file)  # which would hold its reader for ever
    assert tail.read_new_records() == (False, [])
    assert tail.error


def test_a_cut_line_that_the_next_writer_removes_costs_no_other_record(tmp_path):
    file = tmp_path / "events.jsonl"
    append_record(file, {"a": 1})
    with open(file, "a") as out:
        out.write('{"a": 2, "text": "cu')
    tail = RecordTail(file)
    assert tail.read_new_records() == (True, [{"a": 1}])
    append_record(file, {"a": 3, "text": "longer than what was cut"})
    assert [record["a"] for record in tail.read_new_records()[1]] == [3]
    assert tail.damaged == 0


def test_a_step_that_was_done_again_counts_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    add(file, *({"step": n, "loss": n, "seconds": 1, "time": n} for n in (1, 2, 3, 4)))
    add(file, {"step": 4, "valid_loss": 9.0, "time": 4.5})
    metrics = MetricColumns(file)
    metrics.refresh()
    assert not metrics.read_columns()["redone"].any()
    add(file, *({"step": n, "loss": 10 * n, "seconds": 1, "time": 10 + n} for n in (3, 4, 5)))
    metrics.refresh()
    series = metrics.make_series(["loss", "valid_loss", "none"], "step", 100)
    assert series["loss"]["x"] == [1, 2, 3, 4, 5]
    assert series["loss"]["mean"] == [1, 2, 30, 40, 50]
    assert "none" not in series
    assert series["valid_loss"]["x"] == []


def test_values_that_are_none_make_gaps_and_are_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    add(file, {"step": 1, "loss": 2.0, "seconds": 1}, {"step": 2, "loss": "NaN", "seconds": 1})
    add(file, {"step": "x"}, {"step": -1}, {"step": 3, "loss": 10**400, "text": "words", "seconds": 1}, "{}")
    metrics = MetricColumns(file)
    metrics.refresh()
    assert metrics.make_series(["loss"], "step", 10)["loss"]["mean"] == [2.0]
    assert metrics.list_nonfinite_steps("loss") == [2, 3]
    assert metrics.rows == 3
    assert metrics.tail.damaged == 3
    assert "text" not in metrics.keys


@settings(max_examples=25)
@given(st.integers(2, 40), st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_make_buckets_keep_the_extremes(points, values):
    ys = np.array(values)
    result = _make_buckets(np.arange(len(ys), dtype=float), ys, points)
    assert len(result["x"]) == min(points, len(ys))
    assert result["x"] == sorted(result["x"])
    assert np.isclose(min(result["low"]), ys.min(), rtol=1e-5)
    assert np.isclose(max(result["high"]), ys.max(), rtol=1e-5)


def test_the_time_of_a_run_is_told_by_cause(tmp_path):
    """Ten steps of a second, a checkpoint, a hang at step 10 that costs 30 s and three steps; then on to step 12."""
    rows = [(n, 100.0 + n) for n in range(1, 6)] + [(n, 102.0 + n) for n in range(6, 11)]
    rows += [(n, 145.0 + n - 7) for n in (8, 9, 10, 11, 12)]
    file = tmp_path / "metrics.jsonl"
    add(file, *({"step": n, "loss": 1.0, "time": at, "seconds": 1.0} for n, at in rows))
    metrics = MetricColumns(file)
    metrics.refresh()
    events = [
        {"event": "driver_started", "time": 90.0}, {"event": "attempt_started", "time": 95.0},
        {"event": "run_started", "time": 98.0}, {"event": "checkpoint_saved", "time": 106.5},
        {"event": "process_exit", "time": 130.0}, {"event": "hang", "time": 130.0},
        {"event": "attempt_started", "time": 142.0}, {"event": "resumed", "time": 144.0}, {"event": "x", "time": "NaN"},
    ]  # fmt: skip
    result = measure_effective_time(metrics.read_columns(), events)
    assert result.total == pytest.approx(60.0)
    assert sum(result.seconds.values()) == pytest.approx(60.0)
    assert result.seconds == pytest.approx(
        {
            TRAINING: 12.0, "stopped: hang": 30.0, "starting and loading": 8.0, "waiting for nodes": 5.0,
            "repeated steps": 3.0, "saving checkpoints": 2.0,
        }
    )  # fmt: skip
    assert result.share == pytest.approx(0.2)
    # The same with the job done and launched again 20 s later; an alert is not a cause.
    events[5:6] = [
        {"event": "hang", "time": 130.0, "action": "alert"}, {"event": "driver_ended", "time": 115.0},
        {"event": "driver_started", "time": 135.0},
    ]  # fmt: skip
    repeated = measure_effective_time(metrics.read_columns(), sorted(events, key=lambda event: float(event["time"])))
    assert repeated.total == pytest.approx(60.0)
    assert repeated.seconds["not running"] == pytest.approx(20.0)
    assert repeated.seconds["stopped: process ended"] == pytest.approx(10.0)
    later = measure_effective_time(metrics.read_columns(), events, current_time=170.0)
    assert later.total == pytest.approx(80.0)
    assert math.isnan(measure_effective_time({}, []).share)


def test_the_share_of_missing_replicas_is_lost_time(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [(n, 100.0 + n, {} if n < 4 else {"missing_share": 0.25}) for n in range(1, 8)]
    add(file, *({"step": n, "loss": 1.0, "time": at, "seconds": 1.0} | missing for n, at, missing in rows))
    metrics = MetricColumns(file)
    metrics.refresh()
    result = measure_effective_time(metrics.read_columns(), [])
    assert result.seconds == pytest.approx({TRAINING: 6.0, "replicas missing": 1.0})


@pytest.mark.parametrize(
    ("requested", "cause"),
    [(("paused",), "stopped: paused by a person"), (("eviction_asked",), "stopped: node evicted by a person"),
     (("updated", "restarted"), "stopped: settings changed by a person"), ((), "stopped: interrupted")],
)  # fmt: skip
def test_what_a_person_asked_for_is_the_cause_though_steps_followed(tmp_path, requested, cause):
    """Asked at 103, the trainers save behind step 5 and end at 106; they are started again at 126 and load for 4 s."""
    file = tmp_path / "metrics.jsonl"
    rows = [(n, 100.0 + n) for n in range(1, 6)] + [(n, 125.0 + n) for n in range(6, 8)]
    add(file, *({"step": n, "loss": 1.0, "time": at, "seconds": 1.0} for n, at in rows))
    metrics = MetricColumns(file)
    metrics.refresh()
    events = [
        {"event": "driver_started", "time": 98.0}, {"event": "attempt_started", "time": 99.0},
        {"event": "run_started", "time": 99.5},
        {"event": "eviction_asked", "time": 101.5}, {"event": "node_evicted", "time": 101.6},  # it had no ranks
        *({"event": each, "time": 103.0} for each in requested),
        {"event": "checkpoint_saved", "time": 105.5}, {"event": "interrupted", "time": 106.0},
        {"event": "attempt_started", "time": 126.0}, {"event": "resumed", "time": 129.0},
    ]  # fmt: skip
    result = measure_effective_time(metrics.read_columns(), events)
    assert result.seconds == pytest.approx(
        {TRAINING: 7.0, cause: 21.0, "starting and loading": 5.0, "waiting for nodes": 1.0}
    )
    # Without a driver no process works meanwhile.
    alone = measure_effective_time(
        metrics.read_columns(), [item for item in events if item["event"] in ("interrupted", "resumed")]
    )
    assert alone.seconds == pytest.approx(
        {TRAINING: 7.0, "not running": 23.0, "stopped: interrupted": 1.0, "starting and loading": 1.0}
    )
    # Launched again, and its ranks not started yet.
    ended = events[:-2] + [{"event": "driver_ended", "time": 107.0}, {"event": "driver_started", "time": 120.0}]
    waiting = measure_effective_time(
        {key: column[:5] for key, column in metrics.read_columns().items()}, ended, current_time=124.0
    )
    assert waiting.seconds == pytest.approx({TRAINING: 5.0, "not running": 13.0, cause: 6.0, "waiting for nodes": 1.0,
                                             "starting and loading": 1.0})  # fmt: skip


def test_a_run_without_a_driver_says_whether_it_lives(tmp_path):
    reader = RunReader(tmp_path, lambda run: None)
    add(tmp_path / "metrics.jsonl", {"step": 3, "loss": 1.0, "time": 1e9, "seconds": 1})
    add(tmp_path / "events.jsonl", {"event": "run_started", "time": 1e9 - 5, "attempt": 2})
    assert (current := reader.read_overview()["now"])["phase"] == "silent"
    assert current["attempt"] == 2
    assert not current["alive"]
    add(tmp_path / "events.jsonl", {"event": "run_finished", "time": 1e9 + 1})
    assert reader.read_overview()["now"]["phase"] == "done"
    add(tmp_path / "events.jsonl", {"event": "resumed", "time": 1e9 + 9})
    assert reader.read_overview()["now"]["phase"] == "silent"


def test_a_checkpoint_and_the_evaluation_after_it_are_told_apart(tmp_path):
    """Five steps of a second, 2 s of saving, 6 s of the final evaluation; before it ends, it is what a run does now."""
    file = tmp_path / "metrics.jsonl"
    add(file, *({"step": n, "loss": 1.0, "time": 100.0 + n, "seconds": 1.0} for n in range(1, 6)))
    metrics = MetricColumns(file)
    metrics.refresh()
    saved = [{"event": "run_started", "time": 100.0}, {"event": "checkpoint_saved", "time": 107.0}]
    ended = saved + [{"event": "evaluated", "time": 113.0}, {"event": "run_finished", "time": 113.5}]
    result = measure_effective_time(metrics.read_columns(), ended)
    parts = {TRAINING: 5.0, "evaluation": 6.0, "saving checkpoints": 2.0}
    assert result.seconds == pytest.approx(parts | {"between steps": 0.5})
    alive = measure_effective_time(metrics.read_columns(), saved, current_time=113.0, activity="evaluation")
    assert alive.seconds == pytest.approx(parts)
    assert measure_effective_time(
        metrics.read_columns(), [], current_time=113.0, activity="evaluation"
    ).seconds == pytest.approx({TRAINING: 5.0, "evaluation": 8.0})
    # Between two steps, what follows the checkpoint up to the next step belongs to it.
    add(file, {"step": 6, "loss": 1.0, "time": 115.0, "seconds": 1.0})
    metrics.refresh()
    assert measure_effective_time(metrics.read_columns(), saved).seconds["saving checkpoints"] == pytest.approx(9.0)


def test_what_a_run_does_now_is_its_status(tmp_path):
    """An evaluation longer than any step is not silence, and does not count as the phase of the last event."""
    current = time.time()
    add(tmp_path / "metrics.jsonl", {"step": 5, "loss": 1.0, "time": current - 3600.0, "seconds": 1.0})
    add(tmp_path / "events.jsonl", {"event": "run_started", "time": current - 3601.0, "attempt": 0})
    add(tmp_path / "events.jsonl", {"event": "checkpoint_saved", "time": current - 3599.0, "attempt": 0})
    calls, status = CallLog(tmp_path / "status", 0, 1), StatusFile(tmp_path / "status", 0)
    status.update("evaluate", 5)
    result = RunReader(tmp_path, lambda run: None).read_overview()
    assert (result["now"]["phase"], result["now"]["alive"]) == ("running", True)
    assert result["effective"]["seconds"]["evaluation"] == pytest.approx(3599.0, abs=60.0)
    assert result["effective"]["seconds"]["saving checkpoints"] == pytest.approx(1.0)
    calls.close()  # a process that has ended maps nothing
    status.close()
    result = RunReader(tmp_path, lambda run: None).read_overview()
    assert result["now"]["phase"] == "silent"
    assert "evaluation" not in result["effective"]["seconds"]


def test_only_runs_of_the_folder_can_be_asked_for(tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        RunList(tmp_path / "none")
    with pytest.raises(DataError, match="holds no run"):
        RunList(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "b").mkdir()
    add(tmp_path / "runs" / "a" / "metrics.jsonl", {"step": 1})
    add(tmp_path / "metrics.jsonl", {"step": 1})
    runs = RunList(tmp_path / "runs")
    assert runs.list_names() == ["a"]
    assert runs.find_folder("a") == tmp_path / "runs" / "a"
    for name in ("b", "..", ".", "", "../runs/a", "a/../a", "/etc"):
        with pytest.raises(DataError, match="there is no run"):
            runs.find_folder(name)
    assert RunList(tmp_path / "runs" / "a").find_folder("a").samefile(tmp_path / "runs" / "a")


def test_recoveries_are_listed_newest_first_without_damaged_ones(tmp_path):
    record = RecoveryRecord("process_killed", 1, {"detect": 0.1, "first step": 0.4}, 0.5, resumed_step=7, lost_steps=1)
    event = {"event": "recovered", "by": "driver", "attempt": 2} | record.to_details()
    add(
        tmp_path / "events.jsonl",
        event | {"time": 100.0},
        event | {"time": 200.0, "cause": "hang"},
        event | {"time": 300.0, "seconds": "none"},
        event | {"time": "never"},
    )
    reader = RunReader(tmp_path, lambda run: None)
    reader.refresh()
    assert [(one["time"], one["cause"]) for one in reader.list_recoveries()] == [
        (200.0, "hang"),
        (100.0, "process_killed"),
    ]
    assert reader.list_recoveries()[1] == {"time": 100.0} | record.to_details()
