"""The program that starts and ends a node's agent, and the job's description that it writes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megascale.config import ResilienceConfig
from megascale.core.failure import describe_exit
from megascale.resilience.agent import attach
from megascale.resilience.agent.node_folder import record_agent_process
from megascale.resilience.protocol import job_description
from megascale.resilience.protocol.job_description import JobDescription, read_job, to_record, write_job
from tests.conftest import POLL_INTERVAL

JOB = JobDescription("job", 1, ("127.0.0.1", 1), ResilienceConfig())
TOKEN = b"t" * 64


def is_awaited(file: Path) -> bool:
    """Return whether a thread or process waits for the lock of a file."""
    inode = f":{file.stat().st_ino}"
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and any(field.endswith(inode) for field in line.split()) for line in lines)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/locks")
def test_a_request_to_end_waits_for_a_request_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The connection of the request to start may have broken before its agent was recorded."""
    folder = tmp_path / "n0"
    folder.mkdir()
    write_job(folder, JOB, TOKEN)
    request = {"do": "end", "node": "n0", "folder": str(tmp_path), "job": to_record(JOB)}
    agent = subprocess.Popen(["sleep", "600"])
    reaper = threading.Thread(target=agent.wait)  # a killed child has ended when its parent has read its status
    end = threading.Thread(target=attach.serve_request, args=(request,))
    lock_file = folder / "attach.lock"
    try:
        with open(lock_file, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            end.start()
            deadline = time.monotonic() + 30
            while end.is_alive() and not is_awaited(lock_file):
                assert time.monotonic() < deadline
                time.sleep(POLL_INTERVAL)
            record_agent_process(folder, agent.pid)
            reaper.start()
        end.join()
        assert agent.poll() is not None, "the agent that was being started still runs"
        assert json.loads(capsys.readouterr().out) == {"ended": True}
    finally:
        agent.kill()
        agent.wait()


def test_a_node_without_a_folder_has_no_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attach.serve_request({"do": "end", "node": "n0", "folder": str(tmp_path), "job": to_record(JOB)})
    assert json.loads(capsys.readouterr().out) == {"ended": True}
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
