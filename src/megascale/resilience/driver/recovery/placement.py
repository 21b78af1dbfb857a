"""Placement: the choice of a node for every rank, after all nodes have stopped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from megascale.core.events import Event
from megascale.errors import EXIT_BAD_DATA
from megascale.resilience.driver.launch_checks import describe_unknown_nodes
from megascale.resilience.driver.nodes import Node, Nodes, SelfCheck
from megascale.resilience.driver.recovery import escalation
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.recovery.missing_replicas import MissingReplicas
from megascale.resilience.driver.recovery.recovery import Recovery, SelfChecks
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import ENDED, JobEvent, Phase

REQUEST_INTERVAL = 5.0  # seconds between requests for nodes, since a cluster may refuse a request at once
FIRST_WAIT = 10.0  # seconds that the first start waits for all requested nodes, spares included


def _make_natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts n2 before n10."""
    key = []
    for text in re.split(r"(\d+)", name):
        if text.isdigit():
            key.append((int(text), ""))
        else:
            key.append((-1, text))
    return key


def _has_killed_rank(nodes: Sequence[Node]) -> bool:
    """Return True if a node is lost, or if a signal that its agent did not send has ended a rank."""
    killed = (worker.state == "signalled" and not worker.by_agent for node in nodes for worker in node.workers)
    return any(killed) or any(not node.state.is_present for node in nodes)


@dataclass(kw_only=True, eq=False)
class Placement:
    """Gives every rank a node, and starts the trainers once all nodes have stopped.

    Attributes:
        nodes: all nodes.
        recovery: takes out nodes that do not stop.
        self_checks: runs the self-checks that may follow a stop.
        missing_replicas: decides whether the job goes on without the replicas of lost nodes.
        record_event: writes an event into the audit log.
        configured_names: names of the nodes in rank order by resilience.placement; empty: nodes are ordered by name.
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    recovery: Recovery
    self_checks: SelfChecks
    missing_replicas: MissingReplicas
    settings: RunningSettings
    record_event: RecordEvent
    configured_names: tuple[str, ...] = ()
    _reported_waiting: bool = field(default=False, init=False)  # the wait for configured nodes was recorded
    # When each unreachable node began to delay a start, by name, on the monotonic clock.
    _blocking_nodes: dict[str, float] = field(default_factory=dict, init=False)
    _reported_presence: str = field(default="", init=False)  # last recorded sentence about present nodes
    # The order to leave after a step that a first node has carried out, and when the driver learned of that.
    _first_left: tuple[int, float] = field(default=(0, 0.0), init=False)

    # stopping -------------------------------------------------------------------------------------------------------

    def check_stopped(self, current_time: float) -> None:
        """Enter the goal once all nodes have stopped."""
        job = self.job.state
        limits = self.settings.limits
        is_final = job.goal in ENDED or job.goal is Phase.PAUSED  # no start follows this stop
        placed_nodes = [self.nodes[name] for name in job.placement]
        pending_nodes = [node for node in placed_nodes if node.acknowledged_order != self.attempts.last_order]
        # Trainers that save or complete a step get the grace period. Two windows are for the order and its answer.
        limit_seconds = 2 * limits.window
        if job.save or job.joining:
            limit_seconds += limits.grace_period
        for node in pending_nodes:
            reason = ""
            order, problem = node.stop_problem
            # The time of a node that was cut off counts from its return.
            if current_time - max(self.job.phase_entered, node.joined) > limit_seconds:
                reason = f"{node.name} did not stop its processes within {limit_seconds:g} s"
            elif order == self.attempts.last_order:
                reason = f"{node.name} cannot stop its processes: {problem}"
            if reason and node.state.is_present:
                self.nodes.mark_lost(node, reason)
                if not is_final:
                    self.recovery.recover_node(node.name, evict=True)
        if self._must_end_leaving(placed_nodes, pending_nodes, current_time):
            self.attempts.end_leaving()
            return
        # A lost node was fenced, so its acknowledgement is not needed. A joining node has no ranks to stop. It leads to
        # the event GAP below, and so to a new placement.
        if any(node.state.is_present for node in pending_nodes):
            return
        if self.job.state.goal is not Phase.STARTING:  # recover_node may have ended the job.
            self.job.apply(JobEvent.STOPPED)
            if self.job.phase is Phase.DIAGNOSING:
                self.self_checks.begin()
        elif pending_nodes or any(not self.nodes[name].is_staying for name in job.placement):
            # A node that has stopped may be lost while other nodes still run.
            self.job.apply(JobEvent.GAP)
        elif not self._is_blocked(current_time):
            self.attempts.begin(current_time)

    def _must_end_leaving(self, placed: Sequence[Node], pending: Sequence[Node], current_time: float) -> bool:
        """Return True if ranks that were ordered to leave after their step must leave at once.

        If a rank is killed, others wait for it within their step, on GPUs until the end of the grace period. All ranks
        leave after the same step, so that a rank which leaves much later than others hangs.
        """
        order = self.attempts.last_order
        if not self.job.state.joining or self.attempts.hastened_order == order:
            return False
        if self._first_left[0] != order and len(pending) < len(placed):
            self._first_left = (order, current_time)
        first_order, first_time = self._first_left
        is_late = first_order == order and current_time - first_time > self.settings.limits.keep_seconds
        return bool(pending) and (is_late or _has_killed_rank(placed))

    def _is_blocked(self, current_time: float) -> bool:
        """Return True while an unreachable node may still run ranks, which must not start elsewhere meanwhile."""
        holders = {node.name for node in self.nodes.list_unreachable_holders(current_time)}
        freed_names = tuple(sorted(self._blocking_nodes.keys() - holders))
        if freed_names:
            waited_seconds = current_time - min(self._blocking_nodes[name] for name in freed_names)
            names = ", ".join(freed_names)
            text = f"the ranks on {names} must have ended; the start waited {waited_seconds:.1f} s for that"
            self.record_event(Event.RANKS_FENCED, nodes=freed_names, evidence=(text,))
        self._blocking_nodes = {name: self._blocking_nodes.get(name, current_time) for name in holders}
        return bool(holders)

    # placing --------------------------------------------------------------------------------------------------------

    def assign_ranks(self, current_time: float) -> None:
        """Place all ranks once enough nodes are present: usable nodes keep their ranks, spares fill the gaps."""
        self._evict_requested()
        if self.job.phase is not Phase.WAITING:
            return
        job = self.job.state
        holders = [self.nodes.ensure_known(name) for name in job.placement]
        free_nodes = self._list_free_nodes()
        usable_count = sum(node.may_keep_ranks for node in holders) + len(free_nodes)
        continued_size = self.missing_replicas.choose_size()
        if continued_size is None and self.nodes.is_any_joining(holders):
            return  # The recovery action is under way.
        waited_seconds = current_time - self.job.phase_entered
        if not holders and self._must_wait_for_first_nodes(usable_count, waited_seconds):
            return
        # (data-parallel size, number of nodes)
        size = continued_size or self._choose_size(usable_count, len(holders), current_time)
        if size is None:
            return
        data, node_count = size
        if continued_size is not None and not job.joining:
            # Joining nodes are prepared first, while the others train.
            free_nodes = []
        elif job.joining:
            free_nodes.sort(key=lambda node: not node.is_prepared)
        kept_holders: list[Node | None] = list(holders)
        if continued_size is not None:
            kept_holders = [node if self.missing_replicas.is_surviving(node.name) else None for node in holders]
        placement = self._fill(kept_holders, free_nodes, node_count)
        self._reported_presence = ""
        since = 0.0
        if continued_size is not None or job.missing_since:
            since = self.missing_replicas.find_missing_since(data)
            self._record_missing(data)
        reason = job.reason or "first start"
        self.attempts.stop(JobEvent.PLACED, reason, placement=placement, data=data, missing_since=since)

    def _record_missing(self, data: int) -> None:
        """Record that the job goes on with fewer replicas than before."""
        full = self.missing_replicas.full_size
        if data >= self.job.state.data or data >= full:
            return
        text = f"the job goes on with {data} of {full} replicas until replacements join"
        self.record_event(Event.REPLICAS_MISSING, action="continue", evidence=(text,), missing=full - data)

    def _list_free_nodes(self) -> list[Node]:
        """Return the usable nodes without ranks, tested nodes first, and among equals nodes on a lost node's switch."""
        find_switch = self.nodes.cluster.find_switch
        placement = self.job.state.placement
        lost_names = [name for name in placement if name not in self.nodes or not self.nodes[name].is_usable]
        lost_switches = {find_switch(name) for name in lost_names} - {""}
        # Consecutive nodes share a switch, so that neighbouring ranks do.
        names = sorted(self.nodes.names(), key=lambda name: (find_switch(name), _make_natural_key(name)))
        free_nodes = [self.nodes[name] for name in names if name not in placement and self.nodes[name].is_usable]

        def rank_by_preference(node: Node) -> tuple[bool, bool]:  # False sorts before True
            return node.self_check is not SelfCheck.PASSED, find_switch(node.name) not in lost_switches

        return sorted(free_nodes, key=rank_by_preference)

    def _is_any_node_coming(self) -> bool:
        """Return True if a node was requested, or an agent was started, and has not connected yet."""
        return self.nodes.pending_requests > 0 or self.nodes.is_any_joining(self.nodes.all())

    def _must_wait_for_first_nodes(self, usable_count: int, waited_seconds: float) -> bool:
        """Return True if the first start must wait, so that nodes that start together are placed in a fixed order."""
        has_enough = usable_count >= self.settings.limits.nodes
        if self._is_any_node_coming() and (
            not has_enough or waited_seconds < FIRST_WAIT or self._is_configured_node_coming()
        ):
            return True
        return has_enough and self._must_wait_for_configured(waited_seconds)

    def _choose_size(self, usable_count: int, holder_count: int, current_time: float) -> tuple[int, int] | None:
        """Return (data-parallel size, number of nodes) of the next start, None if it has to wait or the job failed."""
        job = self.job.state
        limits = self.settings.limits
        if usable_count >= limits.nodes:
            return limits.nodes * job.ranks_per_node // self.attempts.model_ranks, limits.nodes
        node_count = holder_count or limits.nodes
        previous_data = job.data
        if self.missing_replicas.is_overdue:
            # The job has waited for all replicas. It may now shrink to any size below the full one.
            node_count = limits.nodes
            previous_data = self.missing_replicas.full_size
        if usable_count >= node_count:
            return job.data, node_count
        if self._is_any_node_coming():
            return None
        if limits.replenish_wait and current_time - self.job.phase_entered < limits.replenish_wait:
            self._request_nodes(
                node_count - usable_count, f"{usable_count} of {node_count} nodes are present", current_time
            )
            return None
        sizes = escalation.list_data_sizes(self.settings.config, job.ranks_per_node, usable_count)
        smaller_sizes = [size for size in sizes if size[0] < previous_data]
        if not smaller_sizes:
            self.attempts.fail(f"{usable_count} usable nodes are too few and no other came: the job needs {node_count}")
            return None
        data, node_count = smaller_sizes[0]
        text = (
            f"{usable_count} usable nodes: data parallelism goes from {previous_data} to {data} on {node_count} nodes"
        )
        self.recovery.shrink(text)
        return data, node_count

    def _fill(self, holders: Sequence[Node | None], free_nodes: list[Node], node_count: int) -> tuple[str, ...]:
        """Return the names of `node_count` nodes in rank order, or of fewer if too few nodes are free.

        Args:
            holders: nodes with ranks, in rank order; None in place of a node that loses its ranks.
            free_nodes: nodes that may take free places.
            node_count: number of nodes of the next start.
        """
        preferred: Sequence[Node | None] = holders
        # The placement file applies to a first start, and to a start with more nodes than before.
        follows_file = len(self.configured_names) == node_count and node_count > len(holders)
        if follows_file:
            preferred = [self.nodes.get(name) for name in self.configured_names]
            free_nodes = [
                node for node in self.nodes.all() if node.is_usable and node.name not in self.configured_names
            ]
            free_nodes.sort(key=lambda node: (node.self_check is not SelfCheck.PASSED, _make_natural_key(node.name)))
        slots: list[Node | None] = []  # in rank order
        for node in preferred:
            slots.append(node if node is not None and node.is_usable else None)
        slots += [None] * (node_count - len(slots))
        if not follows_file:
            # A drained node keeps its ranks if no other node can take them.
            for index, node in enumerate(holders):
                is_replaceable = slots.count(None) <= len(free_nodes)
                if node is not None and node.may_keep_ranks and slots[index] is None and not is_replaceable:
                    slots[index] = node
        if node_count < len(slots):
            slots = self._close_gaps(slots, node_count)
        remaining_free_nodes = list(free_nodes)
        names = []
        for node in slots[:node_count]:
            if node is None and remaining_free_nodes:
                node = remaining_free_nodes.pop(0)
            if node is not None:
                names.append(node.name)
        return tuple(names)

    def _close_gaps(self, slots: list[Node | None], node_count: int) -> list[Node | None]:
        """Return the slots of `node_count` nodes out of more slots. A slot without a node is None.

        With continue_replicas as many nodes as possible keep their ranks, so nodes of the dropped slots fill the gaps.
        Otherwise the nodes move up, and ranks change.
        """
        if not self.settings.limits.continue_replicas:
            return [node for node in slots if node is not None]
        kept_slots = slots[:node_count]
        surplus_nodes = [node for node in slots[node_count:] if node is not None]
        for index, node in enumerate(kept_slots):
            if node is None and surplus_nodes:
                kept_slots[index] = surplus_nodes.pop()
        return kept_slots

    def _must_wait_for_configured(self, waited_seconds: float) -> bool:
        """Return True if configured nodes are unknown and may still come. End the job if they are overdue.

        A cluster that can list its nodes beforehand has been checked already, so its missing nodes are replaced.
        """
        limits = self.settings.limits
        unknown = [name for name in self.configured_names if name not in self.nodes]
        if not unknown or self.nodes.cluster.list_possible_nodes(limits.nodes + limits.spares):
            return False
        if waited_seconds >= limits.replenish_wait:
            present = sorted(self.nodes.names(), key=_make_natural_key)
            self.attempts.fail(describe_unknown_nodes(str(limits.placement), unknown, present), EXIT_BAD_DATA)
        elif not self._reported_waiting:
            self._reported_waiting = True
            text = f"waiting up to {limits.replenish_wait:g} s for {', '.join(unknown[:5])} of resilience.placement"
            self.record_event(Event.NODE_REQUESTED, evidence=(text,))
        return True

    def _is_configured_node_coming(self) -> bool:
        """Return True if a node of the placement file may still come."""
        configured = [self.nodes.get(name) for name in self.configured_names]
        if self.nodes.is_any_joining(node for node in configured if node is not None):
            return True
        return self.nodes.pending_requests > 0 and None in configured

    def _evict_requested(self) -> None:
        """Evict the nodes whose eviction a person ordered, now that the trainers have saved."""
        while self.job.phase is Phase.WAITING and self.job.state.evicting:
            *remaining, name = self.job.state.evicting
            self.job.apply(JobEvent.EVICTING, evicting=tuple(remaining))
            self.recovery.recover_node(name, evict=True)

    def _request_nodes(self, missing_count: int, presence: str, current_time: float) -> None:
        """Request nodes at intervals. `presence` is a sentence about the present nodes, recorded when it changes."""
        if current_time - self.nodes.last_request_time <= min(REQUEST_INTERVAL, self.settings.limits.window):
            return
        self.nodes.last_request_time = current_time
        if presence != self._reported_presence:
            self._reported_presence = presence
            self.record_event(Event.NODE_REQUESTED, evidence=(f"{presence}; requesting {missing_count}",))
        for _ in range(missing_count):
            self.nodes.request_node()
