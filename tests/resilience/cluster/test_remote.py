"""Agents started through a command that runs a program elsewhere; here elsewhere is a process of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from megascale.config import Config, ResilienceConfig
from megascale.resilience.agent.node_folder import PROCESS_FILE, end_agent, find_agent
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.remote import Host, RemoteCluster
from megascale.resilience.protocol.job_description import JobDescription, read_job, read_job_token

TOKEN = b"t" * 64


class LocalCluster(RemoteCluster):
    """The far end is this machine; hosts named "gone" are not reached."""

    def make_command(self, host: Host, arguments: Sequence[str]) -> list[str]:
        return ["sh", "-c", "echo no route to it >&2; exit 255"] if host.host == "gone" else list(arguments)


@pytest.fixture
def play(tmp_path: Path):
    """Runs scene(make) on a loop: make(NAMES, epoch=N) is a driver's cluster, announced. Ends the agents."""
    output: list[str] = []
    built: list[LocalCluster] = []

    def make(names: Sequence[str], epoch: int = 1, run: Path = tmp_path / "runs" / "job") -> LocalCluster:
        hosts = [Host(name, "gone" if name.startswith("gone") else "here", folder=str(tmp_path)) for name in names]
        cluster = LocalCluster(ClusterRequest(run, Config(), (), lambda source, text: output.append(text)), hosts)
        built.append(cluster)
        cluster.announce(JobDescription("job", epoch, ("127.0.0.1", 9), ResilienceConfig()), TOKEN)
        return cluster

    def run(scene: Callable[..., Awaitable[None]]) -> list[str]:
        async def limited() -> None:
            async with asyncio.timeout(60):
                await scene(make)
                for cluster in built:
                    await cluster.close()

        asyncio.run(limited())
        return output

    yield run
    for folder in tmp_path.glob(f"*/{PROCESS_FILE}"):
        end_agent(folder.parent)


async def wait_until(result) -> None:
    while not result():
        await asyncio.sleep(0.01)


def state(cluster: LocalCluster) -> dict[str, tuple[bool, bool]]:
    return {info.name: (info.can_start_agent, info.has_agent) for info in cluster.nodes()}


def test_an_agent_is_started_outlives_its_driver_is_found_by_the_next_and_ended(play, tmp_path):
    async def scene(make):
        first = make(["n0"])
        assert first.nodes() == []
        assert await first.request() == "n0"
        assert await first.request() is None
        pid = find_agent(tmp_path / "n0")
        assert pid
        assert state(first) == {"n0": (True, True)}
        job = read_job(tmp_path / "n0")
        assert (job.epoch, job.shared, job.run) == (1, False, str(tmp_path / "n0" / "runs" / "job"))
        assert read_job_token(tmp_path / "n0") == TOKEN
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert TOKEN not in arguments

        second = make(["n0"], epoch=2)
        assert state(second) == {"n0": (True, True)}  # before it has answered: nothing is decided on a guess
        await wait_until(lambda: read_job(tmp_path / "n0").epoch == 2)
        assert find_agent(tmp_path / "n0") == pid
        (tmp_path / "n0" / "epoch").write_text("2")
        assert not await first.start_agent("n0")  # it would have ended what the newer driver runs
        assert find_agent(tmp_path / "n0") == pid

        assert await second.fence("n0")
        assert find_agent(tmp_path / "n0") == 0
        assert state(second) == {"n0": (True, False)}

    output = play(scene)
    assert output == [
        "n0: a driver of epoch 2 controls this node, and this driver of epoch 1 has been replaced; end this driver"
    ]


def test_an_agent_that_is_killed_is_known_at_once_and_started_again(play, tmp_path):
    async def scene(make):
        cluster = make(["n0"])
        assert await cluster.start_agent("n0")
        pid = json.loads((tmp_path / "n0" / PROCESS_FILE).read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            await wait_until(lambda: state(cluster) == {"n0": (True, False)})
        assert cluster.nodes()[0].reason == "its agent ended: signal SIGKILL"
        assert await cluster.start_agent("n0")
        assert find_agent(tmp_path / "n0") not in (0, pid)

    assert play(scene) == []


def test_where_no_command_may_hold_an_agent_its_end_is_seen_by_another_one(play, tmp_path, monkeypatch):
    monkeypatch.setattr(LocalCluster, "waits_separately", True)

    async def scene(make):
        cluster = make(["n0"])
        assert await cluster.start_agent("n0")
        starter, pid = cluster._machines["n0"].process, find_agent(tmp_path / "n0")
        await wait_until(lambda: cluster._machines["n0"].process not in (None, starter))
        assert starter.returncode is not None or await starter.wait()  # killed, and the agent lives
        assert find_agent(tmp_path / "n0") == pid
        assert state(cluster) == {"n0": (True, True)}
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: state(cluster) == {"n0": (True, False)})

    assert play(scene) == []


def test_a_machine_that_was_cut_off_keeps_the_agent_that_it_has(play, tmp_path):
    async def scene(make):
        cluster = make(["n0"])
        assert await cluster.request() == "n0"
        pid = find_agent(tmp_path / "n0")
        cluster._machines["n0"].has_agent = False  # as after a time in which it was unreachable
        assert await cluster.request() == "n0"
        assert find_agent(tmp_path / "n0") == pid

    assert play(scene) == []


def test_machines_that_are_gone_or_barred_are_passed_over(play, tmp_path):
    async def scene(make):
        cluster = make(["gone1", "n1", "n2"])
        cluster.exclude_nodes(frozenset({"n1"}))
        assert await cluster.request() == "n2"
        assert await cluster.request() is None
        assert not await cluster.fence("gone1")  # Its processes are unknown.
        assert not await cluster.start_agent("unheard-of")

    output = play(scene)
    assert output == [
        "gone1: no route to it",
        "unheard-of is no longer in the list of machines: no agent is started there",
    ]


def test_a_folder_of_checkpoints_that_is_another_one_there_is_refused(play, tmp_path):
    async def scene(make):
        cluster = make(["n0"])
        next((tmp_path / "runs" / "job" / "checkpoints").glob(".shared-*")).unlink()
        assert await cluster.request() is None

    (output,) = play(scene)
    assert "is not the driver's folder of checkpoints" in output
    assert "--checkpoint.location" in output


def test_machines_of_a_placement_are_asked_first(play):
    async def scene(make) -> None:
        cluster = make(["gone-a", "b", "gone-c", "d"])
        assert cluster.list_possible_nodes(2) == ["gone-a", "b", "gone-c", "d"]
        cluster.prefer(["d", "gone-c"])
        assert await cluster.request() == "d"
        assert cluster.list_possible_nodes(2) == ["d", "gone-c", "gone-a", "b"]
        assert await cluster.fence("d")

    play(scene)
