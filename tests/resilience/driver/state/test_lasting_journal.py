"""The driver's memory: a full disk, removed files and a clock that goes back do not end it, nor its budgets' terms."""

from __future__ import annotations

import json
import select
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config import ResilienceConfig
from megascale.errors import ConfigError
from megascale.resilience.driver.recovery import escalation
from megascale.resilience.driver.recovery.escalation import Situation, list_past_uses
from megascale.resilience.driver.state.audit_log import AuditLog
from megascale.resilience.driver.state.job_state import JobState, NodeRecord, NodeState, Phase
from megascale.resilience.driver.state.journal import JOURNAL_FILE, Journal, JournalFenced
from megascale.resilience.driver.state.journal_reader import JournalReader
from tests.busy_disk import make_busy_disk

RECOVERY = """
import os, sys
from dataclasses import replace
from pathlib import Path
from megascale.resilience.driver.state.job_state import JobEvent, JobState, Phase
from megascale.resilience.driver.state.journal import WRITES_PER_COPY, Journal

run = Path(sys.argv[1])
journal, _ = Journal.take(run, 0.1)
state = JobState("a", Phase.RUNNING, 1, ("n0",), 1, 1)
journal.save_job(state)
os.environ["BUSY_DISK"] = str(run / "pipe")
for event in (JobEvent.START_ENDED, JobEvent.RECOVERING, JobEvent.RESTARTED):
    journal.record(event, {}, state)
journal.add("recovery_action", attempt=1)
for _ in range(WRITES_PER_COPY + 500):  # more than the pages after which SQLite would copy its log
    journal.renew()
flushes = Path(os.environ["FLUSHES"])
copies = flushes.read_text().splitlines().count(f"fdatasync {journal.path}")
print("recorded", flush=True)
sys.stdin.readline()
journal._flush.close()
print(flushes.read_text().splitlines().count(f"fdatasync {journal.path}") - copies, flush=True)
journal.record(JobEvent.PAUSED, {}, replace(state, phase=Phase.PAUSED))
print(flushes.read_text().count("fdatasync"), flush=True)
journal.close()
"""

FULL = """
import json, resource, sys
from pathlib import Path
from megascale.resilience.driver.state.audit_log import AuditLog
from megascale.resilience.driver.state.job_state import NodeRecord, NodeState
from megascale.resilience.driver.state.journal_reader import JournalReader
from megascale.resilience.driver.state.journal import Journal
from megascale.resilience.driver.state.job_state import JobState, Phase

run, really, said = Path(sys.argv[1]), sys.argv[2] == "disk", []
filler = run / "filler"

def full():
    if not really:
        return resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with open(filler, "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass

def room():
    if really: filler.unlink()
    else: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

journal, _ = Journal.take(run, 0.1)
journal.report = said.append
audit_log = AuditLog(run, journal, lambda who, text: None)
(run / "events.jsonl").write_text("x" * 4095 + "\\n")
audit_log.record("before", attempt=1)
full()
for number in range(200):
    audit_log.record(f"e{number}", attempt=2, nodes=("n0",), evidence=("x" * 500,), seconds=number)
    journal.renew()
journal.save_job(JobState("a", Phase.RUNNING, 2, ("n0",), 1, 1))
journal.save_node("n0", NodeRecord(NodeState.UP, "127.0.0.1", reason="why", changed_at=1.5))
behind = journal.is_behind
room()
journal.renew()
audit_log.record("after", attempt=2)
reader = JournalReader(run)
lines = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()[1:]]
found = [[e.kind for e in reader.events()], lines, reader.job.attempt, list(reader.nodes())]
print(json.dumps([behind, journal.is_behind, said, *found]))
"""


def on_a_small_disk(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program (text, arguments) where `folder` is a disk of 16 MiB of its own."""
    new = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run(new + ["mount", "-t", "tmpfs", "none", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    shell = f'mount -t tmpfs -o size=16m none "$1" && exec {sys.executable} -c "$0" "$@"'
    command = new + ["sh", "-c", shell, arguments[0], str(folder)] + list(arguments[1:])
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("subject", ["limit", "disk"])
def test_a_full_disk_delays_what_is_written_and_ends_nobody(tmp_path, subject):
    if subject == "disk":
        done = on_a_small_disk(tmp_path, FULL, subject)
    else:
        arguments = [sys.executable, "-B", "-c", FULL, str(tmp_path), subject]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    behind, behind_at_the_end, output, kinds, shown, attempt, nodes = json.loads(done.stdout)
    assert behind
    assert not behind_at_the_end, (output, len(kinds), len(shown))
    assert len(output) == 2  # once a minute, and when there is room again
    assert "has no room for the driver's journal" in output[0]
    assert kinds == shown == (["before"] + [f"e{n}" for n in range(200)] + ["after"])
    assert (attempt, nodes) == (2, ["n0"])


@pytest.mark.parametrize("limit", [0, 4096])
def test_a_start_on_a_full_disk_is_one_paragraph(limit, tiny, tmp_path, megascale):
    pytest.importorskip("fastapi")
    # With -B: Python leaves half of a module's bytecode where a file may not grow, for others to stumble over.
    program = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)\n"
        "sys.argv = ['megascale', *sys.argv[2:]]; runpy.run_module('megascale.cli.main', run_name='__main__')"
    )
    arguments = [sys.executable, "-B", "-c", program, str(limit), "launch", str(tiny)]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: the disk of ")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob(f"runs/tiny/{JOURNAL_FILE}.damaged*"))


def test_a_journal_that_is_whole_is_not_set_aside_for_another_fault(tmp_path, monkeypatch):
    journal, _ = Journal.take(tmp_path, 0.1)
    journal.add("x", attempt=1)
    journal.close()
    holder = sqlite3.connect(tmp_path / JOURNAL_FILE, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout, **more: connect(path, timeout=0.05, **more))
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        Journal.take(tmp_path, 0.1)
    holder.close()
    assert not list(tmp_path.glob("*.damaged*"))


def test_removed_files_are_made_again_with_all_that_they_held(tmp_path):
    journal, _ = Journal.take(tmp_path, 0.1)
    output: list[str] = []
    journal.report = output.append
    journal.save_job(JobState("a", Phase.RUNNING, 3, ("n0",), 1, 1))
    journal.save_node("n0", NodeRecord(NodeState.UP, "127.0.0.1", reason="why", changed_at=1.5))
    journal.add("x", attempt=3)
    for file in tmp_path.glob("journal*"):
        file.unlink()
    journal._is_copy_due = True
    journal._copy_log()  # makes no file, which would look like that of another driver
    journal.renew()
    journal.add("y", attempt=3)
    assert "was removed" in output[0]
    reader = JournalReader(tmp_path)
    assert [e.kind for e in reader.events()] == ["x", "y"]
    assert reader.job is not None
    assert reader.job.attempt == 3
    reader.close()
    journal.close()
    repeated, damaged = Journal.take(tmp_path, 0.1)
    assert not damaged
    assert repeated.epoch == journal.epoch + 1
    repeated.close()


def test_a_driver_whose_journal_was_replaced_is_over(tmp_path):
    first, _ = Journal.take(tmp_path, 0.1)
    for file in tmp_path.glob("journal*"):
        file.unlink()
    second, _ = Journal.take(tmp_path, 0.1)
    with pytest.raises(JournalFenced, match="another driver"):
        first.renew()
    second.raise_epoch(9)
    second.add("x", attempt=1)
    third, _ = Journal.take(tmp_path, 0.1)
    assert third.epoch == 10
    with pytest.raises(JournalFenced):
        second.raise_epoch(11)
    third.close()


@given(back=st.floats(0, 1e9), retries=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_budgets_expire_though_the_clock_was_set_back(back, retries, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    journal, _ = Journal.take(run, 0.1)
    audit_log = AuditLog(run, journal, lambda source, text: None)
    for _ in range(retries):
        audit_log.record("recovery_action", attempt=1, action="retry", nodes=("n0",))
    journal._db.execute("UPDATE events SET time = time + ?", (back,))  # the clock has gone back since
    current = time.monotonic()
    uses = list_past_uses(journal.events(), time.time(), current)
    journal.close()
    config = ResilienceConfig(retries=retries, budget_seconds=3600.0)

    def action(later: float) -> str:
        at = Situation("n0", False, True, True, 0, current + later)
        return escalation.choose_action(config, at, uses).action

    assert action(1.0) == "respawn"
    assert action(3601.0) == "retry"


def test_a_second_driver_is_still_refused(tmp_path):
    first, _ = Journal.take(tmp_path, 0.1)
    second = (
        "import sys, time; from pathlib import Path\n"
        "from megascale.resilience.driver.state.journal import Journal\n"
        "journal, _ = Journal.take(Path(sys.argv[1]), 0.1); print('mine', flush=True)\n"
        "while True: journal.renew(); time.sleep(0.02)"
    )
    first.close()
    with subprocess.Popen([sys.executable, "-c", second, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "mine\n"
        with pytest.raises(ConfigError, match="already runs"):
            Journal.take(tmp_path, 1.0)
        holder.kill()


def test_a_port_of_the_driver_that_is_taken_is_named(tiny, tmp_path, megascale):
    pytest.importorskip("fastapi")
    with socket.create_server(("127.0.0.1", 0)) as second:
        for key in ("port", "api_port"):
            done = megascale("launch", tiny, f"--resilience.{key}={second.getsockname()[1]}")
            assert done.returncode == 2, done.stderr
            assert f"resilience.{key}={second.getsockname()[1]}: Address already in use" in done.stderr
            assert "Traceback" not in done.stderr


def test_files_in_memory_fail_by_an_error_and_not_by_a_signal(tmp_path):
    """SIGBUS would end a trainer without a word; a small tmpfs is a disk that is really full."""
    program = (
        "import sys; from pathlib import Path; from megascale.core.status import StatusFile\n"
        "folder = Path(sys.argv[1])\n"
        "try:\n"
        "    with open(folder / 'full', 'wb', buffering=0) as file:\n"
        "        while True: file.write(bytes(4096))\n"
        "except OSError: pass\n"
        "try: StatusFile(folder, 0)\n"
        "except OSError as error: print(error.errno)"
    )
    done = on_a_small_disk(tmp_path, program)
    assert (done.returncode, done.stdout.strip()) == (0, "28"), done.stderr


def test_a_recovery_does_not_wait_for_a_busy_disk_and_an_order_of_a_person_does(tmp_path: Path) -> None:
    environment = make_busy_disk(tmp_path)
    flushes = tmp_path / "flushes"
    command = [sys.executable, "-c", RECOVERY, str(tmp_path)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 60)[0], "a recovery waits for the disk"
            assert process.stdout.readline() == "recorded\n"
            assert [entry.kind for entry in JournalReader(tmp_path).events()] == ["recovery_action"]
            assert "fsync" not in flushes.read_text().split()
            before = flushes.read_text().count("fdatasync")
            with open(tmp_path / "pipe", "w"):  # the disk is free from now on
                output, _ = process.communicate("continue\n", timeout=60)
            assert process.returncode == 0
            copies, count = output.splitlines()
            assert copies == "1", "the log grows without a limit"
            assert int(count) > before, "the order of a person has not waited for the disk"
            assert f"fsync {tmp_path / JOURNAL_FILE}-wal" in flushes.read_text().splitlines()
        finally:
            process.kill()
