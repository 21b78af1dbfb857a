"""Nodes on one machine: which GPUs a node's agent gets when others have ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.checkpoint.background.service import connect_checkpoint_service
from megascale.checkpoint.background.service_protocol import ListSnapshots, private_folder
from megascale.config import Config
from megascale.resilience.agent.node_folder import end_checkpoint_services
from megascale.resilience.cluster import local
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.local import STATE_FILE, ApartCluster, LocalCluster
from megascale.resilience.process_birth import read_birth_time

DEAD = {"pid": 2**22 - 1, "born": 1}


def node(cluster: LocalCluster, name: str, devices: str | None, lives: bool) -> None:
    """The folder of a node whose agent is this process, or has ended."""
    state = {"pid": os.getpid(), "born": read_birth_time(os.getpid())} if lives else DEAD
    folder = cluster.folder / name
    folder.mkdir(exist_ok=True)
    (folder / STATE_FILE).write_text(json.dumps(state | ({} if devices is None else {"devices": devices})))


def devices(cluster: LocalCluster, name: str) -> str:
    (cluster.folder / name).mkdir(exist_ok=True)
    return asyncio.run(cluster._find_free_devices(name))


def test_a_node_that_replaces_another_gets_its_gpus(tmp_path: Path) -> None:
    cluster = LocalCluster(ClusterRequest(tmp_path, Config(), (("0", "1"), ("2", "3"))))
    assert [devices(cluster, "n0"), devices(cluster, "n1")] == ["0,1", "2,3"]
    node(cluster, "n0", "0,1", lives=True)
    node(cluster, "n1", "2,3", lives=False)
    assert devices(cluster, "n1") == "2,3"  # started again
    assert devices(cluster, "n2") == "2,3"  # in its place; it saw all four before
    node(cluster, "n2", "2,3", lives=True)
    node(cluster, "n0", None, lives=False)  # of a version that did not write them down
    assert devices(cluster, "n3") == "0,1"
    assert devices(cluster, "n1") == "0,1"  # its own are another's by now


def test_a_node_without_a_free_gpu_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster(ClusterRequest(tmp_path, Config(), (("0",), ("1",))))
    for number in range(2):
        node(cluster, f"n{number}", None, lives=True)
    monkeypatch.setattr(local, "FREE_TIMEOUT", 0.0)
    assert devices(cluster, "n2") == ""


def test_agents_that_start_together_get_different_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs of the first agent are recorded in a thread, while the second agent may already choose."""
    cluster = LocalCluster(ClusterRequest(tmp_path, Config(), (("0",), ("1",))))
    monkeypatch.setattr(local, "module_command", lambda *arguments: ["sh", "-c", "exec sleep 60"])
    monkeypatch.setattr(cluster, "_write_job", lambda name: cluster.folder / name)
    names = ("n5", "n6")
    for name in names:
        (cluster.folder / name).mkdir()

    async def start() -> tuple[list[bool], list[str]]:
        started = await asyncio.gather(*(cluster.start_agent(name) for name in names))
        groups = [cluster._read_state(name)["devices"] for name in names]
        await asyncio.gather(*(cluster.fence(name) for name in names))
        return started, groups

    started, groups = asyncio.run(start())
    assert started == [True, True]
    assert sorted(groups) == ["0", "1"]
    assert not any(info.has_agent for info in cluster.nodes())


@pytest.mark.parametrize("separate", [False, True])
def test_an_evicted_node_gives_its_memory_back(tmp_path: Path, separate: bool) -> None:
    make = ApartCluster if separate else LocalCluster
    cluster = make(ClusterRequest(tmp_path / "run", Config()))
    for name in ("n0", "n1"):
        (cluster.folder / name).mkdir()
    run = tmp_path / "run.apart/n1/runs/run" if separate else tmp_path / "run"
    talks = {
        name: connect_checkpoint_service(private_folder(run, name), log_file=tmp_path / "log") for name in ("n0", "n1")
    }
    try:
        assert asyncio.run(cluster.fence("n1"))
        assert (
            talks["n1"].request(ListSnapshots()).snapshots == ()
        )  # its agent may be started again, and goes on from what it holds
        cluster.block("n1", "it is broken")
        service_folder = private_folder(run, "n1")
        assert asyncio.run(cluster.fence("n1"))
        assert not service_folder.exists()  # nothing of the killed service is left behind
        with pytest.raises(OSError, match=r"."):
            talks["n1"].request(ListSnapshots())
        assert end_checkpoint_services(run, "n1") == []
        assert talks["n0"].request(ListSnapshots()).snapshots == ()
    finally:
        for talk in talks.values():
            talk.close()
        assert len(end_checkpoint_services(run, "n0")) == 1


def test_an_agent_that_ends_while_it_is_fenced_is_fenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the agents of this driver stay zombies until it reaps them. Those of an earlier driver do not."""
    cluster = LocalCluster(ClusterRequest(tmp_path / "run", Config()))
    (cluster.folder / "n0").mkdir()
    agent = subprocess.Popen(["true"])
    agent.wait()
    seen_pids = iter([agent.pid])
    monkeypatch.setattr(local, "find_agent", lambda folder: next(seen_pids, 0))
    assert asyncio.run(cluster.fence("n0"))


def test_a_node_that_is_taken_out_keeps_no_processes_of_a_foreign_trainer(tmp_path: Path) -> None:
    """Another node of this machine takes over, and writes the same checkpoints."""
    run = tmp_path / "run"
    cluster = LocalCluster(ClusterRequest(run, Config()))
    processes = {}
    for name in ("n0", "n1"):
        (cluster.folder / name).mkdir()
        variables = {"MEGASCALE_JOB": "run", "MEGASCALE_NODE": name, "MEGASCALE_STATUS": str(run / "status")}
        processes[name] = subprocess.Popen(["sleep", "600"], env=os.environ | variables)
    try:
        assert asyncio.run(cluster.fence("n1"))
        assert processes["n1"].wait(30) == -signal.SIGKILL
        assert processes["n0"].poll() is None
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def test_a_program_that_names_the_folder_of_a_service_does_not_end_with_it(tmp_path: Path) -> None:
    """Somebody may look at the folder meanwhile."""
    folder = private_folder(tmp_path, "n0")
    connection = connect_checkpoint_service(folder, log_file=tmp_path / "log")
    viewer = subprocess.Popen([sys.executable, "-c", "input()", str(folder)], stdin=subprocess.PIPE)
    try:
        (pid,) = end_checkpoint_services(tmp_path, "n0")
        assert pid != viewer.pid
        assert viewer.poll() is None
    finally:
        connection.close()
        viewer.kill()
        viewer.communicate()
