"""What the driver has seen, put together as the view that the rules judge."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from megascale.core.events import Event
from megascale.core.grid import Grid
from megascale.resilience.driver.diagnosis.phase_durations import PhaseDurations
from megascale.resilience.driver.nodes.nodes import Nodes, Note
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.driver.state.transitions import JobEvent
from megascale.resilience.protocol.agent_messages import Steps
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker
from megascale.resilience.rules.silence import FIRST_STEP
from megascale.resilience.rules.verdicts import Verdict
from megascale.resilience.rules.view import Metric, SlowFinding, View

METRICS = 400  # steps that are remembered


class Observations:
    """Args:
    job, nodes, attempts: what is looked at.
    settings: in force.
    note: writes an event down.

    Attributes:
        incidents: (time, node, kind) of verdicts that named a node, over all attempts, oldest first.
        past: (time, verdict) of what earlier attempts were ended for, oldest first.
    """

    def __init__(self, job: Job, nodes: Nodes, attempts: Attempts, settings: RunningSettings, note: Note) -> None:
        self._job, self._nodes, self._attempts, self._settings, self._note = job, nodes, attempts, settings, note
        self._metrics: deque[Metric] = deque(maxlen=METRICS)
        self._phase_durations = PhaseDurations()
        self.slow: Callable[[], tuple[SlowFinding, ...]] = tuple  # what spans show, as somebody finds it
        self.incidents: list[tuple[float, str, str]] = []
        self.past: list[tuple[float, Verdict]] = []
        self._first_steps: dict[int, int] = {}
        self._attempt = 0  # that the first steps are of

    def view(self, now: float) -> View:
        """What the rules judge."""
        job, config, limits = self._job.state, self._settings.config, self._settings.limits
        each, parallel = job.ranks_per_node, config.parallel
        placed = [
            self._nodes[name].member(tuple(range(i * each, (i + 1) * each))) for i, name in enumerate(job.placement)
        ]
        return View(
            job=job.name,
            attempt=job.attempt,
            phase=job.phase.value,
            time=now,
            started=self._attempts.started,
            members=placed + [node.member(()) for node in self._nodes.spares()],
            grid=Grid(parallel.tensor, job.data, parallel.pipeline, job.ranks_per_node),
            window=limits.window,
            interval=limits.interval,
            first_step=limits.first_step,
            usual_durations=self._phase_durations.usual(),
            incidents=list(self.incidents),
            past=list(self.past),
            metrics=list(self._metrics),
            slow=self.slow(),
            slow_action=limits.slow_action,
            slow_least=limits.slow_least,
        )

    def learn(self, before: Heartbeat | None, after: Heartbeat) -> None:
        """Phase durations: how long trainers were in a phase without any change, of those that then went on."""
        starting = self._job.phase is Phase.STARTING
        if before is None or before.attempt != after.attempt or not (starting or self._job.phase is Phase.RUNNING):
            return
        for old, new in zip(before.workers, after.workers, strict=False):
            moved = (old.phase, old.step, old.action) != (new.phase, new.step, new.action)
            if not moved or old.rank != new.rank or not old.phase:
                continue
            if not starting:
                self._phase_durations.add(old.phase, old.status_age)
            elif old.phase == "train":  # longer than any other step
                self._phase_durations.add(FIRST_STEP, old.status_age)

    def told(self, steps: Steps) -> None:
        """What steps gave, from the agent of rank 0."""
        if steps.replaces_earlier:
            self._metrics.clear()
        self._metrics.extend(Metric(s.step, s.loss, s.grad_norm, s.seconds) for s in steps.steps)

    def progress(self, now: float, workers: list[Worker]) -> None:
        """The furthest step, and whether this attempt has done its first."""
        job = self._job
        if self._attempt != job.state.attempt:
            self._attempt, self._first_steps = job.state.attempt, {}
        for w in workers:
            if w.phase not in ("train", "save", "evaluate", "done"):
                continue
            first = self._first_steps.setdefault(w.rank, w.step if w.phase == "train" else w.step - 1)
            job.saw_step(w.step)
            if job.phase is Phase.STARTING and (w.step > first or w.phase != "train"):
                job.apply(JobEvent.FIRST_STEP)
                took = now - self._attempts.started
                self._note(
                    Event.FIRST_STEP,
                    evidence=(f"first step of attempt {job.state.attempt} after {took:.2f} s",),
                    seconds=took,
                    step=w.step,
                )

    def blame(self, verdict: Verdict) -> None:
        """Remember what nodes were named for."""
        self.incidents += [(time.monotonic(), node, str(verdict.kind)) for node in verdict.nodes]
