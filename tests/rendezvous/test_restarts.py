"""Starts on one store that outlives them, as torchrun's agents keep it while they restart their processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megascale.errors import ConfigError, TrainingError
from megascale.rendezvous.agree import VERDICT, agree, hash_settings
from megascale.rendezvous.groups import shutdown
from megascale.rendezvous.restarts import open_start
from megascale.rendezvous.stores import Superseded
from tests.forked import context
from tests.rendezvous.conftest import free_port
from tests.rendezvous.test_start import die, start, use_groups

FACTS = {"torch": "2.13"}


@pytest.fixture
def agent_store(ranks, monkeypatch):
    """The store that an agent serves for as long as it lives, with the variables that it gives its processes."""
    limit = timedelta(seconds=30)
    # A port that was free a moment ago may be that of another connection by now.
    server = dist.TCPStore(os.environ["MASTER_ADDR"], 0, None, True, limit, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    return server


def connect(server: dist.TCPStore) -> dist.Store:
    return dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30), wait_for_workers=False)


class Joiner(threading.Thread):
    """A rank that joins the newest start of `server`, again if that start is superseded."""

    def __init__(self, server: dist.TCPStore, rank: int, world: int = 2, timeout: float = 20) -> None:
        super().__init__(daemon=True)
        self.store = connect(server)
        self.rank = rank
        self.world = world
        self.timeout = timeout
        self.error: Exception | None = None
        self.superseded = 0
        self.start()

    def run(self) -> None:
        while True:
            try:
                start = open_start(
                    self.store, self.rank, self.world, timeout=self.timeout, configured_timeout=self.timeout
                )
                agree(start, self.rank, self.world, FACTS, self.timeout, may_restart=True)
                return
            except Superseded:
                self.superseded += 1
            except Exception as error:
                self.error = error
                return

    def finish(self) -> Exception | None:
        self.join(30)
        assert not self.is_alive(), f"rank {self.rank} hangs"
        return self.error


def greet(start: dist.Store, rank: int, host: str, pid: int, world: int = 2) -> None:
    """Leave the greeting of another process with the same settings."""
    facts = {"WORLD_SIZE": str(world), **FACTS}
    start.set(f"start/hello/{rank}", f"{hash_settings(facts)} {host} {pid} 0123abcd")


def ended_process() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def await_greeting(start: dist.Store, rank: int) -> None:
    start.wait([f"start/hello/{rank}"], timedelta(seconds=20))


def test_each_start_has_keys_of_its_own(agent_store):
    for _ in range(3):
        every = [Joiner(agent_store, rank) for rank in (1, 0)]
        assert [received.finish() for received in every] == [None, None]


def test_a_start_that_broke_off_is_superseded(agent_store):
    broken = open_start(
        connect(agent_store), 0, 2, timeout=20, configured_timeout=20
    )  # its rank 0 greets and ends without a verdict
    greet(broken, 0, socket.gethostname(), ended_process())
    early = Joiner(agent_store, 1)
    await_greeting(broken, 1)
    assert Joiner(agent_store, 0).finish() is None
    assert early.finish() is None
    assert early.superseded == 1


def test_a_process_replaces_its_ended_predecessor(agent_store):
    zero = Joiner(agent_store, 0, world=3)
    start = dist.PrefixStore("megascale-start-1", connect(agent_store))
    await_greeting(start, 0)
    greet(start, 1, socket.gethostname(), ended_process(), world=3)
    successor = Joiner(agent_store, 1, world=3)
    # Rank 0 publishes its verdict once three ranks have greeted; a successor that comes later waits for the next start.
    deadline = time.monotonic() + 20
    while f" {os.getpid()} " not in start.get("start/hello/1").decode():
        assert time.monotonic() < deadline, "the successor did not replace the greeting"
    last = Joiner(agent_store, 2, world=3)
    assert [rank.finish() for rank in (zero, successor, last)] == [None] * 3
    assert f" {os.getpid()} " in start.get("start/hello/1").decode()


def test_a_predecessor_on_a_lost_host_is_no_second_claim(agent_store):
    broken = open_start(connect(agent_store), 0, 2, timeout=20, configured_timeout=20)
    greet(broken, 0, "lost-host", 1)
    greet(broken, 1, "lost-host", 2)
    single = Joiner(agent_store, 1)
    assert Joiner(agent_store, 0).finish() is None
    assert single.finish() is None


@pytest.mark.parametrize("host", [socket.gethostname(), "another-host"])
def test_two_running_processes_with_one_rank_are_named(agent_store, host):
    start = open_start(connect(agent_store), 0, 2, timeout=20, configured_timeout=20)
    greet(start, 1, host, os.getppid())
    if host == "another-host":
        start.set(VERDICT, "ok")  # the start went on with the other process as rank 1
    with pytest.raises(ConfigError, match=f"two processes claim rank 1: process {os.getppid()} on {host}"):
        agree(start, 1, 2, FACTS, 20, may_restart=True)


def test_a_second_rank_zero_takes_the_ranks_and_the_first_is_told(agent_store):
    first = Joiner(agent_store, 0)
    start = dist.PrefixStore("megascale-start-1", connect(agent_store))
    await_greeting(start, 0)
    second, single = Joiner(agent_store, 0), Joiner(agent_store, 1)
    assert second.finish() is None
    assert single.finish() is None
    error = first.finish()
    assert isinstance(error, ConfigError)
    assert "two processes claim rank 0" in str(error)


def test_without_rank_zero_the_failure_of_the_start_before_is_named(agent_store):
    assert isinstance(Joiner(agent_store, 0, timeout=0.2).finish(), TrainingError)
    error = Joiner(agent_store, 1, timeout=0.2).finish()
    assert isinstance(error, TrainingError)
    assert "rank 0 of 2 did not come within rendezvous.timeout=0.2 seconds" in str(error)
    assert "the previous start failed: rank 1 of 2 did not come" in str(error)


@pytest.mark.parametrize("store", ["agent", "redis"])
def test_processes_that_torchrun_restarts_make_their_groups_again(ranks, agent_store, monkeypatch, store, request):
    overrides = []
    if store == "redis":
        overrides = [f"rendezvous.url={request.getfixturevalue('redis_server')().url}"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    ranks.start(die, range(3), 3, overrides)
    assert all(isinstance(error, RuntimeError) for error in ranks.results(2).values())
    ranks.start(use_groups, [1], 3, overrides)  # of a node whose processes did not fail: torchrun does not count that
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    ranks.start(use_groups, [2, 0], 3, overrides)
    results = ranks.results(3)
    assert all(isinstance(result, dict) for result in results.values()), results


def die_once(folder: str) -> None:
    """Start as torchrun's variables say; the last rank of the first start ends without a word."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.path.exists(f"{folder}/died"):
        use_groups(rank, world, [])
        open(f"{folder}/{rank} came back", "w").close()
        return
    if rank == world - 1:
        open(f"{folder}/died", "w").close()
    groups = start(rank, world, [])
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        shutdown(groups, failed=True)


def run_agent(node: int, nodes: int, backend: str, port: int, folder: str) -> None:
    """An agent of torchrun, whose processes are forked."""
    launch = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=1,
        run_id="job",
        rdzv_backend=backend,
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": node} if backend == "static" else {},
        local_addr="127.0.0.1",
        start_method="fork",
        monitor_interval=0.05,
        max_restarts=1,
    )
    elastic_launch(launch, die_once)(folder)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_nodes_of_torchrun_recover_from_a_lost_rank(tmp_path, backend):
    port = free_port()
    agents = [context.Process(target=run_agent, args=(node, 2, backend, port, str(tmp_path))) for node in range(2)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join(60)
        agent.kill()
    assert [agent.exitcode for agent in agents] == [0, 0]
    assert sorted(file.name for file in tmp_path.glob("* came back")) == ["0 came back", "1 came back"]
