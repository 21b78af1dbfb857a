"""The table of all runs: its rows, and how much of 1,000 run folders one look reads."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from megascale.core import strict_json
from megascale.observe.dashboard.fleet import NEWEST_BYTES, Fleet
from megascale.observe.dashboard.run_reader import RunReader

LONG = 400  # steps whose records are longer than what a look reads


def write_run(run, steps, event, *, end=None, planned=500):
    """Write a run that ended at `end` with one event after its steps of one second, each of which lost one more."""
    run.mkdir(parents=True)
    end = time.time() - 1e6 if end is None else end
    records = (
        {"step": step, "time": end - 2 * (steps - step), "seconds": 1.0, "loss": 2.5, "mfu": 0.5, "text": "-" * 60}
        for step in range(1, steps + 1)
    )
    lines = [strict_json.dumps(record) for record in records]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    event_record = {"time": end, "event": event, "attempt": 2, "rank": 0}
    (run / "events.jsonl").write_text(strict_json.dumps(event_record) + "\n")
    (run / "config.toml").write_text(f'[model]\nlayers = 2\n[train]\nsteps = {planned}\nname = "{run.name}"\n[data]\n')


def read_rows(fleet, folder):
    """Return the rows by name, and the number of unmeasured effective times."""
    answer = fleet.list_rows(folder)
    return {row["name"]: row for row in answer["runs"]}, answer["unmeasured"]


@pytest.fixture
def opened(monkeypatch):
    """Count the opened files by name."""
    counts = Counter()
    original = os.open

    def count_open(path, *arguments, **options):
        counts[os.path.basename(path)] += 1
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "open", count_open)
    return counts


def test_rows_tell_state_progress_speed_and_last_event(tmp_path):
    write_run(tmp_path / "done", 3, "run_finished", planned=3)
    write_run(tmp_path / "failed", 3, "run_failed")
    write_run(tmp_path / "silent", 3, "checkpoint_saved")
    write_run(tmp_path / "live", 3, "checkpoint_saved", end=time.time())
    rows, unmeasured = read_rows(Fleet(lambda run: None), tmp_path)
    assert unmeasured == 0
    assert {name: row["phase"] for name, row in rows.items()} == {
        "done": "done",
        "failed": "failed",
        "silent": "silent",
        "live": "running",
    }
    assert [name for name, row in rows.items() if row["alive"]] == ["live"]
    done = rows["done"]
    assert (done["step"], done["steps"], done["attempt"], done["event"]) == (3, 3, 2, "run_finished")
    assert (done["mfu"], done["loss"]) == (0.5, 2.5)
    assert done["effective"] == pytest.approx(3 / 5)


def test_job_whose_driver_runs_elsewhere_is_alive_while_it_writes(tmp_path):
    write_run(tmp_path / "live", 3, "checkpoint_saved", end=time.time())
    write_run(tmp_path / "stopped", 3, "checkpoint_saved")
    job = {"phase": "running", "driver": False, "attempt": 1, "why": "", "step": 3, "world": 8}
    rows, _ = read_rows(Fleet(lambda run: job), tmp_path)
    assert rows["live"]["alive"]
    assert not rows["stopped"]["alive"]
    assert "no driver" in rows["stopped"]["why"]


def test_private_run_of_another_user_leaves_the_others_listed(tmp_path, monkeypatch):
    for name in ("mine", "other-user"):
        write_run(tmp_path / name, 3, "run_finished")
    original = os.stat

    def stat(path, *arguments, **options):
        if isinstance(path, os.PathLike) and os.path.basename(os.path.dirname(path)) == "other-user":
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)  # the tests may run as root, for whom nothing is private
    rows, _ = read_rows(Fleet(lambda run: None), tmp_path)
    assert list(rows) == ["mine"]


def test_a_last_record_longer_than_a_look_is_read(tmp_path):
    write_run(tmp_path / "experts", LONG, "checkpoint_saved", end=time.time())
    record = {"step": LONG + 1, "time": time.time(), "seconds": 1.0, "loss": 2.5, "expert_counts": [[1000] * 128] * 48}
    with open(tmp_path / "experts" / "metrics.jsonl", "a") as out:
        out.write(strict_json.dumps(record) + "\n")
    assert len(strict_json.dumps(record)) > NEWEST_BYTES
    (tmp_path / "experts" / "events.jsonl").unlink()
    rows, _ = read_rows(Fleet(lambda run: None), tmp_path)
    row = rows["experts"]
    assert (row["step"], row["loss"], row["phase"]) == (LONG + 1, 2.5, "running")


def test_effective_time_of_long_runs_equals_that_of_the_overview(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, LONG, "run_finished")
        assert (tmp_path / name / "metrics.jsonl").stat().st_size > 2 * NEWEST_BYTES
    fleet = Fleet(lambda run: None, measure_seconds=0.0)  # one run per look
    rows, unmeasured = read_rows(fleet, tmp_path)
    assert unmeasured == 1
    assert sorted(row["effective"] is None for row in rows.values()) == [False, True]
    rows, unmeasured = read_rows(fleet, tmp_path)
    assert unmeasured == 0
    reader = RunReader(tmp_path / "a", lambda run: None)
    assert rows["a"]["effective"] == reader.read_overview()["effective"]["share"]
    assert rows["a"]["step"] == LONG


def test_a_look_at_1000_runs_opens_few_files_and_the_next_only_those_that_changed(tmp_path, opened):
    write_run(tmp_path / "run-0", 2, "run_finished")
    template = {file.name: file.read_bytes() for file in (tmp_path / "run-0").iterdir()}
    for number in range(1, 1000):
        run = tmp_path / f"run-{number}"
        run.mkdir()
        for name, data in template.items():
            (run / name).write_bytes(data)
    fleet = Fleet(lambda run: None)
    opened.clear()
    rows, _ = read_rows(fleet, tmp_path)
    assert len(rows) == 1000
    assert opened == {"metrics.jsonl": 1000, "events.jsonl": 1000, "config.toml": 1000}
    opened.clear()
    read_rows(fleet, tmp_path)
    assert sum(opened.values()) == 0
    with open(tmp_path / "run-7" / "metrics.jsonl", "a") as out:
        out.write(strict_json.dumps({"step": 3, "loss": 2.0, "time": 5.0, "seconds": 1.0}) + "\n")
    opened.clear()
    rows, _ = read_rows(fleet, tmp_path)
    assert rows["run-7"]["step"] == 3
    assert sum(opened.values()) <= 4
