"""Attempts: every stop and every start of the trainers. Two never overlap: all nodes stop before any starts."""

from __future__ import annotations

import secrets
import time
from typing import Any

from megascale.core.events import Event
from megascale.errors import EXIT_FAILED
from megascale.resilience.driver.job_files import JobFiles
from megascale.resilience.driver.nodes.nodes import Node, Nodes, Note
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.driver.state.transitions import JobEvent


class Attempts:
    """Args:
    job, nodes: whose trainers they are, and where.
    settings: in force.
    words: further settings of the trainers' command line.
    note: writes an event down.
    files: the environment of every trainer, and where the nodes were asked to be.

    Attributes:
        started: when this attempt's processes were ordered (or a new driver took them over), on the monotonic clock.
        order: number of the last order to stop or to run self-checks.
    """

    def __init__(
        self,
        job: Job,
        nodes: Nodes,
        settings: RunningSettings,
        words: list[str],
        note: Note,
        files: JobFiles = JobFiles(),
    ) -> None:
        self._job, self._nodes, self._settings, self._words, self._note = job, nodes, settings, words, note
        self._files = files
        self.started = time.monotonic()
        # Answers to stop orders of a driver before are none to ours; no clock: it may be set back.
        self.order = (1 + secrets.randbits(30)) << 20

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        parallel = self._settings.config.parallel
        return parallel.tensor * parallel.pipeline

    def stop(self, event: JobEvent, why: str, **changes: Any) -> None:
        """Stop all trainers for `event`, which says what follows."""
        if self._job.apply(event, why=why, **changes) and self._job.phase is Phase.STOPPING:
            self.order += 1
            for node in self._nodes.all():
                self.send_stop(node)

    def fail(self, why: str, code: int = EXIT_FAILED) -> None:
        """End the job: a person is needed."""
        self._note(Event.JOB_FAILED, action="stop", evidence=(why,), exit_code=code)
        self.stop(JobEvent.FAILED, why, exit_code=code)

    def send_stop(self, node: Node) -> None:
        """Have a node end its trainers (and self-checks) and say so."""
        node.checking = 0
        job = self._job.state
        how = "save" if job.save and job.phase is Phase.STOPPING else "kill"
        grace_period = self._settings.limits.grace_period
        self._nodes.order(node, do="stop", order=self.order, how=how, grace_period=grace_period, forget=job.distrust)

    def begin(self, now: float) -> None:
        """Start the trainers on the nodes that were chosen."""
        job = self._job.state
        first = self._nodes[job.placement[0]]
        # Agents may know more than a journal that was lost: a number that they have had starts nothing.
        attempt = 1 + max(job.attempt, *(node.attempt for node in self._nodes.all()))
        if not self._job.apply(JobEvent.BEGUN, attempt=attempt, master=(first.record.address, first.port)):
            return
        self.started = now
        for node in self._nodes.all():
            node.forget_attempt()
        job = self._job.state
        for name in job.placement:
            self.send_start(self._nodes[name])
        self._note(
            Event.ATTEMPT_STARTED,
            nodes=job.placement,
            evidence=(
                f"attempt {job.attempt}: {job.world} ranks on {', '.join(job.placement)}, data parallelism {job.data}",
                *self._order_of_nodes(job.placement),
            ),
        )

    def _order_of_nodes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """How the nodes chosen compare with resilience.placement."""
        asked, file = self._files.nodes, f"resilience.placement={self._settings.limits.placement}"
        if not asked:
            return ()
        if len(names) != len(asked):
            return (f"not as {file} says, which is for {len(asked)} nodes",)
        other = [f"{got} in the place of {wanted}" for wanted, got in zip(asked, names, strict=True) if wanted != got]
        more = f" and {len(other) - 5} more" if len(other) > 5 else ""
        return (f"as {file} says" + (f", but {', '.join(other[:5])}{more}" if other else ""),)

    def send_start(self, node: Node) -> None:
        """Have a node start its ranks of the current attempt."""
        job, limits = self._job.state, self._settings.limits
        ranks = job.ranks(node.name)
        words = list(self._words)
        if job.data * self.model_ranks != limits.nodes * job.ranks_per_node:
            words.append(f"--parallel.data={job.data}")
        node.last_seen, node.may_run = max(node.last_seen, self.started), True
        self._nodes.order(
            node,
            do="start",
            attempt=job.attempt,
            job=job.name,
            ranks=list(ranks),
            world=job.world,
            master=list(job.master),
            settings=self._settings.config.to_toml(),
            words=words,
            env=self._files.environment,
            fresh=node.name in job.fresh,
            forward=0 if 0 in ranks else None,
            state=job.to_json(),
            identity=self._settings.identity,
        )
