"""Replay of a recorded training job: what its steps would have taken had its operations been typical.

Reads traces in the layout of the OSDI 2025 what-if artifact (one row an operation; ByteDance, Apache-2.0). Operations
that a worker launched together (a send and a receive in one batch) are one item. An item awaits, on its worker, the
item whose end came last before its start (in a job with blocking exchanges: the one before), the item before it on
its stream, and the receive or the compute that it needs; it follows the last of them by its recorded gap. An exchange
moves once both sides have posted it, a collective once its last member has; what an operation took beyond that is its
own duration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megascale.errors import DataError

COMPUTE = ("forward-compute", "backward-compute")
# Point-to-point operations: (kind, which stage is at the other end of it).
SENDS = {"forward-send": ("forward-recv", 1), "backward-send": ("backward-recv", -1)}
RECEIVES = {receive: (send, -step) for send, (receive, step) in SENDS.items()}
# Collectives, by who takes part.
DATA_PARALLEL = ("params-all-gather", "grads-reduce-scatter")
EVERYONE = ("optimizer-clip-main-grad",)
ENDS = ("embedding-grads-all-reduce",)
# Two operations of a worker that start this close together were launched as one batch, in seconds.
TOGETHER = 2e-6
# An item may seem to start this long before what it awaits has ended: clocks and rounding of the recording.
BLUR = 5e-4


@dataclass(frozen=True)
class Operation:
    """One recorded operation.

    Attributes:
        kind, replica, stage, step: what and where.
        tensor: which of the ranks that share replica and stage.
        chunk: model chunk on the stage, -1 where it has no meaning.
        sequence: order among operations of its kind on its worker in its step.
        microbatch: -1 where it has no meaning.
        start, duration: recorded, seconds.
        stages: pipeline stages of the job; chunks interleaved, the last sends to the first.
        own: duration once all who take part are there.
    """

    kind: str
    replica: int
    stage: int
    step: int
    sequence: int
    microbatch: int
    start: float
    duration: float
    stages: int = 1
    tensor: int = 0
    chunk: int = 0
    own: float = 0.0

    @property
    def end(self) -> float:
        """Recorded end."""
        return self.start + self.duration


Worker = tuple[int, int, int]


@dataclass(frozen=True)
class TraceOp:
    """Operations that a worker launches together, `gap` seconds after the last of the items `after` has ended."""

    operations: tuple[Operation, ...]
    gap: float
    after: tuple[int, ...]


@dataclass(frozen=True)
class TraceStep:
    """A recorded step: items of each worker in order, and its recorded length."""

    number: int
    workers: dict[Worker, tuple[TraceOp, ...]]
    recorded: float


def read(path: Path) -> list[TraceStep]:
    """The steps of a trace file. DataError if it is damaged or pyarrow is missing."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"{path} needs pyarrow; pip install pyarrow") from None
    try:
        columns = parquet.read_table(path).to_pydict()
        stages = max(map(int, columns["stage"])) + 1
        places = sorted(set(zip(columns["dp_rank"], columns["stage"], columns["rank"], strict=True)))
        sharing: dict[tuple[int, int], list[int]] = defaultdict(list)
        for replica, stage, rank in places:
            sharing[(replica, stage)].append(rank)
        names = ("optype", "dp_rank", "stage", "rank", "step", "seq_id", "mb_id", "start_ts", "duration", "mc")
        operations = [
            Operation(
                str(kind),
                int(r),
                int(s),
                int(n),
                int(q),
                int(m),
                float(a),
                float(d),
                stages,
                sharing[(r, s)].index(rank),
                int(c),
            )
            for kind, r, s, rank, n, q, m, a, d, c in zip(*(columns[c] for c in names), strict=True)
        ]
    except Exception as error:
        raise DataError(f"{path} cannot be read as a trace: {type(error).__name__}: {error}") from None
    by_step: dict[int, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.duration > 0:
            by_step[operation.step].append(operation)
    return [_step(number, rows) for number, rows in sorted(by_step.items())]


def group_key(operation: Operation) -> tuple[object, ...]:
    """Operations with the same key are the same exchange or collective; a compute operation stands alone."""
    kind, o = operation.kind, operation
    if kind in RECEIVES:
        kind, step = RECEIVES[kind]
        return (kind, o.replica, o.tensor, (o.stage + step) % o.stages, o.sequence)
    if kind in SENDS:
        return (kind, o.replica, o.tensor, o.stage, o.sequence)
    if kind in DATA_PARALLEL:
        return (kind, o.stage, o.tensor, o.sequence)
    if kind in EVERYONE:
        return (kind, o.sequence)
    if kind in ENDS:
        return (kind, o.replica, o.tensor, o.sequence)
    return (kind, o.replica, o.stage, o.tensor, o.sequence, o.microbatch)


def stream(kind: str) -> str:
    """Operations of one stream of a worker run one after another."""
    if kind in COMPUTE:
        return "compute"
    return kind if kind in SENDS or kind in RECEIVES else "rest"


def _step(number: int, rows: list[Operation]) -> TraceStep:
    groups: dict[tuple[object, ...], list[Operation]] = defaultdict(list)
    for operation in rows:
        groups[group_key(operation)].append(operation)
    begin = min(o.start for o in rows)
    workers: dict[Worker, list[Operation]] = defaultdict(list)
    for members in groups.values():
        ready = max(o.start for o in members)
        for operation in members:
            own = max(0.0, min(o.end for o in members) - ready)
            workers[(operation.replica, operation.stage, operation.tensor)].append(replace(operation, own=own))
    items = {worker: _items(mine, begin) for worker, mine in workers.items()}
    return TraceStep(number, items, max(o.end for o in rows) - begin)


def _items(mine: list[Operation], begin: float) -> tuple[TraceOp, ...]:
    """A worker's operations as items, with what each awaits."""
    mine = sorted(mine, key=lambda o: (o.start, o.kind))
    batches: list[list[Operation]] = []
    for operation in mine:
        if batches and operation.start - batches[-1][0].start < TOGETHER:
            batches[-1].append(operation)
        else:
            batches.append([operation])
    at = {id(o): i for i, batch in enumerate(batches) for o in batch}
    ends = [max(o.end for o in batch) for batch in batches]
    needs = _needed(mine)
    last_on: dict[str, int] = {}
    items = []
    for i, batch in enumerate(batches):
        start = batch[0].start
        wanted = {last_on[stream(o.kind)] for o in batch if stream(o.kind) in last_on}
        wanted |= {at[id(other)] for o in batch for other in needs.get(id(o), ())}
        earlier = [j for j in range(i) if ends[j] <= start + TOGETHER]
        if earlier:
            wanted.add(max(earlier, key=lambda j: ends[j]))
        after = tuple(sorted(j for j in wanted if j < i and ends[j] <= start + BLUR))
        before = max((ends[j] for j in after), default=begin)
        items.append(TraceOp(tuple(batch), max(0.0, start - before), after))
        last_on.update({stream(o.kind): i for o in batch})
    return tuple(items)


def _needed(mine: list[Operation]) -> dict[int, list[Operation]]:
    """Compute -> the receive that feeds it, send -> the compute that made it; by order, where the counts agree."""
    needs: dict[int, list[Operation]] = defaultdict(list)
    chunks = max((o.chunk for o in mine if o.kind in COMPUTE), default=0)
    of = {kind: [o for o in mine if o.kind == kind] for kind in (*COMPUTE, *SENDS, *RECEIVES)}
    for compute, receive, send, first, last in (
        ("forward-compute", "forward-recv", "forward-send", (0, 0), (-1, chunks)),
        ("backward-compute", "backward-recv", "backward-send", (-1, chunks), (0, 0)),
    ):

        def at_end(o: Operation, end: tuple[int, int]) -> bool:
            return o.stage == end[0] % o.stages and o.chunk == end[1]

        fed = [o for o in of[compute] if not at_end(o, first)]
        sent = [o for o in of[compute] if not at_end(o, last)]
        if len(fed) == len(of[receive]):
            for o, source in zip(fed, of[receive], strict=True):
                needs[id(o)].append(source)
        if len(sent) == len(of[send]):
            for source, o in zip(sent, of[send], strict=True):
                needs[id(o)].append(source)
    return needs


Duration = Callable[[Operation], float]


def replay_step(step: TraceStep, duration: Duration | None = None, gaps: bool = True) -> float:
    """Seconds of a step with each operation taking `duration` (default: its own), with or without launch gaps."""
    took = duration or (lambda o: o.own)
    members: dict[tuple[object, ...], list[tuple[Worker, int]]] = defaultdict(list)
    for worker, items in step.workers.items():
        for index, item in enumerate(items):
            for operation in item.operations:
                members[group_key(operation)].append((worker, index))
    posted: dict[tuple[Worker, int], float] = {}
    ended: dict[tuple[Worker, int], float] = {}
    count = sum(len(items) for items in step.workers.values())
    followers: dict[tuple[Worker, int], list[tuple[Worker, int]]] = defaultdict(list)
    missing: dict[tuple[Worker, int], int] = {}
    to_post: list[tuple[Worker, int]] = []
    for worker, items in step.workers.items():
        for index, item in enumerate(items):
            missing[(worker, index)] = len(item.after)
            for before in item.after:
                followers[(worker, before)].append((worker, index))
            if not item.after:
                to_post.append((worker, index))
    while to_post:
        worker, index = place = to_post.pop()
        item = step.workers[worker][index]
        free = max((ended[(worker, before)] for before in item.after), default=0.0)
        posted[place] = free + (item.gap if gaps else 0.0)
        # An item ends with its last operation, and those with their last member: ask all whom this one may complete.
        for candidate in {peer for o in item.operations for peer in members[group_key(o)]}:
            if candidate in ended or candidate not in posted:
                continue
            operations = step.workers[candidate[0]][candidate[1]].operations
            groups = [members[group_key(o)] for o in operations]
            if any(peer not in posted for group in groups for peer in group):
                continue
            ended[candidate] = max(
                max(posted[peer] for peer in group) + took(o) for group, o in zip(groups, operations, strict=True)
            )
            for follower in followers[candidate]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    to_post.append(follower)
    if len(ended) != count:
        raise DataError(f"step {step.number} of the trace cannot be replayed: an exchange lacks its other side")
    return max(ended.values())


def operations_of(steps: Iterable[TraceStep]) -> list[Operation]:
    """All operations of some steps."""
    return [o for step in steps for items in step.workers.values() for item in items for o in item.operations]


@dataclass(frozen=True)
class WhatIf:
    """What a job lost to operations that were not typical.

    Attributes:
        recorded, replayed: mean recorded step, and replayed with launch gaps.
        original: replayed without launch gaps.
        ideal: every operation at its kind's typical time: mean of compute, median of the rest.
        by_stage, by_kind, by_replica: step time if only that part's operations were as recorded, the rest typical.
        without_stage: step time if that stage's compute were typical, the rest as recorded.
    """

    recorded: float
    replayed: float
    original: float
    ideal: float
    by_stage: dict[int, float]
    by_kind: dict[str, float]
    by_replica: dict[int, float]
    without_stage: dict[int, float]

    @property
    def slow_down(self) -> float:
        """Original over ideal: what stragglers of all kinds cost."""
        return self.original / self.ideal


def what_if(steps: list[TraceStep]) -> WhatIf:
    """Replay a job with parts of it made typical."""
    everything = operations_of(steps)
    times: dict[str, list[float]] = defaultdict(list)
    for operation in everything:
        times[operation.kind].append(operation.own)
    typical = {k: float(np.mean(v) if k in COMPUTE else np.median(v)) for k, v in times.items()}

    def mean(as_recorded: Callable[[Operation], bool]) -> float:
        took: Duration = lambda o: o.own if as_recorded(o) else typical[o.kind]
        return float(np.mean([replay_step(step, took, gaps=False) for step in steps]))

    stages = sorted({o.stage for o in everything})
    return WhatIf(
        recorded=float(np.mean([s.recorded for s in steps])),
        replayed=float(np.mean([replay_step(s) for s in steps])),
        original=mean(lambda o: True),
        ideal=mean(lambda o: False),
        by_stage={n: mean(lambda o, n=n: o.stage == n) for n in stages},  # type: ignore[misc]
        by_kind={k: mean(lambda o, k=k: o.kind == k) for k in sorted(typical)},  # type: ignore[misc]
        by_replica={n: mean(lambda o, n=n: o.replica == n) for n in sorted({o.replica for o in everything})},  # type: ignore[misc]
        without_stage={n: mean(lambda o, n=n: o.stage != n or o.kind not in COMPUTE) for n in stages},  # type: ignore[misc]
    )
