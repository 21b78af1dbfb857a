"""The program that starts and ends a node's agent, and the job's description that it writes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megascale.config import ResilienceConfig
from megascale.core.failure import describe_exit
from megascale.errors import TrainingError
from megascale.resilience.agent import attach
from megascale.resilience.agent.node_folder import find_agent, record_agent_process
from megascale.resilience.protocol import job_description
from megascale.resilience.protocol.job_description import JobDescription, read_job, to_record, write_job

JOB = JobDescription("job", 1, ("127.0.0.1", 1), ResilienceConfig())
TOKEN = b"t" * 64


def make_request(do: str, folder: Path) -> dict[str, Any]:
    job = {"job": to_record(JOB), "token": TOKEN.decode(), "marker": "", "address": "127.0.0.1", "interface": ""}
    return job | {"do": do, "node": "n0", "folder": str(folder)}


@pytest.fixture
def node_folder(tmp_path: Path) -> Path:
    """Folder of node n0 of a job."""
    folder = tmp_path / "n0"
    folder.mkdir(0o700)
    write_job(folder, JOB, TOKEN)
    return folder


@pytest.fixture
def agent() -> Iterator[subprocess.Popen[bytes]]:
    """Process that stands for an agent. It is reaped at once, as by its parent."""
    with subprocess.Popen(["sleep", "600"]) as process:
        reaper = threading.Thread(target=process.wait)
        reaper.start()
        yield process
        process.kill()
        reaper.join()


def test_a_request_to_end_waits_for_a_request_to_start(
    node_folder: Path,
    agent: subprocess.Popen[bytes],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection of the request to start may have broken before its agent was recorded."""
    flock = fcntl.flock
    is_waiting = threading.Event()

    def observe_lock(file: int, operation: int) -> None:
        try:
            flock(file, operation)
        except BlockingIOError:
            is_waiting.set()
            raise

    with open(node_folder / "attach.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", observe_lock)
        end = threading.Thread(target=attach.serve_request, args=(make_request("end", node_folder.parent),))
        end.start()
        assert is_waiting.wait(30)
        record_agent_process(node_folder, agent.pid)
    end.join()
    assert agent.poll() is not None, "the agent that was being started still runs"
    assert json.loads(capfd.readouterr().out) == {"ended": True}


def test_the_wait_for_an_earlier_request_has_a_limit(node_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "_LOCK_SECONDS", 0.0)
    with open(node_folder / "attach.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TrainingError, match=r"has .*attach\.lock locked for over 0 s; `fuser`"):
            attach.serve_request(make_request("end", node_folder.parent))


@pytest.mark.parametrize("do", ["end", "start"])
def test_a_request_whose_connection_broke_while_it_waited_changes_nothing(
    do: str, node_folder: Path, agent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later request may have started the agent meanwhile."""
    record_agent_process(node_folder, agent.pid)
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    with open(writing_end, "w") as answers:
        monkeypatch.setattr(sys, "stdout", answers)
        with pytest.raises(ConnectionError, match="has broken"):
            attach.serve_request(make_request(do, node_folder.parent))
    assert find_agent(node_folder) == agent.pid


def test_an_agent_ends_on_a_disk_that_has_become_read_only(
    node_folder: Path,
    agent: subprocess.Popen[bytes],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record_agent_process(node_folder, agent.pid)
    (node_folder / "attach.lock").touch()
    open_file = os.open

    def open_read_only(path: Path, flags: int, *arguments: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return open_file(path, flags, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_read_only)
        attach.serve_request(make_request("end", node_folder.parent))
    assert agent.poll() is not None
    assert json.loads(capfd.readouterr().out) == {"ended": True}


@pytest.mark.parametrize("do", ["end", "watch", "start"])
def test_an_agent_whose_record_is_unreadable_does_not_count_as_ended(do: str, node_folder: Path) -> None:
    """Its ranks would be started a second time on another node."""
    (node_folder / "agent.json").mkdir()  # as a failed disk, this raises OSError
    with pytest.raises(IsADirectoryError):
        attach.serve_request(make_request(do, node_folder.parent))


def test_an_agent_without_a_record_is_ended(
    node_folder: Path, agent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request would start a second agent next to it."""

    def fail_to_record(folder: Path, pid: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "agent.json"))

    monkeypatch.setattr(attach, "_start_agent", lambda *arguments, **options: agent)
    monkeypatch.setattr(attach, "record_agent_process", fail_to_record)
    with pytest.raises(OSError, match="No space left"):
        attach.serve_request(make_request("start", node_folder.parent))
    assert agent.wait(30) == -signal.SIGKILL


def test_a_node_without_a_folder_has_no_agent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    attach.serve_request(make_request("end", tmp_path))
    assert json.loads(capfd.readouterr().out) == {"ended": True}
    assert not list(tmp_path.iterdir())


def test_two_writers_of_a_description_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod's agent writes it when it joins, and its thread when the annotations change."""
    replace = os.replace

    def write_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(job_description.os, "replace", replace)
        write_job(tmp_path, JOB, TOKEN)  # the other thread
        replace(source, target)

    monkeypatch.setattr(job_description.os, "replace", write_first)
    write_job(tmp_path, JOB, TOKEN)
    assert read_job(tmp_path) == JOB
    assert len(list(tmp_path.iterdir())) == 2
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in tmp_path.iterdir())


def test_an_end_is_described_by_its_signal_or_code() -> None:
    """Python has names for the standard signals only."""
    assert [describe_exit(code) for code in (3, -9, -40)] == ["exit code 3", "signal SIGKILL", "signal 40"]
