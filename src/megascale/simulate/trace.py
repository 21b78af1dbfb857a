"""Replay of a recorded training job: what its steps would have taken had its operations been typical.

Reads traces in the layout of the OSDI 2025 what-if artifact (one row an operation; ByteDance, Apache-2.0). A worker
runs its operations one after another, as Megatron-LM with blocking exchanges does; operations that were launched
together (a send and a receive in one batch) are one item. An exchange moves once both sides have posted it, a
collective once its last member has; what an operation took beyond that is its own duration.
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


@dataclass(frozen=True)
class Operation:
    """One recorded operation.

    Attributes:
        kind, replica, stage, step: what and where.
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
    own: float = 0.0

    @property
    def end(self) -> float:
        """Recorded end."""
        return self.start + self.duration


Worker = tuple[int, int]


@dataclass(frozen=True)
class Item:
    """Operations that a worker launches together, `gap` seconds after its item before ended."""

    operations: tuple[Operation, ...]
    gap: float


@dataclass(frozen=True)
class Step:
    """A recorded step: items of each worker in order, and its recorded length."""

    number: int
    workers: dict[Worker, tuple[Item, ...]]
    recorded: float


def read(path: Path) -> list[Step]:
    """The steps of a trace file. DataError if it is damaged or pyarrow is missing."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"{path} needs pyarrow; pip install pyarrow") from None
    try:
        columns = parquet.read_table(path).to_pydict()
        stages = max(map(int, columns["stage"])) + 1
        operations = [
            Operation(str(kind), int(r), int(s), int(n), int(q), int(m), float(a), float(d), stages)
            for kind, r, s, n, q, m, a, d in zip(
                *(
                    columns[c]
                    for c in ("optype", "dp_rank", "stage", "step", "seq_id", "mb_id", "start_ts", "duration")
                ),
                strict=True,
            )
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
        return (kind, o.replica, (o.stage + step) % o.stages, o.sequence)
    if kind in SENDS:
        return (kind, o.replica, o.stage, o.sequence)
    if kind in DATA_PARALLEL:
        return (kind, o.stage, o.sequence)
    if kind in EVERYONE:
        return (kind, o.sequence)
    if kind in ENDS:
        return (kind, o.replica, o.sequence)
    return (kind, o.replica, o.stage, o.sequence, o.microbatch)


def _step(number: int, rows: list[Operation]) -> Step:
    groups: dict[tuple[object, ...], list[Operation]] = defaultdict(list)
    for operation in rows:
        groups[group_key(operation)].append(operation)
    begin = min(o.start for o in rows)
    workers: dict[Worker, list[Operation]] = defaultdict(list)
    for members in groups.values():
        ready = max(o.start for o in members)
        for operation in members:
            own = max(0.0, min(o.end for o in members) - ready)
            workers[(operation.replica, operation.stage)].append(replace(operation, own=own))
    items: dict[Worker, tuple[Item, ...]] = {}
    for worker, mine in workers.items():
        mine.sort(key=lambda o: (o.start, o.kind))
        built: list[Item] = []
        ended = begin
        for operation in mine:
            if built and operation.start - built[-1].operations[0].start < TOGETHER:
                built[-1] = Item((*built[-1].operations, operation), built[-1].gap)
            else:
                built.append(Item((operation,), max(0.0, operation.start - ended)))
            ended = max(o.end for o in built[-1].operations)
        items[worker] = tuple(built)
    recorded = max(o.end for o in rows) - begin
    return Step(number, items, recorded)


Duration = Callable[[Operation], float]


def replay_step(step: Step, duration: Duration | None = None, gaps: bool = True) -> float:
    """Seconds of a step with each operation taking `duration` (default: its own), with or without launch gaps."""
    took = duration or (lambda o: o.own)
    members: dict[tuple[object, ...], list[tuple[Worker, int]]] = defaultdict(list)
    for worker, items in step.workers.items():
        for index, item in enumerate(items):
            for operation in item.operations:
                members[group_key(operation)].append((worker, index))
    posted: dict[tuple[Worker, int], float] = {}
    ended: dict[tuple[Worker, int], float] = {}
    ready = [(worker, 0) for worker in step.workers]
    for worker, _ in ready:
        posted[(worker, 0)] = step.workers[worker][0].gap if gaps else 0.0
    while ready:
        place = ready.pop()
        if place in ended:
            continue
        worker, index = place
        operations = step.workers[worker][index].operations
        groups = [members[group_key(o)] for o in operations]
        if any(peer not in posted for group in groups for peer in group):
            continue  # comes again when the last peer has posted
        ended[place] = max(
            max(posted[peer] for peer in group) + took(o) for group, o in zip(groups, operations, strict=True)
        )
        following = (worker, index + 1)
        if index + 1 < len(step.workers[worker]):
            item = step.workers[worker][index + 1]
            posted[following] = ended[place] + (item.gap if gaps else 0.0)
            ready.append(following)
            ready += [peer for o in item.operations for peer in members[group_key(o)] if peer in posted]
    count = sum(len(items) for items in step.workers.values())
    if len(ended) != count:
        raise DataError(f"step {step.number} of the trace cannot be replayed: an exchange lacks its other side")
    return max(ended.values())


def operations_of(steps: Iterable[Step]) -> list[Operation]:
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


def what_if(steps: list[Step]) -> WhatIf:
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
