"""Ranks that outlive a fault stay in their processes: same process ids, state in place, the same weights in the end."""

from __future__ import annotations

import os
import signal
import time

from megascale.core.recovery_record import RecoveryRecord
from megascale.resilience.process_birth import read_birth_time
from tests.resilience.test_launch import CALM, assert_same_run, losses

MEMORY = ["--checkpoint.background=true", "--checkpoint.memory_interval=1", "--checkpoint.linger=30"]


def recovery(job) -> RecoveryRecord:
    record = RecoveryRecord.from_details(job.until("recovered").details)
    assert record is not None
    return record


def test_survivors_stay_with_their_state_and_the_weights_are_those_of_an_undisturbed_run(
    launch, megascale, tiny, tmp_path
):
    steps = ["--train.steps=30", "--checkpoint.interval=30"]
    options = CALM + steps + MEMORY + ["--resilience.keep_seconds=60"]
    job = launch("broken", "--nodes=2", *options)
    job.until("first_step")
    for number, victim in enumerate((1, 0)):
        job.until_step(8 + 8 * number)
        survivor = 1 - victim
        survivor_pid = job.pid(survivor)
        victim_log = job.run / "logs" / f"rank-{victim}.log"
        early_starts = victim_log.read_text().count("prepared before its attempt")
        job.kill_rank(victim)
        record = recovery(job)
        assert (record.cause, record.reused_ranks, record.doubts) == ("process_killed", (survivor,), {}), job.story()
        assert record.standing_ranks in ((survivor,), ())  # at the step that the other's memory has, or rolled back
        assert record.source == ("running ranks and memory" if record.standing_ranks else "memory")
        assert 0 <= record.lost_steps <= 1
        assert job.pid(survivor) == survivor_pid
        # Its replacement was started before the driver ordered the attempt.
        assert victim_log.read_text().count("prepared before its attempt") == early_starts + 1
    assert job.finish() == 0, job.story()
    assert job.pid(1) == survivor_pid
    calm = megascale("train", tiny, "--train.name=calm", "--parallel.data=2", *steps)
    assert calm.returncode == 0, calm.stderr
    assert_same_run(job.run, tmp_path / "runs" / "calm")


def test_a_run_without_any_saved_state_begins_anew_with_initial_weights(launch, megascale, tiny, tmp_path):
    """The survivor's weights have been trained, so they must not count as those of step 0."""
    steps = ["--train.steps=12", "--checkpoint.interval=12"]
    job = launch("unsaved", "--nodes=2", *CALM, *steps, "--resilience.keep_seconds=60")
    job.until("first_step")
    job.until_step(5)
    job.kill_rank(1)
    record = recovery(job)
    assert (record.reused_ranks, record.standing_ranks, record.source) == ((0,), (), "nothing"), job.story()
    assert record.resumed_step == 0
    assert job.finish() == 0, job.story()
    calm = megascale("train", tiny, "--train.name=calm", "--parallel.data=2", *steps)
    assert calm.returncode == 0, calm.stderr
    assert_same_run(job.run, tmp_path / "runs" / "calm")


def test_a_survivor_that_was_stopped_is_replaced_and_the_event_says_why(launch):
    job = launch("stopped", "--nodes=2", *CALM, *MEMORY, "--train.steps=100000", "--resilience.keep_seconds=60")
    job.until("first_step")
    job.until_step(4)
    doubtful = job.pid(0)
    os.kill(doubtful, signal.SIGSTOP)
    job.kill_rank(1)
    record = recovery(job)
    assert record.reused_ranks == ()
    assert record.doubts == {"0": "it was stopped by a signal"}
    assert job.pid(0) != doubtful


def test_without_keep_seconds_every_rank_gets_a_new_process(launch):
    job = launch("replaced", "--nodes=2", *CALM, *MEMORY, "--train.steps=100000", "--resilience.keep_seconds=0")
    job.until("first_step")
    job.until_step(4)
    survivor = job.pid(0)
    job.kill_rank(1)
    record = recovery(job)
    assert (record.reused_ranks, record.doubts) == ((), {})
    assert job.pid(0) != survivor


def test_copies_in_memory_outlive_the_linger_while_agents_wait_for_an_order(launch):
    """A second crash on a node makes the driver end all trainers for self-checks. A stopped driver delays the start."""
    linger = 5.0
    memory = [*MEMORY[:-1], f"--checkpoint.linger={linger:g}", "--checkpoint.interval=0"]
    job = launch("checked", "--nodes=2", "--resilience.window=5", *memory, "--train.steps=100000")
    job.until("first_step")
    job.until_step(4)
    os.kill(job.pid(1), signal.SIGSEGV)
    assert recovery(job).cause == "segmentation_fault"
    job.until_step(losses(job.run)[-1][0] + 4)
    survivor = job.pid(0)
    os.kill(job.pid(1), signal.SIGSEGV)
    crash = job.until("segmentation_fault")
    assert crash.action == "diagnose", crash.evidence
    job.wait(lambda: not read_birth_time(survivor), "end of the trainers")
    os.kill(job.process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + linger + 2.0  # a service looks every 0.2 s whether it is still needed
    job.wait(lambda: time.monotonic() > deadline, "end of the linger")
    os.kill(job.process.pid, signal.SIGCONT)
    record = recovery(job)
    assert record.source == "memory", job.story()
    assert 0 <= record.lost_steps <= 1
