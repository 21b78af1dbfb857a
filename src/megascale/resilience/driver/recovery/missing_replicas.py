"""Training without the replicas of lost nodes (resilience.continue_replicas), and the return of missing replicas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megascale.config import Config
from megascale.core.events import Event
from megascale.errors import ConfigError
from megascale.resilience.driver.nodes import Node, Nodes
from megascale.resilience.driver.recovery.attempts import Attempts, choose_first_order
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobEvent, Phase

PREPARATION_LIMIT = 60.0  # seconds after which nodes join even if their processes are not prepared


def list_continued_sizes(config: Config, ranks_per_node: int, nodes: int) -> list[tuple[int, int]]:
    """Return the pairs (data-parallel size, number of nodes) with which `nodes` nodes may go on, largest first.

    Every node must be full, every replica needs a micro-batch, and at most resilience.max_missing_replicas are missing.
    """
    parallel = config.parallel
    train = config.train
    limits = config.resilience
    model_ranks = parallel.model_ranks
    full_size = limits.nodes * ranks_per_node // model_ranks
    # Each unit of the data-parallel size holds expert x replicate ranks that train different samples.
    microbatches = train.global_batch // train.micro_batch
    size_by_batch = microbatches // (parallel.expert * parallel.replicate)
    size_by_nodes = nodes * ranks_per_node // model_ranks
    largest_size = min(full_size, size_by_nodes, size_by_batch)
    smallest_size = max(1, full_size - limits.max_missing_replicas)
    sizes = []
    for data in reversed(range(smallest_size, largest_size + 1)):
        if data * model_ranks % ranks_per_node == 0:
            sizes.append((data, data * model_ranks // ranks_per_node))
    return sizes


def check_continued_sizes(config: Config, ranks_per_node: int) -> None:
    """Raise ConfigError if a job with resilience.continue_replicas could not go on after the loss of one node."""
    limits = config.resilience
    if not limits.continue_replicas:
        return
    key = "resilience.continue_replicas=true"
    full_size = limits.nodes * ranks_per_node // config.parallel.model_ranks
    if limits.nodes < 2 or full_size < 2:
        raise ConfigError(
            f"{key} goes on with the replicas on other nodes, and this job has {full_size} on {limits.nodes} nodes; "
            "set --parallel.data=2 or more and --nodes=2 or more, or leave resilience.continue_replicas out"
        )
    if list_continued_sizes(config, ranks_per_node, limits.nodes - 1):
        return
    unlimited = limits.model_copy(update={"max_missing_replicas": full_size - 1})
    sizes = list_continued_sizes(config.model_copy(update={"resilience": unlimited}), ranks_per_node, limits.nodes - 1)
    if not sizes:
        raise ConfigError(
            f"{key} with resilience.nodes={limits.nodes}: each of the {full_size} replicas has ranks on every node, so "
            "none is complete without one node; leave resilience.continue_replicas out"
        )
    largest_size, _ = sizes[0]
    missing = full_size - largest_size
    raise ConfigError(
        f"resilience.max_missing_replicas={limits.max_missing_replicas} is too low for {key}: without one of "
        f"{limits.nodes} nodes {missing} of {full_size} replicas are missing; set "
        f"--resilience.max_missing_replicas={missing} or more"
    )


@dataclass(kw_only=True, eq=False)
class MissingReplicas:
    """Decides with how many replicas a job goes on, and when new nodes take the place of missing replicas.

    Attributes:
        job: the job.
        nodes: all nodes.
        attempts: stops the trainers.
        settings: the settings in force.
        record_event: writes an event into the audit log.
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    settings: RunningSettings
    record_event: RecordEvent
    # The last order to prepare processes: (attempt, names of the joining nodes, time of the order)
    _preparation: tuple[int, tuple[str, ...], float] = field(default=(0, (), 0.0), init=False)
    # The last order to prepare groups: its number, (attempt, names of the joining nodes), None after it was withdrawn
    _groups_number: int = field(default_factory=choose_first_order, init=False)
    _groups_purpose: tuple[int, tuple[str, ...]] | None = field(default=None, init=False)

    @property
    def full_size(self) -> int:
        """Data-parallel size of all replicas."""
        return self.settings.limits.nodes * self.job.state.ranks_per_node // self.attempts.model_ranks

    @property
    def is_overdue(self) -> bool:
        """True if replicas have been missing for longer than resilience.max_missing_seconds."""
        since = self.job.state.missing_since
        return since > 0 and time.time() - since > self.settings.limits.max_missing_seconds

    def choose_size(self) -> tuple[int, int] | None:
        """Return (data-parallel size, number of nodes) with which the job goes on; None if it must wait for nodes.

        Nodes whose recovery is under way do not delay the others: they join later.
        """
        state = self.job.state
        if not self.settings.limits.continue_replicas or not state.attempt or not state.placement or self.is_overdue:
            return None
        survivors = [name for name in state.placement if self.is_surviving(name)]
        if state.joining:
            return self._find_size(len(survivors) + len(self.nodes.list_spares()))
        if len(survivors) == len(state.placement):
            return None
        return self._find_size(len(survivors))

    def is_surviving(self, name: str) -> bool:
        """Return True if a node with ranks takes part in the next attempt without a recovery."""
        is_recovered = any(name == node for node, _ in self.job.state.recovery)
        return name in self.nodes and self.nodes[name].may_keep_ranks and not is_recovered

    def _find_size(self, nodes: int) -> tuple[int, int] | None:
        """Return the largest pair of `list_continued_sizes` for `nodes` nodes, None if there is none."""
        sizes = list_continued_sizes(self.settings.config, self.job.state.ranks_per_node, nodes)
        return sizes[0] if sizes else None

    def find_missing_since(self, data: int) -> float:
        """Return when replicas began to be missing, in seconds since 1970, for a data-parallel size; 0: none."""
        if data >= self.full_size or self.is_overdue:
            return 0.0
        return self.job.state.missing_since or time.time()

    def check_degraded_job(self) -> None:
        """Let prepared nodes join at the next step boundary. Stop the job if replicas are missing for too long."""
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
        spares = self.nodes.list_spares()
        size = self._find_size(len(state.placement) + len(spares))
        if size is None or size[0] <= state.data:
            self._withdraw_groups(())
            return
        data, node_count = size
        joining = spares[: node_count - len(state.placement)]
        self._withdraw_groups(tuple(node.name for node in joining))
        if not self._is_prepared(joining, data):
            return
        joining_names = tuple(node.name for node in joining)
        reason = f"{', '.join(joining_names)} join: {data} of {self.full_size} replicas from the next step on"
        self.record_event(Event.REPLICAS_JOINING, action="join", nodes=joining_names, evidence=(reason,))
        self.attempts.timeline.begin_join(time.monotonic())
        joins_at_once = all(node.is_prepared for node in joining)
        self.attempts.stop(JobEvent.JOINING, reason, joins_at_once=joins_at_once)

    def _is_prepared(self, joining: Sequence[Node], data: int) -> bool:
        """Return True if the processes of joining nodes wait for the next attempt. Order their start if needed."""
        state = self.job.state
        limits = self.settings.limits
        if not limits.keep_seconds:  # Processes do not wait for an attempt, so they start with it.
            return True
        names = tuple(node.name for node in joining)
        current_time = time.monotonic()
        attempt, prepared_names, since = self._preparation
        if (attempt, prepared_names) != (state.attempt, names):
            self._preparation = (state.attempt, names, current_time)
            following = replace(state, placement=state.placement + names, data=data)
            for node in joining:
                self.attempts.prepare_join(node, following)
            return False
        # After the limit, processes that cannot be prepared start with the attempt.
        if current_time - since > PREPARATION_LIMIT:
            return True
        if not all(node.is_prepared for node in joining):
            return False
        # A single rank serves no store in which others could meet it.
        needs_groups = self.settings.config.rendezvous.prepared_groups and state.world > 1
        return not needs_groups or self._are_groups_prepared(joining, data)

    def _are_groups_prepared(self, joining: Sequence[Node], data: int) -> bool:
        """Return True if the groups with which nodes join are made, or failed. Order them if needed.

        A joining process ends its preparation with those of all other ranks, so only joining nodes report it.
        """
        state = self.job.state
        names = tuple(node.name for node in joining)
        purpose = (state.attempt, names)
        if self._groups_purpose != purpose:
            self._groups_purpose = purpose
            self._groups_number += 1
            following = replace(state, placement=state.placement + names, data=data)
            self.attempts.prepare_groups(following, self._groups_number)
            return False
        return all(node.has_ended_groups(self._groups_number) for node in joining)

    def _withdraw_groups(self, names: tuple[str, ...]) -> None:
        """Let ranks drop the groups that they prepare in this attempt, unless these are for the nodes `names`."""
        state = self.job.state
        if self._groups_purpose is None:
            return
        attempt, earlier_names = self._groups_purpose
        if attempt == state.attempt and earlier_names != names:
            self._groups_purpose = None
            self._groups_number += 1
            self.attempts.drop_groups(state.placement + earlier_names, self._groups_number)
