"""Recovery: the recovery action for each fault, chosen by the escalation policy, and new spares for those used up."""

from __future__ import annotations

import time
from dataclasses import replace

from megascale.core.events import Event
from megascale.resilience.driver.nodes.nodes import Nodes, Note
from megascale.resilience.driver.recovery import escalation, progress
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.escalation import Situation, Use
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import NodeState, Phase
from megascale.resilience.driver.state.transitions import JobEvent

REFILL = 30.0  # seconds between requests for nodes in place of spares


class Recovery:
    """Args:
    job, nodes, attempts: what is recovered.
    settings: in force.
    uses: recovery actions taken so far, by drivers before too.
    note: writes an event down.

    Attributes:
        reasons: why each node was last blamed.
    """

    def __init__(
        self, job: Job, nodes: Nodes, attempts: Attempts, settings: RunningSettings, uses: list[Use], note: Note
    ) -> None:
        self._job, self._nodes, self._attempts, self._note = job, nodes, attempts, note
        self._limits, self.uses = settings.limits, uses
        self.reasons: dict[str, str] = {}
        self._refilled: list[float] = []  # when new spares were asked for

    def recover(self, blamed: tuple[str, ...], evict: frozenset[str]) -> None:
        """After a fault: choose a recovery action for each node to blame, stop what runs, start again."""
        actions = {name: self.recover_node(name, name in evict) for name in blamed or ("",)}
        if self._job.phase in (Phase.STARTING, Phase.RUNNING):  # recover_node may have ended the job
            why = ", ".join(f"{action} {name}".strip() for name, action in actions.items())
            self._attempts.stop(JobEvent.RESTARTED, why)

    def recover_node(self, name: str, evict: bool) -> str:
        """Choose and begin the recovery action for one node ("": for all, none to blame); returns it."""
        nodes, job = self._nodes, self._job.state
        node = nodes.get(name)
        known = {info.name: info for info in nodes.cluster.nodes()}
        spares = nodes.spares()
        silent = node is not None and time.monotonic() - node.last_seen > self._limits.window
        at = Situation(
            node=name,
            evict=evict,
            reachable=node is None or (nodes.answers(node) and not silent),
            alive=node is None or (name in known and known[name].alive),
            running=name in known and known[name].running,
            spares=len(spares),
            tested=sum(bool(n.tested) for n in spares),
            time=time.monotonic(),
            slow_start=nodes.slow_start,
        )
        choice = escalation.choose(self._limits, at, self.uses)
        if node is not None and name not in job.placement and choice.action == "spare":
            choice = replace(choice, action="replenish")  # a spare that is lost: have a new one
        why, explains = choice.reasons, bool(name) and job.unexplained
        if explains:
            # Ranks had lost contact with nobody known to blame; it was this node, so that retry costs no budget.
            escalation.refund_last_blameless_use(self.uses)
            why = (*why, f"{name} explains why ranks had lost contact; that retry does not count")
        self.uses.append(Use(at.time, choice.action, name))
        self._job.apply(
            JobEvent.RECOVERING,
            recovery=(*(each for each in job.recovery if each[0] != name), (name, choice.action)),
            unexplained=not name,
        )
        about = (name,) if name else ()
        self._note(Event.RECOVERY_ACTION, action=choice.action, nodes=about, evidence=why, explains=explains)
        if choice.action == "stop":
            step, times = progress.count_equal_ends(job)
            again = f"; each of the last {times} starts ended in step {step}" if step and times > 1 else ""
            self._attempts.fail("no recovery action is left: " + "; ".join(choice.reasons) + again)
        elif choice.action == "respawn":
            for each in [node] if node is not None else [nodes[n] for n in job.placement]:
                nodes.start(each, "respawn")
        elif choice.action != "retry" and node is not None:
            nodes.take_out(node, evict, self.reasons.get(name, choice.reasons[-1]))
            if choice.action == "replenish":
                nodes.ask_for_one()
        return choice.action

    def shrink(self, why: str) -> None:
        """Go on with fewer copies: too few nodes are left, and none came."""
        self.uses.append(Use(time.monotonic(), "shrink", ""))
        self._note(Event.RECOVERY_ACTION, action="shrink", evidence=(why,))

    def refill(self, now: float) -> None:
        """While training runs: have new spares in place of those that were used."""
        nodes, limits = self._nodes, self._limits
        there = sum(n.state in (NodeState.UP, NodeState.JOINING) for n in nodes.all()) + nodes.requests
        missing = limits.nodes + limits.spares - there
        self._refilled = [t for t in self._refilled if now - t < limits.budget_seconds]
        if missing <= 0 or not limits.replenish_wait or len(self._refilled) >= limits.replacements:
            return
        if self._refilled and now - self._refilled[-1] < REFILL:
            return
        self._refilled.append(now)
        text = f"{there} nodes are there; asking for {missing} to have {limits.spares} spare again"
        self._note(Event.NODE_REQUESTED, evidence=(text,))
        for _ in range(missing):
            nodes.ask_for_one()
