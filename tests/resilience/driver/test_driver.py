"""A driver over real sockets with one agent that is played: what it receives leads to the right orders."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megascale.config import load
from megascale.core.exit_record import ExitKind, ExitRecord
from megascale.resilience.cluster.base import Cluster, NodeInfo
from megascale.resilience.driver.driver import Driver
from megascale.resilience.driver.launch_checks import JobFiles
from megascale.resilience.driver.state.job_state import JobState, Phase
from megascale.resilience.driver.state.journal import Entry, Journal
from megascale.resilience.protocol import agent_channel, contact
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker
from megascale.resilience.protocol.job_description import JobDescription


class OneNode(Cluster):
    """A cluster whose agent is the test's."""

    def __init__(self) -> None: ...

    def announce(self, job: JobDescription, token: bytes) -> None: ...

    def nodes(self) -> list[NodeInfo]:
        return [NodeInfo("n0", "127.0.0.1", True, True)]

    async def start_agent(self, name: str) -> bool:
        return True

    async def fence(self, name: str) -> bool:
        return True

    async def request(self) -> str | None:
        return None


class Played:
    """The agent: acknowledges stops, each with another port; `started` answers a start. Ends with the job, or when
    `started` says so by True."""

    def __init__(self, run: Path, epoch: int, attempt: int) -> None:
        self.run = run
        self.epoch = epoch
        self.attempt = attempt
        self.port = 1000
        self.starts: list[Any] = []
        self.sequence = 0

    async def serve(self, started: Callable[[Played, agent_channel.AgentChannel], bool]) -> None:
        where = contact.read_contact(self.run).agents
        reader, writer = await asyncio.open_connection(*where)
        channel = await agent_channel.open_channel(reader, writer, contact.read_token(self.run), driver=False)
        hello = {
            "job": "job",
            "node": "n0",
            "address": "127.0.0.1",
            "pod": "",
            "boot": "b",
            "version": agent_channel.VERSION,
        }
        details = {"epoch": self.epoch, "attempt": self.attempt, "hardware": {}, "versions": {}}
        channel.send_message(do="hello", **hello, **details)
        while True:
            order = await channel.receive()
            assert order.epoch >= self.epoch
            self.epoch = order.epoch
            if order.do == "stop":
                self.port += 1
                channel.send_message(do="stopped", order=order.order, attempt=self.attempt, port=self.port, codes={})
            elif order.do == "start" and order.attempt > self.attempt:  # an agent does nothing twice
                self.attempt = order.attempt
                self.starts.append(order)
                if started(self, channel):
                    break
            elif order.do == "leave":
                break
        channel.close()

    def beat(self, channel: agent_channel.AgentChannel, **worker: Any) -> None:
        self.sequence += 1
        workers = (Worker(**{"rank": 0, "pid": 1, "state": "running"} | worker),)
        beat = Heartbeat("job", self.attempt, "n0", self.sequence, 1, workers=workers)
        channel.send(beat)


def driven(
    run: Path,
    agent: Played,
    started: Callable[[Played, agent_channel.AgentChannel], bool],
    full: bool = True,
    files: JobFiles = JobFiles(),
    settings: tuple[str, ...] = (),
) -> tuple[int, list[Entry], int]:
    """Run a new job; (exit code, events, epoch at the end). `whole`: to its end, not only until the agent is done."""

    async def serve() -> tuple[int, list[Entry], int]:
        contact.make_token(run)
        journal, _ = Journal.take(run, 0.1)
        driver = Driver(
            run, load(None, list(settings)), OneNode(), [], journal, JobState("job", Phase.WAITING), job_files=files
        )
        await driver.open()
        driver.announce("")
        async with asyncio.timeout(60):
            job = asyncio.create_task(driver.run())
            await agent.serve(started)
            if full:
                code = await job
            else:
                code = -1
                job.cancel()
                await asyncio.gather(job, return_exceptions=True)
        events, epoch = journal.events(), contact.read_contact(run).epoch
        journal.close()
        return code, events, epoch

    return asyncio.run(serve())


def test_a_driver_whose_journal_was_removed_takes_over_what_its_agent_knows(tmp_path):
    agent = Played(tmp_path, epoch=5, attempt=7)
    _, events, epoch = driven(tmp_path, agent, lambda played, channel: True, full=False)
    assert [(order.attempt, order.epoch) for order in agent.starts] == [(8, 6)]
    assert epoch == 6
    report = next(e for e in events if e.kind == "journal_damaged")
    assert "n0 knows a driver of epoch 5 and attempt 7" in report.evidence[0]


def test_a_placement_on_nodes_that_never_come_ends_the_job_before_it_starts(tmp_path):
    """The cluster does not know its nodes beforehand."""
    agent = Played(tmp_path, epoch=0, attempt=0)
    code, events, _ = driven(
        tmp_path,
        agent,
        lambda played, channel: True,
        files=JobFiles(nodes=("rack7-host3",)),
        settings=("--resilience.replenish_wait=0.5",),
    )
    assert code == 4
    assert any("waiting up to 0.5 s for rack7-host3" in e.evidence[0] for e in events if e.kind == "node_requested")
    assert not agent.starts
    report = next(e for e in events if e.kind == "job_failed").evidence[0]
    assert "rack7-host3, which the cluster does not have; it has n0" in report


def test_the_environment_goes_with_every_start(tmp_path):
    agent = Played(tmp_path, epoch=0, attempt=0)
    files = JobFiles(environment={"NCCL_IB_TIMEOUT": "21"})
    driven(tmp_path, agent, lambda played, channel: True, full=False, files=files)
    assert agent.starts[0].env == {"NCCL_IB_TIMEOUT": "21"}


def test_each_port_that_is_taken_is_followed_by_another_five_times(tmp_path):
    def is_connected(played: Played, channel: agent_channel.AgentChannel) -> bool:
        error = "ConfigError: rank 0 cannot serve the store"
        played.beat(channel, state="exited", code=2, exit=ExitRecord(ExitKind.PORT_TAKEN), error=error)
        return False

    agent = Played(tmp_path, epoch=0, attempt=0)
    code, events, _ = driven(tmp_path, agent, is_connected)
    ports = [order.master[1] for order in agent.starts]
    assert len(ports) == len(set(ports)) == 5
    assert code != 0
    kinds = [e.kind for e in events]
    assert kinds.count("port_taken") == 5
    assert "user_error" not in kinds
    assert "5 ports in a row were taken" in next(e for e in events if e.kind == "job_failed").evidence[0]


def test_trainers_that_cannot_be_started_for_want_of_room_tell_of_a_full_disk(tmp_path):
    def full(played: Played, channel: agent_channel.AgentChannel) -> bool:
        if len(played.starts) == 1:
            why = "could not start the trainers: No space left on device"
            channel.send_message(do="failed", attempt=played.attempt, reason=why, errno=errno.ENOSPC)
            return False
        return True

    _, events, _ = driven(tmp_path, Played(tmp_path, 0, 0), full, full=False)
    result = next(e for e in events if e.kind == "disk_full")
    assert (result.action, result.nodes) == ("recover", ("n0",))
