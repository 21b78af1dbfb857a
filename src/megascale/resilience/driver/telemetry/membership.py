"""Adoption of running trainers, loss of nodes, and the cluster's reports about nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megascale.core.events import Event
from megascale.errors import EXIT_INTERRUPTED
from megascale.resilience.driver.diagnosis.observations import Observations
from megascale.resilience.driver.nodes import Node, Nodes
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.placement import FIRST_WAIT
from megascale.resilience.driver.recovery.recovery import Recovery
from megascale.resilience.driver.recovery.response import Response
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import ENDED, EVENT_FIELDS, JobEvent, JobState, NodeState, Phase
from megascale.resilience.driver.state.journal import JournalFenced
from megascale.resilience.protocol.agent_channel import AgentChannel
from megascale.resilience.protocol.agent_messages import Hello
from megascale.resilience.rules.table import evict_repeat_offenders
from megascale.resilience.rules.view import Verdict


@dataclass(frozen=True)
class _HeldAttempt:
    """The attempt whose trainers an agent holds.

    Attributes:
        state: the state of the job with which the trainers were started.
        has_stepped: the trainers have completed a step.
    """

    state: JobState
    has_stepped: bool


@dataclass(kw_only=True, eq=False)
class Adoption:
    """Adopts the running trainers of agents if the journal is older than the trainers.

    An agent keeps the state of the job that came with the order to start trainers until an order to stop them. A driver
    whose journal was lost or reset to an older state stops nothing and starts nothing until all running agents have
    connected, or a deadline has passed. Then the highest attempt that an agent holds is the job's.

    Attributes:
        nodes: all nodes.
        attempts: stops and starts the trainers.
        response: acts on nodes that returned without their trainers.
        window: seconds of silence after which a node is lost.
        record_event: writes an event into the audit log.
        is_waiting: the driver waits for agents, which may know more about the job than the journal.
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    response: Response
    window: float
    record_event: RecordEvent
    is_waiting: bool = False
    _deadline: float = field(default=0.0, init=False)  # when the wait for agents ends, on the monotonic clock
    _held_attempts: dict[str, _HeldAttempt] = field(default_factory=dict, init=False)  # by name of the node

    def wait_for_agents(self, current_time: float) -> None:
        """Wait until the agents have reported the attempts that they hold."""
        self.is_waiting = True
        self._deadline = current_time + max(FIRST_WAIT, 2 * self.window)

    def handle_arrival(self, node: Node, hello: Hello) -> None:
        """Remember the trainers of a node that connected, and send the orders that it has missed.

        A node with a newer attempt than the journal's shows that the journal is behind.
        """
        held_attempt = _parse_held(hello, self.job.state.name)
        if held_attempt is None:
            self._held_attempts.pop(node.name, None)
        else:
            self._held_attempts[node.name] = held_attempt
        if node.attempt > self.job.state.attempt and not self.is_waiting:
            self.wait_for_agents(time.monotonic())
        if not self.is_waiting:
            self._catch_up(node)

    def _catch_up(self, node: Node) -> None:
        """Send a connected node the order that it has missed: to stop or to start its ranks."""
        state = self.job.state
        phase = state.phase
        is_placed = node.name in state.placement
        if phase is Phase.STOPPING:
            self.attempts.send_stop(node)
        elif phase is Phase.STARTING and is_placed and node.attempt < state.attempt:
            self.attempts.send_start(node)
        elif self.job.is_running and is_placed and node.attempt != state.attempt:
            reason = f"the agent of {node.name} returned without the processes of attempt {state.attempt}"
            ranks = state.ranks(node.name)
            verdict = Verdict(
                Event.AGENT_RESTARTED, nodes=(node.name,), ranks=ranks, action="recover", evidence=(reason,)
            )
            self.response.act([verdict])
        elif phase in (Phase.WAITING, Phase.PAUSED) or not is_placed:
            self.attempts.send_stop(node)

    def decide(self, current_time: float) -> bool:
        """Decide which attempt is the job's once all running agents have connected; return False if it is too early."""
        running_names = [info.name for info in self.nodes.cluster.nodes() if info.has_agent]
        expected_nodes = [self.nodes[name] for name in running_names if name in self.nodes]
        have_all_connected = all(
            node.channel is not None for node in expected_nodes if node.state is not NodeState.EVICTED
        )
        if current_time < self._deadline and not have_all_connected:
            return False
        self.is_waiting = False
        connected_nodes = [node for node in self.nodes.all() if node.channel is not None]
        newest_attempt = max((node.attempt for node in connected_nodes), default=0)
        known_attempt = self.job.state.attempt
        held_attempts = [self._held_attempts[node.name] for node in connected_nodes if node.name in self._held_attempts]
        newest_held_attempts = [held for held in held_attempts if held.state.attempt == newest_attempt]
        # A person may have ended the job meanwhile.
        if newest_held_attempts and newest_attempt >= known_attempt and not self.job.is_ending:
            self._adopt(newest_held_attempts[0])
        elif newest_attempt > known_attempt:
            self._skip_attempts(newest_attempt)
        for node in connected_nodes:
            self._catch_up(node)
        return True

    def _adopt(self, held_attempt: _HeldAttempt) -> None:
        """Continue the job with the attempt that agents hold."""
        state = held_attempt.state
        previous = self.job.state
        if held_attempt.has_stepped and state.missing_since:
            event = JobEvent.ADOPTED_DEGRADED
        elif held_attempt.has_stepped:
            event = JobEvent.ADOPTED_RUNNING
        else:
            event = JobEvent.ADOPTED
        changes = {name: getattr(state, name) for name in EVENT_FIELDS[event]}
        if previous.attempt == state.attempt:  # The journal may know later steps than the start of the attempt.
            changes["step"] = max(state.step, previous.step)
        changes["updating"] = state.updating and not held_attempt.has_stepped
        if not self.job.apply(event, **changes):
            return
        current_time = time.monotonic()
        self.attempts.started = current_time
        for name in state.placement:
            node = self.nodes.ensure_known(name)
            node.last_seen = max(node.last_seen, current_time)  # A node that has not connected gets the whole window.
        holder = next(name for name, attempt in self._held_attempts.items() if attempt.state.attempt == state.attempt)
        text = (
            f"the journal knew attempt {previous.attempt}; the agent of {holder} runs attempt {state.attempt}: it is "
            f"the job's now, and its processes on {', '.join(state.placement)} continue"
        )
        self.record_event(Event.ATTEMPT_ADOPTED, nodes=(holder,), evidence=(text,), known=previous.attempt)

    def _skip_attempts(self, newest_attempt: int) -> None:
        """Number the next start above `newest_attempt`, which agents know but whose trainers they no longer hold."""
        known_attempt = self.job.state.attempt
        self.job.apply(JobEvent.OUTGROWN, attempt=newest_attempt)
        reason = (
            f"the journal knew attempt {known_attempt}, the agents know {newest_attempt}, but hold no process of it"
        )
        self.record_event(Event.JOURNAL_BEHIND, evidence=(reason,), known=known_attempt)
        if self.job.is_at_work:
            self.attempts.stop(JobEvent.RESTARTED, reason)


def _parse_held(hello: Hello, name: str) -> _HeldAttempt | None:
    """Return the attempt whose trainers an agent holds, None if it holds no valid one."""
    if hello.trainers is None:
        return None
    try:
        state = JobState.from_json(hello.trainers.state)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if state.name != name or state.attempt != hello.attempt or hello.node not in state.placement:
        return None
    return _HeldAttempt(state, hello.trainers.stepped)


@dataclass(kw_only=True, eq=False)
class LostNodes:
    """Finds lost nodes: silent nodes without ranks, nodes whose agent has ended, and nodes that the cluster removed.

    Attributes:
        nodes: all nodes.
        recovery: recovers nodes without running ranks.
        response: acts on the loss of nodes with running ranks.
        observations: provides the view with the nodes' incidents.
        window: seconds of silence after which a node is lost.
    """

    job: Job
    nodes: Nodes
    recovery: Recovery
    response: Response
    observations: Observations
    window: float

    def find_lost_nodes(self, current_time: float) -> None:
        """Find the nodes that are lost. The rules judge the silence of nodes whose ranks run."""
        self._drop_removed_nodes()
        for node in self.nodes.all():
            if self.job.is_at_work and node.name in self.job.state.placement:
                continue
            reason = self._explain_loss(node, current_time)
            if reason and self.job.is_ending:
                self.nodes.mark_lost(node, reason)
            elif reason:
                self.recover_lost_node(node, reason)

    def _drop_removed_nodes(self) -> None:
        """End the agents of nodes that the cluster has taken out of the job, and recover these nodes' ranks."""
        removed_names = self.nodes.cluster.removed_nodes
        for name in removed_names:
            node = self.nodes.get(name)
            if node is None:
                continue
            # After a change of drivers the agent of a removed node may connect late, like other agents. Wait for it
            # as long as agents of other nodes are awaited.
            other_nodes = [candidate for candidate in self.nodes.all() if candidate.name not in removed_names]
            is_given_up = node.state is NodeState.JOINING and not self.nodes.is_any_joining(other_nodes)
            if not node.state.is_present and not is_given_up:
                continue
            self.nodes.order(node, do="stop", order=0, how="kill", grace_period=0.0)
            self.nodes.order(node, do="leave")
            reason = f"the cluster has taken {name} out of the job; the processes there were ordered to end"
            if self.job.is_ending:
                self.nodes.mark_lost(node, reason)
            else:
                self.nodes.mark_gone(node, reason)  # The agent may answer, but must not be started again on this node.
                self.recover_lost_node(node, reason)

    def _explain_loss(self, node: Node, current_time: float) -> str:
        """Return why a node is lost, "" if it is not."""
        if node.state.is_present and current_time - node.last_seen > self.window:
            return f"no message from {node.name} for {current_time - node.last_seen:.1f} s"
        if node.state is NodeState.JOINING and current_time > node.deadline:
            problems = [info.reason for info in self.nodes.cluster.nodes() if info.name == node.name and info.reason]
            return ": ".join([f"the agent of {node.name} did not connect"] + problems)
        return ""

    def compute_next_silence(self, current_time: float, default: float) -> float:
        """Return the seconds until the first node with ranks would count as silent; `default` without such a node."""
        deadlines = [self.nodes[name].last_seen + self.window for name in self.job.state.placement]
        seconds = min((deadline - current_time for deadline in deadlines if deadline > current_time), default=default)
        return max(0.01, seconds)  # The loop needs a moment for other work.

    def forgive_delay(self, seconds: float) -> None:
        """Extend all windows by a delay of the driver, which received nothing meanwhile (slow disk, busy host)."""
        current_time = time.monotonic()
        for node in self.nodes.all():
            node.last_seen = min(current_time, node.last_seen + seconds)

    def recover_if_agent_ended(self, node: Node) -> None:
        """Recover a disconnected node at once if the cluster reports that its agent has ended."""
        info = next((info for info in self.nodes.cluster.nodes() if info.name == node.name), None)
        if info is None or info.has_agent or node.channel is not None or not node.state.is_present:
            return
        if not self.job.is_ending:
            reason = f"the agent of {node.name} has ended: its connection closed and no process is there"
            self.recover_lost_node(node, reason)

    def recover_lost_node(self, node: Node, reason: str) -> None:
        """Recover a node that was lost while the job continues; evict one that is lost again and again."""
        ranks = self.job.state.ranks(node.name)
        verdict = Verdict(Event.NODE_LOST, nodes=(node.name,), ranks=ranks, action="recover", evidence=(reason,))
        view = self.observations.view(time.monotonic())
        verdict = evict_repeat_offenders(view, [verdict])[0]
        if self.job.is_at_work and node.name in self.job.state.placement:
            self.response.act([verdict])
            return
        evidence = "; ".join(verdict.evidence)
        self.recovery.reasons[node.name] = evidence
        self.nodes.mark_lost(node, evidence)
        self.response.add_incident(verdict)
        self.recovery.recover_node(node.name, evict=verdict.action == "evict")


@dataclass(kw_only=True, eq=False)
class ClusterNotices:
    """Handles the cluster's own reports: nodes that it ends or drains, and a job that it gives to another driver.

    Attributes:
        nodes: all nodes.
        attempts: stops the trainers.
        response: acts on the cluster's verdicts.
        record_event: writes an event into the audit log.
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    response: Response
    record_event: RecordEvent
    _drain_reasons: dict[str, str] = field(default_factory=dict, init=False)  # last recorded reason by node
    _ordered_to_leave: dict[str, AgentChannel] = field(default_factory=dict, init=False)  # connection by node

    def handle(self) -> None:
        """Handle the cluster's new reports. Raise JournalFenced if another driver has a newer epoch."""
        cluster = self.nodes.cluster
        if cluster.replaced_by:
            raise JournalFenced(cluster.replaced_by)
        self.response.act(cluster.take_verdicts())
        self.nodes.refresh_cluster_status()
        for node in self.nodes.all():
            self._send_leave(node)
            self._record_drain(node)
        if cluster.withdrawal_reason and not self.job.is_ending and self.job.phase not in ENDED:
            # Nothing is saved: the other driver may have begun, and only one may write.
            reason = f"{cluster.withdrawal_reason}: this driver ends its remaining processes"
            self.record_event(Event.JOB_INTERRUPTED, action="stop", evidence=(reason,))
            self.attempts.stop(JobEvent.INTERRUPTED, reason, exit_code=EXIT_INTERRUPTED)

    def _send_leave(self, node: Node) -> None:
        """Order an agent that the cluster ends to leave, once per connection.

        The cluster's own order may be lost: a kubelet may be dead while the processes that it started train on.
        """
        is_ending = node.name in self.nodes.cluster_status.ending
        if is_ending and node.channel is not None and self._ordered_to_leave.get(node.name) is not node.channel:
            self._ordered_to_leave[node.name] = node.channel
            self.nodes.order(node, do="leave")

    def _record_drain(self, node: Node) -> None:
        """Record the begin or the end of a drain."""
        reason = node.drain_reason
        was_drained = bool(self._drain_reasons.get(node.name))
        self._drain_reasons[node.name] = reason
        if reason and not was_drained:
            text = f"the cluster drains {node.name} ({reason}): its ranks continue, it gets no new ones"
            self.record_event(Event.NODE_CORDONED, nodes=(node.name,), evidence=(text,))
        elif was_drained and not reason:
            text = f"the cluster no longer drains {node.name}"
            self.record_event(Event.NODE_UNCORDONED, nodes=(node.name,), evidence=(text,))
