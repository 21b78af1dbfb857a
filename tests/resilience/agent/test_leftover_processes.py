"""Processes that ranks of a foreign trainer have started may save, and end with their agent, node or lease."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale.config import ResilienceConfig
from megascale.core.python_process import module_command
from megascale.resilience.agent.leftover_processes import end_leftover_processes, find_rank_processes
from megascale.resilience.agent.node_folder import end_agent, find_agent, record_agent_process
from megascale.resilience.agent.trainers import Trainers
from megascale.resilience.driver.telemetry.agent_server import AgentServer
from megascale.resilience.protocol.agent_messages import Start
from megascale.resilience.protocol.job_description import JobDescription, write_job
from tests.resilience.agent.test_agent_end import TOKEN, Driver, wait_until

# A rank that starts a process in a session of its own, as a launcher or a writer of checkpoints does.
SETTINGS = """
[foreign]
command = ["sh", "-c", "setsid sh -c 'echo writer $$; exec sleep 600' & wait"]
patterns = ["it (?P<step>[0-9]+)"]
"""
JOB = "tiny"
NODE = "n0"


@pytest.fixture
def start_process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start processes with the environment of a rank, and with given differences."""
    processes = []

    def start(run: Path, *, user: int | None = None, **changes: str) -> subprocess.Popen[bytes]:
        variables = {"MEGASCALE_JOB": JOB, "MEGASCALE_NODE": NODE, "MEGASCALE_STATUS": str(run / "status")}
        process = subprocess.Popen(["sleep", "600"], env=os.environ | variables | changes, user=user)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def wait_for_end(pid: int) -> None:
    """Wait until a process that is no child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 30.0)[0], f"process {pid} still runs"
    finally:
        os.close(descriptor)


def make_start(attempt: int, settings: str = SETTINGS) -> Start:
    return Start(1, attempt, JOB, (0,), 1, ("127.0.0.1", 1), settings)


def test_only_processes_of_the_job_the_node_and_the_run_end(start_process, tmp_path):
    leftover = start_process(tmp_path)
    others = [
        start_process(tmp_path, MEGASCALE_JOB="other"),
        start_process(tmp_path, MEGASCALE_NODE="n01"),
        start_process(tmp_path / "other"),
    ]
    assert find_rank_processes(tmp_path, JOB, NODE) == [leftover.pid]
    assert end_leftover_processes(tmp_path, JOB, NODE) == [leftover.pid]
    assert leftover.wait() == -signal.SIGKILL
    assert [process.poll() for process in others] == [None] * 3
    assert end_leftover_processes(tmp_path, JOB, NODE) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")
def test_a_process_of_another_user_does_not_end(start_process, tmp_path):
    """The agent of root can read the environment of all processes, which another user may have copied."""
    process = start_process(tmp_path, user=65534)
    assert end_leftover_processes(tmp_path, JOB, NODE) == []
    assert process.poll() is None


def read_writers(run: Path) -> list[int]:
    """Return the process ids that the rank's log names, one per attempt."""
    log = run / "logs" / "rank-0.log"
    if not log.exists():
        return []
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("writer")]


async def start_rank(folder: Path, run: Path, settings: str = SETTINGS) -> tuple[Trainers, int]:
    """Start a rank of a foreign trainer, and return the process id of the process that it starts."""
    local = Trainers(run, folder, lambda: None, limits=ResilienceConfig(preload=False))
    local.start_server()
    local.start(make_start(1, settings), "127.0.0.1", TOKEN)
    await wait_until(lambda: read_writers(run))
    return local, read_writers(run)[0]


def test_processes_end_with_the_ranks_that_the_agent_ends(tmp_path):
    """The lease may have ended: the driver starts the ranks on another node."""
    for name, end in (("n0", Trainers.end_server), ("n1", lambda local: local.kill_from_thread("lease"))):
        (tmp_path / name).mkdir()

        async def run(name: str, end: Callable[[Trainers], None]) -> int:
            local, pid = await start_rank(tmp_path / name, tmp_path / "runs" / name)
            end(local)
            local.end_server()
            return pid

        wait_for_end(asyncio.run(run(name, end)))


def test_the_trainer_of_a_wrapper_script_has_the_grace_period_to_save(tmp_path):
    """SIGTERM ends the shell at once. Its trainer saves until the test lets it end."""
    folder, run = tmp_path / NODE, tmp_path / "runs" / JOB
    folder.mkdir()
    os.mkfifo(tmp_path / "pipe")
    trainer = tmp_path / "trainer.sh"
    trainer.write_text(
        f"trap 'read line < {tmp_path}/pipe; echo saved > {tmp_path}/saved; exit 0' TERM\n"
        "echo writer $$\nwhile :; do sleep 0.02; done\n"
    )
    command = json.dumps(["sh", "-c", f"sh {trainer} & wait"])
    settings = f"[foreign]\ncommand = {command}\npatterns = ['it (?P<step>[0-9]+)']\n"

    async def work() -> None:
        local, _ = await start_rank(folder, run, settings)
        await wait_until(lambda: local.trainers[0].pid)
        leader = local.trainers[0].pid
        stop = asyncio.create_task(local.stop("save", grace_period=60.0))
        # Opening the pipe succeeds once the trainer saves.
        await wait_until(lambda: not Path(f"/proc/{leader}").exists())
        descriptor = await asyncio.wait_for(asyncio.to_thread(os.open, tmp_path / "pipe", os.O_WRONLY), 30)
        assert local.list_running()
        assert not stop.done()
        os.write(descriptor, b"continue\n")
        os.close(descriptor)
        await asyncio.wait_for(stop, 30)
        assert local.trainers[0].status == signal.SIGTERM
        local.end_server()

    asyncio.run(work())
    assert (tmp_path / "saved").read_text() == "saved\n"


def test_an_agent_ends_what_the_ranks_of_earlier_attempts_have_started(start_process, tmp_path):
    folder, run = tmp_path / NODE, tmp_path / "runs" / JOB
    folder.mkdir()
    driver = Driver()
    command = module_command("megascale.resilience.agent.main", "--node", NODE, "--folder", str(folder))

    async def start_attempt(attempt: int) -> int:
        fields = {name: getattr(make_start(attempt), name) for name in ("attempt", "job", "ranks", "world", "settings")}
        driver.channels[-1].send_message(do="start", epoch=1, master=["127.0.0.1", 1], **fields)
        await wait_until(lambda: len(read_writers(run)) == attempt)
        return read_writers(run)[-1]

    async def work() -> None:
        server = AgentServer(JOB, TOKEN, driver, driver)
        location = await server.open("127.0.0.1", 0)
        limits = ResilienceConfig(interval=10.0, window=30.0, preload=False)
        write_job(folder, JobDescription(JOB, 1, location, limits, str(run)), TOKEN)
        agent = subprocess.Popen(command)
        try:
            await wait_until(lambda: driver.beats)
            writer = await start_attempt(1)
            agent.kill()
            agent.wait()
            await wait_until(lambda: find_rank_processes(run, JOB, NODE) == [writer])
            agent = subprocess.Popen(command)
            await wait_until(lambda: len(driver.channels) == 2)
            wait_for_end(writer)
            # A rank that ends by itself may leave a process too, whose GPU memory the next attempt needs.
            leftover = start_process(run)
            writer = await start_attempt(2)
            assert leftover.poll() == -signal.SIGKILL
            assert writer in find_rank_processes(run, JOB, NODE)
        finally:
            agent.kill()
            agent.wait()
            await server.close()
            end_leftover_processes(run, JOB, NODE)

    asyncio.run(work())


def test_the_end_of_an_agent_by_its_cluster_ends_them_too(start_process, tmp_path):
    folder, run = tmp_path / NODE, tmp_path / "runs" / JOB
    folder.mkdir()
    write_job(folder, JobDescription(JOB, 1, ("127.0.0.1", 1), ResilienceConfig(), str(run)), TOKEN)
    leftover = start_process(run)
    agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record_agent_process(folder, agent.pid)
    assert find_agent(folder) == agent.pid
    assert end_agent(folder)
    assert agent.wait() == -signal.SIGKILL
    agent.stdin.close()
    assert leftover.wait() == -signal.SIGKILL
