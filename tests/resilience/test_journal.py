"""The journal: one writer at a time, nothing lost by a crash, damage set aside and told."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys

import pytest

from megascale.errors import ConfigError, DataError
from megascale.resilience.contact import make_token, read_token
from megascale.resilience.journal import FILE, Fenced, Journal, NodeRow, Reader, born
from megascale.resilience.machine import Job, Phase


def test_what_is_written_is_there_for_the_next_driver(tmp_path):
    journal, damaged = Journal.take(tmp_path, 0.1)
    assert not damaged
    job = Job("a", Phase.RUNNING, 2, ("n0",), 1, 1)
    journal.save_job(job)
    node = NodeRow("n0", "127.0.0.1", "up", "why", 1.5, {"cordoned": False})
    journal.save_node(node)
    entry = journal.add("x", attempt=2, nodes=("n0",), ranks=(1,), evidence=("because",), seconds=2.5)
    journal.close()
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    again, _ = Journal.take(tmp_path, 0.1)
    assert again.epoch == journal.epoch + 1
    assert again.job() == job
    assert again.nodes() == [node]
    assert again.events() == [entry]
    again.close()


def test_a_living_driver_keeps_its_job_and_one_that_is_silent_loses_it(tmp_path):
    import threading

    first, _ = Journal.take(tmp_path, 0.2)
    stop = threading.Event()

    def live() -> None:
        mine = Journal(first.path, sqlite3.connect(first.path, isolation_level=None), first.epoch)
        while not stop.wait(0.02):
            mine.renew()

    thread = threading.Thread(target=live)
    thread.start()
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        Journal.take(tmp_path, 0.5)
    stop.set()
    thread.join()
    second, _ = Journal.take(tmp_path, 0.2)
    with pytest.raises(Fenced):
        first.add("x", attempt=1)
    with pytest.raises(Fenced):
        first.renew()
    second.add("y", attempt=1)
    assert [e.kind for e in second.events()] == ["y"]


def test_the_lease_of_a_dead_process_is_taken_at_once_and_its_last_write_is_there(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from megascale.resilience.journal import Journal\n"
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
        journal.save_job(Job("a"))
        file = run / FILE
        wal = file.with_name(FILE + "-wal")
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
        file.with_name(FILE + "-shm").unlink(missing_ok=True)
        again, damaged = Journal.take(run, 0.05, least_epoch=7)
        again.add("after", attempt=1)
        kinds = [e.kind for e in again.events()]
        assert kinds[-1] == "after"
        assert kinds[:-1] == [f"e{i}" for i in range(len(kinds) - 1)]
        if damaged:
            assert again.epoch == 8
            assert list(run.glob(f"{FILE}.damaged-*"))
        again.close()


def test_reading_needs_a_journal_and_a_whole_one(tmp_path):
    with pytest.raises(DataError, match="megascale launch"):
        Reader(tmp_path)
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match="damaged"):
        Reader(tmp_path)


def test_a_process_is_known_by_pid_and_birth():
    assert born(os.getpid()) > 0
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert born(child.pid) == 0  # a zombie is dead
    child.wait()
    assert born(child.pid) == 0


def test_a_token_others_can_read_is_refused(tmp_path):
    token = make_token(tmp_path)
    assert token == make_token(tmp_path) == read_token(tmp_path)
    path = tmp_path / "driver" / "token"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(DataError, match="chmod 600"):
        read_token(tmp_path)
