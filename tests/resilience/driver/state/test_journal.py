"""The journal: one writer at a time, nothing lost by a crash, damage set aside and noted."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.config import Config
from megascale.core.events import format_time
from megascale.errors import ConfigError, DataError
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.local import LocalCluster
from megascale.resilience.driver import start_driver
from megascale.resilience.driver.driver import Driver
from megascale.resilience.driver.state import journal_disk
from megascale.resilience.driver.state.audit_log import LostEvents, count_drivers, restore_lost_events
from megascale.resilience.driver.state.job_state import JobState, NodeRecord, NodeState, Phase
from megascale.resilience.driver.state.journal import JOURNAL_FILE, Journal, JournalFenced
from megascale.resilience.driver.state.journal_disk import find_filesystem_type, is_network_filesystem
from megascale.resilience.driver.state.journal_reader import MAX_SILENCE_SECONDS, JournalReader
from megascale.resilience.process_birth import read_birth_time
from megascale.resilience.protocol.contact import make_token, read_token
from tests.damaged_records import damaged_lines


def test_what_is_written_is_there_for_the_next_driver(tmp_path):
    journal, damaged = Journal.take(tmp_path, 0.1)
    assert not damaged
    job = JobState("a", Phase.RUNNING, 2, ("n0",), 1, 1)
    journal.save_job(job)
    node = NodeRecord(NodeState.UP, "127.0.0.1", reason="why", changed_at=1.5)
    journal.save_node("n0", node)
    entry = journal.add("x", attempt=2, nodes=("n0",), ranks=(1,), evidence=("because",), seconds=2.5)
    journal.close()
    assert (tmp_path / JOURNAL_FILE).stat().st_mode & 0o077 == 0
    repeated, _ = Journal.take(tmp_path, 0.1)
    assert repeated.epoch == journal.epoch + 1
    assert repeated.job() == job.with_node("n0", node)
    assert repeated.nodes() == {"n0": node}
    assert repeated.events() == [entry]
    repeated.close()


def test_a_driver_on_another_host_lives_while_its_journal_changes(tmp_path, monkeypatch):
    """Commands on a login node see the journal of a driver in a Slurm job or a pod."""
    journal, _ = Journal.take(tmp_path, 0.1)
    journal.save_job(JobState("a", Phase.RUNNING, 2, ("n0",), 1, 1))
    monkeypatch.setattr("socket.gethostname", lambda: "login")
    reader = JournalReader(tmp_path)
    assert reader.is_driver_alive()
    for file in tmp_path.glob(f"{JOURNAL_FILE}*"):
        os.utime(file, (0, time.time() - 2 * MAX_SILENCE_SECONDS))
    assert not reader.is_driver_alive()
    journal.renew()
    assert reader.is_driver_alive()
    journal.close()
    assert not reader.is_driver_alive()
    reader.close()


def test_a_living_driver_keeps_its_job_and_one_that_is_silent_loses_it(tmp_path):
    import threading

    first, _ = Journal.take(tmp_path, 0.2)
    stop = threading.Event()

    def live() -> None:
        local = Journal(first.path, sqlite3.connect(first.path, isolation_level=None), first.epoch)
        while not stop.wait(0.02):
            local.renew()

    thread = threading.Thread(target=live)
    thread.start()
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        Journal.take(tmp_path, 0.5)
    stop.set()
    thread.join()
    second, _ = Journal.take(tmp_path, 0.2)
    with pytest.raises(JournalFenced):
        first.add("x", attempt=1)
    with pytest.raises(JournalFenced):
        first.renew()
    second.add("y", attempt=1)
    assert [e.kind for e in second.events()] == ["y"]


def test_a_driver_that_has_lost_its_right_to_the_job_is_replaced_while_it_lives(tmp_path):
    first, _ = Journal.take(tmp_path, 0.2)
    second, _ = Journal.take(tmp_path, 1000.0, ended_epoch=first.epoch)  # no watching: this would take long
    assert second.epoch == first.epoch + 1
    with pytest.raises(JournalFenced):
        first.renew()
    second.renew()


def test_the_lease_of_a_dead_process_is_taken_at_once_and_its_last_write_is_there(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from megascale.resilience.driver.state.journal import Journal\n"
        "journal, _ = Journal.take(Path(sys.argv[1]), 0.1)\n"
        "for i in range(20): journal.add(f'e{i}', attempt=i)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    journal, damaged = Journal.take(tmp_path, 1000.0)
    assert not damaged
    assert [e.kind for e in journal.events()] == [f"e{i}" for i in range(20)]


def test_a_journal_cut_or_garbled_anywhere_opens_or_is_set_aside(tmp_path):
    rng = random.Random(1)
    for trial in range(25):
        run = tmp_path / str(trial)
        run.mkdir()
        journal, _ = Journal.take(run, 0.1)
        for i in range(30):
            journal.add(f"e{i}", attempt=i, evidence=("x" * 200,))
        journal.save_job(JobState("a"))
        file = run / JOURNAL_FILE
        wal = file.with_name(JOURNAL_FILE + "-wal")
        victim = rng.choice([p for p in (file, wal) if p.exists() and p.stat().st_size])
        data = bytearray(victim.read_bytes())
        copies = {p: p.read_bytes() for p in (file, wal) if p.exists()}
        journal.close()
        for path, content in copies.items():
            path.write_bytes(content)
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(40):
                data[rng.randrange(len(data))] = rng.randrange(256)
        victim.write_bytes(data)
        file.with_name(JOURNAL_FILE + "-shm").unlink(missing_ok=True)
        repeated, damaged = Journal.take(run, 0.05, known_epoch=7)
        repeated.add("after", attempt=1)
        kinds = [e.kind for e in repeated.events()]
        assert kinds[-1] == "after"
        assert kinds[:-1] == [f"e{i}" for i in range(len(kinds) - 1)]
        if damaged:
            assert repeated.epoch == 8
            assert list(run.glob(f"{JOURNAL_FILE}.damaged-*"))
        repeated.close()


def test_reading_needs_a_journal_and_a_whole_one(tmp_path):
    with pytest.raises(DataError, match="megascale launch"):
        JournalReader(tmp_path)
    (tmp_path / JOURNAL_FILE).write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match="damaged"):
        JournalReader(tmp_path)


def test_a_process_is_known_by_pid_and_birth():
    assert read_birth_time(os.getpid()) > 0
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert read_birth_time(child.pid) == 0  # a zombie is dead
    child.wait()
    assert read_birth_time(child.pid) == 0


def test_a_token_others_can_read_is_refused(tmp_path):
    token = make_token(tmp_path)
    assert token == make_token(tmp_path) == read_token(tmp_path)
    path = tmp_path / "driver" / "token"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(DataError, match="chmod 600"):
        read_token(tmp_path)


# what SQLite does not notice -----------------------------------------------------------------------------------------


def written(run) -> Journal:
    """A journal with a job, a node and an event."""
    journal, _ = Journal.take(run, 0.05)
    journal.save_job(JobState("a", Phase.RUNNING, 5, ("n0",), 1, 1))
    record = NodeRecord(NodeState.UP, "127.0.1.1", reason="its agent came", changed_at=1, facts={"pod": "p"})
    journal.save_node("n0", record)
    journal.add("recovery_action", attempt=5, action="retry", nodes=("n0",), evidence=("use 1 of 5",), seconds=(1, 2.5))
    return journal


CHANGES = [
    "UPDATE job SET state = replace(state, '\"attempt\": 5', '\"attempt\": 4')",
    "UPDATE nodes SET name = 'n1'",
    "UPDATE nodes SET state = 'evicted'",
    "UPDATE events SET attempt = 6",
    "UPDATE events SET evidence = '[\"use 2 of 5\"]'",
    "UPDATE events SET nodes = '[n0]'",
    "UPDATE events SET details = 'null'",
    "UPDATE lease SET epoch = 'x'",
    "UPDATE lease SET epoch = -1",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_row_that_turned_into_another_is_damage(tmp_path, change):
    written(tmp_path).close()
    db = sqlite3.connect(tmp_path / JOURNAL_FILE)
    db.execute(change)
    db.commit()
    db.close()
    journal, damaged = Journal.take(tmp_path, 0.05, known_epoch=3)
    assert damaged
    assert (journal.job(), journal.nodes(), journal.events()) == (None, {}, [])
    assert journal.epoch == 4
    assert journal.damaged_copy is not None
    assert journal.damaged_copy.exists()
    journal.close()


@pytest.mark.parametrize("change", CHANGES + ["UPDATE job SET state = replace(state, 'starting', 'starding')"])
def test_reading_a_garbled_row_is_one_paragraph_or_what_it_says(tmp_path, change):
    written(tmp_path).close()
    db = sqlite3.connect(tmp_path / JOURNAL_FILE)
    db.execute(change)
    db.commit()
    db.close()
    try:
        reader = JournalReader(tmp_path)
        reader.nodes(), reader.events()
    except DataError as error:
        assert "the journal is damaged" in str(error)


def test_a_damaged_journal_hides_no_other_job(tmp_path):
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        written(tmp_path / name).close()
    (tmp_path / "bad" / JOURNAL_FILE).write_bytes(b"no database")
    result = CliRunner().invoke(app, ["jobs", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert [Path(row["run"]).name for row in json.loads(result.stdout)] == ["good"]
    assert f"{tmp_path / 'bad' / JOURNAL_FILE}" in result.stderr
    alone = CliRunner().invoke(app, ["jobs", str(tmp_path / "bad")])
    assert isinstance(alone.exception, DataError)
    with pytest.raises(DataError, match="is not a folder"):
        JournalReader(tmp_path / "missing")


def test_rows_without_checksums_are_damaged(tmp_path):
    written(tmp_path).close()
    db = sqlite3.connect(tmp_path / JOURNAL_FILE)
    for table, column in (("job", "state"), ("nodes", "facts"), ("events", "details")):
        db.execute(f"UPDATE {table} SET {column} = json_remove({column}, '$.sum')")
    db.commit()
    db.close()
    repeated, damaged = Journal.take(tmp_path, 0.05)
    assert damaged
    repeated.close()


# events that the journal has lost ------------------------------------------------------------------------------------


def driver(run, journal: Journal) -> Driver:
    return Driver(
        run, Config(), LocalCluster(ClusterRequest(run, Config())), ["train"], journal, JobState("a", attempt=3)
    )


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(remaining=st.integers(0, 12), evicted=st.integers(-1, 11), garbled=st.integers(0, 11))
def test_events_that_a_journal_has_lost_come_back(tmp_path_factory, remaining, evicted, garbled):
    run = tmp_path_factory.mktemp("run")
    journal, _ = Journal.take(run, 0.05)
    stored = driver(run, journal)
    for i in range(12):
        if i == evicted:
            stored.record_event("node_evicted", nodes=("n7",), evidence=("it was slow",))
        else:
            stored.record_event(
                "recovery_action", action="retry", nodes=(f"n{i}",), ranks=(i,), evidence=("why",), seconds=i / 3
            )
    noted = journal.events()
    journal.close()
    db = sqlite3.connect(run / JOURNAL_FILE)
    db.execute("DELETE FROM events WHERE id > ?", (remaining,))
    db.commit()
    db.close()
    text = (run / "events.jsonl").read_bytes().splitlines()
    text[garbled] = text[garbled][: len(text[garbled]) // 2]
    (run / "events.jsonl").write_bytes(b"\n".join([b'{"time": 1.0, "event": "evaluated", "step": 5}'] + list(text)))
    repeated, damaged = Journal.take(run, 0.05)
    assert not damaged
    recalled = restore_lost_events(repeated, run)
    expected = [e for i, e in enumerate(noted) if i < remaining or i != garbled]
    assert [e.__dict__ | {"id": 0} for e in repeated.events()] == [e.__dict__ | {"id": 0} for e in expected]
    assert recalled.count == len(expected) - remaining
    assert recalled.attempt == 3
    back = remaining <= evicted != garbled
    assert recalled.evicted == (("n7",) if back else ())
    assert [record.state for record in repeated.nodes().values()] == (["evicted"] if back else [])
    assert restore_lost_events(repeated, run).count == 0
    repeated.close()


@settings(max_examples=25)
@given(data=st.data())
def test_damaged_events_come_back_as_events_or_not_at_all(tmp_path_factory, data):
    run = tmp_path_factory.mktemp("run")
    sound = [
        {
            "time": 1e9 + i,
            "event": "hang",
            "by": "driver",
            "attempt": i,
            "nodes": ["n0"],
            "ranks": [1],
            "evidence": [""],
        }
        for i in range(4)
    ]
    (run / "events.jsonl").write_bytes(data.draw(damaged_lines(sound)))
    journal, _ = Journal.take(run, 0.05)
    restore_lost_events(journal, run)
    for entry in journal.events():
        assert format_time(entry.time)
        assert 0 <= entry.attempt < 1 << 63
    journal.close()
    assert count_drivers(run) == 0


# network file systems ------------------------------------------------------------------------------------------------


def mount(point: str, kind: str) -> str:
    escaped = point.replace("\\", "\\134").replace(" ", "\\040")
    return f"36 35 0:1 / {escaped} rw,relatime shared:1 - {kind} server:/x rw\n"


@given(st.lists(st.tuples(st.lists(st.sampled_from(["a", "ab", "a b", "c\\"]), max_size=3), st.integers(0, 9))))
def test_the_deepest_and_last_mount_tells_what_a_path_lies_on(tmp_path_factory, mounts):
    file = tmp_path_factory.getbasetemp() / "mountinfo"
    root = "/nowhere"
    file.write_text(mount("/", "ext4") + "".join(mount("/".join([root] + p), f"kind{k}") for p, k in mounts))
    for path in ([], ["a"], ["ab"], ["a b", "a"], ["c\\", "a", "ab", "a"]):
        under = [(len(p), i, k) for i, (p, k) in enumerate(mounts) if path[: len(p)] == p]
        expected = f"kind{max(under)[2]}" if under else "ext4"
        assert find_filesystem_type(type(file)("/".join([root] + path)), file) == expected


def test_which_file_systems_are_shared():
    for kind in ("nfs", "nfs4", "cifs", "fuse.sshfs", "fuse.glusterfs", "lustre", "gpfs", "9p"):
        assert is_network_filesystem(kind), kind
    for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuseblk", ""):
        assert not is_network_filesystem(kind), kind


@pytest.mark.skipif(sys.platform != "linux", reason="mounts are found through /proc")
def test_this_machines_own_mounts_are_read(tmp_path):
    assert find_filesystem_type(tmp_path)


def test_on_a_network_file_system_the_journal_does_without_a_log_and_says_so(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    written(run).close()  # with a log, as older versions have it
    mounts = tmp_path / "mountinfo"
    mounts.write_text(mount("/", "ext4") + mount(str(run), "nfs4"))
    monkeypatch.setattr(journal_disk, "MOUNTS", mounts)
    journal, damaged = Journal.take(run, 0.05)
    assert not damaged
    assert journal.network_filesystem == "nfs4"
    assert (journal.job().phase, journal.job().attempt) == (Phase.RUNNING, 5)
    stored = driver(run, journal)
    start_driver._report_journal(stored, journal, LostEvents())
    reader = JournalReader(run)  # while the driver has it open
    stored.record_event("x", evidence=("more",))
    assert [e.kind for e in reader.events()] == ["recovery_action", "journal_without_wal", "x"]
    assert "nfs4" in reader.events()[1].evidence[0]
    reader.close()
    assert not list(run.glob("*-wal"))
    assert not list(run.glob("*-shm"))
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    journal.close()


@pytest.mark.parametrize(
    "change",
    [
        {"event": "\ud800"},
        {"evidence": ["\ud800"]},
        {"extra": {"a": "\ud800"}},
        {"attempt": 1 << 64},
        {"attempt": -1},
        {"time": "nan"},
        {"time": "1e999"},
        {"ranks": [float("inf")]},
    ],
)
def test_events_that_no_journal_can_hold_are_left_out(tmp_path, change):
    good = {"time": 1.0, "event": "hang", "by": "driver", "attempt": 1}
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (good | change, good)))
    journal, _ = Journal.take(tmp_path, 0.05)
    assert restore_lost_events(journal, tmp_path).count == 1
    assert [entry.kind for entry in journal.events()] == ["hang"]
    journal.close()
