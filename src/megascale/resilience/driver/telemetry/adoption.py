"""A driver whose journal is behind what runs: it takes over what the agents hold, and trainers go on.

An agent keeps the state that came with the order to start its trainers until it is ordered to stop them. A driver whose
journal was lost, or brought back to an older state, stops nothing and starts nothing until all agents that run have
come (or `_decide_by`); then the highest attempt among them is the job's.
"""

from __future__ import annotations

import time

from megascale.core.events import Event
from megascale.resilience.driver.nodes.nodes import Node, Nodes, Note
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.placement import TOGETHER
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobState, NodeState, Phase
from megascale.resilience.driver.state.transitions import FIELDS, JobEvent
from megascale.resilience.driver.telemetry.response import Response
from megascale.resilience.protocol.agent_messages import Hello
from megascale.resilience.rules.verdicts import Verdict


class Adoption:
    """Args:
    job, nodes, attempts: as the journal knows them.
    response: for nodes that came back without their trainers.
    window: of silence, seconds.
    note: writes an event down.

    Attributes:
        unsure: whether the agents may know more of the job than this driver.
    """

    def __init__(
        self, job: Job, nodes: Nodes, attempts: Attempts, response: Response, window: float, note: Note
    ) -> None:
        self._job, self._nodes, self._attempts, self._response = job, nodes, attempts, response
        self._window, self._note = window, note
        self.unsure = False
        self._decide_by = 0.0

    def wait_for_agents(self, now: float) -> None:
        """Do nothing before the agents have said what they hold."""
        self.unsure, self._decide_by = True, now + max(TOGETHER, 2 * self._window)

    def came(self, node: Node, hello: Hello) -> None:
        """A node came: keep what it holds (an attempt that is newer than the journal's shows that the journal is
        behind), and have it do what it has missed."""
        node.held = _held(hello, self._job.state.name)
        if node.attempt > self._job.state.attempt and not self.unsure:
            self.wait_for_agents(time.monotonic())
        if not self.unsure:
            self._catch_up(node)

    def _catch_up(self, node: Node) -> None:
        """Order a node that comes (again) to do what it has missed."""
        job = self._job.state
        phase, placed = job.phase, node.name in job.placement
        if phase is Phase.STOPPING:
            self._attempts.send_stop(node)
        elif phase is Phase.STARTING and placed and node.attempt < job.attempt:
            self._attempts.send_start(node)
        elif phase is Phase.RUNNING and placed and node.attempt != job.attempt:
            why = f"the agent of {node.name} came back without the processes of attempt {job.attempt}"
            found = Verdict(Event.AGENT_RESTARTED, (node.name,), job.ranks(node.name), "recover", (why,))
            self._response.act([found])
        elif phase in (Phase.WAITING, Phase.PAUSED) or not placed:
            self._attempts.send_stop(node)

    def decide(self, now: float) -> bool:
        """Once all agents that run have come, or late: whose attempt is the job's. False: not yet."""
        running = [info.name for info in self._nodes.cluster.nodes() if info.running]
        coming = [self._nodes[n] for n in running if n in self._nodes]
        if now < self._decide_by and any(n.channel is None for n in coming if n.state is not NodeState.EVICTED):
            return False
        self.unsure = False
        here = [node for node in self._nodes.all() if node.channel is not None]
        newest = max((node.attempt for node in here), default=0)
        known = self._job.state.attempt
        held = next((n.held for n in here if n.held is not None and n.held[0].attempt == newest), None)
        by_a_person = self._job.ending  # meanwhile
        if held is not None and newest >= known and not by_a_person:
            self._go_on_with(*held)
        elif newest > known:
            self._outgrow(newest)
        for node in here:
            self._catch_up(node)
        return True

    def _go_on_with(self, state: JobState, stepped: bool) -> None:
        """What agents hold is the job's attempt, whatever the journal says."""
        before = self._job.state
        event = JobEvent.ADOPTED_RUNNING if stepped else JobEvent.ADOPTED
        changes = {name: getattr(state, name) for name in FIELDS[event]}
        changes["step"] = max(state.step, before.step if before.attempt == state.attempt else 0)
        changes["updating"] = state.updating and not stepped
        if not self._job.apply(event, **changes):
            return
        now = time.monotonic()
        self._attempts.started = now
        for name in state.placement:
            node = self._nodes.known(name)
            node.last_seen = max(node.last_seen, now)  # those that have not come get the whole window
        holders = [n.name for n in self._nodes.all() if n.held is not None and n.held[0].attempt == state.attempt]
        why = (
            f"the journal knew of attempt {before.attempt}; the agent of {holders[0]} runs attempt {state.attempt}: it "
            f"is the job's, and its processes on {', '.join(state.placement)} go on"
        )
        self._note(Event.ATTEMPT_ADOPTED, nodes=(holders[0],), evidence=(why,), known=before.attempt)

    def _outgrow(self, newest: int) -> None:
        """Agents have known newer attempts and hold none of them: the next start must be newer still."""
        known = self._job.state.attempt
        self._job.apply(JobEvent.OUTGROWN, attempt=newest)
        why = f"the journal knew of attempt {known}, the agents of {newest}, of which nothing runs any more"
        self._note(Event.JOURNAL_BEHIND, evidence=(why,), known=known)
        if self._job.phase in (Phase.STARTING, Phase.RUNNING):
            self._attempts.stop(JobEvent.RESTARTED, why)


def _held(hello: Hello, name: str) -> tuple[JobState, bool] | None:
    """(the job as the agent's trainers were started, whether they have done a step); None: it holds no trainers."""
    held = hello.trainers
    if held is None:
        return None
    try:
        job = JobState.from_json(held.state)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if job.name != name or job.attempt != hello.attempt or hello.node not in job.placement:
        return None
    return job, held.stepped
