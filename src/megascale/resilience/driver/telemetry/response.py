"""What follows from verdicts: each is written down once, and the hardest is acted upon."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.core.events import Event
from megascale.errors import EXIT_FAILED
from megascale.resilience.driver.diagnosis.observations import Observations
from megascale.resilience.driver.nodes.nodes import Nodes, Note
from megascale.resilience.driver.process.loop_tasks import LoopTasks
from megascale.resilience.driver.recovery import progress
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.recovery.recovery import Recovery
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.driver.state.transitions import JobEvent
from megascale.resilience.rules.verdicts import SEVERITY, Verdict

log = logging.getLogger("megascale.driver")

# What new settings may bring about.
_OF_SETTINGS = (Event.USER_ERROR, Event.OUT_OF_MEMORY, Event.NONFINITE_LOSS)


class Response:
    """Args:
    run: the run folder, whose samples are looked up.
    job, nodes, attempts: what is acted upon.
    recovery: chooses the recovery action of each node to blame.
    seen: remembers verdicts for later judgements.
    settings: in force.
    tasks: for what takes long.
    note: writes an event down.
    """

    def __init__(
        self,
        run: Path,
        job: Job,
        nodes: Nodes,
        attempts: Attempts,
        recovery: Recovery,
        seen: Observations,
        settings: RunningSettings,
        tasks: LoopTasks,
        note: Note,
    ) -> None:
        self._run, self._job, self._nodes, self._attempts, self._recovery = run, job, nodes, attempts, recovery
        self._seen, self._settings, self._tasks, self._note = seen, settings, tasks, note
        self._noted: set[tuple[Any, ...]] = set()
        self._naming = False  # the job ends as soon as the samples of its last step are known

    def act(self, verdicts: Sequence[Verdict]) -> None:
        """Write verdicts down, each once an attempt, and act on the hardest."""
        fresh = [verdict for verdict in map(self._bearable, verdicts) if self._is_new(verdict)]
        for verdict in fresh:
            self._note(
                verdict.kind,
                action=verdict.action,
                nodes=verdict.nodes,
                ranks=verdict.ranks,
                evidence=verdict.evidence,
                person=verdict.person,
            )
            self._recovery.reasons |= {
                node: f"{verdict.kind}: {verdict.evidence[0]}" for node in verdict.nodes if verdict.evidence
            }
            self._seen.blame(verdict)
        hard = [v for v in fresh if SEVERITY[v.action] >= SEVERITY["recover"]]
        if hard and not self._naming and self._job.phase in (Phase.STARTING, Phase.RUNNING):
            self._seen.past += [(time.monotonic(), v) for v in hard]
            self._answer(hard)

    def _bearable(self, verdict: Verdict) -> Verdict:
        """A slow node still trains: where no spare stands by it is not given up, since a job without it would not."""
        if verdict.kind != Event.SLOW_NODE or verdict.action != "evict" or self._nodes.spares():
            return verdict
        text = "no spare stands by to take its ranks, so it goes on; it is evicted once one does"
        return replace(verdict, action="alert", evidence=(*verdict.evidence, text))

    def _is_new(self, verdict: Verdict) -> bool:
        key = (self._job.state.attempt, verdict.kind, verdict.nodes, verdict.ranks, verdict.action)
        new = key not in self._noted
        self._noted.add(key)
        return new

    def _answer(self, hard: list[Verdict]) -> None:
        worst = max(hard, key=lambda v: SEVERITY[v.action])
        distrust = self._job.state.distrust or any(v.kind == Event.CHECKSUM_MISMATCH for v in hard)
        if self._job.state.updating and worst.kind in _OF_SETTINGS:
            self._job.apply(JobEvent.START_ENDED, distrust=distrust)
            self._undo_update(worst)
            return
        workers = [w for n in self._nodes.all() if n.heartbeat for w in n.heartbeat.workers]
        at = progress.find_end_step(hard, workers)
        self._job.apply(JobEvent.START_ENDED, distrust=distrust, **progress.count_start(self._job.state, at))
        limit = self._settings.limits.no_progress_limit
        if worst.action == "stop":
            self._end("; ".join(worst.evidence[:3]), self._code_of(worst), at)
        elif self._job.state.starts_without_progress >= limit:
            hopeless = progress.explain_no_progress(self._job.state, limit)
            self._end(f"{hopeless}; the last: {'; '.join(worst.evidence[:2])}", EXIT_FAILED, at)
        elif worst.action == "diagnose":
            self._attempts.stop(JobEvent.DIAGNOSED, "self-checks after: " + worst.evidence[0])
        else:
            evict = {n for v in hard if v.action == "evict" for n in v.nodes}
            blamed = tuple(dict.fromkeys(n for v in hard for n in v.nodes))
            self._recovery.recover(blamed, frozenset(evict))

    def _undo_update(self, verdict: Verdict) -> None:
        """New settings brought no step: go back to those before, and start again."""
        self._settings.undo()
        text = "the new settings brought no step and are taken back: " + "; ".join(verdict.evidence[:2])
        self._note(Event.UPDATE_UNDONE, evidence=(text,))
        self._attempts.stop(JobEvent.RESTARTED, text, updating=False)

    def _end(self, why: str, code: int, at: int) -> None:
        """End the job; if it ended within step `at`, after that step and its samples are named."""
        if not at:
            self._attempts.fail(why, code)
            return
        self._naming = True
        self._tasks.spawn(self._end_named(why, code, at))

    async def _end_named(self, why: str, code: int, at: int) -> None:
        try:
            sentence, found = await progress.samples_of(self._run, at)
        except Exception as error:  # the job must end all the same
            log.warning("the samples of step %d cannot be named", at, exc_info=True)
            sentence, found = f"its samples cannot be named: {error!r}", {}
        finally:
            self._naming = False
        if self._job.phase not in (Phase.STARTING, Phase.RUNNING):
            return  # a person was quicker
        step, times = progress.count_equal_ends(self._job.state)
        again = f"each of the last {times} starts ended in step {at}" if times > 1 else f"it ended in step {at}"
        self._note(
            Event.FATAL_STEP, evidence=(f"{again}: {sentence}",), step=step, times=times, samples=found.get("samples")
        )
        self._attempts.fail(f"{why}; {again}: {sentence}", code)

    def _code_of(self, verdict: Verdict) -> int:
        """The job's exit code for a verdict that ends it: that of the process at fault."""
        codes = [
            w.code
            for n in self._nodes.all()
            if n.heartbeat
            for w in n.heartbeat.workers
            if w.rank in verdict.ranks and w.state == "exited" and w.code
        ]
        return codes[0] if codes else EXIT_FAILED
