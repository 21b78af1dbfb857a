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
    for part in re.split(r"(\d+)", name):
        if part.isdigit():
            key.append((int(part), ""))
        else:
            key.append((-1, part))
    return key


@dataclass(kw_only=True, eq=False)
class Placement:
    """Gives every rank a node, and starts the trainers once all nodes have stopped.

    Attributes:
        job: whose ranks are placed.
        nodes: all nodes.
        attempts: starts the trainers.
        recovery: takes out nodes that do not stop.
        checks: runs the self-checks that may follow a stop.
        missing_replicas: goes on without the replicas of lost nodes.
        settings: the settings in force.
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
    _reported_waiting: bool = field(default=False, init=False)
    # When each unreachable node began to delay a start, by name.
    _blocking_nodes: dict[str, float] = field(default_factory=dict, init=False)
    _reported_presence: str = field(default="", init=False)

    # stopping -------------------------------------------------------------------------------------------------------

    def check_stopped(self, current_time: float) -> None:
        """Enter the goal once all nodes have stopped."""
        job = self.job.state
        limits = self.settings.limits
        is_final = job.goal in ENDED or job.goal is Phase.PAUSED
        placed = [self.nodes[name] for name in job.placement]
        pending = [node for node in placed if node.acknowledged_order != self.attempts.last_order]
        limit = (limits.grace_period if job.save or job.joining else 0.0) + 2 * limits.window
        for node in pending:
            # The time of a node that was cut off counts from its return.
            if node.state.is_present and current_time - max(self.job.phase_entered, node.joined) > limit:
                self.nodes.mark_lost(node, f"{node.name} did not stop its processes within {limit:g} s")
                if not is_final:
                    self.recovery.recover_node(node.name, evict=True)
        # A lost node was fenced, so its acknowledgement is not needed. A joining node leads to a gap below.
        if any(node.state.is_present for node in pending):
            return
        if self.job.state.goal is not Phase.STARTING:  # recover_node may have ended the job.
            self.job.apply(JobEvent.STOPPED)
            if self.job.phase is Phase.DIAGNOSING:
                self.self_checks.begin()
        elif pending or any(not self.nodes[name].is_staying for name in job.placement):
            # A node that has stopped may be lost while other nodes still run.
            self.job.apply(JobEvent.GAP)
        elif not self._is_blocked(current_time):
            self.attempts.begin(current_time)

    def _is_blocked(self, current_time: float) -> bool:
        """Return True while an unreachable node may still run ranks, which must not start elsewhere meanwhile."""
        holders = {node.name for node in self.nodes.list_unreachable_holders(current_time)}
        freed = tuple(sorted(self._blocking_nodes.keys() - holders))
        if freed:
            waited = current_time - min(self._blocking_nodes[name] for name in freed)
            text = f"the ranks on {', '.join(freed)} must have ended; the start waited {waited:.1f} s for that"
            self.record_event(Event.RANKS_FENCED, nodes=freed, evidence=(text,))
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
        free = self._list_free_nodes()
        usable_count = sum(node.may_keep_ranks for node in holders) + len(free)
        continued = self.missing_replicas.choose_size()
        if continued is None and self.nodes.is_any_joining(holders):
            return  # The recovery action is under way.
        waited = current_time - self.job.phase_entered
        if not holders and self._must_wait_for_first_nodes(usable_count, waited):
            return
        size = continued or self._choose_size(usable_count, len(holders), current_time)
        if size is None:
            return
        data, count = size
        if continued is not None and not job.joining:
            # Joining nodes are prepared first, while the others train.
            free = []
        elif job.joining:
            free.sort(key=lambda node: not node.is_prepared)
        preferred: list[Node | None] = list(holders)
        if continued is not None:
            preferred = [node if self.missing_replicas.is_surviving(node.name) else None for node in holders]
        placement = self._fill(preferred, free, count)
        self._reported_presence = ""
        since = 0.0
        if continued is not None or job.missing_since:
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
        switch = self.nodes.cluster.switch
        placement = self.job.state.placement
        lost = [name for name in placement if name not in self.nodes or not self.nodes[name].is_usable]
        lost_switches = {switch(name) for name in lost} - {""}
        # Consecutive nodes share a switch, so that neighbouring ranks do.
        names = sorted(self.nodes.names(), key=lambda name: (switch(name), _make_natural_key(name)))
        free = [self.nodes[name] for name in names if name not in placement and self.nodes[name].is_usable]

        def rank_by_preference(node: Node) -> tuple[bool, bool]:  # False sorts before True
            return node.self_check is not SelfCheck.PASSED, switch(node.name) not in lost_switches

        return sorted(free, key=rank_by_preference)

    def _is_any_coming(self) -> bool:
        return self.nodes.pending_requests > 0 or self.nodes.is_any_joining(self.nodes.all())

    def _must_wait_for_first_nodes(self, usable_count: int, waited: float) -> bool:
        """Return True if the first start must wait, so that nodes that start together are placed in a fixed order."""
        has_enough = usable_count >= self.settings.limits.nodes
        if self._is_any_coming() and (not has_enough or waited < FIRST_WAIT or self._is_configured_node_coming()):
            return True
        return has_enough and self._must_wait_for_configured(waited)

    def _choose_size(self, usable_count: int, holder_count: int, current_time: float) -> tuple[int, int] | None:
        """Return (data-parallel size, number of nodes) of the next start, None if it has to wait or the job failed."""
        job = self.job.state
        limits = self.settings.limits
        if usable_count >= limits.nodes:
            return limits.nodes * job.ranks_per_node // self.attempts.model_ranks, limits.nodes
        count = holder_count or limits.nodes
        previous = job.data
        if self.missing_replicas.is_overdue:
            # The job has waited for all replicas. It may now shrink to any size below the full one.
            count = limits.nodes
            previous = self.missing_replicas.full_size
        if usable_count >= count:
            return job.data, count
        if self._is_any_coming():
            return None
        if limits.replenish_wait and current_time - self.job.phase_entered < limits.replenish_wait:
            self._request_nodes(count - usable_count, f"{usable_count} of {count} nodes are present", current_time)
            return None
        sizes = escalation.list_data_sizes(self.settings.config, job.ranks_per_node, usable_count)
        smaller = [size for size in sizes if size[0] < previous]
        if not smaller:
            self.attempts.fail(f"{usable_count} usable nodes are too few and no other came: the job needs {count}")
            return None
        data, count = smaller[0]
        text = f"{usable_count} usable nodes: data parallelism goes from {previous} to {data} on {count} nodes"
        self.recovery.shrink(text)
        return data, count

    def _fill(self, holders: Sequence[Node | None], free: list[Node], count: int) -> tuple[str, ...]:
        """Return the names of `count` nodes in rank order.

        Args:
            holders: nodes with ranks, in rank order; None for one that gets none.
            free: nodes that may fill the gaps.
        """
        preferred: Sequence[Node | None] = holders
        # The placement file applies to a first start, and to a start with more nodes than before.
        follows_file = len(self.configured_names) == count > len(holders)
        if follows_file:
            preferred = [self.nodes.get(name) for name in self.configured_names]
            free = [node for node in self.nodes.all() if node.is_usable and node.name not in self.configured_names]
            free.sort(key=lambda node: (node.self_check is not SelfCheck.PASSED, _make_natural_key(node.name)))
        slots = [node if node is not None and node.is_usable else None for node in preferred]  # in rank order
        slots += [None] * (count - len(slots))
        if not follows_file:
            # A drained node keeps its ranks if no other node can take them.
            for i, node in enumerate(holders):
                if node is not None and node.may_keep_ranks and slots[i] is None and slots.count(None) > len(free):
                    slots[i] = node
        if count < len(slots):
            slots = self._close_gaps(slots, count)
        remaining = iter(free)
        filled = [node if node is not None else next(remaining, None) for node in slots[:count]]
        return tuple(node.name for node in filled if node is not None)

    def _close_gaps(self, slots: list[Node | None], count: int) -> list[Node | None]:
        """Return `count` slots without gaps. With continue_replicas as many nodes as possible keep their ranks."""
        if not self.settings.limits.continue_replicas:
            return [node for node in slots if node is not None]
        closed = slots[:count]
        surplus_nodes = [node for node in slots[count:] if node is not None]
        for i, node in enumerate(closed):
            if node is None and surplus_nodes:
                closed[i] = surplus_nodes.pop()
        return closed

    def _must_wait_for_configured(self, waited: float) -> bool:
        """Return True if configured nodes are unknown and may still come. End the job if they are overdue.

        A cluster that can list its nodes beforehand has been checked already, so its missing nodes are replaced.
        """
        limits = self.settings.limits
        unknown = [name for name in self.configured_names if name not in self.nodes]
        if not unknown or self.nodes.cluster.list_possible_nodes(limits.nodes + limits.spares):
            return False
        if waited >= limits.replenish_wait:
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
        if current_time - self.nodes.last_request_time <= min(REQUEST_INTERVAL, self.settings.limits.window):
            return
        self.nodes.last_request_time = current_time
        if presence != self._reported_presence:
            self._reported_presence = presence
            self.record_event(Event.NODE_REQUESTED, evidence=(f"{presence}; requesting {missing_count}",))
        for _ in range(missing_count):
            self.nodes.request_node()
