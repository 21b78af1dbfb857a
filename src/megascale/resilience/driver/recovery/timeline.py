"""The times of a recovery under way, from the fault to the first new step, which become one RecoveryRecord.

A driver that takes over a recovery does not know its begin, so it records none. Ages that agents report become times on
the driver's clock; they are late by the delay of a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megascale.core.events import Event
from megascale.core.recovery_record import RecoveryRecord
from megascale.core.status import FAILED_IN_STEP
from megascale.resilience.driver.nodes import Node
from megascale.resilience.protocol.heartbeat import RankStart, Worker
from megascale.resilience.rules.view import Verdict

_SILENT_NODE = (Event.NODE_LOST, Event.MISSED_HEARTBEAT)


@dataclass
class RecoveryTimeline:
    """Collects the times of one recovery. Times are on the driver's monotonic clock.

    Attributes:
        cause: event name of the first verdict, "" while nothing is recovered.
        causes: event names of all verdicts.
        fault: when the fault occurred.
        decided: when the driver gave its first verdict.
        started: when the newest attempt was ordered.
        starts: attempts since the fault.
        complete_step: the furthest step that was complete at the fault.
    """

    cause: str = ""
    causes: set[str] = field(default_factory=set)
    fault: float = 0.0
    decided: float = 0.0
    started: float = 0.0
    starts: int = 0
    complete_step: int = 0

    def begin_recovery(self, verdict: Verdict, nodes: Sequence[Node], current_time: float) -> None:
        """Note a verdict that ends an attempt; only the first one since the last step counts."""
        self.causes.add(str(verdict.kind))
        self.complete_step = max([self.complete_step, *map(_count_complete_steps, _list_workers(nodes))])
        if self.cause:
            return
        self.cause = str(verdict.kind)
        self.fault = min(current_time, _find_fault_time(verdict, nodes, current_time))
        self.decided = current_time

    def begin_join(self, current_time: float) -> None:
        """Note that nodes join a job that has gone on without them."""
        self.forget()
        self.cause = str(Event.REPLICAS_JOINING)
        self.fault = self.decided = current_time

    def begin_attempt(self, current_time: float) -> None:
        """Note that the next attempt was ordered."""
        self.started = current_time
        self.starts += 1

    def forget(self) -> None:
        """Drop what was noted."""
        self.cause = ""
        self.causes = set()
        self.starts = 0
        self.complete_step = 0

    def finish(self, nodes: Sequence[Node], current_time: float) -> RecoveryRecord | None:
        """Return the record once the newest attempt has made a step, None if no fault preceded it."""
        record = self._make_record(nodes, current_time) if self.cause else None
        self.forget()
        return record

    def _make_record(self, nodes: Sequence[Node], current_time: float) -> RecoveryRecord:
        starts = dict(_list_starts(nodes))
        seconds = {"detect": self.decided - self.fault, "decide": self.started - self.decided}
        ends = {
            "processes": [received - start.process_age for received, start in starts.values()],
            "groups": [received - start.groups_age for received, start in starts.values() if start.groups_age >= 0],
            "state": [received - start.state_age for received, start in starts.values() if start.state_age >= 0],
        }
        begin = self.started
        for phase, times in ends.items():
            if times:
                # The slowest rank counts. Messages from several machines are late by different times.
                end = min(current_time, max(begin, *times))
                seconds[phase] = end - begin
                begin = end
        seconds["first step"] = current_time - begin
        ready = [start for _, start in starts.values() if start.state_age >= 0]
        resumed_step = max((start.step for start in ready), default=-1)
        loaded = [start.source for start in ready if not start.is_standing]
        return RecoveryRecord(
            cause=self.cause,
            starts=self.starts,
            seconds=seconds,
            total=current_time - self.fault,
            resumed_step=resumed_step,
            lost_steps=max(0, self.complete_step - resumed_step) if ready else -1,
            source=next(iter(loaded), ""),
            reused_ranks=tuple(sorted(rank for rank, (_, start) in starts.items() if start.is_reused)),
            standing_ranks=tuple(sorted(rank for rank, (_, start) in starts.items() if start.is_standing)),
            doubts={str(rank): start.doubt for rank, (_, start) in sorted(starts.items()) if start.doubt},
        )


def _list_workers(nodes: Sequence[Node]) -> Iterator[Worker]:
    for node in nodes:
        yield from node.workers


def _list_starts(nodes: Sequence[Node]) -> Iterator[tuple[int, tuple[float, RankStart]]]:
    """Yield (rank, (time received, report)) of the newest reports of all ranks."""
    for node in nodes:
        received = node.history[-1][0] if node.history else node.last_seen
        for worker in node.workers:
            if worker.start is not None:
                yield worker.rank, (received, worker.start)


def _count_complete_steps(worker: Worker) -> int:
    if worker.phase in ("train", FAILED_IN_STEP):
        return max(0, worker.step - 1, worker.completed_steps and worker.step)
    return worker.step


def _find_fault_time(verdict: Verdict, nodes: Sequence[Node], current_time: float) -> float:
    """Return when the fault of a verdict occurred, the present time if nothing shows it."""
    ends = []
    changes = []
    for node in nodes:
        received = node.history[-1][0] if node.history else node.last_seen
        for worker in node.workers:
            if worker.rank in verdict.ranks and worker.state != "running":
                ends.append(received - worker.ended_age)
            elif worker.phase:
                changes.append(received - worker.status_age)
    if ends:
        return min(ends)
    if verdict.kind in _SILENT_NODE:
        return max((node.last_seen for node in nodes if node.name in verdict.nodes), default=current_time)
    if verdict.kind == Event.HANG:
        return max(changes, default=current_time)
    return current_time
