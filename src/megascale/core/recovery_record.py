"""The record of one recovery: the seconds of each phase between a fault and the next new step, and what was kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# The phases in order. Each begins where the one before it ends, so that their sum is the whole recovery.
#   detect: from the fault to the driver's verdict
#   decide: to the order that starts the next attempt: every node has stopped, and ranks have nodes
#   processes: until every rank runs the trainer, in a new process or in the one that it kept
#   groups: until every rank has met the others and has its communicators
#   state: until every rank has the model, the optimizer and its data
#   first step: until the driver has learned of the first complete step
PHASES = ("detect", "decide", "processes", "groups", "state", "first step")

_MAX_SECONDS = 1e9  # a longer phase is damage


@dataclass(frozen=True)
class RecoveryRecord:
    """One recovery, as the driver saw it.

    Attributes:
        cause: event name of the verdict that ended the previous attempt.
        starts: attempts that were started until one came to a step.
        seconds: seconds by phase; a phase of which a rank reported nothing is absent.
        total: seconds from the fault to the driver's knowledge of the first step.
        resumed_step: the step whose state the attempt continued from, -1 if unknown.
        lost_steps: complete steps that were repeated, -1 if unknown.
        source: where ranks that loaded their state found it ("memory", "a peer's memory", "storage", "nothing").
        reused_ranks: ranks that stayed in their processes.
        standing_ranks: ranks among them whose weights and optimizer state stayed in place.
        doubts: rank -> why its process was replaced although it had survived.
    """

    cause: str
    starts: int
    seconds: dict[str, float]
    total: float
    resumed_step: int = -1
    lost_steps: int = -1
    source: str = ""
    reused_ranks: tuple[int, ...] = ()
    standing_ranks: tuple[int, ...] = ()
    doubts: dict[str, str] = field(default_factory=dict)

    def to_details(self) -> dict[str, Any]:
        """Return the record as the details of an event."""
        details = asdict(self)
        details["seconds"] = {name: round(seconds, 3) for name, seconds in self.seconds.items()}
        details["total"] = round(self.total, 3)
        return details

    @staticmethod
    def from_details(details: Mapping[str, Any]) -> RecoveryRecord | None:
        """Return the record of an event, None if its details are damaged or of another release."""
        try:
            recorded = dict(details["seconds"].items())
            seconds = {name: float(recorded[name]) for name in PHASES if name in recorded}
            total = float(details["total"])
            if not all(0 <= number <= _MAX_SECONDS for number in (total, *seconds.values())):
                return None
            return RecoveryRecord(
                cause=str(details["cause"])[:100],
                starts=int(details["starts"]),
                seconds=seconds,
                total=total,
                resumed_step=int(details["resumed_step"]),
                lost_steps=int(details["lost_steps"]),
                source=str(details["source"]),
                reused_ranks=tuple(int(rank) for rank in details["reused_ranks"]),
                standing_ranks=tuple(int(rank) for rank in details["standing_ranks"]),
                doubts={str(rank): str(reason) for rank, reason in details["doubts"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None

    def describe(self) -> tuple[str, ...]:
        """Return the record as sentences."""
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        sentences = [f"{self.total:.2f} s from the fault ({self.cause}) to the next new step: {phases}"]
        if self.starts > 1:
            sentences[0] += f"; {self.starts} starts"
        if self.resumed_step >= 0:
            text = f"resumed after step {self.resumed_step}"
            if self.source:
                text += f" from {self.source}"
            if self.lost_steps >= 0:
                text += f"; {self.lost_steps} step{'s' * (self.lost_steps != 1)} lost"
            sentences.append(text)
        if self.reused_ranks:
            text = f"rank{'s' * (len(self.reused_ranks) > 1)} {format_numbers(self.reused_ranks)} stayed in place"
            if self.standing_ranks:
                text += f", with the state of {format_numbers(self.standing_ranks)}"
            sentences.append(text)
        sentences += [f"rank {rank} was replaced: {reason}" for rank, reason in list(self.doubts.items())[:8]]
        return tuple(sentences)


def format_numbers(numbers: tuple[int, ...], limit: int = 16) -> str:
    """Return numbers as a list that is cut after `limit` of them."""
    listed = ", ".join(map(str, numbers[:limit]))
    if len(numbers) > limit:
        listed += f" and {len(numbers) - limit} more"
    return listed
