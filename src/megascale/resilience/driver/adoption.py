"""A driver whose journal is behind what runs: it takes over what the agents hold, and trainers go on.

An agent keeps the state that came with the order to start its trainers until it is ordered to stop them. A driver whose
journal was lost, or brought back to an older state, stops nothing and starts nothing until all agents that run have
come (or `_decide_by`); then the highest attempt among them is the job's.
"""

from __future__ import annotations

import time
from dataclasses import replace

from megascale.core.events import Event
from megascale.resilience.driver.diagnosis import Diagnosis
from megascale.resilience.driver.job_state import ENDED, JobState, Phase
from megascale.resilience.driver.nodes import Node, NodeState
from megascale.resilience.driver.placement import TOGETHER
from megascale.resilience.protocol.agent_messages import Hello


class Adoption(Diagnosis):
    """A part of Driver. unsure: whether the agents may know more of the job than this driver."""

    unsure: bool = False
    _decide_by: float = 0.0

    def catch_up(self, node: Node) -> None:
        raise NotImplementedError

    def doubt(self, now: float) -> None:
        """Do nothing before the agents have said what they hold."""
        self.unsure, self._decide_by = True, now + max(TOGETHER, 2 * self.limits.window)

    def handle_held(self, node: Node, hello: Hello) -> None:
        """Keep what an agent holds: an attempt that is newer than the journal's shows that the journal is behind."""
        node.held = _held(hello, self.job.name)
        if node.attempt > self.job.attempt and not self.unsure:
            self.doubt(time.monotonic())

    def decide(self, now: float) -> bool:
        """Once all agents that run have come, or late: whose attempt is the job's. False: not yet."""
        coming = [info.name for info in self.cluster.nodes() if info.running]
        coming = [n for n in coming if n in self.nodes and self.nodes[n].state is not NodeState.EVICTED]
        if now < self._decide_by and any(self.nodes[name].channel is None for name in coming):
            return False
        self.unsure = False
        here = [node for node in self.nodes.values() if node.channel is not None]
        newest = max((node.attempt for node in here), default=0)
        known, phase = self.job.attempt, self.job.phase
        holder = next((n for n in here if n.held is not None and n.held[0].attempt == newest), None)
        asked = phase in ENDED or self.job.goal in ENDED  # by a person, meanwhile
        if holder is not None and newest >= known and not asked:
            self._go_on_with(holder, known)
        elif newest > known:
            self._outgrow(newest)
        for node in here:
            self.catch_up(node)
        return True

    def _go_on_with(self, node: Node, known: int) -> None:
        assert node.held is not None
        state, stepped = node.held
        # What the journal says may be wrong in any way, so this is no step of the state machine.
        self.job = replace(
            state,
            phase=Phase.RUNNING if stepped else Phase.STARTING,
            step=max(state.step, self.job.step if known == state.attempt else 0),
            updating=state.updating and not stepped,
            fresh=(),
            distrust=False,
        )
        self.journal.save_job(self.job)
        now = time.monotonic()
        self.started = self._entered = now
        for name in self.job.placement:
            each = self.nodes.setdefault(name, Node(name))
            each.last_seen = max(each.last_seen, now)  # those that have not come get the whole window
        why = (
            f"the journal knew of attempt {known}; the agent of {node.name} runs attempt {state.attempt}: it is the "
            f"job's, and its processes on {', '.join(state.placement)} go on"
        )
        self.note(Event.ATTEMPT_ADOPTED, nodes=(node.name,), evidence=(why,), known=known)

    def _outgrow(self, newest: int) -> None:
        """Agents have known newer attempts and hold none of them: the next start must be newer still."""
        known = self.job.attempt
        self.job = replace(self.job, attempt=newest)
        self.journal.save_job(self.job)
        why = f"the journal knew of attempt {known}, the agents of {newest}, of which nothing runs any more"
        self.note(Event.JOURNAL_BEHIND, evidence=(why,), known=known)
        if self.job.phase in (Phase.STARTING, Phase.RUNNING):
            self.suspend(Phase.WAITING, why)


def _held(hello: Hello, name: str) -> tuple[JobState, bool] | None:
    """(the job as the agent's trainers were started, whether they have done a step); None: it holds no trainers."""
    held = hello.held
    if held is None:
        return None
    try:
        job = JobState.from_json(held.state)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if job.name != name or job.attempt != hello.attempt or hello.node not in job.placement:
        return None
    return job, held.stepped
