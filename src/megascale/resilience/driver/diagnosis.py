"""Diagnosis: the view that the rules judge, their verdicts, and what follows from them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from megascale.core.events import Event
from megascale.core.grid import Grid
from megascale.errors import EXIT_FAILED
from megascale.resilience import rules
from megascale.resilience.driver import hang_diagnosis, progress
from megascale.resilience.driver.job_state import Phase
from megascale.resilience.driver.metrics_tail import MetricsTail
from megascale.resilience.driver.phase_durations import PhaseDurations
from megascale.resilience.driver.placement import Placement
from megascale.resilience.rules.verdicts import SEVERITY, Verdict
from megascale.resilience.rules.view import View

SETTLING_SECONDS = 0.3  # seconds after a first bad end in which others of the same cause show
THOROUGH = 1.0  # seconds between looks at the history of all nodes


class Diagnosis(Placement):
    """A part of Driver."""

    metrics_tail: MetricsTail
    phase_durations: PhaseDurations
    past: list[tuple[float, Verdict]]
    _noted: set[tuple[Any, ...]]
    _explaining: bool = False
    _looking: bool = False  # whether the history is being looked at
    _looked: float = 0.0  # when it was looked at last, and how long that took
    _took: float = 0.0
    _naming: bool = False  # the job ends as soon as the samples of its last step are known

    def undo_update(self, verdict: Verdict) -> None:
        raise NotImplementedError

    def view(self, now: float) -> View:
        """What the rules judge."""
        job, parallel, holders = self.job, self.config.parallel, set(self.job.placement)
        each = job.ranks_per_node
        placed = [
            self.nodes[name].member(tuple(range(i * each, (i + 1) * each))) for i, name in enumerate(job.placement)
        ]
        spares = [n.member(()) for n in self.nodes.values() if n.name not in holders and n.usable]
        return View(
            job=job.name,
            attempt=job.attempt,
            phase=job.phase.value,
            now=now,
            started=self.started,
            members=placed + spares,
            grid=Grid(parallel.tensor, job.data, parallel.pipeline, job.ranks_per_node),
            window=self.limits.window,
            interval=self.limits.interval,
            first_step=self.limits.first_step,
            learned=self.phase_durations.usual(),
            incidents=list(self.incidents),
            past=list(self.past),
            metrics=self.metrics_tail.read(),
        )

    def judge(self, now: float) -> None:
        """Apply the rules to what is known and act on the verdicts."""
        view = self.view(now)
        workers = [w for _, w in view.workers()]
        self._progress(now, workers)
        if len(workers) == self.job.world and all(w.state == "exited" and not w.code for w in workers):
            self.enter(Phase.DONE, why="every rank ended well", exit_code=0)
            self.note(Event.JOB_DONE, evidence=(f"all {self.job.world} ranks ended with exit code 0",))
            return
        bad = [w for w in workers if w.state == "signalled" or w.code]
        if bad and self._first_bad is None:
            self._first_bad = now
        ended = sum(w.state != "running" for w in workers)
        if bad and ended < self.job.world and now - (self._first_bad or now) < SETTLING_SECONDS:
            return
        # Of a job so large that it takes long, the history is looked at less often.
        if not self._looking and now - self._looked > max(THOROUGH, 10 * self._took):
            self._looking = True
            self.spawn(self._look_through(view.still()))
        verdicts = rules.judge(view, rules.QUICK)
        hang = next((v for v in verdicts if v.kind == Event.HANG), None)
        if hang is not None and not self._explaining:
            self._explaining = True
            self.spawn(self._explain(hang, view))
        self.act([v for v in verdicts if v.kind != Event.HANG])

    async def _look_through(self, view: View) -> None:
        """Judge the history of all nodes in a thread: heartbeats are read meanwhile, silence is seen in time."""
        try:
            verdicts = await asyncio.to_thread(rules.judge, view, rules.SLOW)
        finally:
            self._looking, self._looked = False, time.monotonic()
            self._took = self._looked - view.now
        if self.job.attempt == view.attempt and self.job.phase in (Phase.STARTING, Phase.RUNNING):
            self.act(verdicts)

    async def _explain(self, hang: Verdict, view: View) -> None:
        """Find out in a thread who began a hang: ranks are asked for their stacks."""
        try:
            found = await asyncio.to_thread(hang_diagnosis.refine, hang, view, self.run_folder)
        finally:
            self._explaining = False
        if self.job.attempt == view.attempt:
            self.act([found])

    def _progress(self, now: float, workers: list[Any]) -> None:
        """The furthest step, and whether this attempt has done its first."""
        for w in workers:
            if w.phase not in ("train", "save", "evaluate", "done"):
                continue
            first = self._first_steps.setdefault(w.rank, w.step if w.phase == "train" else w.step - 1)
            if w.step > self.job.step:
                self.job = replace(self.job, step=w.step)
            if self.job.phase is Phase.STARTING and (w.step > first or w.phase != "train"):
                self.enter(Phase.RUNNING, updating=False)
                took = now - self.started
                self.note(
                    Event.FIRST_STEP,
                    evidence=(f"first step of attempt {self.job.attempt} after {took:.2f} s",),
                    seconds=took,
                    step=w.step,
                )

    def act(self, verdicts: list[Verdict]) -> None:
        """Write verdicts down, each once an attempt, and act on the hardest."""
        fresh = []
        for verdict in verdicts:
            key = (self.job.attempt, verdict.kind, verdict.nodes, verdict.ranks, verdict.action)
            if key in self._noted:
                continue
            self._noted.add(key)
            fresh.append(verdict)
            self.note(
                verdict.kind,
                action=verdict.action,
                nodes=verdict.nodes,
                ranks=verdict.ranks,
                evidence=verdict.evidence,
                person=verdict.person,
            )
            self.reasons |= {
                node: f"{verdict.kind}: {verdict.evidence[0]}" for node in verdict.nodes if verdict.evidence
            }
            self.incidents += [(time.monotonic(), node, str(verdict.kind)) for node in verdict.nodes]
        hard = [v for v in fresh if SEVERITY[v.action] >= SEVERITY["respawn"]]
        if not hard or self._naming or self.job.phase not in (Phase.STARTING, Phase.RUNNING):
            return
        self.past += [(time.monotonic(), v) for v in hard]
        worst = max(hard, key=lambda v: SEVERITY[v.action])
        if any(v.kind == Event.CHECKSUM_MISMATCH for v in hard):
            self.job = replace(self.job, distrust=True)
        if self.job.updating and worst.kind in (Event.USER_ERROR, Event.OUT_OF_MEMORY, Event.NONFINITE_LOSS):
            self.undo_update(worst)
            return
        workers = [w for n in self.nodes.values() if n.heartbeat for w in n.heartbeat.workers]
        at = progress.step_of_end(hard, workers)
        self.job = progress.count(self.job, at)
        if worst.action == "stop":
            self._end("; ".join(worst.evidence[:3]), self._code_of(worst), at)
        elif self.job.starts_without_progress >= self.limits.no_progress_limit:
            hopeless = progress.hopeless(self.job, self.limits.no_progress_limit)
            why = f"{hopeless}; the last: {'; '.join(worst.evidence[:2])}"
            self._end(why, EXIT_FAILED, at)
        elif worst.action == "diagnose":
            self.suspend(Phase.DIAGNOSING, "self-checks after: " + worst.evidence[0])
        else:
            evict = {n for v in hard if v.action == "evict" for n in v.nodes}
            blamed = tuple(dict.fromkeys(n for v in hard for n in v.nodes))
            self.recover(blamed, frozenset(evict))

    def _end(self, why: str, code: int, at: int) -> None:
        """End the job; if it ended within step `at`, after that step and its samples are named."""
        if not at:
            self.fail(why, code)
            return
        self._naming = True
        self.spawn(self._end_named(why, code, at))

    async def _end_named(self, why: str, code: int, at: int) -> None:
        try:
            sentence, found = await progress.samples_of(self.run_folder, at)
        except OSError as error:
            sentence, found = f"its samples cannot be named: {error}", {}
        finally:
            self._naming = False
        if self.job.phase not in (Phase.STARTING, Phase.RUNNING):
            return  # a person was quicker
        step, times = progress.same_end(self.job)
        again = f"each of the last {times} starts ended in step {at}" if times > 1 else f"it ended in step {at}"
        self.note(
            Event.FATAL_STEP, evidence=(f"{again}: {sentence}",), step=step, times=times, samples=found.get("samples")
        )
        self.fail(f"{why}; {again}: {sentence}", code)

    def _code_of(self, verdict: Verdict) -> int:
        """The job's exit code for a verdict that ends it: that of the process at fault."""
        codes = [
            w.code
            for n in self.nodes.values()
            if n.heartbeat
            for w in n.heartbeat.workers
            if w.rank in verdict.ranks and w.state == "exited" and w.code
        ]
        return codes[0] if codes else EXIT_FAILED
