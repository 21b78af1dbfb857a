"""Observations of the driver, which become the view that the rules judge."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale.core.events import Event
from megascale.core.grid import Grid
from megascale.resilience.driver.nodes import Nodes
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.recovery.response import Response
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobEvent, Phase
from megascale.resilience.protocol.agent_messages import Steps
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker
from megascale.resilience.rules.silence import FIRST_STEP, FOREIGN_GRACE_PERIOD
from megascale.resilience.rules.view import Metric, SlowFinding, View

METRICS_LIMIT = 400  # last steps whose metrics are kept
DURATIONS_LIMIT = 20  # longest durations of a phase that are kept
_FREQUENT_SHARE = 20  # a duration is frequent if one of this many durations is at least as long
_SINGLE_WEIGHT = 0.3  # weight of the longest duration of all


class PhaseDurations:
    """The longest times for which trainers stay in a phase without a change, learned from the run.

    A duration is usual if one of twenty durations of the phase is at least as long, or `DURATIONS_LIMIT` of them are.
    So after some time a pause every hundred steps does not count as a hang. The longest duration of all, such as that
    of a host that was busy for a moment, counts with the weight `_SINGLE_WEIGHT`.
    """

    def __init__(self) -> None:
        self._longest: dict[str, list[float]] = {}  # phase -> longest durations in seconds, ascending
        self._counts: dict[str, int] = {}  # phase -> number of all durations

    def add(self, phase: str, seconds: float) -> None:
        """Add the seconds for which a trainer stayed in a phase."""
        longest = self._longest.setdefault(phase, [])
        self._counts[phase] = self._counts.get(phase, 0) + 1
        if len(longest) < DURATIONS_LIMIT or seconds > longest[0]:
            insort(longest, seconds)
            del longest[:-DURATIONS_LIMIT]

    def compute_usual(self) -> dict[str, float]:
        """Return the longest usual duration of each phase in seconds."""
        usual = {}
        for phase, longest in self._longest.items():
            frequent_count = max(1, self._counts[phase] // _FREQUENT_SHARE)
            position = min(DURATIONS_LIMIT, frequent_count, len(longest))  # from the end: the longest has position 1
            usual[phase] = max(longest[-position], _SINGLE_WEIGHT * longest[-1])
        return usual


@dataclass(kw_only=True, eq=False)
class Observations:
    """Collects the observations that the rules judge.

    Attributes:
        nodes: all nodes.
        attempts: has the start time of the present attempt.
        response: has earlier incidents and verdicts.
        record_event: writes an event into the audit log.
        list_slow_findings: returns the slow machines that the spans show.
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    response: Response
    settings: RunningSettings
    record_event: RecordEvent
    list_slow_findings: Callable[[], tuple[SlowFinding, ...]] = tuple
    _metrics: deque[Metric] = field(default_factory=lambda: deque(maxlen=METRICS_LIMIT), init=False)
    _durations: PhaseDurations = field(default_factory=PhaseDurations, init=False)
    _first_steps_attempt: int = field(default=0, init=False)  # attempt of `_first_steps`
    _first_steps: dict[int, int] = field(default_factory=dict, init=False)  # first seen step of that attempt by rank

    def view(self, current_time: float) -> View:
        """Return the view that the rules judge."""
        state = self.job.state
        limits = self.settings.limits
        parallel = self.settings.config.parallel
        size = state.ranks_per_node
        axis_sizes = parallel.axis_sizes() | {"data": state.data}
        holders = []
        for index, name in enumerate(state.placement):
            first_rank = index * size
            holders.append(self.nodes[name].view(tuple(range(first_rank, first_rank + size))))
        return View(
            job=state.name,
            attempt=state.attempt,
            phase=Phase.RUNNING.value if self.job.is_running else state.phase.value,
            time=current_time,
            started=self.attempts.started,
            members=holders + [node.view(()) for node in self.nodes.list_spares()],
            grid=Grid.from_world_size(parallel.model_ranks * state.data, ranks_per_host=size, **axis_sizes),
            window=limits.window,
            interval=limits.interval,
            first_step=limits.first_step,
            usual_durations=self._compute_usual_durations(),
            incidents=list(self.response.incidents),
            past=list(self.response.past_verdicts),
            metrics=list(self._metrics),
            slow_findings=self.list_slow_findings(),
            slow_action=limits.slow_action,
            slow_least=limits.slow_least,
            replay_action=limits.replay_action,
            **self._describe_foreign(),
        )

    def _describe_foreign(self) -> dict[str, Any]:
        """Return the fields of the view for another trainer's command, {} for this package's trainer."""
        if not self.settings.config.foreign.command:
            return {}
        return {"is_foreign": True, "grace_period": FOREIGN_GRACE_PERIOD, "saved_step": self.saved_step}

    @property
    def saved_step(self) -> int:
        """Step of the newest complete checkpoint that an agent has found; 0 if unknown."""
        heartbeats = [node.heartbeat for node in self.nodes.all()]
        return max((heartbeat.saved_step for heartbeat in heartbeats if heartbeat is not None), default=0)

    def _compute_usual_durations(self) -> dict[str, float]:
        """Return the longest usual duration of each phase; another trainer's steps may pause as long as configured."""
        durations = self._durations.compute_usual()
        pause = self.settings.config.foreign.pause
        if pause:
            durations["train"] = max(durations.get("train", 0.0), pause / FOREIGN_GRACE_PERIOD)
        return durations

    def learn_durations(self, previous: Heartbeat | None, heartbeat: Heartbeat) -> None:
        """Learn from two successive heartbeats how long trainers stayed in the phases that they left."""
        if previous is None or previous.attempt != heartbeat.attempt or not self.job.is_at_work:
            return
        is_starting = self.job.phase is Phase.STARTING
        for old, new in zip(previous.workers, heartbeat.workers, strict=False):
            has_moved = (old.phase, old.step, old.action) != (new.phase, new.step, new.action)
            if not has_moved or old.rank != new.rank or not old.phase:
                continue
            if not is_starting:
                self._durations.add(old.phase, old.status_age)
            elif old.phase == "train":  # A first step takes longer than any other.
                self._durations.add(FIRST_STEP, old.status_age)

    def record_steps(self, steps: Steps) -> None:
        """Store the metrics of steps, from the agent of rank 0."""
        if steps.replaces_earlier:
            self._metrics.clear()
        for item in steps.steps:
            self._metrics.append(Metric(item.step, item.loss, grad_norm=item.grad_norm, seconds=item.seconds))

    def follow_progress(self, current_time: float, workers: Sequence[Worker]) -> None:
        """Advance the job to the furthest step, and to RUNNING after the first step of this attempt."""
        if self._first_steps_attempt != self.job.state.attempt:
            self._first_steps_attempt = self.job.state.attempt
            self._first_steps = {}
        furthest_step = self.job.state.step
        for worker in workers:
            if worker.phase not in ("train", "save", "evaluate", "done"):
                continue
            # Outside of "train", `step` is the last complete step.
            current_step = worker.step if worker.phase == "train" else worker.step - 1
            first_step = self._first_steps.setdefault(worker.rank, current_step)
            self.job.advance(worker.step)
            has_done_step = worker.step > first_step or worker.phase != "train" or worker.completed_steps > 0
            if self.job.phase is Phase.STARTING and has_done_step:
                event = JobEvent.FIRST_STEP
                if self.job.state.missing_since > 0:
                    event = JobEvent.FIRST_STEP_DEGRADED
                self.job.apply(event)
                seconds = current_time - self.attempts.started
                text = f"first step of attempt {self.job.state.attempt} after {seconds:.2f} s"
                evidence = (text,) + self._describe_resumption(worker, furthest_step)
                self.record_event(Event.FIRST_STEP, evidence=evidence, seconds=seconds, step=worker.step)
                self._record_recovery(current_time)

    def _record_recovery(self, current_time: float) -> None:
        """Record the recovery that has ended with a first step, if there was one."""
        record = self.attempts.timeline.finish(self.nodes.all(), current_time)
        if record is not None:
            self.record_event(Event.RECOVERED, evidence=record.describe(), **record.to_details())

    def _describe_resumption(self, worker: Worker, furthest_step: int) -> tuple[str, ...]:
        """Return a sentence about the checkpoint from which another trainer resumed, empty for this package's trainer.

        Args:
            worker: the rank that has completed the first step.
            furthest_step: the furthest step of earlier attempts.
        """
        if not self.settings.config.foreign.command or self.job.state.attempt == 1:
            return ()
        step = worker.step - max(0, worker.completed_steps - 1)
        saved_step = self.saved_step
        repeated = max(0, furthest_step - step + 1)
        text = f"it is step {step}; {repeated} steps are repeated"
        if saved_step > step:
            text += (
                f"; the trainer did not resume from its newest checkpoint, that of step {saved_step}: check the "
                "option by which it resumes"
            )
        elif saved_step:
            text += f"; the newest checkpoint is that of step {saved_step}"
        return (text,)
