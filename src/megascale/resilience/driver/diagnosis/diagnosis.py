"""Diagnosis: the rules judge the newest heartbeats in every iteration of the loop, and the history in a thread.

The verdict about a hang names a rank and a collective only after the agents have examined their ranks. That takes up to
a second, so it begins shortly before the ranks have stood still for as long as allowed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megascale.core.events import Event
from megascale.core.layout import Layout
from megascale.observe.hang.scene import Scene
from megascale.observe.hang.verdict import explain_hang, format_headline
from megascale.resilience import rules
from megascale.resilience.driver.diagnosis.investigations import RankInvestigation, SlowMachineSearch
from megascale.resilience.driver.diagnosis.observations import Observations
from megascale.resilience.driver.process import LoopTasks
from megascale.resilience.driver.recovery.response import Response
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobEvent
from megascale.resilience.protocol.heartbeat import Worker
from megascale.resilience.rules.silence import (
    LONG_PHASE_FLOOR,
    compute_allowed_age,
    compute_status_age,
    find_hang,
)
from megascale.resilience.rules.table import evict_repeat_offenders
from megascale.resilience.rules.view import Action, Verdict, View

SETTLING_SECONDS = 0.3  # seconds after a first failed rank in which other ranks may fail for the same cause
PAUSE_FACTOR = 4.0  # multiple of a hang's limit for which ranks may pause if no rank waits for another
PAUSE_INTERVAL = 5.0  # seconds between examinations of another trainer's ranks that progress without a step
log = logging.getLogger("megascale.driver")
EXAMINATION_LEAD = 3.0  # seconds from the examination of the ranks to the verdict about a hang
EXAMINATION_PAUSE = 1.0  # least seconds between the beginnings of two examinations before a verdict
HISTORY_INTERVAL = 1.0  # seconds between judgements of the history of all nodes
_HANG_SENTENCES = 10  # sentences of the examination in a verdict's evidence
# Kinds of hangs with wrong calls. A first one may come from a corrupted state; a second one comes from the code.
_CODE_FAULTS = frozenset({"mismatched collective", "missing send", "missing call"})


class Examination(NamedTuple):
    """Examination of an attempt's ranks that stand still. began: on the monotonic clock; layout: None if unknown."""

    attempt: int
    began: float
    scene: Scene
    layout: Layout | None

    def is_valid(self, view: View) -> bool:
        """Return True if no rank has moved since the examination began, as far as heartbeats have reported."""
        if self.attempt != view.attempt or self.scene.moving:
            return False
        return not _has_moved(view, self.began)


@dataclass(kw_only=True, eq=False)
class Diagnosis:
    """Applies the rules and hands their verdicts to the response.

    Attributes:
        observations: provides the view that the rules judge.
        rank_investigation: asks the agents about ranks that do not progress.
        tasks: runs lengthy work.
        record_event: writes an event into the audit log.
    """

    job: Job
    observations: Observations
    rank_investigation: RankInvestigation
    slow_machines: SlowMachineSearch
    response: Response
    tasks: LoopTasks
    record_event: RecordEvent
    _first_failure: tuple[int, float] | None = field(default=None, init=False)  # (attempt, time) of a failed rank
    _is_explaining: bool = field(default=False, init=False)  # the agents examine the ranks of a hang
    _examination: Examination | None = field(default=None, init=False)  # the newest one
    _is_judging_history: bool = field(default=False, init=False)
    _history_judged_at: float = field(default=0.0, init=False)  # end of the last judgement, on the monotonic clock
    _history_duration: float = field(default=0.0, init=False)  # seconds of the last judgement
    _pause_end: float = field(default=0.0, init=False)  # before which a pause of another trainer is not examined again

    def judge(self, current_time: float) -> None:
        """Apply the rules to the observations and act on the verdicts."""
        view = self.observations.view(current_time)
        workers = [worker for _, worker in view.workers()]
        self.slow_machines.start_if_due(current_time)
        self.observations.follow_progress(current_time, workers)
        world = self.job.state.world
        if len(workers) == world and all(worker.state == "exited" and not worker.code for worker in workers):
            self.job.apply(JobEvent.FINISHED, reason="every rank ended with exit code 0")
            self.record_event(Event.JOB_DONE, evidence=(f"all {world} ranks ended with exit code 0",))
            return
        if self._is_settling(current_time, workers, world):
            return
        # Judge the history of a large job less often, since a judgement takes long.
        interval = max(HISTORY_INTERVAL, 10 * self._history_duration)
        if not self._is_judging_history and current_time - self._history_judged_at > interval:
            self._is_judging_history = True
            self.tasks.spawn(self._judge_history(view.snapshot()))
        verdicts = rules.judge(view, rules.QUICK_RULES)
        hangs = [verdict for verdict in verdicts if verdict.kind == Event.HANG]
        if not self._is_explaining and current_time >= self._pause_end:
            if hangs:
                self._is_explaining = True
                self.tasks.spawn(self._explain(hangs[0], view))
            elif self._must_examine(view):
                self._is_explaining = True
                self.tasks.spawn(self._examine_early(view))
        self.response.act([verdict for verdict in verdicts if verdict.kind != Event.HANG])

    def _is_settling(self, current_time: float, workers: Sequence[Worker], world: int) -> bool:
        """Return True if a rank has just failed, so that other ranks may fail for the same cause in a moment."""
        if not any(worker.state == "signalled" or worker.code for worker in workers):
            return False
        attempt = self.job.state.attempt
        if self._first_failure is None or self._first_failure[0] != attempt:
            self._first_failure = (attempt, current_time)
        _, failure_time = self._first_failure
        ended_count = sum(worker.state != "running" for worker in workers)
        return ended_count < world and current_time - failure_time < SETTLING_SECONDS

    async def _judge_history(self, view: View) -> None:
        """Judge the history of all nodes in a thread, so that the loop reads heartbeats meanwhile."""
        try:
            verdicts = await asyncio.to_thread(rules.judge, view, rules.SLOW_RULES)
        finally:
            self._is_judging_history = False
            self._history_judged_at = time.monotonic()
            self._history_duration = self._history_judged_at - view.time
        if self.job.state.attempt == view.attempt and self.job.is_at_work:
            self.response.act(verdicts)

    def _must_examine(self, view: View) -> bool:
        """Return True if the ranks will soon count as hanging, and have moved since the last examination.

        Another trainer's ranks report few changes, so they are examined only once they have stood still for too long.
        """
        if view.is_foreign or not find_hang(view, EXAMINATION_LEAD):
            return False
        examination = self._examination
        if examination is None:
            return True
        # Ranks may move during each examination, so that none of them counts.
        return not examination.is_valid(view) and view.time - examination.began >= EXAMINATION_PAUSE

    async def _examine_early(self, view: View) -> None:
        """Examine the ranks before the verdict about a hang."""
        try:
            self._examination = await self._examine(view)
        finally:
            self._is_explaining = False

    async def _examine(self, view: View) -> Examination:
        """Let the agents examine their ranks and request their stacks."""
        began = time.monotonic()
        scene, layout = await self.rank_investigation.gather()
        return Examination(view.attempt, began, scene=scene, layout=layout)

    async def _explain(self, hang: Verdict, view: View) -> None:
        """Find the ranks that began a hang, from an examination since which no rank has moved.

        A heartbeat that reports a move meanwhile ends the search. The rules judge again.
        """
        still_since = view.time
        try:
            examination = self._examination
            if examination is None or not examination.is_valid(view):
                examination = await self._examine(view)
            else:
                still_since = examination.began
            self._examination = None
            scene = replace(examination.scene, now_ns=time.time_ns())
            verdict = await asyncio.to_thread(refine_hang, hang, view, scene=scene, layout=examination.layout)
        finally:
            self._is_explaining = False
        if verdict.action == "alert":
            self._pause_end = time.monotonic() + PAUSE_INTERVAL
        if self.job.state.attempt != view.attempt:
            return
        current_view = self.observations.view(time.monotonic())
        if not view.is_foreign and _has_moved(current_view, still_since):
            log.info("a rank has moved since the hang was detected: %s", "; ".join(hang.evidence[:1]))
            return
        self.response.act([verdict])


def _has_moved(view: View, since: float) -> bool:
    """Return True if heartbeats have reported a move of a rank after `since`, on the monotonic clock."""
    ages = [compute_status_age(view, member, worker) for member, worker in view.workers()]
    return min(ages, default=0.0) <= view.time - since


def _may_be_a_pause(view: View) -> bool:
    """Return True if another trainer may be in an evaluation: a rank has paused for less than its limit."""
    for member, worker in view.workers():
        limit = max(LONG_PHASE_FLOOR, PAUSE_FACTOR * compute_allowed_age(view, worker))
        if compute_status_age(view, member, worker) < limit:
            return True
    return False


def refine_hang(verdict: Verdict, view: View, scene: Scene, layout: Layout | None) -> Verdict:
    """Return a verdict of kind HANG with the ranks that began the hang, their nodes, and the evidence.

    Args:
        view: the view that the rules judged.
        scene: the reports of the agents about their ranks.
        layout: the layout of the ranks, None if unknown.
    """
    if not scene.ranks:
        evidence = verdict.evidence + ("the hang was not examined: no agent reported about its ranks",)
        return replace(verdict, evidence=evidence)
    hang = explain_hang(scene, layout)
    holders = [member.node for rank in hang.ranks for member in view.members if rank in member.ranks]
    nodes = tuple(dict.fromkeys(holders))  # each once, in the order of the ranks
    evidence = (format_headline(hang),) + hang.evidence[:_HANG_SENTENCES] + verdict.evidence
    action: Action = "diagnose" if hang.kind == "network" else "recover"
    if view.is_foreign and hang.kind == "none" and (scene.moving or _may_be_a_pause(view)):
        text = f"the start is not ended, since it may save, load or evaluate: {hang.evidence[0]}"
        return replace(verdict, action="alert", evidence=(text,) + verdict.evidence)
    is_repeated = any(past.kind == Event.HANG and past.cause == hang.kind for _, past in view.past)
    needs_person = hang.kind in _CODE_FAULTS and is_repeated
    if needs_person:
        action = "stop"
        evidence = evidence + ("an earlier start hung the same way, so the fault is in the code",)
    refined = replace(
        verdict,
        nodes=nodes,
        ranks=hang.ranks,
        action=action,
        evidence=evidence,
        needs_person=needs_person,
        cause=hang.kind,
    )
    return evict_repeat_offenders(view, [refined])[0]
