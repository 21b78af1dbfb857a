"""Nodes that a cluster drains, a job that it gives to another driver, and a signal that comes twice."""

from __future__ import annotations

import asyncio
import time

from megascale.errors import EXIT_INTERRUPTED
from megascale.resilience.driver import operations
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.protocol.agent_messages import Stopped
from tests.resilience.driver.telemetry.test_adoption import Channel
from tests.resilience.driver.telemetry.test_lost_nodes import hello, play


def start_again(driver, channels) -> tuple[str, ...]:
    """Stop everything and place it anew; the nodes that then have ranks."""
    driver.recovery.recover(("n0",), frozenset())
    for _ in range(2):  # one stop before placing, one before starting
        for name, channel in channels.items():
            driver.telemetry.handle_message(name, channel, Stopped(driver.attempts.last_order, 1, 4000))
        driver.run_iteration(time.monotonic())
    assert driver.job.phase is Phase.STARTING
    return driver.job.state.placement


def test_a_drained_node_trains_on_and_is_left_for_a_spare_at_the_next_start(tmp_path):
    async def scene(driver, cluster, channels):
        cluster.drained = {"n1": "fan is loud"}
        driver.run_iteration(time.monotonic())
        driver.run_iteration(time.monotonic())
        assert driver.job.phase is Phase.RUNNING
        assert "stop" not in channels["n1"].orders
        assert start_again(driver, channels) == ("n0", "n2")

        cluster.drained = {}
        driver.run_iteration(time.monotonic())
        assert driver.nodes["n1"].is_usable

    events = play(tmp_path, scene)
    report, back = [e for e in events if e.kind in ("node_cordoned", "node_uncordoned")]
    assert report.nodes == back.nodes == ("n1",)
    assert "fan is loud" in report.evidence[0]


def test_drained_nodes_keep_their_ranks_where_no_other_can_take_them_and_get_no_new_ones(tmp_path):
    async def scene(driver, cluster, channels):
        cluster.drained = dict.fromkeys(cluster.names, "maintenance")
        driver.run_iteration(time.monotonic())
        assert driver.nodes.list_spares() == []
        assert start_again(driver, channels) == ("n0", "n1")

    events = play(tmp_path, scene)
    assert len([e for e in events if e.kind == "node_cordoned"]) == 3


def test_a_driver_whose_job_the_cluster_starts_elsewhere_ends_all_it_has_and_saves_nothing(tmp_path):
    async def scene(driver, cluster, channels):
        cluster.withdrawal_reason = "the job was started again"
        driver.run_iteration(time.monotonic())
        driver.run_iteration(time.monotonic())
        assert driver.job.is_ending
        assert not driver.job.state.save
        assert driver.job.state.exit_code == EXIT_INTERRUPTED
        assert [channels[name].orders.count("stop") for name in ("n0", "n1")] == [1, 1]

    events = play(tmp_path, scene)
    (ended,) = [e for e in events if e.kind == "job_interrupted"]
    assert "started again" in ended.evidence[0]


def test_a_signal_that_comes_twice_at_once_still_saves_and_a_later_one_does_not(tmp_path, monkeypatch):
    async def scene(driver, cluster, channels):
        driver.operations.interrupt()
        driver.operations.interrupt()
        assert driver.job.state.save
        assert channels["n0"].orders.count("stop") == 1
        monkeypatch.setattr(operations, "REPEATED_SIGNAL_SECONDS", 0.0)
        await asyncio.sleep(0)
        driver.operations.interrupt()
        assert not driver.job.state.save

    play(tmp_path, scene)


def test_what_the_cluster_has_end_is_told_so_by_the_driver_too(tmp_path):
    """A pod whose kubelet is dead, or that was removed by force, trains on: only the driver tells its agent."""

    async def scene(driver, cluster, channels):
        cluster.ending = frozenset({"n1"})
        driver.run_iteration(time.monotonic())
        driver.run_iteration(time.monotonic())
        assert channels["n1"].orders.count("leave") == 1
        assert "leave" not in channels["n0"].orders + channels["n2"].orders
        assert driver.job.phase is Phase.RUNNING  # it saves first
        assert not driver.nodes["n1"].is_usable

        repeated = Channel()  # a connection that broke may have held the order
        driver.admission.handle_hello(repeated, hello("n1", ("n0", "n1")))
        driver.run_iteration(time.monotonic())
        assert repeated.orders.count("leave") == 1

    play(tmp_path, scene)


def test_a_node_that_begins_to_end_once_it_has_stopped_gets_no_ranks(tmp_path):
    async def scene(driver, cluster, channels):
        driver.recovery.recover(("n0",), frozenset())
        for name, channel in channels.items():
            driver.telemetry.handle_message(name, channel, Stopped(driver.attempts.last_order, 1, 4000))
        driver.run_iteration(time.monotonic())  # placed as before
        for name, channel in channels.items():
            driver.telemetry.handle_message(name, channel, Stopped(driver.attempts.last_order, 1, 4000))
        cluster.ending = frozenset({"n1"})
        driver.run_iteration(time.monotonic())
        for name, channel in channels.items():
            driver.telemetry.handle_message(name, channel, Stopped(driver.attempts.last_order, 1, 4000))
        driver.run_iteration(time.monotonic())
        assert driver.job.phase is Phase.STARTING
        assert driver.job.state.placement == ("n0", "n2")
        assert "start" not in channels["n1"].orders

    play(tmp_path, scene)
