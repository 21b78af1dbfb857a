"""Noticing that nodes are gone: silent ones that hold no ranks, and agents that have ended."""

from __future__ import annotations

import time

from megascale.core.events import Event
from megascale.resilience.driver.diagnosis.observations import Observations
from megascale.resilience.driver.nodes.nodes import Node, Nodes
from megascale.resilience.driver.recovery.recovery import Recovery
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import NodeState, Phase
from megascale.resilience.driver.state.transitions import NodeEvent
from megascale.resilience.driver.telemetry.response import Response
from megascale.resilience.rules.offenders import repeated
from megascale.resilience.rules.verdicts import Verdict


class LostNodes:
    """Args:
    job, nodes: who may be lost.
    recovery: for those without ranks.
    seen: their history.
    response: for those whose ranks run.
    window: seconds without a message after which a node counts as lost.
    """

    def __init__(
        self, job: Job, nodes: Nodes, recovery: Recovery, seen: Observations, response: Response, window: float
    ) -> None:
        self._job, self._nodes, self._recovery, self._seen = job, nodes, recovery, seen
        self._response, self._window = response, window

    def watch(self, now: float) -> None:
        """Nodes that are silent are lost; the rules judge those whose ranks run."""
        job, taken = self._job, self._nodes.taken
        for name in taken:
            node = self._nodes.get(name)
            # One whose agent has yet to be told of this driver is not waited for, but the others are, spares too.
            awaited = node is not None and node.state is NodeState.JOINING
            coming = awaited and self._nodes.is_coming(n for n in self._nodes.all() if n.name not in taken)
            if node is not None and (node.state is NodeState.UP or (awaited and not coming)):
                self._nodes.order(node, do="stop", order=0, how="kill", grace_period=0.0)
                self._nodes.order(node, do="leave")
                why = f"the cluster has taken {name} out of the job; what still ran there was told to end"
                if job.ending:
                    self._nodes.lose(node, why)
                    continue
                self._nodes.change(
                    name, NodeEvent.DEPARTED, why=why
                )  # it answers, and must not be started again in place
                self._nodes.give_up(node)
                self.recover_lost_node(node, why)
        judged = set(job.state.placement if job.phase in (Phase.STARTING, Phase.RUNNING) else ())
        for node in self._nodes.all():
            if node.name in judged:
                continue
            if node.state is NodeState.UP and now - node.last_seen > self._window:
                why = f"no message from {node.name} for {now - node.last_seen:.1f} s"
            elif node.state is NodeState.JOINING and now > node.deadline:
                about = next((i.reason for i in self._nodes.cluster.nodes() if i.name == node.name), "")
                why = f"the agent of {node.name} did not come" + (f": {about}" if about else "")
            else:
                continue
            if job.ending:
                self._nodes.lose(node, why)
            else:
                self.recover_lost_node(node, why)

    def next_silence(self, now: float, default: float) -> float:
        """Seconds until the first node whose heartbeats come now would count as silent; `default` if there is none."""
        last = (self._nodes[name].last_seen for name in self._job.state.placement)
        left = (seen + self._window - now for seen in last)
        return max(0.01, min((seconds for seconds in left if seconds > 0), default=default))

    def forgive(self, late: float) -> None:
        """A driver that was held up (a slow disk, a host without CPU) received nothing meanwhile: that is no silence of
        the nodes."""
        now = time.monotonic()
        for node in self._nodes.all():
            node.last_seen = min(now, node.last_seen + late)

    def look_after(self, node: Node) -> None:
        """Its connection closed: if the cluster says that no agent runs there any more, there is no need to wait."""
        info = next((each for each in self._nodes.cluster.nodes() if each.name == node.name), None)
        if info is None or info.running or node.channel is not None or node.state is not NodeState.UP:
            return
        if not self._job.ending:
            self.recover_lost_node(
                node, f"the agent of {node.name} has ended: its connection closed and no process is there"
            )

    def recover_lost_node(self, node: Node, why: str) -> None:
        """A node is gone while the job goes on: recover it; one that goes missing again and again is evicted."""
        job = self._job
        running = job.phase in (Phase.STARTING, Phase.RUNNING) and node.name in job.state.placement
        verdict = Verdict(Event.NODE_LOST, (node.name,), job.state.ranks(node.name), "recover", (why,))
        verdict = repeated(self._seen.view(time.monotonic()), [verdict])[0]
        if running:
            self._response.act([verdict])
        else:
            reason = self._recovery.reasons[node.name] = "; ".join(verdict.evidence)
            self._nodes.lose(node, reason)
            self._seen.blame(verdict)
            self._recovery.recover_node(node.name, evict=verdict.action == "evict")
