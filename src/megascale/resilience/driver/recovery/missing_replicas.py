"""Training without the replicas of lost nodes (resilience.continue_replicas): sizes, limits and the way back."""

from __future__ import annotations

import time
from dataclasses import dataclass

from megascale.config import Config
from megascale.core.events import Event
from megascale.errors import ConfigError
from megascale.resilience.driver.nodes import Nodes
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.driver.state.transitions import JobEvent


def list_continued_sizes(config: Config, ranks_per_node: int, nodes: int) -> list[tuple[int, int]]:
    """Return (data-parallel size, number of nodes) with which `nodes` nodes may go on, largest first.

    Every node must be full and every replica needs a micro-batch. At most resilience.max_missing_replicas are missing.
    """
    parallel, train, limits = config.parallel, config.train, config.resilience
    model = parallel.model_ranks
    full = limits.nodes * ranks_per_node // model
    replicas_per_size = parallel.expert * parallel.replicate
    largest = min(full, nodes * ranks_per_node // model, train.global_batch // train.micro_batch // replicas_per_size)
    sizes = []
    for data in range(largest, max(0, full - limits.max_missing_replicas - 1), -1):
        if data * model % ranks_per_node == 0:
            sizes.append((data, data * model // ranks_per_node))
    return sizes


def check_continued_sizes(config: Config, ranks_per_node: int) -> None:
    """Raise ConfigError if a job with resilience.continue_replicas could not go on without one of its nodes."""
    limits = config.resilience
    if not limits.continue_replicas:
        return
    key = "resilience.continue_replicas=true"
    full = limits.nodes * ranks_per_node // config.parallel.model_ranks
    if limits.nodes < 2 or full < 2:
        raise ConfigError(
            f"{key} goes on with the replicas on other nodes, and this job has {full} on {limits.nodes} nodes; set "
            "--parallel.data=2 or more and --nodes=2 or more, or leave resilience.continue_replicas out"
        )
    if list_continued_sizes(config, ranks_per_node, limits.nodes - 1):
        return
    unlimited = limits.model_copy(update={"max_missing_replicas": full - 1})
    sizes = list_continued_sizes(config.model_copy(update={"resilience": unlimited}), ranks_per_node, limits.nodes - 1)
    if not sizes:
        raise ConfigError(
            f"{key} with resilience.nodes={limits.nodes}: each of the {full} replicas has ranks on every node, so none "
            "is complete without one node; leave resilience.continue_replicas out"
        )
    raise ConfigError(
        f"resilience.max_missing_replicas={limits.max_missing_replicas} is too low for {key}: without one of "
        f"{limits.nodes} nodes {full - sizes[0][0]} of {full} replicas are missing; set "
        f"--resilience.max_missing_replicas={full - sizes[0][0]} or more"
    )


@dataclass(kw_only=True, eq=False)
class MissingReplicas:
    """Decides with how many replicas a job goes on, and when the missing ones are taken in.

    Attributes:
        job: the job.
        nodes: all nodes.
        attempts: stops the trainers.
        settings: in force.
        record_event: writes an event into the audit log.
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    settings: RunningSettings
    record_event: RecordEvent

    @property
    def full_size(self) -> int:
        """Data-parallel size of all replicas."""
        return self.settings.limits.nodes * self.job.state.ranks_per_node // self.attempts.model_ranks

    @property
    def is_overdue(self) -> bool:
        """True if replicas have been missing for longer than resilience.max_missing_seconds."""
        since = self.job.state.missing_since
        return since > 0 and time.time() - since > self.settings.limits.max_missing_seconds

    def choose_size(self, usable: int) -> tuple[int, int] | None:
        """Return (data-parallel size, number of nodes) with which the job goes on; None if it must wait for nodes."""
        state = self.job.state
        has_trained = state.attempt > 0 and bool(state.placement)
        if not self.settings.limits.continue_replicas or not has_trained or self.is_overdue:
            return None
        sizes = list_continued_sizes(self.settings.config, state.ranks_per_node, usable)
        return sizes[0] if sizes else None

    def find_start(self, data: int) -> float:
        """Return since when replicas have been missing, in seconds since 1970, if the job goes on with `data`."""
        if data >= self.full_size:
            return 0.0
        return self.job.state.missing_since or time.time()

    def check(self) -> None:
        """Take ready nodes in at the next step boundary. Stop the job if replicas are missing for too long."""
        state = self.job.state
        if state.phase is not Phase.DEGRADED:
            return
        if self.is_overdue:
            limit = self.settings.limits.max_missing_seconds
            reason = (
                f"{self.full_size - state.data} replicas have been missing for longer than "
                f"resilience.max_missing_seconds={limit:g}: the job waits for them"
            )
            self.record_event(Event.REPLICAS_OVERDUE, action="wait", evidence=(reason,))
            self.attempts.stop(JobEvent.JOINING, reason)
            return
        holders = [self.nodes[name] for name in state.placement]
        ready = self.nodes.spares()
        size = self.choose_size(sum(node.is_usable for node in holders) + len(ready))
        if size is None or size[0] <= state.data:
            return
        names = tuple(node.name for node in ready)
        reason = f"{', '.join(names)} join: {size[0]} of {self.full_size} replicas from the next step on"
        self.record_event(Event.REPLICAS_JOINING, action="join", nodes=names, evidence=(reason,))
        self.attempts.timeline.begin_join(time.monotonic())
        self.attempts.stop(JobEvent.JOINING, reason)
