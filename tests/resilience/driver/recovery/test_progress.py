"""A job without progress ends with a verdict that names the step, for any cause."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config import load
from megascale.core.status import FAILED_IN_STEP
from megascale.data.dataset.ledger import find_step_samples
from megascale.data.dataset.samples import hash_sample_ids
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.local import LocalCluster
from megascale.resilience.driver.driver import Driver
from megascale.resilience.driver.recovery import escalation as progress
from megascale.resilience.driver.state.job_state import JobState, Phase
from megascale.resilience.driver.state.journal import Journal
from megascale.resilience.protocol.heartbeat import Worker
from megascale.resilience.rules.view import Verdict
from tests.conftest import lines


def inject_fault(run: Path, **fault: object) -> None:
    """A fault that both ranks do to themselves in every attempt."""
    (run / "faults").mkdir(parents=True)
    for rank in range(2):
        record = {"rank": rank, "persistent": True} | fault
        (run / "faults" / f"{rank}.json").write_text(json.dumps(record))


def test_a_step_that_kills_every_start_ends_the_job_and_is_named_with_its_samples(launch, megascale, tmp_path):
    inject_fault(tmp_path / "runs" / "doomed", kind="segfault", step=7)
    arguments = ["--nodes=1", "--train.steps=50", "--checkpoint.interval=2", "--resilience.faults=true"]
    job = launch("doomed", *arguments, "--resilience.no_progress_limit=3")
    assert job.finish() == 1, job.story()
    events = job.events()
    assert 2 <= sum(e.kind == "attempt_started" for e in events) <= 5, job.story()
    (fatal,) = [e for e in events if e.kind == "fatal_step"]
    assert fatal.details["step"] == 7
    assert fatal.details["times"] >= 3
    named = fatal.details["samples"]
    assert [s["sample"] for s in named] == [24, 25, 26, 27]  # six steps of four samples are before it
    failed = next(e for e in events if e.kind == "job_failed")
    for part in ("no step beyond 7", "ended in step 7", "samples 24 to 27", "SIGSEGV"):
        assert part in failed.evidence[0]
    # The verdict names the samples that an undisturbed run trains in that step.
    calm = megascale("train", tmp_path / "tiny.toml", "--train.steps=7", "--train.name=calm", "--parallel.data=2")
    assert calm.returncode == 0, calm.stderr
    ledger = lines(tmp_path / "runs" / "calm" / "samples" / "ledger.jsonl")[6]
    ids = np.array([[s["epoch"], 0, s["window"]] for s in named], dtype=np.int64)
    assert (ledger["first"], ledger["count"], ledger["ids"]) == (24, 4, f"{hash_sample_ids(ids):016x}")


def trainer(rank: int, phase: str, step: int) -> Worker:
    return Worker(rank, 100 + rank, "signalled", 11, phase, step)


def test_a_start_ends_in_the_step_of_those_to_blame_and_not_while_it_saves_or_loads():
    blamed = [Verdict("x", ("n0",), (1,), "recover", ("why",))]
    absent = [Verdict("x", (), (), "recover", ("why",))]
    pair = [trainer(0, FAILED_IN_STEP, 7), trainer(1, "train", 7)]
    assert progress.find_end_step(blamed, pair) == 7
    # However soon they end after the step has begun: the driver may not have seen them in it.
    assert progress.find_end_step(absent, [trainer(0, FAILED_IN_STEP, 7), trainer(1, FAILED_IN_STEP, 7)]) == 7
    for phase in ("", "start", "load", "save", "evaluate", "done", "failed"):
        assert progress.find_end_step(blamed, [trainer(1, phase, 7)]) == 0
    assert progress.find_end_step(blamed, [trainer(1, "failed", 0)]) == 0  # an error before the first step
    # Of several steps, that of most ranks counts, and of all ranks only those to blame.
    assert progress.find_end_step(absent, [trainer(0, "train", 8), trainer(1, "train", 7), trainer(2, "train", 7)]) == 7
    assert progress.find_end_step(blamed, [trainer(0, "train", 8), trainer(1, "train", 7), trainer(2, "train", 8)]) == 7
    assert progress.find_end_step(blamed, [trainer(0, "train", 8)]) == 0


def test_equal_ends_are_counted_from_the_last_one():
    assert progress.count_equal_ends(JobState("a")) == (0, 0)
    assert progress.count_equal_ends(replace(JobState("a"), ends=(7, 3, 7, 7))) == (7, 2)
    job = replace(JobState("a"), step=5, best=5, ends=(3,), starts_without_progress=1)
    assert progress.compute_progress(job, 6) == {"starts_without_progress": 2, "ends": (3, 6)}
    assert progress.compute_progress(replace(job, step=6), 6) == {"best": 6, "starts_without_progress": 0, "ends": (6,)}
    ends = progress.compute_progress(replace(job, ends=tuple(range(50))), 99)["ends"]
    assert ends == (*range(1, 50), 99)
    assert "brought no step beyond 5 (resilience.no_progress_limit=3)" in progress.explain_no_progress(job, 3)
    assert "brought no step at all" in progress.explain_no_progress(replace(job, best=0), 3)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10)), max_size=60), st.integers(1, 8))
def test_starts_without_a_new_step_are_counted_whatever_they_ended_for(ends, limit):
    """(furthest step that a start was seen in, step that it ended in) of each: the job ends within the limit."""
    job = JobState("a")
    without = 0
    furthest = 0
    for observed, at in ends:
        job = replace(job, step=max(job.step, observed))
        job = replace(job, **progress.compute_progress(job, at))
        without = 0 if observed > furthest else without + 1
        furthest = max(furthest, observed)
        assert job.starts_without_progress == without
        assert len(job.ends) == min(without + (furthest > 0), progress.REMEMBERED_ENDS)
        step, times = progress.count_equal_ends(job)
        assert step == at
        assert all(end == at for end in job.ends[-times:])
        assert JobState.from_json(job.to_json()) == job
        if job.starts_without_progress >= limit:
            assert f"{without} starts in a row" in progress.explain_no_progress(job, limit)
            break


KINDS = ("segmentation_fault", "cuda_error", "network_error", "process_exit", "hang", "nonfinite_gradient", "new_kind")


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(["recover", "diagnose", "evict"])), min_size=10),
    st.integers(1, 6),
    st.integers(0, 3),
)
@settings(max_examples=20, deadline=None)
def test_no_cause_and_no_remedy_gets_around_the_count(tmp_path_factory, ends, limit, steps):
    """A driver whose starts all end without a new step, but for a first one that brought `steps`."""
    run = tmp_path_factory.mktemp("run")
    config = load(None, [f"--resilience.no_progress_limit={limit}", "--resilience.retries=1000"])
    journal, _ = Journal.take(run, 0.05)

    async def work() -> int:
        driver = Driver(
            run,
            config,
            LocalCluster(ClusterRequest(run, config)),
            ["train"],
            journal,
            JobState("a", Phase.RUNNING, 1),
        )
        for number, (kind, action) in enumerate(ends):
            driver.job.state = replace(driver.job.state, phase=Phase.RUNNING, attempt=number + 1, step=steps)
            driver.response.act([Verdict(kind, (), (0,), action, ("why",))])
            if driver.job.state.goal is Phase.FAILED:
                return number + 1
        return 0

    starts = asyncio.run(work())
    assert starts == limit + (steps > 0)
    (failed,) = [e for e in journal.events() if e.kind == "job_failed"]
    assert f"{limit} starts in a row" in failed.evidence[0]
    journal.close()


def test_a_job_of_an_older_version_is_still_read():
    record = json.loads(JobState("a", attempt=3).to_json())
    del record["ends"]
    assert JobState.from_json(json.dumps(record)) == JobState("a", attempt=3)


@pytest.mark.parametrize(("step", "expected"), [(1, (0, 4)), (2, (4, 4)), (3, (8, 6)), (4, (14, 6)), (6, (26, 6))])
def test_a_steps_samples_follow_the_ledger(step, expected):
    """The batch size was changed to 6 before step 3."""
    ledger = [{"step": 1, "first": 0, "count": 4}, {"step": 2, "first": 4, "count": 4}]
    ledger += [{"step": 3, "first": 8, "count": 6}]
    assert find_step_samples(ledger, step, 6) == expected


@given(st.integers(1, 1000), st.integers(1, 64))
def test_without_a_ledger_samples_follow_the_batch_size(step, batch):
    assert find_step_samples([], step, batch) == ((step - 1) * batch, batch)
