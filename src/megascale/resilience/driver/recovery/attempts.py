"""Attempts: every stop and every start of the trainers. They never overlap: all nodes stop before any starts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale.core.events import Event
from megascale.errors import EXIT_FAILED
from megascale.resilience.driver.launch_checks import JobFiles
from megascale.resilience.driver.nodes import Node, Nodes, SelfCheck
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.recovery.timeline import RecoveryTimeline
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobEvent, JobState, Phase

# Stops after which the time until the next step is not a recovery's.
_PERSONAL = (JobEvent.PAUSED, JobEvent.FAILED, JobEvent.INTERRUPTED)

# Faults of one process or node. A full disk, an error in the program or a network that lost contact may concern all.
_LOCAL_FAULTS = frozenset(
    map(
        str,
        (
            Event.PROCESS_KILLED,
            Event.SEGMENTATION_FAULT,
            Event.CUDA_ERROR,
            Event.DEVICE_FAULT,
            Event.HANG,
            Event.SLOW_NODE,
            Event.NODE_LOST,
            Event.MISSED_HEARTBEAT,
            Event.AGENT_RESTARTED,
            Event.PORT_TAKEN,
        ),
    )
)


def _first_order() -> int:
    # Acknowledgements of an earlier driver's orders must not count. A clock may be set back, so the number is random.
    return (1 + secrets.randbits(30)) << 20


@dataclass(kw_only=True, eq=False)
class Attempts:
    """Starts and stops the trainers.

    Attributes:
        job: whose trainers they are.
        nodes: where they run.
        settings: in force.
        record_event: writes an event into the audit log.
        overrides: further settings of the trainers' command line.
        files: the trainers' environment and the configured order of the nodes.
        started: when this attempt's processes were ordered or taken over, on the monotonic clock.
        order: number of the last order to stop or to run self-checks.
        timeline: times of the recovery under way.
    """

    job: Job
    nodes: Nodes
    settings: RunningSettings
    record_event: RecordEvent
    overrides: Sequence[str] = ()
    files: JobFiles = field(default_factory=JobFiles)
    started: float = field(default_factory=time.monotonic)
    order: int = field(default_factory=_first_order)
    timeline: RecoveryTimeline = field(default_factory=RecoveryTimeline)

    @property
    def model_ranks(self) -> int:
        """The number of ranks that hold one copy of the model."""
        return self.settings.config.parallel.model_ranks

    def stop(self, event: JobEvent, reason: str, **changes: Any) -> None:
        """Stop all trainers for `event`, which determines the phase that follows."""
        if event in _PERSONAL:
            self.timeline.forget()
        # A pause while no trainers run enters its goal at once; ranks may still be parked in their processes.
        if self.job.apply(event, reason=reason, **changes) and self.job.phase in (Phase.STOPPING, Phase.PAUSED):
            self.order += 1
            for node in self.nodes.all():
                self.send_stop(node)

    def fail(self, reason: str, code: int = EXIT_FAILED) -> None:
        """End the job, since a person is needed."""
        self.record_event(Event.JOB_FAILED, action="stop", evidence=(reason,), exit_code=code)
        self.stop(JobEvent.FAILED, reason, exit_code=code)

    def send_stop(self, node: Node) -> None:
        """Order a node to end its trainers and self-checks and to acknowledge that."""
        if node.self_check is SelfCheck.RUNNING:
            node.self_check = SelfCheck.NOT_RUN
        state = self.job.state
        how = "kill"
        if state.phase is Phase.STOPPING and state.save:
            how = "save"
        elif state.phase is Phase.STOPPING and state.joining:
            how = "leave"
        elif state.phase is Phase.STOPPING and self._may_keep(node):
            how = "keep"
        period = self.settings.limits.grace_period
        self.nodes.order(node, do="stop", order=self.order, how=how, grace_period=period, forget=state.distrust)

    def _may_keep(self, node: Node) -> bool:
        """Return whether the ranks of a node may stay in their processes.

        They are to start again as they are, after faults that say nothing against other processes.
        """
        state = self.job.state
        if not self.timeline.causes or not self.timeline.causes <= _LOCAL_FAULTS:
            return False
        is_restarted = state.goal in (Phase.WAITING, Phase.STARTING) and not state.distrust
        return is_restarted and node.name in state.placement and node.name not in state.fresh

    def begin(self, current_time: float) -> None:
        """Start the trainers on the nodes of the placement."""
        first = self.nodes[self.job.state.placement[0]]
        # After the loss of a journal, agents may know newer attempts. A number that they know would start nothing.
        attempt = 1 + max(self.job.state.attempt, *(node.attempt for node in self.nodes.all()))
        if not self.job.apply(JobEvent.BEGUN, attempt=attempt, master=(first.record.address, first.port)):
            return
        self.started = current_time
        self.timeline.begin_attempt(current_time)
        for node in self.nodes.all():
            node.forget_attempt()
        state = self.job.state
        for name in state.placement:
            self.send_start(self.nodes[name])
        summary = (
            f"attempt {state.attempt}: {state.world} ranks on {', '.join(state.placement)}, data parallelism "
            f"{state.data}"
        )
        evidence = (summary,) + self._compare_with_placement_file(state.placement)
        self.record_event(Event.ATTEMPT_STARTED, nodes=state.placement, evidence=evidence)

    def _compare_with_placement_file(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Describe how the chosen nodes differ from resilience.placement; empty without such a file."""
        configured = self.files.nodes
        if not configured:
            return ()
        file = f"resilience.placement={self.settings.limits.placement}"
        if len(names) != len(configured):
            return (f"the placement differs from {file}, which is for {len(configured)} nodes",)
        changes = [f"{name} replaces {old}" for old, name in zip(configured, names, strict=True) if name != old]
        if not changes:
            return (f"the placement follows {file}",)
        listed = ", ".join(changes[:5])
        if len(changes) > 5:
            listed += f" and {len(changes) - 5} more"
        return (f"the placement follows {file}, but {listed}",)

    def send_start(self, node: Node) -> None:
        """Order a node to start its ranks of the current attempt."""
        node.last_seen = max(node.last_seen, self.started)
        self._send_start(node, self.job.state, prepares=False)

    def prepare_join(self, node: Node, following: JobState) -> None:
        """Order a node to start processes that wait for the attempt of the state `following`, in which they join."""
        self._send_start(node, following, prepares=True)

    def _send_start(self, node: Node, state: JobState, *, prepares: bool) -> None:
        ranks = state.ranks(node.name)
        overrides = list(self.overrides)
        if state.data * self.model_ranks != self.settings.limits.nodes * state.ranks_per_node:
            overrides.append(f"--parallel.data={state.data}")
        self.nodes.leases.holders.add(node.name)
        self.nodes.order(
            node,
            do="start",
            attempt=state.attempt,
            job=state.name,
            ranks=list(ranks),
            world=state.world,
            master=list(state.master),
            settings=self.settings.config.to_toml(),
            words=overrides,
            env=self.files.environment,
            fresh=node.name in state.fresh,
            forward=0 if 0 in ranks else None,
            state=state.to_json(),
            identity=self.settings.identity,
            prepares=prepares,
        )
