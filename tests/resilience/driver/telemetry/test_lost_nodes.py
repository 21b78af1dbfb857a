"""Nodes that a cluster takes out of the job, and ends of agents that a cluster elsewhere learns of a little later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from megascale.config import Config, ResilienceConfig
from megascale.resilience.cluster.base import NO_REASONS, Cluster, NodeInfo
from megascale.resilience.driver.driver import Driver
from megascale.resilience.driver.recovery import escalation
from megascale.resilience.driver.recovery.escalation import Choice
from megascale.resilience.driver.state.job_state import JobEvent, JobState, NodeEvent, NodeState, Phase
from megascale.resilience.driver.state.journal import Journal
from megascale.resilience.protocol.agent_messages import Hello, RunningTrainers, Stopped
from tests.resilience.driver.telemetry.test_adoption import Channel


class Elsewhere(Cluster):
    """Nodes whose agents others start; what is `removed_nodes` or `over` is for the test to say."""

    removed_nodes: frozenset[str] = frozenset()
    ending: frozenset[str] = frozenset()
    drained: Mapping[str, str] = NO_REASONS

    def __init__(self, count: int) -> None:
        self.names = [f"n{i}" for i in range(count)]
        self.over: set[str] = set()
        self.barred: frozenset[str] = frozenset()

    def exclude_nodes(self, names: frozenset[str]) -> None:
        self.barred = names

    def announce(self, job: Any, token: bytes) -> None: ...

    def nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(n, "", n not in self.removed_nodes, n not in self.removed_nodes | self.over) for n in self.names
        ]

    async def start_agent(self, name: str) -> bool:
        return False

    async def fence(self, name: str) -> bool:
        return False

    async def request(self) -> str | None:
        return None


def hello(node: str, placement: tuple[str, ...], **changes: Any) -> Hello:
    state = JobState("a", Phase.RUNNING, 1, placement).to_json()
    stored = RunningTrainers(state, True) if node in placement else None
    arguments = {
        "job": "a",
        "node": node,
        "version": "",
        "address": "",
        "boot": node,
        "epoch": 1,
        "attempt": 1,
        "trainers": stored,
    }
    return Hello(**arguments | changes)


Scene = Callable[[Driver, Elsewhere, dict[str, Channel]], Awaitable[None]]


def play(run: Path, scene: Scene, nodes: int = 2, spares: int = 1) -> list[Any]:
    """A running job on the first nodes with the others as spares; the driver's events after the scene."""
    journal, _ = Journal.take(run, 0.05)

    async def work() -> None:
        cluster = Elsewhere(nodes + spares)
        placement = tuple(cluster.names[:nodes])
        job = JobState("a", Phase.RUNNING, 1, placement, data=nodes)
        config = Config(resilience=ResilienceConfig(nodes=nodes, spares=spares, cluster="elsewhere"))
        driver = Driver(run, config, cluster, ["train"], journal, job)
        channels = {name: Channel() for name in cluster.names}
        for name, channel in channels.items():
            assert driver.admission.handle_hello(channel, hello(name, placement)) == ""
        await scene(driver, cluster, channels)
        driver.tasks.cancel()

    asyncio.run(work())
    events = journal.events()
    journal.close()
    return events


def test_what_still_runs_on_a_node_that_was_taken_away_is_ended_and_replaced(tmp_path):
    async def scene(driver, cluster, channels):
        cluster.removed_nodes = frozenset({"n1"})
        driver.lost_nodes.find_lost_nodes(time.monotonic())
        assert channels["n1"].orders[:3] == ["welcome", "stop", "leave"]
        assert driver.nodes["n1"].state is NodeState.LOST
        assert driver.job.phase is Phase.STOPPING

        # Its agent lives and connects again: it gets the same answer, and does not count as a node.
        repeated = Channel()
        assert driver.admission.handle_hello(repeated, hello("n1", ("n0", "n1"))) == ""
        assert repeated.orders == ["welcome", "stop", "leave"]
        assert driver.nodes["n1"].channel is None
        assert driver.nodes["n1"].state is NodeState.LOST

    events = play(tmp_path, scene)
    (lost,) = [e for e in events if e.kind == "node_lost"]
    assert lost.nodes == ("n1",)
    assert "has taken n1 out of the job" in lost.evidence[0]
    assert [e.action for e in events if e.kind == "recovery_action"] == ["spare"]


def test_a_node_that_was_taken_away_is_not_waited_for_by_a_driver_that_is_new(tmp_path):
    async def scene(driver, cluster, channels):
        driver.telemetry.handle_disconnect("n1", channels["n1"])
        driver.nodes.change("n1", NodeEvent.AWAITED)  # as at its start: the agent may come
        driver.nodes["n1"].last_seen = time.monotonic() + 20.0
        cluster.removed_nodes = frozenset({"n1"})
        driver.lost_nodes.find_lost_nodes(time.monotonic())
        assert driver.nodes["n1"].state is NodeState.LOST
        assert driver.job.phase is Phase.STOPPING

    assert [e.action for e in play(tmp_path, scene) if e.kind == "recovery_action"] == ["spare"]


def test_an_end_that_the_cluster_learns_of_late_needs_no_window_of_silence(tmp_path):
    async def scene(driver, cluster, channels):
        driver.telemetry.handle_disconnect("n1", channels["n1"])
        await asyncio.sleep(0.3)  # The connection has closed. It is unknown whether the agent has ended.
        assert driver.nodes["n1"].state is NodeState.UP
        cluster.over.add("n1")
        async with asyncio.timeout(2.0):  # the window is 5 s
            while driver.nodes["n1"].state is NodeState.UP:
                await asyncio.sleep(0.01)

    events = play(tmp_path, scene)
    (lost,) = [e for e in events if e.kind == "node_lost"]
    assert "its connection closed and no process is there" in lost.evidence[0]


def test_a_cluster_is_asked_for_no_machine_whose_agent_is_there_nor_for_an_evicted_one(tmp_path):
    async def scene(driver, cluster, channels):
        await driver.nodes.wait_for_new_node()
        assert cluster.barred == {"n0", "n1", "n2"}
        driver.nodes.mark_lost(driver.nodes["n1"], "cut off")
        driver.nodes.take_out(driver.nodes["n2"], evict=True, reason="a person")
        await driver.nodes.wait_for_new_node()
        assert cluster.barred == {"n0", "n2"}

    play(tmp_path, scene)


def test_thirty_of_thirty_two_nodes_that_are_lost_at_once_and_given_back_train_again(tmp_path):
    async def scene(driver, cluster, channels):
        current, removed = time.monotonic(), cluster.names[2:]
        for name in removed:
            driver.nodes[name].last_seen = current - 6.0  # the window is 5 s
        driver.run_iteration(current)
        async with asyncio.timeout(10.0):
            while driver.job.phase is Phase.RUNNING:
                driver.run_iteration(time.monotonic())
                await asyncio.sleep(0.01)
        order = driver.attempts.last_order
        for name in cluster.names[:2]:
            stopped = Stopped(order, 1, 4000)
            driver.telemetry.handle_message(name, channels[name], stopped)
        driver.run_iteration(time.monotonic())
        assert driver.job.phase is Phase.WAITING  # two are too few for now, and the others are asked for
        assert not [name for name in removed if driver.nodes[name].is_usable]

        began = time.monotonic()
        for name in removed:
            channels[name] = Channel()
            assert driver.admission.handle_hello(channels[name], hello(name, (), boot=f"{name} again", attempt=0)) == ""
        driver.run_iteration(time.monotonic())
        assert driver.job.phase is Phase.STOPPING  # all stop, and say so, before any starts
        for name, channel in channels.items():
            driver.telemetry.handle_message(name, channel, Stopped(driver.attempts.last_order, 1, 4000))
        driver.run_iteration(time.monotonic())
        assert driver.job.phase is Phase.STARTING
        assert sorted(driver.job.state.placement) == sorted(cluster.names)
        assert driver.job.state.data == 32
        assert all("start" in channel.orders for channel in channels.values())
        assert time.monotonic() - began < 30.0  # of 60, the rest being the trainers' own start

    events = play(tmp_path, scene, nodes=32, spares=0)
    assert not [e for e in events if e.kind == "job_failed"]


def test_a_node_whose_ranks_sigkill_does_not_end_is_evicted_at_once(tmp_path: Path) -> None:
    async def scene(driver: Driver, cluster: Elsewhere, channels: dict[str, Channel]) -> None:
        driver.attempts.stop(JobEvent.RESTARTED, "a rank was killed")
        order = driver.attempts.last_order
        outdated = Stopped(order - 1, 1, 0, problem="of an earlier order")
        driver.telemetry.handle_message("n0", channels["n0"], outdated)
        blocked = Stopped(order, 1, 0, problem="SIGKILL has not ended rank 1 (process 7)")
        driver.telemetry.handle_message("n1", channels["n1"], blocked)
        driver.run_iteration(time.monotonic())
        assert driver.nodes["n1"].state is NodeState.EVICTED
        assert driver.nodes["n0"].state is NodeState.UP
        assert driver.job.phase is Phase.STOPPING  # n0 has not answered yet

    events = play(tmp_path, scene)
    (lost,) = [event for event in events if event.kind == "node_lost"]
    assert lost.evidence == ("n1 cannot stop its processes: SIGKILL has not ended rank 1 (process 7)",)
    assert [event.action for event in events if event.kind == "recovery_action"] == ["spare"]


def test_a_driver_that_took_over_waits_for_agents_to_be_told_of_it(tmp_path):
    async def scene(driver, cluster, channels):
        current = time.monotonic()
        driver.nodes.start_missing_agents(current)
        window = driver.limits.window
        assert driver.nodes["n1"].last_seen == current
        cluster.notice_seconds = 20.0
        driver.nodes.start_missing_agents(current)
        assert driver.nodes["n1"].last_seen > current + window
        driver.admission.handle_hello(channels["n1"], hello("n1", ("n0", "n1")))
        assert driver.nodes["n1"].last_seen < current + window

    play(tmp_path, scene)


def test_a_node_that_gets_ranks_for_the_first_time_is_told_whose_checkpoints_they_go_on_from(tmp_path):
    class RecordingChannel(Channel):
        def send_message(self, do: str, **details: object) -> None:
            super().send_message(do, **details)
            if do == "start":
                self.identity = details["identity"]

    async def scene(driver, cluster, channels):
        node = driver.nodes["n2"]
        node.channel = report = RecordingChannel()
        driver.attempts.send_start(node)
        assert report.identity == ""
        (tmp_path / "identity").write_text("0123456789abcdef\n")
        driver.attempts.send_start(node)
        assert report.identity == "0123456789abcdef"

    play(tmp_path, scene)


def test_an_agent_that_cannot_be_started_is_not_waited_for(tmp_path, monkeypatch, caplog):
    async def fail(self: Elsewhere, name: str) -> bool:
        raise KeyError("of no kind that was expected")

    monkeypatch.setattr(Elsewhere, "start_agent", fail)

    async def scene(driver: Driver, cluster: Elsewhere, channels: dict[str, Channel]) -> None:
        node = driver.nodes["n2"]
        driver.nodes.start_in_background(node, "for a test")
        while node.deadline == float("inf"):
            await asyncio.sleep(0)
        assert node.deadline == 0.0
        assert "the agent of node n2 cannot be started" in caplog.text

    play(tmp_path, scene)


def test_a_job_ends_though_its_last_samples_cannot_be_named(tmp_path, monkeypatch):
    async def fail(run: Path, step: int) -> Any:
        raise KeyError("first")

    monkeypatch.setattr("megascale.resilience.driver.recovery.response.find_samples", fail)

    async def scene(driver: Driver, cluster: Elsewhere, channels: dict[str, Channel]) -> None:
        driver.response.fail("it failed", code=1, end_step=3)
        while driver.job.phase is Phase.RUNNING:
            await asyncio.sleep(0)

    failed = next(event for event in play(tmp_path, scene) if event.kind == "job_failed")
    assert "its samples cannot be determined: KeyError" in failed.evidence[0]


def test_a_write_that_waits_for_the_disk_makes_no_node_silent(tmp_path, monkeypatch):
    """The driver reads nothing while it writes an event, so that no node was silent for that time."""
    situations = []
    monkeypatch.setattr(
        escalation, "choose_action", lambda limits, at, uses: situations.append(at) or Choice("retry", ())
    )

    async def scene(driver: Driver, cluster: Elsewhere, channels: dict[str, Channel]) -> None:
        current_time = time.monotonic()
        driver.nodes.iteration_time = current_time
        monkeypatch.setattr(time, "monotonic", lambda: current_time + 100 * driver.limits.window)
        driver.recovery.recover_node("n1", evict=False)
        driver.nodes.iteration_time = time.monotonic()
        driver.recovery.recover_node("n1", evict=False)

    play(tmp_path, scene)
    assert [at.is_reachable for at in situations] == [True, False]
