"""What the driver knows at one moment, as plain data: the only thing that the rules look at."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megascale.core.grid import Grid
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker
from megascale.resilience.rules.verdicts import Action, Verdict

HISTORY = 60
PIECE = 8  # members, about 2 ms of judging
REST = 0.005  # seconds


@dataclass(frozen=True)
class Metric:
    """What a step gave, from the run's metrics: loss, gradient norm before clipping, seconds."""

    step: int
    loss: float
    grad_norm: float
    seconds: float


@dataclass(frozen=True)
class SlowFinding:
    """A rank that its recorded spans show to be slow (observe/analysis/stragglers.py).

    Attributes:
        rank: whose own work or link it is.
        slower: share by which it takes longer than comparable ranks; of a link, of a step.
        cause: such as "GPU", "host: loader" or "link".
        confidence: 1 - healthy ranks of this job that would be expected to show as much.
        evidence: sentences.
    """

    rank: int
    slower: float
    cause: str
    confidence: float
    evidence: tuple[str, ...] = ()


@dataclass
class RankView:
    """One node of the running attempt.

    Attributes:
        node: its name.
        ranks: the ranks that were placed on it, ascending; empty for a spare.
        last_seen: the driver's monotonic clock when the newest heartbeat came (or when the attempt began).
        heartbeat: the newest one of this attempt, None before the first.
        history: (time received, heartbeat) of the last HISTORY ones of this attempt, oldest first.
        connected: whether its connection stands.
    """

    node: str
    ranks: tuple[int, ...] = ()
    last_seen: float = 0.0
    heartbeat: Heartbeat | None = None
    history: deque[tuple[float, Heartbeat]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    connected: bool = True

    def worker(self, rank: int) -> Worker | None:
        """The newest heartbeat's entry about one rank, None if there is none."""
        workers = self.heartbeat.workers if self.heartbeat is not None else ()
        return next((w for w in workers if w.rank == rank), None)


class Paced(list[RankView]):
    """Members that are gone through piece by piece, with a rest after each.

    A thread that computes without rest takes the interpreter for 5 ms each time that another one waits for a socket:
    a loop that reads 1,500 messages a second falls seconds behind.
    """

    def __iter__(self) -> Iterator[RankView]:
        for number, member in enumerate(super().__iter__()):
            if number % PIECE == PIECE - 1:
                time.sleep(REST)
            yield member


@dataclass
class View:
    """The job as the driver sees it. All times are seconds on the driver's monotonic clock.

    Attributes:
        job, attempt: which start of which job.
        phase: state of the job (see driver/state/job_state.py): "starting", "running", ...
        now: the present.
        started: when this attempt's processes were started.
        members: the nodes that hold its ranks, in rank order, and the spares after them.
        grid: how ranks are laid out.
        window: seconds without a heartbeat after which a node counts as lost.
        interval: seconds between heartbeats.
        first_step: most seconds that start, loading and the first step may take.
        learned: seconds that trainers are usually in a phase ("train", "save", ..., "first step") without any change
            at the longest (diagnosis/phase_durations.py); empty or lacking a phase before it was seen.
        incidents: (time, node, kind) of verdicts that named a node, over all attempts, oldest first.
        past: (time, verdict) of what earlier attempts were ended for, oldest first.
        metrics: of this attempt's last steps, oldest first.
        slow: what recorded spans of this attempt show; empty where the driver does not see them.
        slow_action, slow_least: what follows for a machine that is slower by that share or more.
    """

    job: str
    attempt: int
    phase: str
    time: float
    started: float
    members: list[RankView]
    grid: Grid
    window: float
    interval: float
    first_step: float
    usual_durations: dict[str, float] = field(default_factory=dict)
    incidents: list[tuple[float, str, str]] = field(default_factory=list)
    past: list[tuple[float, Verdict]] = field(default_factory=list)
    metrics: list[Metric] = field(default_factory=list)
    slow: tuple[SlowFinding, ...] = ()
    slow_action: Action = "alert"
    slow_least: float = 0.1
    _workers: list[tuple[RankView, Worker]] | None = field(default=None, init=False, repr=False, compare=False)

    def snapshot(self) -> View:
        """A copy whose histories do not grow while another thread looks through them."""
        return replace(self, members=Paced(replace(m, history=deque(m.history, HISTORY)) for m in self.members))

    def workers(self) -> list[tuple[RankView, Worker]]:
        """Every worker that a heartbeat has named, with its node, by rank. Worked out once a view."""
        if self._workers is None:
            found = [
                (m, w)
                for m in self.members
                if m.heartbeat is not None and m.heartbeat.attempt == self.attempt
                for w in m.heartbeat.workers
            ]
            found.sort(key=lambda item: item[1].rank)
            self._workers = found
        return self._workers
