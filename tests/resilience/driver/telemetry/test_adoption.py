"""A journal that is lost or set back under a running job: the agents know better, and trainers go on."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sqlite3
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config import Config
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.local import LocalCluster
from megascale.resilience.driver.driver import Driver
from megascale.resilience.driver.state.job_state import JobState, Phase
from megascale.resilience.driver.state.journal import JOURNAL_FILE, Journal
from megascale.resilience.driver.state.journal_reader import Entry, JournalReader
from megascale.resilience.driver.telemetry.membership import _parse_held
from megascale.resilience.protocol.agent_messages import Hello, RunningTrainers


def test_a_journal_set_back_garbled_or_removed_stops_no_trainer(launch):
    arguments = ["--nodes=2", "--spares=1", "--train.steps=100000", "--checkpoint.interval=0", "--lr.schedule=constant"]
    job = launch("behind", *arguments)
    job.until("first_step", attempt=1)
    older = job.cwd / "older.sqlite"
    with sqlite3.connect(older) as copy, sqlite3.connect(job.run / JOURNAL_FILE) as db:
        db.backup(copy)
    job.kill_rank(1)
    job.until("first_step", attempt=2)
    pids = [job.pid(0), job.pid(1)]

    def adopt_again(damage) -> list[str]:
        """Kill the driver, damage the journal, and start a driver: what it tells until it has taken over."""
        job.process.kill()
        job.process.wait()
        damage()
        began = time.time()

        def list_new() -> list[Entry]:
            return [e for e in job.events() if e.time >= began]

        job.start()
        adopted = job.wait(lambda: [e for e in list_new() if e.kind == "attempt_adopted"], "the adoption")
        assert adopted[0].details["known"] <= 2
        job.until_step((job.run / "metrics.jsonl").read_text().count("\n") + 3)
        assert [job.pid(0), job.pid(1)] == pids, job.story()
        reader = JournalReader(job.run)
        reader.close()
        assert reader.job is not None
        assert (reader.job.attempt, reader.job.phase) == (2, Phase.RUNNING)
        return [e.kind for e in list_new()]

    def remove() -> None:
        for file in job.run.glob(f"{JOURNAL_FILE}*"):
            file.unlink()

    def set_back() -> None:
        remove()
        shutil.copy(older, job.run / JOURNAL_FILE)

    def garble() -> None:
        remove()
        (job.run / JOURNAL_FILE).write_bytes(b"no database" * 1000)

    def remove_all() -> None:
        remove()
        (job.run / "events.jsonl").unlink()  # only the agents know

    assert "journal_behind" in adopt_again(set_back)
    assert "journal_damaged" in adopt_again(garble)
    assert [e.attempt for e in job.events() if e.kind == "attempt_started"] == [1, 2]  # its history is there
    adopt_again(remove_all)
    job.seen = 0
    # It can still do all that a driver does: another fault, and an end on request.
    job.kill_rank(0)
    job.until("first_step", attempt=3)
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.story()


def hello(**changes) -> Hello:
    stored = RunningTrainers(JobState("a", Phase.STARTING, 5, ("n0", "n1")).to_json(), stepped=True)
    arguments = {
        "job": "a",
        "node": "n0",
        "version": "",
        "address": "",
        "boot": "",
        "epoch": 1,
        "attempt": 5,
        "trainers": stored,
    }
    return Hello(**arguments | changes)


def test_what_an_agent_holds_is_believed_only_if_it_fits():
    stored = _parse_held(hello(), "a")
    assert (stored.state.attempt, stored.state.placement, stored.has_stepped) == (5, ("n0", "n1"), True)
    assert _parse_held(hello(), "b") is None
    assert _parse_held(hello(node="n2"), "a") is None
    assert _parse_held(hello(attempt=6), "a") is None
    assert _parse_held(hello(trainers=None), "a") is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(st.text() | JSON.map(json.dumps), st.booleans())
def test_an_agent_that_holds_nonsense_holds_nothing(text, stepped):
    assert _parse_held(hello(trainers=RunningTrainers(text, stepped)), "a") is None


class Channel:
    """The driver's end of a channel."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def send_message(self, do: str, **details: object) -> None:
        self.orders.append(do)

    def close(self) -> None:
        self.orders.append("closed")


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 6),
    st.sampled_from([Phase.WAITING, Phase.PAUSED]),
)
@settings(max_examples=60, deadline=None)
def test_the_highest_attempt_that_agents_hold_is_the_jobs(tmp_path_factory, agents, recorded, phase):
    """(attempt, whether its trainers run, whether they have done a step) of each agent; what the journal knows."""
    run = tmp_path_factory.mktemp("run")
    journal, _ = Journal.take(run, 0.05)
    newest = max(attempt for attempt, _, _ in agents)
    stored = {a: [f"n{i}" for i, (b, runs, _) in enumerate(agents) if runs and a == b] for a in range(7)}

    async def work() -> tuple[Driver, list[Channel]]:
        driver = Driver(
            run,
            Config(),
            LocalCluster(ClusterRequest(run, Config())),
            ["train"],
            journal,
            JobState("a", phase, recorded),
            is_journal_doubtful=True,
        )
        driver.adoption.wait_for_agents(time.monotonic())
        channels = [Channel() for _ in agents]
        for i, (attempt, runs, stepped) in enumerate(agents):
            state = JobState("a", Phase.STARTING, attempt, tuple(stored[attempt])).to_json()
            contains = RunningTrainers(state, stepped) if runs else None
            greeting = hello(node=f"n{i}", attempt=attempt, boot=str(i), trainers=contains)
            assert driver.admission.handle_hello(channels[i], greeting) == ""
        assert all("stop" not in channel.orders for channel in channels)  # not before it is decided
        assert driver.adoption.decide(time.monotonic())
        return driver, channels

    driver, channels = asyncio.run(work())
    job = driver.job.state
    adopted = newest >= recorded and stored[newest]
    assert job.attempt == max(newest, recorded)
    assert job.placement == (tuple(stored[newest]) if adopted else ())
    stepped = bool(adopted) and agents[int(stored[newest][0][1:])][2]
    assert job.phase == ((Phase.RUNNING if stepped else Phase.STARTING) if adopted else phase)
    for i, channel in enumerate(channels):
        assert ("stop" in channel.orders) == (not adopted or f"n{i}" not in stored[newest])
    assert ("attempt_adopted" in [e.kind for e in journal.events()]) == bool(adopted)
    assert journal.job() == job or not (adopted or newest > recorded)
    journal.close()
