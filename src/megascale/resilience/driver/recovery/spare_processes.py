"""Processes on spares that wait for their first attempt (resilience.prepare_spares).

Without them, the ranks of a spare import libraries, make their GPU's context, compile kernels and page-lock memory
while all other ranks wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megascale.resilience.driver.nodes import Node, Nodes, SelfCheck
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import Phase


@dataclass(kw_only=True, eq=False)
class SpareProcesses:
    """Orders spares to prepare processes for the ranks that they may receive.

    Attributes:
        job: the job.
        nodes: all nodes.
        attempts: sends the orders.
        settings: the settings in force.
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    settings: RunningSettings
    _ordered_attempts: dict[str, int] = field(default_factory=dict, init=False)  # attempt of the last order, by node

    @property
    def is_enabled(self) -> bool:
        """True if spares prepare processes. Only processes of this package's trainer can wait for an attempt."""
        limits = self.settings.limits
        has_own_trainer = limits.preload and not self.settings.config.foreign.command
        return limits.prepare_spares and limits.keep_seconds > 0 and has_own_trainer

    def prepare(self) -> None:
        """Order each spare without prepared processes to start them, once per attempt.

        A spare that must pass self-checks first gets the order after them, since they need its GPUs.
        """
        state = self.job.state
        if not self.is_enabled or state.phase is not Phase.RUNNING or not state.placement:
            return
        for node in self.nodes.list_spares():
            if self._needs_order(node):
                self._ordered_attempts[node.name] = state.attempt
                # A process keeps no rank number while it waits. The last node's ranks only give their count.
                following = replace(state, placement=(*state.placement[:-1], node.name))
                self.attempts.prepare_join(node, following)

    def _needs_order(self, node: Node) -> bool:
        if self.settings.limits.test_spares and node.self_check is not SelfCheck.PASSED:
            return False
        return not node.is_prepared and self._ordered_attempts.get(node.name) != self.job.state.attempt
