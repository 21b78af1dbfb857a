"""Self-checks: nodes test themselves, all after a doubt, spares while they wait; one that fails is taken out."""

from __future__ import annotations

import time

from megascale.core.events import Event
from megascale.resilience.driver.nodes.nodes import Node, Nodes, Note
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.recovery.recovery import Recovery
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.driver.state.transitions import JobEvent
from megascale.resilience.protocol.agent_messages import Diagnosed


class SelfChecks:
    """Args:
    job, nodes, attempts: whose nodes are tested; nothing trains on them meanwhile, but for spares.
    recovery: takes out the nodes that fail.
    settings: in force.
    note: writes an event down.
    """

    def __init__(
        self, job: Job, nodes: Nodes, attempts: Attempts, recovery: Recovery, settings: RunningSettings, note: Note
    ) -> None:
        self._job, self._nodes, self._attempts, self._recovery, self._note = job, nodes, attempts, recovery, note
        self._limits = settings.limits
        self._spare_orders = 0  # far below the numbers of orders to all

    def begin(self) -> None:
        """Have all nodes test themselves."""
        self._attempts.order += 1
        for node in self._nodes.all():
            node.report = None
            self._order(node, self._attempts.order)

    def _order(self, node: Node, number: int) -> None:
        self._nodes.order(node, do="diagnose", order=number, grace_period=self._limits.grace_period)

    def check(self, now: float) -> None:
        """When all results are there: take out the nodes that failed, start again."""
        asked = [n for n in self._nodes.all() if n.usable]
        late = now - self._job.entered > self._limits.grace_period + self._limits.window
        if any(n.report is None for n in asked) and not late:
            return
        for node in asked:
            self.take_in(node, node.report or Diagnosed(self._attempts.order, 1, stderr="no result in time"))
        if self._job.phase is Phase.DIAGNOSING:
            self._job.apply(JobEvent.TESTED)

    def test_spares(self) -> None:
        """Have spares test themselves that have not yet."""
        if not self._limits.test_spares:
            return
        for node in self._nodes.spares():
            if not node.tested and not node.checking:
                self._spare_orders += 1
                node.checking = self._spare_orders
                self._order(node, node.checking)

    def received(self, node: Node, report: Diagnosed) -> None:
        """A node has tested itself."""
        if report.order == self._attempts.order:
            node.report = report
        elif report.order == node.checking:
            node.checking = 0
            self.take_in(node, report)

    def take_in(self, node: Node, report: Diagnosed) -> None:
        """Take in the result of a node's self-checks; one that failed is taken out."""
        said = report.stderr.strip()[-500:]
        passed = not report.code
        node.tested = time.time() if passed else 0.0
        verdict = "passed" if passed else f"failed: {said or 'see its report'}"
        role = "" if node.name in self._job.state.placement else "spare "
        self._note(
            Event.NODE_DIAGNOSED,
            nodes=(node.name,),
            action="none" if passed else "evict",
            evidence=(f"self-checks of {role}{node.name} {verdict}",),
            report=report.report,
        )
        if not passed:
            self._recovery.reasons[node.name] = f"self-checks {verdict}"
            self._recovery.recover_node(node.name, evict=True)
