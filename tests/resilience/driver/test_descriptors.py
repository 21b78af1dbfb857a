"""Events are written when every descriptor is taken, and the loop goes on when they cannot be."""

from __future__ import annotations

import errno
import json
import os
import resource
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale.resilience.driver.process import SpareDescriptors
from megascale.resilience.driver.state.audit_log import AuditLog
from megascale.resilience.driver.state.journal import Journal
from tests.conftest import lines


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "driver").mkdir()
    return tmp_path


@pytest.fixture
def no_descriptors() -> Iterator[Callable[[], None]]:
    """Takes all that are left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used: list[int] = []

    def take() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
        try:
            while True:
                used.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE

    yield take
    for handle in used:
        os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_events_are_written_when_all_descriptors_are_taken(run, no_descriptors):
    journal, _ = Journal.take(run, 3.0)
    log = AuditLog(run, journal, lambda source, text: None)
    no_descriptors()
    with pytest.raises(OSError, match="Too many open files"):
        (run / "anything").touch()
    for number in range(3):
        log.record("hang", attempt=number)
    assert [entry.attempt for entry in journal.events()] == [0, 1, 2]
    assert [json.loads(line)["attempt"] for line in _lines(run)] == [0, 1, 2]
    journal.close()


def _lines(run: Path) -> list[str]:
    """Return the lines of the events, read with one descriptor more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft + 1, hard))
    return (run / "events.jsonl").read_text().splitlines()


def test_an_event_follows_a_line_that_a_crash_has_cut(run):
    journal, _ = Journal.take(run, 3.0)
    log = AuditLog(run, journal, lambda source, text: None)
    log.record("hang", attempt=0)
    with open(run / "events.jsonl", "a") as out:
        out.write('{"time": 3.0, "ev')
    log.record("hang", attempt=1)
    assert [record["attempt"] for record in lines(run / "events.jsonl")] == [0, 1]
    journal.close()


def test_an_event_that_cannot_be_written_ends_nothing(run):
    journal, _ = Journal.take(run, 3.0)
    output: list[str] = []
    log = AuditLog(run, journal, lambda source, text: output.append(text))
    (run / "events.jsonl").mkdir()
    log.record("hang", attempt=1)
    log.record("hang", attempt=2)
    assert len([text for text in output if "cannot be written" in text]) == 1
    (run / "events.jsonl").rmdir()
    log.record("hang", attempt=3)
    lines = (run / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["attempt"] for line in lines] == [1, 2, 3]
    assert (run / "events.jsonl").stat().st_mode & 0o077 == 0
    journal.close()


def test_they_are_given_back_with_their_owner():
    before = len(os.listdir("/proc/self/fd"))
    spare = SpareDescriptors()
    assert len(os.listdir("/proc/self/fd")) == before + 8
    del spare
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_errors_are_not_hidden():
    spare = SpareDescriptors()

    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(FileNotFoundError):
        spare.call_with_reserve(lambda: fail(FileNotFoundError(errno.ENOENT, "no")))
    with pytest.raises(sqlite3.OperationalError):
        spare.call_with_reserve(lambda: fail(sqlite3.OperationalError("disk I/O error")))
    spare.close()
