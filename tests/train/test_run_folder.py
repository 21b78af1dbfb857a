"""Files of a run folder that are read when it goes on: a cut end is dropped, other damage is named."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.config import from_tree, load
from megascale.core.events import Event
from megascale.errors import DataError
from megascale.train.run_folder import RunFolder, find_checkpoints, load_run_config, read_records, resolve_paths
from tests.busy_disk import make_busy_disk
from tests.conftest import lines
from tests.damaged_records import limited_memory


def test_a_cut_end_is_dropped_and_other_damage_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for end in ("", "\n", '\n{"step": 2, "lo', "\n[1]\n", "\n" + "x" * (2 << 20)):
        file.write_text('{"step": 1}' + end)
        assert read_records(file) == [{"step": 1}]
    for damage in ("[1]", '{"step": 2, "lo', "x" * (2 << 20), "[" * 5000):
        file.write_text('{"step": 1}\n' + damage + '\n{"step": 3}\n')
        with pytest.raises(DataError, match=r"metrics\.jsonl line 2 is not a record"):
            read_records(file)


def test_a_pipe_and_a_line_without_end_are_no_records(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    os.truncate(file, 1 << 27)
    with limited_memory(64 << 20):
        assert read_records(file) == [{"step": 1}]
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DataError, match="it is a pipe or a device"):
        read_records(file)
    os.mkfifo(tmp_path / "identity")
    with pytest.raises(DataError, match="identity cannot be read"):
        RunFolder(tmp_path).read_identity()


def test_going_back_keeps_lines_whose_step_is_known(tmp_path):
    folder = RunFolder(tmp_path)
    records = [{"step": 1}, {"step": "x"}, {"step": 10**400}, {"step": [1]}, {"step": 3}]
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    folder.drop_steps_after(2)
    assert lines(folder.metrics) == [{"step": 1}]


def test_an_event_holds_its_attempt_and_details(tmp_path):
    folder = RunFolder(tmp_path)
    folder.attempt = 3
    folder.append_event(Event.RESUMED, step=7, message="x")
    folder.append_event(Event.RUN_FINISHED, step=9)
    first, second = lines(folder.events)
    assert (first["event"], first["attempt"], first["rank"], first["step"], first["message"]) == (
        "resumed",
        3,
        0,
        7,
        "x",
    )
    assert second["event"] == "run_finished"
    assert second["time"] >= first["time"] > 1e9
    assert first["date"].startswith("20")


@pytest.mark.parametrize(
    ("events", "attempt"),
    [
        ([], 0),
        ([("run_started", 0)], 1),
        ([("run_started", 0), ("resumed", 1), ("checkpoint_saved", 1)], 2),
        ([("run_started", None), ("resumed", None), ("resumed", None)], 3),  # of releases without numbers
        ([("run_started", 0), ("checkpoint_saved", 4)], 5),  # a crash has lost the events of starts
        ([("run_started", 0), ("run_failed", 4), ("imported", 7)], 1),  # those starts were not accepted
    ],
)
def test_a_start_has_a_number_above_all_earlier_ones(tmp_path, monkeypatch, events, attempt):
    monkeypatch.delenv("MEGASCALE_ATTEMPT", raising=False)
    folder = RunFolder(tmp_path)
    records = [{"event": name} | ({} if number is None else {"attempt": number}) for name, number in events]
    records.append({"event": "hang", "attempt": 40, "by": "driver"})
    folder.events.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert folder.find_next_attempt() == attempt
    for text, expected in (("12", 12), ("-1", 0), ("x", attempt)):
        monkeypatch.setenv("MEGASCALE_ATTEMPT", text)
        assert folder.find_next_attempt() == expected


def test_the_last_saved_step_is_that_of_the_present_run(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.find_last_saved_step() is None
    assert folder.read_events() == []
    for event, step in (("run_started", 0), ("checkpoint_saved", 4), ("checkpoint_saved", 8), ("evaluated", 9)):
        folder.append_event(Event(event), step=step)
    assert folder.find_last_saved_step() == 8
    folder.append_event(Event.RESUMED, step=9)  # from memory
    assert folder.find_last_saved_step() == 8
    folder.append_event(Event.RESUMED, step=4)
    assert folder.find_last_saved_step() == 4
    folder.append_event(Event.RUN_STARTED, step=0)
    assert folder.find_last_saved_step() is None


def test_going_back_to_a_step_keeps_that_step(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create()
    for file in (folder.metrics, folder.samples):
        file.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    folder.drop_steps_after(2)
    for file in (folder.metrics, folder.samples):
        assert lines(file) == [{"step": 1}, {"step": 2}]
        assert not list(file.parent.glob("*.tmp"))
    folder.samples.unlink()
    folder.drop_steps_after(1)
    assert not folder.samples.exists()


def test_an_accepted_start_is_recorded_without_what_it_accepted(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_identity() is None
    folder.write_accepted_start(
        from_tree({"checkpoint": {"accept_changes": ["train.seed"]}, "train": {"seed": 5}}), "name"
    )
    assert folder.read_identity() == "name"
    recorded = load(folder.config)
    assert (recorded.checkpoint.accept_changes, recorded.train.seed) == ([], 5)
    folder.identity.write_text("\n")
    assert folder.read_identity() is None
    with pytest.raises(DataError, match=r"is not a run folder: it has no config\.toml"):
        load_run_config(tmp_path / "other")


def configured(runs: str, **data: object):
    return from_tree({"train": {"runs": runs, "name": "a"}, "data": data, "checkpoint": {"location": "saved/a"}})


def test_paths_of_a_run_begin_where_it_was_started(tmp_path, monkeypatch):
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    for folder in (start / "sets", start / "saved", start / "runs" / "a", elsewhere):
        folder.mkdir(parents=True)
    config = configured("runs", train=["sets/x", "nowhere/x", "/absolute/x"], valid="sets/v", tokenizer="sets/t.json")
    monkeypatch.chdir(elsewhere)
    resolved = resolve_paths(config, start / "runs" / "a")
    assert resolved.data.train == [f"{start}/sets/x", "nowhere/x", "/absolute/x"]
    assert (resolved.data.valid, resolved.data.tokenizer) == (f"{start}/sets/v", f"{start}/sets/t.json")
    assert find_checkpoints(start / "runs" / "a", resolved) == f"{start}/saved/a"
    plain = resolve_paths(from_tree({"train": {"runs": "runs", "name": "a"}}), start / "runs" / "a")
    assert (plain.data.valid, plain.data.tokenizer, plain.checkpoint.location) == (None, None, None)
    assert find_checkpoints(Path("x"), plain) == Path("x/checkpoints")
    url = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"location": "s3://saved/a"})})
    assert resolve_paths(url, start / "runs" / "a").checkpoint.location == "s3://saved/a"
    # Where the folder does not show where the run was started, and in that folder itself, paths stay.
    for runs, run in (("runs", start / "runs" / "b"), ("../runs", start / "runs" / "a"), (f"{start}/runs", start)):
        unchanged = configured(runs, train=["sets/x"])
        assert resolve_paths(unchanged, run) is unchanged
    monkeypatch.chdir(start)
    assert resolve_paths(config, Path("runs/a")) is config


START = """
import os, sys
from pathlib import Path
from megascale.core.events import Event
from megascale.train.reporter import Reporter
from megascale.train.run_folder import RunFolder

folder = RunFolder(Path(sys.argv[1]) / "run")
folder.create()
reporter = Reporter(folder, is_leader=True)
os.environ["BUSY_DISK"] = sys.argv[1] + "/pipe"
reporter.write_event(Event.RESUMED, step=7)
reporter.report_active({"kernels": "fused"})
folder.append_event(Event.RUN_FAILED, awaits_disk=False, step=8)
print("written", flush=True)
sys.stdin.readline()
folder._event_flush.close()
flush = f"fsync {folder.events}"
flushes = Path(os.environ["FLUSHES"])
count = flushes.read_text().splitlines().count(flush)
reporter.write_last_event(Event.RUN_FINISHED, step=9, finished=True)
print(count, flushes.read_text().splitlines().count(flush) - count, flush=True)
"""


def test_a_start_does_not_wait_for_a_busy_disk_and_the_end_of_a_run_does(tmp_path: Path) -> None:
    """A recovery may follow a large checkpoint, whose bytes keep the disk busy for seconds."""
    environment = make_busy_disk(tmp_path)
    command = [sys.executable, "-c", START, str(tmp_path)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 60)[0], "an event of a start waits for the disk"
            assert process.stdout.readline() == "written\n"
            folder = RunFolder(tmp_path / "run")
            assert [record["event"] for record in folder.read_events()] == ["resumed", "active", "run_failed"]
            assert not (tmp_path / "flushes").exists()
            with open(tmp_path / "pipe", "w"):  # the disk is free from now on
                output, _ = process.communicate("continue\n", timeout=60)
            assert process.returncode == 0
            in_thread, at_end = map(int, output.split())
            assert in_thread > 0, "no thread has flushed the events of the start"
            assert at_end == 1, "the end of the run has not waited for the disk"
            assert folder.read_events()[-1]["event"] == "run_finished"
        finally:
            process.kill()
