"""What the cluster says of the job by itself: nodes that it drains, and that it has given the job to another driver."""

from __future__ import annotations

from megascale.core.events import Event
from megascale.errors import EXIT_INTERRUPTED
from megascale.resilience.driver.nodes.nodes import Nodes, Note
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import ENDED
from megascale.resilience.driver.state.journal import JournalFenced
from megascale.resilience.driver.state.transitions import JobEvent
from megascale.resilience.driver.telemetry.response import Response


class ClusterNotices:
    """Args:
    job, nodes, attempts: what is told of.
    response: for its verdicts.
    note: writes an event down.
    """

    def __init__(self, job: Job, nodes: Nodes, attempts: Attempts, response: Response, note: Note) -> None:
        self._job, self._nodes, self._attempts, self._note = job, nodes, attempts, note
        self._response = response

    def handle(self) -> None:
        """Take in what is new. Raises JournalFenced where another driver has the newer epoch."""
        cluster = self._nodes.cluster
        if cluster.replaced:
            raise JournalFenced(cluster.replaced)
        self._response.act(cluster.reports())
        drained, ending = self._nodes.drained, self._nodes.ending
        for node in self._nodes.all():
            node.leaving = node.name in ending
            if node.leaving and node.channel is not None and node.told is not node.channel:
                # Whoever runs its agent does so too, if it is there: a kubelet may be dead while what it ran trains on.
                node.told = node.channel
                self._nodes.order(node, do="leave")
            why = drained.get(node.name, "")
            if why and not node.drained:
                text = f"the cluster drains {node.name} ({why}): what runs there goes on, it gets nothing new"
                self._note(Event.NODE_CORDONED, nodes=(node.name,), evidence=(text,))
            elif node.drained and not why:
                text = f"the cluster does not drain {node.name} any more"
                self._note(Event.NODE_UNCORDONED, nodes=(node.name,), evidence=(text,))
            node.drained = why
        if not cluster.withdrawn or self._job.ending:
            return
        if self._job.phase not in ENDED:
            # Nothing is saved: the other driver may have begun, and no two may write.
            why = f"{cluster.withdrawn}: this driver ends what it still has"
            self._note(Event.JOB_INTERRUPTED, action="stop", evidence=(why,))
            self._attempts.stop(JobEvent.INTERRUPTED, why, exit_code=EXIT_INTERRUPTED)
