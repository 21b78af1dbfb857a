"""What the rules conclude: the shape of a verdict. Why it was reached stands in it, for the journal and for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["none", "alert", "diagnose", "recover", "evict", "stop"]

# From mildest to hardest: of several verdicts the hardest is acted upon.
SEVERITY: dict[Action, int] = {"none": 0, "alert": 1, "recover": 2, "diagnose": 3, "evict": 4, "stop": 5}


@dataclass(frozen=True)
class Verdict:
    """One conclusion.

    Attributes:
        kind: an event name (core/events.py).
        nodes, ranks: what it is about; those to blame, not those that suffered.
        action: none (note it), alert (tell a person), diagnose (suspend and test), recover (start the processes
            again, by the recovery action that the escalation policy chooses), evict (take the nodes out and start
            again), stop (end the job).
        evidence: sentences a person understands, one an observation.
        person: only a person can fix it, such as an exception in the user's own code.
    """

    kind: str
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    action: Action = "none"
    evidence: tuple[str, ...] = ()
    person: bool = False

    def __post_init__(self) -> None:
        if self.action not in SEVERITY:
            raise ValueError(f"action={self.action!r} of verdict {self.kind} is none of {', '.join(SEVERITY)}")
