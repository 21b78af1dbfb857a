"""Ranks of an unreachable node start elsewhere only when they have surely ended there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from megascale.config import Config, ResilienceConfig
from megascale.resilience.cluster.base import NodeInfo
from megascale.resilience.driver.driver import Driver
from megascale.resilience.driver.state.job_state import JobState, Phase
from megascale.resilience.driver.state.journal import Journal
from megascale.resilience.protocol.agent_messages import Stopped
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker
from tests.resilience.driver.telemetry.test_adoption import Channel
from tests.resilience.driver.telemetry.test_lost_nodes import Elsewhere, hello


class Seeing(Elsewhere):
    """A cluster that may see that nothing of a node runs any more."""

    certain = False

    def nodes(self) -> list[NodeInfo]:
        return [NodeInfo(n, "", n not in self.over, n not in self.over) for n in self.names]

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.noted: list[str] = []

    def has_stopped(self, name: str) -> bool:
        return self.certain

    def record_agent_end(self, name: str) -> None:
        self.noted.append(name)


def nothing(driver: Driver, cluster: Seeing, channel: Channel) -> None: ...


def play(run: Path, free: Any, before: Any = nothing) -> tuple[list[str], list[Any]]:
    """Node n1 of n0 and n1 is lost after `before(driver, cluster, its channel)`, n2 is the spare; `free(driver,
    cluster)` is what ends its ranks. The orders of n1 up to then and the driver's events."""
    journal, _ = Journal.take(run, 0.05)
    orders: list[str] = []

    async def work() -> None:
        cluster = Seeing(3)
        job = JobState("a", Phase.RUNNING, 1, ("n0", "n1"), data=2)
        limits = ResilienceConfig(nodes=2, spares=1, cluster="elsewhere", agent_lease=1000.0)
        driver = Driver(run, Config(resilience=limits), cluster, ["train"], journal, job)
        channels = {name: Channel() for name in cluster.names}
        for name, channel in channels.items():
            assert driver.admission.handle_hello(channel, hello(name, ("n0", "n1"))) == ""
        cluster.over.add("n1")
        before(driver, cluster, channels["n1"])
        driver.nodes["n1"].last_seen -= 100.0
        driver.lost_nodes.recover_lost_node(driver.nodes["n1"], "it is silent")
        orders.extend(channels["n1"].orders)

        def step() -> None:
            for name in ("n0", "n2"):
                stopped = Stopped(driver.attempts.last_order, 1, 29500)
                driver.telemetry.handle_message(name, channels[name], stopped)
            driver.run_iteration(time.monotonic())

        for _ in range(5):
            step()
        assert driver.job.phase is Phase.STOPPING, "ranks of n1 were started elsewhere while they may run there"
        assert driver.job.state.placement == ("n0", "n2")
        free(driver, cluster)
        step()
        assert (driver.job.phase, driver.job.state.attempt) == (Phase.STARTING, 2)
        driver.tasks.cancel()

    asyncio.run(work())
    events = journal.events()
    journal.close()
    return orders, events


def test_when_its_lease_is_over(tmp_path):
    def free(driver: Driver, cluster: Seeing) -> None:
        driver.nodes.leases.end_times["n1"] = time.monotonic()

    orders, events = play(tmp_path, free)
    assert orders[-2:] == ["parted", "closed"]  # in this order: an end of the connection alone means the driver's end
    (fenced,) = [e for e in events if e.kind == "ranks_fenced"]
    assert fenced.nodes == ("n1",)


def test_when_the_cluster_has_seen_it_end(tmp_path):
    def free(driver: Driver, cluster: Seeing) -> None:
        cluster.certain = True

    play(tmp_path, free)


def beat(sequence: int, state: Literal["running", "exited"], leaving: bool = True) -> Heartbeat:
    return Heartbeat("a", 1, "n1", sequence, 0, workers=(Worker(1, 4711, state),), leaving=leaving)


@pytest.mark.parametrize("expected", ["by the cluster", "by its word"])
def test_when_an_agent_that_ends_says_that_it_has_ended_them(tmp_path, expected):
    """A pod is deleted: that its ranks have ended is known from its agent, which is heard to its end, and not only when
    its kubelet has said so or its lease is over."""
    channel = Channel()

    def before(driver: Driver, cluster: Seeing, matching: Channel) -> None:
        nonlocal channel
        channel = matching
        if expected == "by the cluster":
            cluster.ending = frozenset({"n1"})
        else:
            driver.telemetry.handle_heartbeat("n1", matching, beat(1, "running"))

    def free(driver: Driver, cluster: Seeing) -> None:
        received = channel.orders.count("heard")
        driver.telemetry.handle_heartbeat("n1", channel, beat(2, "running"))
        assert "n1" in driver.nodes.leases.holders
        assert channel.orders.count("heard") == received  # or its ranks could run on for ever
        driver.telemetry.handle_heartbeat("n1", channel, beat(3, "exited"))
        assert channel.orders.count("heard") == received + 1  # it waits for that
        assert cluster.noted == ["n1"]

    orders, events = play(tmp_path, free, before)
    assert "parted" not in orders
    assert "closed" not in orders
    (fenced,) = [e for e in events if e.kind == "ranks_fenced"]
    assert fenced.nodes == ("n1",)


def test_ranks_that_ended_under_an_agent_that_goes_on_may_be_started_again(tmp_path):
    def before(driver: Driver, cluster: Seeing, matching: Channel) -> None:
        driver.telemetry.handle_heartbeat("n1", matching, beat(1, "exited", leaving=False))
        assert "n1" in driver.nodes.leases.holders

    play(tmp_path, lambda driver, cluster: setattr(cluster, "certain", True), before)
