"""Diagnosis: when the rules look at what, quickly at the newest heartbeats and in a thread through the history."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from megascale.core.events import Event
from megascale.resilience import rules
from megascale.resilience.driver.diagnosis import hang_diagnosis
from megascale.resilience.driver.diagnosis.observations import Observations
from megascale.resilience.driver.diagnosis.slow_look import SlowLook
from megascale.resilience.driver.diagnosis.standing_ranks import StandingRanks
from megascale.resilience.driver.nodes.nodes import Note
from megascale.resilience.driver.process.loop_tasks import LoopTasks
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.driver.state.transitions import JobEvent
from megascale.resilience.protocol.heartbeat import Worker
from megascale.resilience.rules.verdicts import Verdict
from megascale.resilience.rules.view import View

SETTLING_SECONDS = 0.3  # seconds after a first bad end in which others of the same cause show
THOROUGH = 1.0  # seconds between looks at the history of all nodes


class Diagnosis:
    """Args:
    job: what is judged.
    seen: gives the view.
    standing: asks the agents about ranks that stand still.
    act: what takes the verdicts.
    tasks: for what takes long.
    note: writes an event down.
    slow: looks for slow machines in spans.
    """

    def __init__(
        self,
        job: Job,
        seen: Observations,
        standing: StandingRanks,
        act: Callable[[Sequence[Verdict]], None],
        tasks: LoopTasks,
        note: Note,
        slow: SlowLook,
    ) -> None:
        self._job, self._seen, self._standing, self.act = job, seen, standing, act
        self._tasks, self._note, self._slow = tasks, note, slow
        seen.slow = slow.found
        self._first_bad: tuple[int, float] | None = None  # attempt, and when one of its ranks first ended badly
        self._explaining = False
        self._looking = False  # whether the history is being looked at
        self._looked = 0.0  # when it was looked at last, and how long that took
        self._took = 0.0

    def judge(self, now: float) -> None:
        """Apply the rules to what is known and act on the verdicts."""
        view, job = self._seen.view(now), self._job
        workers = [w for _, w in view.workers()]
        self._slow.consider(now)
        self._seen.progress(now, workers)
        world = job.state.world
        if len(workers) == world and all(w.state == "exited" and not w.code for w in workers):
            job.apply(JobEvent.FINISHED, why="every rank ended well")
            self._note(Event.JOB_DONE, evidence=(f"all {world} ranks ended with exit code 0",))
            return
        if self._settling(now, workers, world):
            return
        # Of a job so large that it takes long, the history is looked at less often.
        if not self._looking and now - self._looked > max(THOROUGH, 10 * self._took):
            self._looking = True
            self._tasks.spawn(self._look_through(view.snapshot()))
        verdicts = rules.judge(view, rules.QUICK)
        hang = next((v for v in verdicts if v.kind == Event.HANG), None)
        if hang is not None and not self._explaining:
            self._explaining = True
            self._tasks.spawn(self._explain(hang, view))
        self.act([v for v in verdicts if v.kind != Event.HANG])

    def _settling(self, now: float, workers: Sequence[Worker], world: int) -> bool:
        """Whether a rank has just ended badly, and others of the same cause may show in a moment."""
        if not any(w.state == "signalled" or w.code for w in workers):
            return False
        attempt = self._job.state.attempt
        if self._first_bad is None or self._first_bad[0] != attempt:
            self._first_bad = (attempt, now)
        ended = sum(w.state != "running" for w in workers)
        return ended < world and now - self._first_bad[1] < SETTLING_SECONDS

    async def _look_through(self, view: View) -> None:
        """Judge the history of all nodes in a thread: heartbeats are read meanwhile, silence is seen in time."""
        try:
            verdicts = await asyncio.to_thread(rules.judge, view, rules.SLOW)
        finally:
            self._looking, self._looked = False, time.monotonic()
            self._took = self._looked - view.time
        if self._job.state.attempt == view.attempt and self._job.phase in (Phase.STARTING, Phase.RUNNING):
            self.act(verdicts)

    async def _explain(self, hang: Verdict, view: View) -> None:
        """Find out who began a hang: agents look at their ranks and ask for their stacks."""
        try:
            evidence, layout = await self._standing.gather()
            found = await asyncio.to_thread(hang_diagnosis.refine, hang, view, evidence, layout)
        finally:
            self._explaining = False
        if self._job.state.attempt == view.attempt:
            self.act([found])
