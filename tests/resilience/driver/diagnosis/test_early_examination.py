"""Examination of ranks that stand still, before the verdict about their hang."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from megascale.observe.hang.scene import RankEvidence, pack_evidence
from megascale.resilience.driver.diagnosis.diagnosis import EXAMINATION_LEAD, EXAMINATION_PAUSE
from megascale.resilience.driver.driver import Driver
from megascale.resilience.protocol.agent_messages import Evidence
from megascale.resilience.protocol.heartbeat import Heartbeat
from megascale.resilience.rules.silence import HANG_FLOOR
from tests.resilience.driver.telemetry.test_adoption import Channel
from tests.resilience.driver.telemetry.test_lost_nodes import Elsewhere, play
from tests.resilience.rules.views import worker

EARLY_AGE = HANG_FLOOR - 1.0


def send_heartbeats(driver: Driver, channels: dict[str, Channel], age: float, sequence: int) -> None:
    """Send a heartbeat of each rank, whose status is `age` seconds old. The process of rank 1 is stopped."""
    for rank, name in enumerate(("n0", "n1")):
        state = worker(rank, status_age=age, stopped=rank == 1)
        beat = Heartbeat("a", 1, name, sequence, 0, workers=(state,))
        driver.telemetry.handle_heartbeat(name, channels[name], beat)


def answer(driver: Driver, channels: dict[str, Channel]) -> None:
    """Send the evidence about each rank."""
    for rank, name in enumerate(("n0", "n1")):
        evidence = RankEvidence(rank, "stopped" if rank == 1 else "running")
        order = driver.rank_investigation._order
        message = Evidence(order, rank, data=pack_evidence(evidence, history=1))
        driver.telemetry.handle_message(name, channels[name], message)


async def iterate(driver: Driver, is_over) -> None:
    """Run iterations of the driver until `is_over()`."""
    async with asyncio.timeout(30):
        while not is_over():
            driver.run_iteration(time.monotonic())
            await asyncio.sleep(0.001)


def count_examinations(channels: dict[str, Channel]) -> list[int]:
    return [channels[name].orders.count("explain") for name in ("n0", "n1")]


@pytest.mark.parametrize("moves", [False, True])
def test_ranks_are_examined_before_they_count_as_hanging(moves: bool, tmp_path: Path) -> None:
    """If a rank moves after the examination, the verdict needs another one."""

    async def scene(driver: Driver, cluster: Elsewhere, channels: dict[str, Channel]) -> None:
        send_heartbeats(driver, channels, age=HANG_FLOOR - EXAMINATION_LEAD - 1.0, sequence=1)
        driver.run_iteration(time.monotonic())
        await asyncio.sleep(0)
        assert count_examinations(channels) == [0, 0]
        send_heartbeats(driver, channels, age=EARLY_AGE, sequence=2)
        await iterate(driver, lambda: count_examinations(channels) == [1, 1])
        answer(driver, channels)
        await iterate(driver, lambda: driver.diagnosis._examination is not None)
        assert driver.job.is_running
        assert not driver.diagnosis._is_explaining
        if moves:
            # The status is younger than the examination.
            driver.diagnosis._examination = driver.diagnosis._examination._replace(began=time.monotonic() - 60.0)
        send_heartbeats(driver, channels, age=HANG_FLOOR + 0.01, sequence=3)
        if moves:
            await iterate(driver, lambda: count_examinations(channels) == [2, 2])
            assert driver.job.is_running
            answer(driver, channels)
        await iterate(driver, lambda: not driver.job.is_running)
        assert count_examinations(channels) == ([2, 2] if moves else [1, 1])

    (hang,) = [event for event in play(tmp_path, scene, spares=0) if event.kind == "hang"]
    assert hang.ranks == (1,)
    assert hang.evidence[0].startswith("stopped: rank 1")


@pytest.mark.parametrize("moves", [False, True])
def test_a_move_that_is_reported_after_the_hang_prevents_the_verdict(moves: bool, tmp_path: Path) -> None:
    """Neither the heartbeat of the hang nor the examination before it can show the move."""

    async def scene(driver: Driver, cluster: Elsewhere, channels: dict[str, Channel]) -> None:
        send_heartbeats(driver, channels, age=EARLY_AGE, sequence=1)
        await iterate(driver, lambda: count_examinations(channels) == [1, 1])
        answer(driver, channels)
        await iterate(driver, lambda: driver.diagnosis._examination is not None)
        send_heartbeats(driver, channels, age=HANG_FLOOR + 0.01, sequence=2)
        driver.run_iteration(time.monotonic())  # detects the hang; its task has not begun
        assert driver.diagnosis._is_explaining
        send_heartbeats(driver, channels, age=0.0 if moves else HANG_FLOOR + 0.02, sequence=3)
        if not moves:
            await iterate(driver, lambda: not driver.job.is_running)
            return
        await iterate(driver, lambda: not driver.diagnosis._is_explaining)
        for _ in range(5):
            driver.run_iteration(time.monotonic())
            await asyncio.sleep(0.001)
        assert driver.job.is_running
        # The next silence has an examination of its own.
        send_heartbeats(driver, channels, age=HANG_FLOOR + 0.01, sequence=4)
        await iterate(driver, lambda: count_examinations(channels) == [2, 2])
        answer(driver, channels)
        await iterate(driver, lambda: not driver.job.is_running)

    assert [event.kind for event in play(tmp_path, scene, spares=0)].count("hang") == 1


def test_an_examination_that_does_not_count_is_repeated_after_a_pause(tmp_path: Path) -> None:
    async def scene(driver: Driver, cluster: Elsewhere, channels: dict[str, Channel]) -> None:
        send_heartbeats(driver, channels, age=EARLY_AGE, sequence=1)
        await iterate(driver, lambda: count_examinations(channels) == [1, 1])
        answer(driver, channels)
        await iterate(driver, lambda: driver.diagnosis._examination is not None)
        of_another_attempt = driver.diagnosis._examination._replace(attempt=-1, began=time.monotonic())
        driver.diagnosis._examination = of_another_attempt
        for _ in range(5):
            driver.run_iteration(time.monotonic())
            await asyncio.sleep(0.001)
        assert count_examinations(channels) == [1, 1]
        earlier = of_another_attempt.began - EXAMINATION_PAUSE
        driver.diagnosis._examination = of_another_attempt._replace(began=earlier)
        await iterate(driver, lambda: count_examinations(channels) == [2, 2])

    play(tmp_path, scene, spares=0)


def test_the_loop_wakes_for_the_heartbeat_that_shows_a_hang(tmp_path: Path) -> None:
    async def scene(driver: Driver, cluster: Elsewhere, channels: dict[str, Channel]) -> None:
        send_heartbeats(driver, channels, age=HANG_FLOOR - 0.5, sequence=1)
        wake = driver.tasks.wake
        for age, is_awake in ((HANG_FLOOR - 0.1, False), (HANG_FLOOR + 0.01, True), (HANG_FLOOR + 1.0, False)):
            wake.clear()
            send_heartbeats(driver, channels, age=age, sequence=2)
            assert wake.is_set() == is_awake

    play(tmp_path, scene, spares=0)
