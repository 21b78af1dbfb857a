"""Commands refuse what this machine cannot hold before anything of it starts, and start many ranks in waves."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megascale.config import ResilienceConfig
from megascale.core import capacity
from megascale.resilience.cluster.base import Cluster, NodeInfo
from megascale.resilience.driver import nodes
from megascale.resilience.driver.process import LoopTasks
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobState, NodeEvent, NodeState
from megascale.resilience.driver.state.journal import Journal
from megascale.resilience.protocol.job_description import JobDescription
from megascale.train import launcher
from tests.forked import Forked

LIMITED = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2);"
MAIN = "sys.argv[1:2] = []; from megascale.cli.main import main; main()"


def limited(files: int, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`megascale WORDS` where a process may have only so many files open."""
    command = [sys.executable, "-c", f"{LIMITED} {MAIN}", str(files)] + [str(argument) for argument in arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)


def test_launch_refuses_a_crowd_before_any_agent(tiny, tmp_path):
    result = limited(66, "launch", tiny, "--nodes=2", "--train.micro_batch=1", cwd=tmp_path)
    assert result.returncode == 3, result.stderr
    for part in ("68 open files", "may have 66", "ulimit -n 68", "--nodes", "--train.fit=force"):
        assert part in result.stderr
    assert not (tmp_path / "runs").exists()


def test_train_refuses_before_any_rank(tiny, tmp_path):
    arguments = ["train", tiny, "--parallel.data=2", "--train.micro_batch=1"]
    result = limited(65, *arguments, cwd=tmp_path)
    assert result.returncode == 3, result.stderr
    assert "a trainer needs 66 open files" in result.stderr
    assert not (tmp_path / "runs").exists()
    shown = limited(65, *arguments, "--dry-run", cwd=tmp_path)
    assert shown.returncode == 0
    assert "# would be refused here: a trainer needs 66 open files" in shown.stdout


@pytest.mark.parametrize("command", ["train", "launch"])
def test_data_that_is_not_there_is_seen_first(command, tiny, tmp_path, megascale):
    arguments = ["--parallel.data=2", "--train.micro_batch=1", f"--data.valid={tmp_path}/none"]
    result = megascale(command, tiny, *arguments)
    assert result.returncode == 4, result.stderr
    assert f"{tmp_path}/none" in re.sub(r"\s+", " ", result.stderr)
    assert not (tmp_path / "runs").exists()


def test_a_port_that_is_taken_is_named(tiny, tmp_path, megascale):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        result = megascale("launch", tiny, f"--resilience.port={port}")
    assert result.returncode == 2, result.stderr
    assert f"resilience.port={port}" in result.stderr


def test_one_process_asks_for_its_memory(tiny, monkeypatch, tmp_path, capsys):
    from megascale import api
    from megascale.errors import FitError

    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text("MemAvailable: 100 kB\n")
    local = capacity.Capacity.measure
    monkeypatch.setattr(capacity.Capacity, "measure", lambda **options: local(proc, tmp_path / "cgroup", **options))
    with pytest.raises(FitError, match=r"tensors of 1 rank .* MemAvailable leaves 100.0 KiB"):
        api.train(api.load_config(tiny))
    assert not (tmp_path / "runs").exists()
    result = api.train(api.load_config(tiny, ["--train.fit=force", "--train.steps=1"]))
    assert result.step == 1
    assert "train.fit=force: starting although" in capsys.readouterr().err


def test_trainers_start_in_waves(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "max_concurrent_imports", lambda cores: 2)
    ranks: list[subprocess.Popen[bytes]] = []
    waves = launcher._Waves(ranks, [])
    code = "import os, pathlib; pathlib.Path(f'came-{os.getpid()}').touch(); "
    code += "os.write(int(os.environ['MEGASCALE_IMPORTED_PIPE']), b'.')"
    most = 0
    try:
        for _ in range(6):
            waves.wait()
            most = max(most, len(ranks) - len(list(tmp_path.glob("came-*"))))
            command = [sys.executable, "-c", code]
            ranks.append(
                subprocess.Popen(command, cwd=tmp_path, env=os.environ | waves.environment, pass_fds=(waves.write_end,))
            )
        assert most <= 1
    finally:
        for process in ranks:
            process.wait(60)
        waves.close()


def test_a_wave_ends_with_an_interruption_or_a_failure(monkeypatch):
    monkeypatch.setattr(launcher, "max_concurrent_imports", lambda cores: 1)
    interruptions: list[float] = []
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE) as single:
        waves = launcher._Waves([single], interruptions)
        waiting = threading.Thread(target=waves.wait)
        waiting.start()
        interruptions.append(1.0)
        waiting.join(30)
        assert not waiting.is_alive()
        interruptions.clear()
        single.kill()
        waves.wait()
        waves.close()


def test_several_ranks_train_though_one_starts_at_a_time(tiny, tmp_path):
    before = "from megascale.train import launcher; launcher.wave = lambda cores: 1"
    arguments = ["--parallel.data=2", "--train.steps=2", "--train.micro_batch=1"]
    command = Forked(["train", tiny] + arguments, before=before, cwd=tmp_path)
    assert command.wait(120) == 0, command.communicate()
    assert (tmp_path / "runs" / "tiny" / "checkpoints").is_dir()


class _Agents(Cluster):
    """A cluster whose agents come a few turns of the loop after their start."""

    def __init__(self, run: Path, dead: set[str]) -> None:
        journal, _ = Journal.take(run, 0.05)
        job, limits = Job(JobState("a"), journal), ResilienceConfig()
        self.table = nodes.Nodes(job, self, LoopTasks(), limits, lambda kind, **details: None)
        self.dead, self.present = dead, set()
        self.most = self.number = 0

    def announce(self, job: JobDescription, token: bytes) -> None: ...

    def nodes(self) -> list[NodeInfo]:
        return []

    async def fence(self, name: str) -> bool:
        return True

    async def start_agent(self, name: str) -> bool:
        self.present.add(name)
        self.most = max(self.most, len(self.present))
        if name in self.dead:
            self.present.discard(name)
            return False
        asyncio.get_running_loop().call_later(0.01, self._connect, name)
        return True

    async def request(self) -> str | None:
        self.number += 1
        name = f"new{self.number}"
        await self.start_agent(name)
        return name

    def _connect(self, name: str) -> None:
        self.present.discard(name)
        self.table.change(name, NodeEvent.CONNECTED)


def test_agents_start_in_waves(monkeypatch, tmp_path):
    monkeypatch.setattr(nodes, "MAX_STARTING_AGENTS", 3)

    async def begin() -> _Agents:
        agents = _Agents(tmp_path, {"n4"})
        table = agents.table
        for number in range(10):
            table.ensure_known(f"n{number}")
        table.pending_requests = 4
        works = [table.start_agent(node) for node in table.all()]
        await asyncio.wait_for(asyncio.gather(*works, *(table.wait_for_new_node() for _ in range(4))), 60)
        return agents

    agents = asyncio.run(begin())
    assert agents.most <= 3
    assert agents.table._joining_count == agents.table.pending_requests == 0
    assert [node.name for node in agents.table.all() if node.state is not NodeState.UP] == ["n4"]
    assert agents.table["n4"].deadline == 0.0


def test_an_agent_started_again_gives_its_place_in_the_wave_back(monkeypatch, tmp_path):
    monkeypatch.setattr(nodes, "MAX_STARTING_AGENTS", 1)

    async def begin() -> None:
        agents = _Agents(tmp_path, set())
        node = agents.table.ensure_known("n0")
        monkeypatch.setattr(agents, "_connect", lambda name: None)  # the first never comes
        first = asyncio.create_task(agents.table.start_agent(node))
        while not agents.present:
            await asyncio.sleep(0)
        node.deadline = float("inf")  # as Nodes.start leaves it
        monkeypatch.undo()
        await asyncio.wait_for(asyncio.gather(first, agents.table.start_agent(node)), 60)
        assert node.state is NodeState.UP

    asyncio.run(begin())
