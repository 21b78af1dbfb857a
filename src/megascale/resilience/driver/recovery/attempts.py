"""Attempts: every stop and every start of the trainers, and the times of a recovery.

Two attempts never overlap: all nodes stop before any node starts. `RecoveryTimeline` collects the times from a fault to
the first new step. A driver that takes over a recovery from another driver does not know when the recovery began, so it
records none.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale.core.events import Event
from megascale.core.recovery_record import RecoveryRecord
from megascale.core.status import FAILED_IN_STEP
from megascale.errors import EXIT_FAILED
from megascale.resilience.driver.launch_checks import JobFiles
from megascale.resilience.driver.nodes import Node, Nodes, SelfCheck
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobEvent, JobState, Phase
from megascale.resilience.protocol.agent_messages import Stopped
from megascale.resilience.protocol.heartbeat import RankStart, Worker
from megascale.resilience.rules.view import Verdict

_MAX_LISTED_CHANGES = 5  # replaced nodes that an event names
# Verdicts about nodes that sent no more messages.
_SILENT_NODE = (Event.NODE_LOST, Event.MISSED_HEARTBEAT)
# Stops after which the time until the next step does not count as a recovery.
_STOPS_WITHOUT_RECOVERY = (JobEvent.PAUSED, JobEvent.FAILED, JobEvent.INTERRUPTED)
# Faults of one process or node. A full disk, an error in the program or a broken network may concern all nodes.
_LOCAL_FAULTS: frozenset[str] = frozenset(
    {
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
    }
)


@dataclass
class RecoveryTimeline:
    """Collects the times of one recovery. Times are on the driver's monotonic clock.

    Attributes:
        cause: event name of the first verdict, "" outside of a recovery.
        causes: event names of all verdicts.
        fault: when the fault occurred.
        decided: when the driver reached its first verdict.
        started: when the newest attempt was ordered.
        starts: number of attempts since the fault.
        decide_seconds: parts of the time from the verdict to the newest attempt, without the rest.
        complete_step: the furthest step that was complete in a heartbeat at the fault.
    """

    cause: str = ""
    causes: set[str] = field(default_factory=set)
    fault: float = 0.0
    decided: float = 0.0
    started: float = 0.0
    starts: int = 0
    decide_seconds: dict[str, float] = field(default_factory=dict)
    complete_step: int = 0
    _stop_order: tuple[int, float] = (0, 0.0)  # number and time of the stop order that nodes carry out
    _last_stopped: tuple[Stopped, float] | None = None  # the last node's acknowledgement of it, and its time

    def begin_recovery(self, verdict: Verdict, nodes: Sequence[Node], current_time: float) -> None:
        """Note a verdict that ends an attempt. The first verdict since the last step determines cause and times."""
        self.causes.add(str(verdict.kind))
        for worker in _list_workers(nodes):
            self.complete_step = max(self.complete_step, _count_complete_steps(worker))
        if self.cause:
            return
        self._last_stopped = None  # of a stop that had another reason
        self.cause = str(verdict.kind)
        self.fault = min(current_time, _find_fault_time(verdict, nodes, current_time))
        self.decided = current_time

    def begin_join(self, current_time: float) -> None:
        """Note that nodes join a job that continued without them."""
        self.forget()
        self.cause = str(Event.REPLICAS_JOINING)
        self.fault = current_time
        self.decided = current_time

    def begin_stop(self, order: int, current_time: float) -> None:
        """Note that all nodes were ordered to stop."""
        self._end_stop()
        self._stop_order = (order, current_time)

    def note_stopped(self, message: Stopped, current_time: float) -> None:
        """Note that a node has carried out the newest order to stop."""
        self._last_stopped = (message, current_time)

    def _end_stop(self) -> None:
        """Divide the seconds of the last stop order, of which the last node to acknowledge it decides the duration."""
        if self._last_stopped is None:
            return
        message, stop_time = self._last_stopped
        self._last_stopped = None
        order, order_time = self._stop_order
        if message.order != order or not self.cause:
            return
        parts = {
            "ranks leave": message.leave_seconds,
            "files": message.files_seconds,
            "killed ranks end": message.exit_seconds,
        }
        parts["messages"] = max(0.0, stop_time - order_time - sum(parts.values()))
        for part, seconds in parts.items():
            self.decide_seconds[part] = self.decide_seconds.get(part, 0.0) + seconds

    def begin_attempt(self, current_time: float) -> None:
        """Note that the next attempt was ordered."""
        self._end_stop()
        self.started = current_time
        self.starts += 1

    def forget(self) -> None:
        """Drop the noted recovery."""
        self.cause = ""
        self.causes = set()
        self.starts = 0
        self.decide_seconds = {}
        self._last_stopped = None
        self.complete_step = 0

    def finish(self, nodes: Sequence[Node], current_time: float) -> RecoveryRecord | None:
        """Return the record once the newest attempt has made a step, None if no fault preceded it."""
        record = None
        if self.cause:
            record = self._make_record(nodes, current_time)
        self.forget()
        return record

    def _make_record(self, nodes: Sequence[Node], current_time: float) -> RecoveryRecord:
        """Return the record: the time from the fault to the first new step, divided into consecutive phases.

        An age in a report is the time since the end of a phase on its rank; below 0 the phase has not ended there.
        """
        reports = dict(_list_starts(nodes))  # (time received, report of the start) by rank
        step_end = self._find_step_end(reports.values(), current_time)
        last_step_seconds = self._begin_pause(reports.values())
        seconds = {"detect": self.decided - self.fault, "decide": self.started - self.decided}
        ends = {  # times at which each phase ended on the ranks, in the order of the phases
            "processes": [received - start.process_age for received, start in reports.values()],
            "groups": [received - start.groups_age for received, start in reports.values() if start.groups_age >= 0],
            "state": [received - start.state_age for received, start in reports.values() if start.state_age >= 0],
        }
        begin = self.started
        for phase, times in ends.items():
            if times:
                # The slowest rank counts. Messages from several machines are late by different times.
                end = min(step_end, max(begin, *times))
                seconds[phase] = end - begin
                begin = end
        seconds["first step"] = step_end - begin
        ready = [start for _, start in reports.values() if start.state_age >= 0]
        resumed_step = max((start.step for start in ready), default=-1)
        # Ranks that kept their state in memory (standing ranks) loaded nothing.
        loaded = [start.source for start in ready if not start.is_standing]
        source = loaded[0] if loaded else ""
        lost_steps = -1  # unknown
        if ready:
            # A rank may have completed a step after its last heartbeat before the fault.
            kept_steps = [start.kept_step for _, start in reports.values()]
            lost_steps = max(0, max(self.complete_step, *kept_steps) - resumed_step)
        return RecoveryRecord(
            cause=self.cause,
            starts=self.starts,
            seconds=seconds,
            total=step_end - self.fault,
            resumed_step=resumed_step,
            lost_steps=lost_steps,
            source=source,
            reused_ranks=tuple(sorted(rank for rank, (_, start) in reports.items() if start.is_reused)),
            standing_ranks=tuple(sorted(rank for rank, (_, start) in reports.items() if start.is_standing)),
            doubts={str(rank): start.doubt for rank, (_, start) in sorted(reports.items()) if start.doubt},
            last_step_seconds=last_step_seconds,
            decide_seconds=self.decide_seconds,
        )

    def _find_step_end(self, reports: Iterable[tuple[float, RankStart]], current_time: float) -> float:
        """Return when the newest attempt had completed its first step, the present time if no rank reports it.

        The results of a step contain those of all ranks. The first rank that has them therefore shows its end. An age
        counts from the receipt of its heartbeat, so the time is late by the transfer of the message.
        """
        ends = [received - start.stepped_age for received, start in reports if start.stepped_age >= 0]
        if not ends:
            return current_time
        return min(current_time, max(self.started, min(ends)))

    def _begin_pause(self, reports: Iterable[tuple[float, RankStart]]) -> float:
        """Let a join begin when the first rank had completed its last step, and return the seconds until then.

        The ranks train until then. Without a join, or if no rank reports the time, nothing changes.
        """
        if self.cause != Event.REPLICAS_JOINING:
            return 0.0
        stops = [received - start.left_age for received, start in reports if start.left_age >= 0]
        if not stops:
            return 0.0
        stop = min(self.started, max(self.fault, min(stops)))
        seconds = stop - self.fault
        self.fault = self.decided = stop
        return seconds


def _list_workers(nodes: Sequence[Node]) -> Iterator[Worker]:
    """Yield the ranks in the newest heartbeats of nodes."""
    for node in nodes:
        yield from node.workers


def _list_starts(nodes: Sequence[Node]) -> Iterator[tuple[int, tuple[float, RankStart]]]:
    """Yield (rank, (time received, report)) of the newest reports of all ranks."""
    for node in nodes:
        received = _find_receive_time(node)
        for worker in node.workers:
            if worker.start is not None:
                yield worker.rank, (received, worker.start)


def _find_receive_time(node: Node) -> float:
    """Return when a node's newest heartbeat came, on the driver's monotonic clock. Ages in it count from then."""
    if not node.history:
        return node.last_seen
    received, _ = node.history[-1]
    return received


def _count_complete_steps(worker: Worker) -> int:
    """Return the number of the last complete step of a rank.

    This package's trainer reports a step at its begin. `completed_steps` is set if a program reports it at its end.
    """
    if worker.phase in ("train", FAILED_IN_STEP) and not worker.completed_steps:
        return max(0, worker.step - 1)  # The rank computes `step`.
    return worker.step


def _find_fault_time(verdict: Verdict, nodes: Sequence[Node], current_time: float) -> float:
    """Return when the fault of a verdict occurred, the present time if nothing shows it."""
    end_times = []  # of the processes at fault
    change_times = []  # of the newest change in the status of each running rank
    for node in nodes:
        received = _find_receive_time(node)
        for worker in node.workers:
            if worker.rank in verdict.ranks and worker.state != "running":
                end_times.append(received - worker.ended_age)
            elif worker.phase:
                change_times.append(received - worker.status_age)
    if end_times:
        return min(end_times)
    if verdict.kind in _SILENT_NODE:
        return max((node.last_seen for node in nodes if node.name in verdict.nodes), default=current_time)
    if verdict.kind == Event.HANG:
        return max(change_times, default=current_time)
    return current_time


def choose_first_order() -> int:
    """Return the number of a driver's first order, far from the numbers of other drivers' orders.

    An acknowledgement of an earlier driver's order must not count. Numbers from the clock could repeat if the clock is
    set back, so the number is random. Drivers count up from it, and the shift keeps 2^20 numbers for each of them.
    """
    return (1 + secrets.randbits(30)) << 20


@dataclass(kw_only=True, eq=False)
class Attempts:
    """Starts and stops the trainers.

    Attributes:
        record_event: writes an event into the audit log.
        overrides: further settings of the trainers' command line.
        files: the trainers' environment and the configured order of the nodes.
        started: when this attempt's processes were ordered or taken over, on the monotonic clock.
        last_order: number of the last order to stop or to run self-checks.
        hastened_order: number of the last order of `end_leaving`.
        timeline: times of the recovery under way.
    """

    job: Job
    nodes: Nodes
    settings: RunningSettings
    record_event: RecordEvent
    overrides: Sequence[str] = ()
    files: JobFiles = field(default_factory=JobFiles)
    started: float = field(default_factory=time.monotonic)
    last_order: int = field(default_factory=choose_first_order)
    hastened_order: int = 0
    timeline: RecoveryTimeline = field(default_factory=RecoveryTimeline)

    @property
    def model_ranks(self) -> int:
        """Number of ranks that together hold one replica of the model."""
        return self.settings.config.parallel.model_ranks

    def stop(self, event: JobEvent, reason: str, **changes: Any) -> None:
        """Stop all trainers for `event`, which determines the phase that follows."""
        if event in _STOPS_WITHOUT_RECOVERY:
            self.timeline.forget()
        # Without running trainers a pause begins at once, without STOPPING. Processes of ranks that left an attempt may
        # still wait for the next one, so nodes are ordered to stop then too.
        if self.job.apply(event, reason=reason, **changes) and self.job.phase in (Phase.STOPPING, Phase.PAUSED):
            self.last_order += 1
            self.timeline.begin_stop(self.last_order, time.monotonic())
            for node in self.nodes.all():
                self.send_stop(node)

    def fail(self, reason: str, code: int = EXIT_FAILED) -> None:
        """End the job, since a person is needed."""
        self.record_event(Event.JOB_FAILED, action="stop", evidence=(reason,), exit_code=code)
        self.stop(JobEvent.FAILED, reason, exit_code=code)

    def end_leaving(self) -> None:
        """Let all ranks leave at once that were ordered to leave after their step, since a rank has ended meanwhile."""
        self.last_order += 1
        self.hastened_order = self.last_order
        self.timeline.begin_stop(self.last_order, time.monotonic())
        for node in self.nodes.all():
            self.send_stop(node)

    def send_stop(self, node: Node) -> None:
        """Order a node to end its trainers and self-checks and to acknowledge that."""
        if node.self_check is SelfCheck.RUNNING:
            node.self_check = SelfCheck.NOT_RUN
        state = self.job.state
        how = "kill"
        if state.phase is Phase.STOPPING and state.save:
            how = "save"
        elif state.phase is Phase.STOPPING and state.joining:
            how = "keep" if self.hastened_order == self.last_order else "leave"
        elif state.phase is Phase.STOPPING and self._may_keep_processes(node):
            how = "keep"
        self.nodes.order(
            node,
            do="stop",
            order=self.last_order,
            how=how,
            grace_period=self.settings.limits.grace_period,
            forget=state.distrust,
            joins_at_once=how == "leave" and state.joins_at_once,
        )

    def _may_keep_processes(self, node: Node) -> bool:
        """Return True if the ranks of a node may stay in their processes until the next attempt.

        They may after faults of other processes, if the node keeps its ranks and its memory is trusted.
        """
        state = self.job.state
        if not self.timeline.causes or not self.timeline.causes <= _LOCAL_FAULTS:
            return False
        is_restarted = state.goal in (Phase.WAITING, Phase.STARTING) and not state.distrust
        has_processes = node.name in state.placement or node.is_prepared
        return is_restarted and has_processes and node.name not in state.fresh

    def begin(self, current_time: float) -> None:
        """Start the trainers on the nodes of the placement."""
        first_node = self.nodes[self.job.state.placement[0]]  # Rank 0 runs there and serves the attempt's store.
        # Agents may know newer attempts than a lost journal. They ignore the start of an attempt that they know.
        attempt = 1 + max(self.job.state.attempt, *(node.attempt for node in self.nodes.all()))
        if not self.job.apply(JobEvent.BEGUN, attempt=attempt, master=(first_node.record.address, first_node.port)):
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
        listed = ", ".join(changes[:_MAX_LISTED_CHANGES])
        if len(changes) > _MAX_LISTED_CHANGES:
            listed += f" and {len(changes) - _MAX_LISTED_CHANGES} more"
        return (f"the placement follows {file}, but {listed}",)

    def send_start(self, node: Node) -> None:
        """Order a node to start its ranks of the current attempt."""
        node.last_seen = max(node.last_seen, self.started)
        self._send_start(node, self.job.state, prepares=False)

    def prepare_join(self, node: Node, following: JobState) -> None:
        """Order a node to start processes that wait for the attempt of the state `following`, in which they join."""
        self._send_start(node, following, prepares=True)

    def prepare_groups(self, following: JobState, number: int) -> None:
        """Order all nodes of the state `following` to make its groups while the present attempt trains."""
        for name in following.placement:
            self.nodes.order(
                self.nodes[name],
                do="prepare_groups",
                attempt=following.attempt,
                number=number,
                ranks=list(following.ranks(name)),
                world=following.world,
                data=following.data,
                master=list(following.master),
            )

    def drop_groups(self, names: Iterable[str], number: int) -> None:
        """Order nodes to drop the groups that they have prepared."""
        for name in names:
            if name in self.nodes:
                self.nodes.order(self.nodes[name], do="prepare_groups", attempt=self.job.state.attempt, number=number)

    def _send_start(self, node: Node, state: JobState, *, prepares: bool) -> None:
        """Order a node to start its ranks of the attempt in `state`, or only to prepare their processes."""
        ranks = state.ranks(node.name)
        overrides = list(self.overrides)
        # The configuration is for all nodes. With fewer replicas than that, the trainers need the smaller size.
        if state.data * self.model_ranks != self.settings.limits.nodes * state.ranks_per_node:
            overrides.append(f"--parallel.data={state.data}")
        if not prepares:  # processes that wait for an attempt cannot train without a further order
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
