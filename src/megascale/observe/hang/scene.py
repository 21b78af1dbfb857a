"""The evidence of a run that stands still: of each rank, and of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megascale.core.calls import CallRecord
from megascale.core.status import Status
from megascale.observe.hang.flight import FlightDump

ProcessState = Literal["running", "stopped", "gone", "unknown"]


@dataclass(frozen=True)
class RankEvidence:
    """All that is known of one rank.

    Attributes:
        rank: which one.
        process: "running", "stopped" (SIGSTOP, a debugger), "gone", or "unknown" where it runs on another host.
        status, record: its files, None where it left none.
        answered: whether it answered when asked for its stack; None if it was not asked.
        stack: frames of its main thread, innermost first.
        reader: state of the process that reads its samples, if it waits for one.
        flight: what torch's flight recorder held.
        moving: whether it came further while it was looked at.
    """

    rank: int
    process: ProcessState = "unknown"
    status: Status | None = None
    record: CallRecord | None = None
    answered: bool | None = None
    stack: tuple[str, ...] = ()
    reader: ProcessState = "unknown"
    flight: FlightDump | None = None
    moving: bool = False


@dataclass(frozen=True)
class Scene:
    """The evidence of a whole run.

    Attributes:
        ranks: by rank; a rank that left nothing is missing.
        world: how many ranks there are, as the ranks themselves say.
        moving: ranks whose place changed while we looked.
        now_ns: when it was taken, on this host's clock.
        sent: whether it is what agents sent, none of whose ranks write here.
    """

    ranks: dict[int, RankEvidence]
    world: int
    moving: frozenset[int] = field(default_factory=frozenset)
    now_ns: int = 0
    from_agents: bool = False
