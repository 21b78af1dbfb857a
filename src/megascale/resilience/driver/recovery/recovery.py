"""Recovery of nodes at fault, requests for new spares, and self-checks.

The escalation policy chooses the recovery action of each node at fault. All nodes run self-checks after a verdict that
demands them, and spares run them while they wait. A node that fails its self-checks is evicted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from megascale.core.events import Event
from megascale.resilience.driver.nodes import Node, Nodes, SelfCheck
from megascale.resilience.driver.recovery import escalation
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.escalation import Choice, Situation, Use
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobEvent, Phase
from megascale.resilience.protocol.agent_messages import Diagnosed

REFILL_INTERVAL = 30.0  # seconds between requests for nodes in place of used spares


@dataclass(kw_only=True, eq=False)
class Recovery:
    """Chooses and begins recovery actions.

    Attributes:
        job: the job whose nodes are recovered.
        nodes: all nodes.
        attempts: stops and starts the trainers.
        record_event: writes an event into the audit log.
        uses: recovery actions so far, including those of earlier drivers.
        reasons: why each node was blamed last, by its name.
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    settings: RunningSettings
    record_event: RecordEvent
    uses: list[Use] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    _refill_times: list[float] = field(default_factory=list, init=False)  # when spares were requested

    def recover(self, blamed: tuple[str, ...], evict: frozenset[str]) -> None:
        """Begin a recovery action for each node to blame, stop all trainers, and start again."""
        names = blamed or ("",)  # "": one action that blames no node
        actions = {name: self.recover_node(name, evict=name in evict) for name in names}
        if self.job.is_at_work:  # recover_node may have ended the job.
            reason = ", ".join(f"{action} {name}".strip() for name, action in actions.items())
            self.attempts.stop(JobEvent.RESTARTED, reason)

    def recover_node(self, name: str, *, evict: bool) -> str:
        """Choose and begin the recovery action for a node; return the action. Without a node to blame `name` is ""."""
        job = self.job.state
        node = self.nodes.get(name)
        situation = self._assess(name, node, evict=evict)
        choice = escalation.choose_action(self.settings.limits, situation, self.uses)
        if node is not None and name not in job.placement and choice.action == "spare":
            choice = replace(choice, action="replenish")  # A lost spare is replaced by a new node.
        reasons = choice.reasons
        explains = bool(name) and job.unexplained
        if explains:
            # In the last recovery ranks had lost contact, and no node was blamed. This node was the cause, so that
            # retry does not count.
            escalation.refund_last_blameless_use(self.uses)
            reasons = reasons + (f"{name} explains why ranks had lost contact; that retry does not count",)
        self.uses.append(Use(situation.time, choice.action, name))
        actions_of_others = tuple((other, action) for other, action in job.recovery if other != name)
        recovery = (*actions_of_others, (name, choice.action))
        self.job.apply(JobEvent.RECOVERING, recovery=recovery, unexplained=not name)
        self.record_event(
            Event.RECOVERY_ACTION,
            action=choice.action,
            nodes=(name,) if name else (),
            evidence=reasons,
            explains=explains,
        )
        self._begin(choice, node, evict=evict)
        return choice.action

    def _assess(self, name: str, node: Node | None, *, evict: bool) -> Situation:
        """Return the facts that determine the recovery action for a node (None: no node is to blame)."""
        infos = {info.name: info for info in self.nodes.cluster.nodes()}
        spares = self.nodes.list_spares()
        current_time = time.monotonic()
        # A write in this iteration may have waited for the disk. Agents that sent messages meanwhile are not silent.
        is_silent = node is not None and self.nodes.iteration_time - node.last_seen > self.settings.limits.window
        return Situation(
            node=name,
            must_evict=evict,
            is_reachable=node is None or (self.nodes.is_reachable(node) and not is_silent),
            can_start=node is None or (name in infos and infos[name].can_start_agent),
            is_running=name in infos and infos[name].has_agent,
            spare_count=len(spares),
            tested_count=sum(spare.self_check is SelfCheck.PASSED for spare in spares),
            time=current_time,
            has_slow_start=self.nodes.cluster.slow_start,
        )

    def _begin(self, choice: Choice, node: Node | None, *, evict: bool) -> None:
        """Begin the chosen action. "retry" needs no action here, since all trainers are started again anyway."""
        if choice.action == "stop":
            step, count = escalation.count_equal_ends(self.job.state)
            reason = f"no recovery action remains: {'; '.join(choice.reasons)}"
            if step and count > 1:
                reason += f"; each of the last {count} starts ended in step {step}"
            self.attempts.fail(reason)
        elif choice.action == "respawn":
            names = (node.name,) if node is not None else self.job.state.placement
            for name in names:
                self.nodes.start_in_background(self.nodes[name], "respawn")
        elif choice.action != "retry" and node is not None:
            reason = self.reasons.get(node.name, choice.reasons[-1])
            self.nodes.take_out(node, evict=evict, reason=reason)
            if choice.action == "replenish":
                self.nodes.request_node()

    def shrink(self, reason: str) -> None:
        """Record that the job continues with fewer replicas, since too few nodes remain."""
        self.uses.append(Use(time.monotonic(), "shrink", ""))
        self.record_event(Event.RECOVERY_ACTION, action="shrink", evidence=(reason,))

    def refill_spares(self, current_time: float) -> None:
        """Request new nodes in place of spares that were used, while training runs."""
        limits = self.settings.limits
        present_count = sum(not node.state.is_excluded for node in self.nodes.all()) + self.nodes.pending_requests
        missing_count = limits.nodes + limits.spares - present_count
        self._refill_times = [time for time in self._refill_times if current_time - time < limits.budget_seconds]
        if missing_count <= 0 or not limits.replenish_wait or len(self._refill_times) >= limits.replacements:
            return
        if self._refill_times and current_time - self._refill_times[-1] < REFILL_INTERVAL:
            return
        self._refill_times.append(current_time)
        target_count = limits.nodes + limits.spares
        text = (
            f"{present_count} of {target_count} nodes and spares are present or requested; requesting {missing_count}"
        )
        self.record_event(Event.NODE_REQUESTED, evidence=(text,))
        for _ in range(missing_count):
            self.nodes.request_node()


@dataclass(kw_only=True, eq=False)
class SelfChecks:
    """Orders self-checks and evicts the nodes that fail them.

    Attributes:
        job: the job whose nodes are tested. Only spares are tested while it trains.
        nodes: all nodes.
        recovery: takes out the nodes that fail.
        record_event: writes an event into the audit log.
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    recovery: Recovery
    settings: RunningSettings
    record_event: RecordEvent
    _reports: dict[str, Diagnosed] = field(default_factory=dict, init=False)  # by node
    _spare_orders: dict[str, int] = field(default_factory=dict, init=False)  # by node; below all numbers of `attempts`

    def begin(self) -> None:
        """Order all nodes to run their self-checks."""
        self.attempts.last_order += 1
        self._reports = {}
        for node in self.nodes.all():
            self._order(node, self.attempts.last_order)

    def _order(self, node: Node, order_number: int) -> None:
        """Order a node to run its self-checks."""
        self.nodes.order(node, do="diagnose", order=order_number, grace_period=self.settings.limits.grace_period)

    def collect_results(self, current_time: float) -> None:
        """Once all results have come, evict the nodes that failed and start again."""
        limits = self.settings.limits
        tested = [node for node in self.nodes.all() if node.is_usable]
        is_late = current_time - self.job.phase_entered > limits.grace_period + limits.window
        if any(node.name not in self._reports for node in tested) and not is_late:
            return
        for node in tested:
            missing = Diagnosed(self.attempts.last_order, 1, stderr="no result in time")
            self.record_result(node, self._reports.get(node.name, missing))
        if self.job.phase is Phase.DIAGNOSING:
            self.job.apply(JobEvent.TESTED)

    def test_spares(self) -> None:
        """Order untested spares to run their self-checks."""
        if not self.settings.limits.test_spares:
            return
        for node in self.nodes.list_spares():
            if node.self_check is SelfCheck.NOT_RUN:
                order_number = 1 + max(self._spare_orders.values(), default=0)
                self._spare_orders[node.name] = order_number
                node.self_check = SelfCheck.RUNNING
                self._order(node, order_number)

    def receive_report(self, node: Node, report: Diagnosed) -> None:
        """Take the report of a node's self-checks."""
        if report.order == self.attempts.last_order:
            self._reports[node.name] = report
        elif node.self_check is SelfCheck.RUNNING and report.order == self._spare_orders.get(node.name):
            self.record_result(node, report)

    def record_result(self, node: Node, report: Diagnosed) -> None:
        """Record the result of a node's self-checks, and evict a node that failed."""
        has_passed = report.code == 0
        node.self_check = SelfCheck.PASSED if has_passed else SelfCheck.NOT_RUN
        details = report.stderr.strip()[-500:] or "see its report"
        result = "passed" if has_passed else f"failed: {details}"
        role = "" if node.name in self.job.state.placement else "spare "
        self.record_event(
            Event.NODE_DIAGNOSED,
            nodes=(node.name,),
            action="none" if has_passed else "evict",
            evidence=(f"self-checks of {role}{node.name} {result}",),
            report=report.report,
        )
        if not has_passed:
            self.recovery.reasons[node.name] = f"self-checks {result}"
            self.recovery.recover_node(node.name, evict=True)
