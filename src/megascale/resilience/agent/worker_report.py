"""State of a rank's process, as a heartbeat reports it to the driver."""

from __future__ import annotations

import os
import time
from typing import Literal

from megascale.errors import EXIT_FAILED
from megascale.resilience.agent.process_usage import ProcessUsage, read_usage
from megascale.resilience.agent.rank_programs import Progress, TrainerProcess
from megascale.resilience.protocol.heartbeat import RankStart, Worker, truncate

_TEXT_CHARACTERS = 200  # limit of the heartbeat for a name or a reason
_REPORTED_SECONDS = 30.0  # heartbeats describe a rank's start until this many seconds after its state was loaded


def describe_worker(trainer: TrainerProcess) -> Worker:
    """Return the state of a rank for a heartbeat, with the progress that was read last."""
    current_time = time.monotonic()
    progress = trainer.progress or Progress()
    usage = ProcessUsage()
    state: Literal["running", "exited", "signalled"] = "running"
    code = 0  # exit code, or number of the signal that ended the process
    tail = ""
    ended_age = 0.0
    if trainer.is_parked:
        # To the driver, a parked rank is a process that ended because it lost its peers.
        state = "exited"
        code = EXIT_FAILED
        ended_age = current_time - trainer.progress_time
    elif trainer.status is None:
        if trainer.pid:
            usage = read_usage(trainer.pid)
    else:
        ended_age = current_time - trainer.ended
        if os.WIFSIGNALED(trainer.status):
            state = "signalled"
            code = os.WTERMSIG(trainer.status)
        else:
            state = "exited"
            code = os.WEXITSTATUS(trainer.status)
        if code:
            tail = trainer.tail or trainer.read_tail()
    return Worker(
        rank=trainer.rank,
        pid=trainer.pid,
        state=state,
        code=code,
        phase=progress.phase,
        step=progress.step,
        action=truncate(progress.action, _TEXT_CHARACTERS),
        microbatch=progress.microbatch,
        completed_steps=progress.completed_steps,
        status_age=current_time - trainer.progress_time,
        message=truncate(progress.message),
        rss=usage.resident_bytes,
        cpu_seconds=usage.cpu_seconds,
        stopped=usage.stopped,
        stderr_tail=tail,
        exit=trainer.record,
        error=truncate(trainer.error),
        ended_age=ended_age,
        by_agent=trainer.by_agent,
        start=_describe_start(trainer),
    )


def _describe_start(trainer: TrainerProcess) -> RankStart | None:
    """Return the progress of a rank's start.

    Return None before the rank reports it, after the process has ended, and once enough heartbeats have reported the
    complete start.
    """
    start = trainer.start
    if start is None or trainer.status is not None:
        return None
    current_time = time.time_ns()

    def measure_age(time_ns: int) -> float:
        """Return the seconds since a time, or -1 if the time is 0 (unknown)."""
        return max(0.0, (current_time - time_ns) / 1e9) if time_ns else -1.0

    progress = trainer.progress or Progress()
    has_completed_step = progress.step > trainer.first_step >= 0
    if has_completed_step and measure_age(start.state_ns) > _REPORTED_SECONDS:
        return None
    return RankStart(
        process_age=measure_age(start.process_ns),
        groups_age=measure_age(start.groups_ns),
        state_age=measure_age(start.state_ns),
        step=start.step,
        source=start.source,
        is_reused=start.is_reused,
        is_standing=start.is_standing,
        left_age=measure_age(start.left_ns),
        stepped_age=measure_age(start.stepped_ns),
        kept_step=start.kept_step,
        doubt=trainer.replacement_reason[:_TEXT_CHARACTERS],
    )
