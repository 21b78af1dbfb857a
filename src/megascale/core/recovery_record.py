"""Record of one recovery: the seconds of each phase from a fault to the next new step, and which ranks kept state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# The phases in order. Each begins at the end of the phase before it, so that their sum is the whole recovery. They end
#   detect: with the driver's verdict
#   decide: with the order that starts the next attempt; all nodes have stopped, and each rank has a node
#   processes: when every rank runs the trainer, in a new or in a reused process
#   groups: when every rank has its communicators
#   state: when every rank has the model, the optimizer and its data
#   first step: when a rank has the results of the first complete step; if none reports the time, when the driver has
#       received the report of the step
PHASES = ("detect", "decide", "processes", "groups", "state", "first step")

_MAX_SECONDS = 1e9  # a record with a longer phase is damaged
_MAX_PARTS = 16  # of a phase
_LISTED_SECONDS = 0.01  # least seconds of a part that `describe` lists


@dataclass(frozen=True)
class RecoveryRecord:
    """One recovery, as the driver observed it.

    Attributes:
        cause: event name of the verdict that ended the previous attempt.
        starts: number of attempts that were started until one completed a step.
        seconds: seconds by phase. A phase that some rank did not report is absent.
        total: seconds from the fault to the end of the first step.
        resumed_step: step of the state from which the attempt continued, -1 if unknown.
        lost_steps: number of complete steps that were repeated, -1 if unknown.
        source: source of the state that ranks loaded ("memory", "a peer's memory", "storage", "nothing").
        reused_ranks: ranks whose processes were reused.
        standing_ranks: reused ranks whose weights and optimizer state stayed in memory.
        doubts: by rank, why a surviving process was replaced.
        last_step_seconds: if replicas join, seconds from the order until the others had completed their last step. They
            train meanwhile, so `total` begins afterwards.
        decide_seconds: parts of the phase "decide" in seconds: until the ranks of the last node had left their attempt,
            until it had sent their files, until the kernel had freed the memory of killed ranks, and for messages. The
            driver's own work is the rest. In a join the parts also contain `last_step_seconds`.
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
    last_step_seconds: float = 0.0
    decide_seconds: dict[str, float] = field(default_factory=dict)

    def to_details(self) -> dict[str, Any]:
        """Return the record as the details of an event."""
        details = asdict(self)
        details["seconds"] = {name: round(seconds, 3) for name, seconds in self.seconds.items()}
        details["decide_seconds"] = {name: round(seconds, 3) for name, seconds in self.decide_seconds.items()}
        details["total"] = round(self.total, 3)
        details["last_step_seconds"] = round(self.last_step_seconds, 3)
        return details

    @staticmethod
    def from_details(details: Mapping[str, Any]) -> RecoveryRecord | None:
        """Return the record of an event, None if its details are damaged or of another release."""
        try:
            recorded = dict(details["seconds"].items())
            seconds = {name: float(recorded[name]) for name in PHASES if name in recorded}
            total = float(details["total"])
            parts = details.get("decide_seconds", {})
            decide_seconds = {str(name)[:100]: float(value) for name, value in list(parts.items())[:_MAX_PARTS]}
            if not all(0 <= value <= _MAX_SECONDS for value in (total, *seconds.values(), *decide_seconds.values())):
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
                last_step_seconds=float(details.get("last_step_seconds", 0.0)),
                decide_seconds=decide_seconds,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None

    def describe(self) -> tuple[str, ...]:
        """Return the record as sentences."""
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        begin = f"the fault ({self.cause})"
        if self.last_step_seconds:
            begin = f"the last step before the join, {self.last_step_seconds:.2f} s after the order,"
        sentences = [f"{self.total:.2f} s from {begin} to the next new step: {phases}"]
        long_parts = [f"{name} {value:.2f}" for name, value in self.decide_seconds.items() if value >= _LISTED_SECONDS]
        if long_parts:
            sentences[0] += f"; of decide: {', '.join(long_parts)}"
        if self.starts > 1:
            sentences[0] += f"; {self.starts} starts"
        if self.resumed_step >= 0:
            text = f"resumed after step {self.resumed_step}"
            if self.source:
                text += f" from {self.source}"
            if self.lost_steps >= 0:
                noun = "step" if self.lost_steps == 1 else "steps"
                text += f"; {self.lost_steps} {noun} lost"
            sentences.append(text)
        if self.reused_ranks:
            noun = "rank" if len(self.reused_ranks) == 1 else "ranks"
            text = f"{noun} {format_numbers(self.reused_ranks)} stayed in place"
            if self.standing_ranks:
                text += f", with the state of {format_numbers(self.standing_ranks)}"
            sentences.append(text)
        sentences += [f"rank {rank} was replaced: {reason}" for rank, reason in list(self.doubts.items())[:8]]
        return tuple(sentences)


def format_numbers(numbers: tuple[int, ...], limit: int = 16) -> str:
    """Return numbers as text: the first `limit` of them, and how many more there are."""
    text = ", ".join(str(number) for number in numbers[:limit])
    if len(numbers) > limit:
        text += f" and {len(numbers) - limit} more"
    return text
