"""Whole jobs whose surroundings break: ports, journals, passwords, disks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.config import load
from megascale.core.secrets import remove_password
from tests.rendezvous.conftest import redis_server as redis_server
from tests.resilience.test_launch import losses


def test_a_port_taken_before_its_use_is_followed_by_another(launch, tmp_path):
    """The agents' first choice is a port that somebody listens on by then."""
    before = (
        "import pathlib, socket\n"
        "import megascale.resilience.agent.agent as agent\n"
        "free, taken = agent.find_free_port, []\n"
        "def first_is_taken(address='127.0.0.1', avoid=()):\n"
        f"    if pathlib.Path({str(tmp_path / 'runs/taken/logs/rank-0.log')!r}).exists(): return free(address, avoid)\n"
        "    taken.append(socket.create_server((address, 0)))\n"
        "    return taken[-1].getsockname()[1]\n"
        "agent.find_free_port = first_is_taken\n"
    )
    job = launch("taken", "--nodes=2", "--train.steps=4", before=before)
    verdict = job.until("port_taken")
    assert (verdict.action, verdict.ranks) == ("recover", (0,))
    job.until("first_step", attempt=2)
    assert job.finish() == 0, job.story()
    assert not [e for e in job.events() if e.kind in ("user_error", "job_failed")]


def test_with_journal_and_contact_removed_the_next_driver_takes_the_agents_over(launch, tmp_path):
    job = launch("removed", "--nodes=2", "--train.steps=100000", "--checkpoint.interval=20")
    job.until("first_step")
    job.kill_rank(1)
    job.until("first_step", attempt=2)
    job.process.kill()
    job.process.wait()
    agents = [job.agent(node) for node in ("n0", "n1")]
    trainers = [job.pid(rank) for rank in (0, 1)]
    for file in tuple(job.run.glob("journal*")) + (job.run / "driver" / "contact.json", job.run / "driver" / "token"):
        file.unlink()
    job.seen = 0
    job.start()
    report = job.until("attempt_adopted")
    assert "attempt 2" in report.evidence[0]
    assert [job.pid(rank) for rank in (0, 1)] == trainers
    assert [job.agent(node) for node in ("n0", "n1")] == agents
    # Removed under a driver that lives: nothing is lost, and it goes on.
    for file in job.run.glob("journal*"):
        file.unlink()
    job.wait(lambda: list(job.run.glob("journal.sqlite")), "a new journal")
    job.kill_rank(0)
    job.until("process_killed")
    job.until("first_step", attempt=3)
    job.process.terminate()
    assert job.finish() == 130, job.story()
    steps = [step for step, _ in losses(job.run)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_disk_that_is_full_for_the_driver_and_the_trainers_ends_neither_a_second_time(launch, megascale):
    job = launch("full", "--nodes=2", "--train.steps=100000", "--checkpoint.interval=20")
    job.until("first_step")
    job.until_step(25)
    before = [job.pid(0), job.pid(1)]
    hard = resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE, (4096, hard))
    injected = megascale("faults", "inject", "full-disk", "--run", job.run)
    assert injected.returncode == 0, injected.stderr
    # The rank whose disk was full has a new process, the other may stay in its own.
    job.wait(lambda: [job.pid(0), job.pid(1)] != before, "the second attempt, of which the journal has no room to tell")
    resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    full = job.until("disk_full")
    assert full.action == "recover"
    assert "the disk is full" in full.evidence[0]
    job.until("first_step", attempt=2)
    job.process.terminate()
    assert job.finish() == 130, job.story()
    # A rank's own log may have room for the beginning of one.
    output = job.output.read_text().splitlines()
    assert not [line for line in output if "Traceback" in line and not line.lstrip().startswith("rank")]


def test_a_password_in_the_url_works_under_launch_and_stands_nowhere(launch, redis_server, tmp_path):
    server = redis_server("--requirepass", "s3cret/@")
    url = f"--rendezvous.url=redis://:s3cret%2F%40@127.0.0.1:{server.port}"
    single = ["--nodes=1", "--parallel.data=1", "--train.steps=100000", "--checkpoint.interval=0"]
    job = launch("redis", *single, url, new=True)
    job.until("first_step")
    arguments = {pid: _read_arguments(pid) for pid in Path("/proc").iterdir() if pid.name.isdigit()}
    local = [text for text in arguments.values() if b"/runs/redis" in text or str(tmp_path).encode() in text]
    assert len(local) >= 2  # the driver, the agent
    # The server was told its password that way by this test.
    assert not [text for text in local if b"s3cret" in text and b"requirepass" not in text]
    job.process.terminate()
    assert job.finish() == 130, job.story()
    stored = [file for file in job.run.rglob("*") if file.is_file() and b"s3cret" in file.read_bytes()]
    assert not stored
    assert "s3cret" not in job.output.read_text()


def _read_arguments(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_command_line_loses_its_password_and_nothing_else():
    arguments = ["python", "-m", "megascale", "launch", "a:b@c.toml", "--rendezvous.url=rediss://me:p%40w@host/1"]
    shown, secret = remove_password(arguments)
    assert (shown[:-1], shown[-1], secret) == (arguments[:-1], "--rendezvous.url=rediss://me@host/1", "p@w")
    assert remove_password(["--rendezvous.url", "redis://:x@h"]) == (["--rendezvous.url", "redis://h"], "x")
    for plain in (["--rendezvous.url=redis://me@host"], ["--rendezvous.url=env://"], ["--rendezvous.url"]):
        assert remove_password(plain) == (plain, None)


@pytest.mark.parametrize(
    "arguments", [["--rendezvous.url=redis://:s3cret%2F@h"], ["--rendezvous.url", "redis://:s3cret%2F@h"]]
)
def test_a_command_with_a_password_starts_itself_anew_without(tmp_path, arguments):
    """Its configuration is a pipe: while it waits there, its words and its environment can be read."""
    file = tmp_path / "a.toml"
    os.mkfifo(file)
    command = [sys.executable, "-m", "megascale.cli.main", "launch", str(file)] + list(arguments)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        with open(file, "w") as out:  # returns when it has come to read
            observed = _read_arguments(Path(f"/proc/{process.pid}"))
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            out.write("no TOML")
        output = process.communicate(timeout=60)[1]
    assert str(file).encode() in observed
    assert b"s3cret" not in observed
    assert b"\0MEGASCALE_REDIS_PASSWORD=s3cret/\0" in environment
    assert process.returncode == 2
    assert "is not valid TOML" in output
    assert "s3cret" not in output


def test_a_password_from_a_file_is_handed_down_in_the_environment(monkeypatch):
    pytest.importorskip("fastapi")
    from megascale.resilience.driver.start_driver import _hand_down_password

    monkeypatch.setenv("MEGASCALE_REDIS_PASSWORD", "old")
    handed = _hand_down_password(load(None, ["--rendezvous.url=redis://:new%2F@h"]))
    assert handed.rendezvous.password is None
    assert os.environ["MEGASCALE_REDIS_PASSWORD"] == "new/"
    assert _hand_down_password(handed) == handed
