"""The end of an agent: the driver hears that its ranks have ended before the agent is gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megascale.config import ResilienceConfig
from megascale.core.calls import CallLog
from megascale.resilience.agent.agent import Agent
from megascale.resilience.agent.trainers import TrainerProcess
from megascale.resilience.driver.telemetry.agent_server import AgentServer
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import Hello, Start, StartFailed, Stopped
from megascale.resilience.protocol.heartbeat import Heartbeat
from megascale.resilience.protocol.job_description import JobDescription, write_job

TOKEN = b"0" * 64


@dataclass
class Driver:
    """The driver's side of agents' connections. answers: whether heartbeats are answered."""

    answers: bool = True
    channels: list[agent_channel.AgentChannel] = field(default_factory=list)
    beats: list[Heartbeat] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)

    def handle_hello(self, channel: agent_channel.AgentChannel, hello: Hello) -> str:
        self.channels.append(channel)
        channel.send_message(do="welcome", epoch=1, version=agent_channel.VERSION)
        return ""

    def handle_heartbeat(self, node: str, channel: agent_channel.AgentChannel, heartbeat: Heartbeat) -> None:
        self.beats.append(heartbeat)
        if self.answers:
            channel.send_message(do="heard", epoch=1, sequence=heartbeat.sequence)

    def handle_message(self, node: str, channel: agent_channel.AgentChannel, message: Any) -> None:
        self.messages.append(message)

    def handle_disconnect(self, node: str, channel: agent_channel.AgentChannel) -> None: ...

    def record_refusal(self, peer: str, node: str, why: str) -> None: ...


async def wait_until(observed: Callable[[], Any]) -> None:
    async with asyncio.timeout(30.0):
        while not observed():
            await asyncio.sleep(0.005)


Scene = Callable[[Driver, Agent, TrainerProcess, asyncio.Task[None]], Awaitable[None]]


def play(folder: Path, monkeypatch: pytest.MonkeyPatch, scene: Scene, lease: float | None = 30.0) -> Driver:
    """An agent with one rank, which the scene ends, and its driver."""
    driver = Driver()
    monkeypatch.setattr(
        "megascale.resilience.agent.trainers.Trainers.start_server", lambda self: None
    )  # nothing is forked

    async def work() -> None:
        server = AgentServer("job", TOKEN, driver, driver)
        location = await server.open("127.0.0.1", 0)
        limits = ResilienceConfig(interval=10.0, window=30.0, agent_lease=lease)
        write_job(folder, JobDescription("job", 1, location, limits, str(folder / "run"), shared=True), TOKEN)
        agent = Agent("n0", folder, "127.0.0.1", "")
        rank = agent.trainers.trainers[0] = TrainerProcess(0, folder / "log", 0)
        life = asyncio.create_task(agent.run())
        await wait_until(lambda: driver.beats)
        try:
            await scene(driver, agent, rank, life)
        finally:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            await server.close()

    asyncio.run(work())
    return driver


def test_a_driver_hears_that_ranks_have_ended_which_ended_just_now(tmp_path, monkeypatch):
    """An agent that has seen its last rank end goes at once: the heartbeat that tells of it must not stay behind."""

    async def scene(driver: Driver, agent: Agent, rank: TrainerProcess, life: asyncio.Task[None]) -> None:
        agent.trainers._fork_server.process = object()  # type: ignore[assignment]
        os.kill(os.getpid(), signal.SIGTERM)
        await wait_until(lambda: driver.beats[-1].leaving)
        assert not driver.beats[-1].is_finished
        agent.trainers._fork_server.process = None
        rank.end(130 << 8)
        await life
        await wait_until(lambda: driver.beats[-1].is_finished)

    play(tmp_path, monkeypatch, scene)


def test_a_driver_that_hung_up_is_told_when_it_is_back(tmp_path, monkeypatch):
    async def scene(driver: Driver, agent: Agent, rank: TrainerProcess, life: asyncio.Task[None]) -> None:
        driver.channels[0].close()
        await wait_until(lambda: agent.link.channel is None)
        rank.end(130 << 8)
        agent.end_requested.set()
        await life
        assert len(driver.channels) == 2
        assert driver.beats[-1].is_finished

    play(tmp_path, monkeypatch, scene)


def test_an_agent_that_ends_starts_no_ranks(tmp_path, monkeypatch):
    """Its report of the end of its ranks stays true."""

    async def scene(driver: Driver, agent: Agent, rank: TrainerProcess, life: asyncio.Task[None]) -> None:
        driver.answers = False
        rank.end(130 << 8)
        agent.end_requested.set()
        await wait_until(lambda: driver.beats[-1].is_finished)
        start = {"attempt": 2, "job": "job", "ranks": [0], "world": 1, "master": ["127.0.0.1", 1], "settings": ""}
        driver.channels[0].send_message(do="start", epoch=1, **start)
        await wait_until(lambda: driver.messages)
        driver.channels[0].send_message(do="heard", epoch=1, sequence=driver.beats[-1].sequence)
        await life

    (failed,) = play(tmp_path, monkeypatch, scene).messages
    assert isinstance(failed, StartFailed)
    assert "agent is ending" in failed.reason


def test_a_driver_hears_of_a_package_that_a_start_needs_and_a_node_lacks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "regex", None)
    settings = "[foreign]\ncommand = ['true']\npatterns = ['it (?P<step>[0-9]+)']\n"

    async def scene(driver: Driver, agent: Agent, rank: TrainerProcess, life: asyncio.Task[None]) -> None:
        rank.end(130 << 8)
        start = {"attempt": 2, "job": "job", "ranks": [0], "world": 1, "master": ["127.0.0.1", 1], "settings": settings}
        await wait_until(lambda: driver.channels)
        driver.channels[0].send_message(do="start", epoch=1, **start)
        await wait_until(lambda: driver.messages)
        agent.end_requested.set()
        await life

    (failed,) = play(tmp_path, monkeypatch, scene).messages
    assert isinstance(failed, StartFailed)
    assert "the package regex is not installed; run pip install" in failed.reason


def test_without_a_lease_it_waits_for_no_answer(tmp_path, monkeypatch):
    async def scene(driver: Driver, agent: Agent, rank: TrainerProcess, life: asyncio.Task[None]) -> None:
        driver.answers = False
        rank.end(130 << 8)
        agent.end_requested.set()
        async with asyncio.timeout(3.0):  # less than it would wait
            await life

    play(tmp_path, monkeypatch, scene, lease=None)


def garble(folder: Path, pid: int) -> None:
    """Write a status record with an invalid time, next to a sound record of calls of the same process."""
    CallLog(folder, 0, 1).close()
    body = json.dumps({"rank": 0, "pid": pid, "phase": "train", "step": 1, "time_ns": "now"}).encode()
    (folder / "rank-0.status").write_bytes(struct.pack("<QI", 2, len(body)) + body)


def test_a_garbled_status_record_and_a_reader_that_fails_silence_no_agent(tmp_path, monkeypatch, caplog):
    async def scene(driver: Driver, agent: Agent, rank: TrainerProcess, life: asyncio.Task[None]) -> None:
        async def beats() -> Heartbeat:
            before = len(driver.beats)
            agent.telemetry._changed.set()
            await wait_until(lambda: len(driver.beats) > before)
            return driver.beats[-1]

        rank.pid = os.getpid()
        garble(agent.run_folder / "status", rank.pid)
        assert (await beats()).workers[0].phase == ""  # as before its first record
        monkeypatch.setattr(agent.trainers, "read_checksums", lambda: 1 / 0)
        assert (await beats()).workers[0].pid == rank.pid
        failing = iter([True])
        workers = agent.trainers.describe_workers
        monkeypatch.setattr(agent.trainers, "describe_workers", lambda: 1 / 0 if next(failing, False) else workers())
        agent.telemetry._changed.set()  # this one ends the loop of heartbeats, which starts again
        await wait_until(lambda: "the heartbeat failed" in caplog.text)
        assert (await beats()).workers[0].pid == rank.pid
        rank.end(0)
        agent.end_requested.set()
        await life

    monkeypatch.setattr("megascale.core.failure.keep_running.__defaults__", (0.01,))
    play(tmp_path, monkeypatch, scene)
    assert "checksums of weights failed (ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("how", ["keep", "kill"])
def test_an_agent_reports_how_long_killed_ranks_delay_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Ranks that stay in their processes do not wait until the memory of a killed rank is free."""

    async def scene(driver: Driver, agent: Agent, rank: TrainerProcess, life: asyncio.Task[None]) -> None:
        rank.end(signal.SIGKILL)
        agent.trainers._dying.pids.add(-1)
        driver.channels[0].send_message(do="stop", epoch=1, order=7, how=how, grace_period=1.0)
        if how == "kill":
            await wait_until(lambda: agent._order_task is not None)
            assert not driver.messages
            agent.trainers._dying.pids.clear()
        await wait_until(lambda: driver.messages)
        agent.end_requested.set()
        await life

    (stopped,) = play(tmp_path, monkeypatch, scene).messages
    assert isinstance(stopped, Stopped)
    assert stopped.order == 7
    assert (stopped.exit_seconds > 0.005) is (how == "kill")


def test_an_agent_reports_that_sigkill_does_not_end_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(driver: Driver, agent: Agent, rank: TrainerProcess, life: asyncio.Task[None]) -> None:
        async def fail_to_stop(*arguments: object, **options: object) -> str:
            return "SIGKILL has not ended rank 0 (process 7)"

        monkeypatch.setattr(agent.trainers, "stop", fail_to_stop)
        driver.channels[0].send_message(do="stop", epoch=1, order=7, how="kill", grace_period=1.0)
        await wait_until(lambda: driver.messages)
        agent.end_requested.set()

    (stopped,) = play(tmp_path, monkeypatch, scene).messages
    assert isinstance(stopped, Stopped)
    assert (stopped.order, stopped.port) == (7, 0)
    assert stopped.problem == "SIGKILL has not ended rank 0 (process 7)"


def test_a_start_next_to_ranks_that_still_train_is_refused(tmp_path, monkeypatch):
    async def scene(driver: Driver, agent: Agent, rank: TrainerProcess, life: asyncio.Task[None]) -> None:
        monkeypatch.setattr(agent.trainers, "has_active_ranks", lambda: False)  # which refuses this start before
        order = Start(epoch=1, attempt=3, job="job", ranks=(0,), world=1, master=("127.0.0.1", 1), settings="")
        refusal, errno = await agent._start_trainers(order)
        assert refusal == "attempt 3 cannot start: of 1 processes of the attempt before, 1 still train"
        assert errno == 0

    play(tmp_path, monkeypatch, scene)
