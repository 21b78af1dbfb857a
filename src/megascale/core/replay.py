"""When everything happens: a schedule's dependency graph with durations. For the planner, simulator and what-if.

Resources of a stage are its streams: one for compute, one for parameter gathers, one for gradient reductions, and one
for each of its channels. Work on a stream runs in list order. An action starts when its stream is free and

- FORWARD/BACKWARD: its message is here, its chunk's parameters are gathered (first forward), its send buffer is free,
  and without overlap (Schedule.exposed) what the stage sent before has arrived;
- SEND/RECV: the compute before it in the stage's list has ended. The transfer starts when both sides have posted;
- GATHER_PARAMS: the compute before it in the list has ended; REDUCE_GRADS: the backward that it arms has ended
  (data-parallel peers run in step; that buckets leave within that backward is for `simulate` to add).

Times are in the unit of the durations. Several data-parallel replicas with durations of their own replay at once:
arrays then have a second axis. Times follow from one pass over the graph in topological levels, in numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megascale.core.schedule import SEND_SLOTS, Action, ActionKind, Schedule

STREAMS = ("compute", "send", "gather", "reduce")
_STREAM_OF_KIND = np.array([0, 0, 1, 1, 1, 1, 2, 3])
_SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
_RECEIVES = (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD)

DurationOf = Callable[[int, Action], float]


@dataclass(frozen=True, eq=False)
class Graph:
    """A schedule compiled for replay: build once, replay many times.

    Actions of all stages stand one after another in list order; index n is the n-th. A SEND and its RECV share one
    transfer, kept at the SEND's index.

    Attributes:
        schedule: what was compiled.
        stage, kind, chunk, microbatch: int arrays [actions].
        partner: index of the other side of a SEND or RECV, else -1.
        before: [actions, 7] indices whose end an action's start awaits, -1 where none: the compute before it in
            the list (for a reduction the backward that it arms); for compute its transfer, its gather and the send that
            must free a buffer; for a transfer the compute before its RECV on the other stage; then the previous action
            on the stream; then the last forward and backward sends that compute waits for without overlap.
        levels: indices in topological order, level by level: no action awaits one of its own level.
    """

    schedule: Schedule
    stage: np.ndarray
    kind: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    partner: np.ndarray
    before: np.ndarray
    levels: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Graph:
        """Compile; ValueError if the schedule can never finish (see core/checker.py)."""
        sizes = [len(t) for t in schedule.table]
        stage = np.repeat(np.arange(schedule.stages), sizes)
        kind, chunk, microbatch = np.concatenate(schedule.table).T.astype(np.int64)
        partner = _partners(schedule, stage, kind, chunk, microbatch)
        before = _dependencies(schedule, stage, kind, chunk, microbatch, partner)
        real = ~np.isin(kind, _RECEIVES)
        return cls(schedule, stage, kind, chunk, microbatch, partner, before, _levels(before, real))

    def awaiting(self, extra: np.ndarray) -> Graph:
        """The same actions with more waits: action n also awaits actions extra[n], [actions, k], -1 where none.

        For engines that do more than the schedule asks, such as blocking exchanges. ValueError if that deadlocks.
        """
        before = np.concatenate([self.before, extra], axis=1)
        return replace(self, before=before, levels=_levels(before, ~np.isin(self.kind, _RECEIVES)))

    @property
    def actions(self) -> int:
        """Number of actions over all stages."""
        return len(self.kind)

    @cached_property
    def stream(self) -> np.ndarray:
        """Index into LANES of each action."""
        return _STREAM_OF_KIND[self.kind]

    def durations(
        self,
        forward: object,
        backward: object,
        send_forward: object = 0.0,
        send_backward: object = 0.0,
        gather: object = 0.0,
        reduce: object = 0.0,
    ) -> np.ndarray:
        """Durations [actions] from scalars or arrays [stages, virtual] for each kind (a RECV takes none itself)."""
        shape = (self.schedule.stages, self.schedule.virtual_stages)
        costs = (forward, backward, send_forward, 0.0, send_backward, 0.0, gather, reduce)
        table = np.stack([np.broadcast_to(np.asarray(c, dtype=float), shape) for c in costs])
        return table[self.kind, self.stage, self.chunk]


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each action ran.

    Attributes:
        graph: what was replayed.
        start, end: [actions] or [actions, replicas]. A transfer's SEND and RECV both end with it; each starts when
            its side has posted it, `moving` says when bytes began to flow.
        moving: as start, but for SEND and RECV the moment at which both sides were ready.
    """

    graph: Graph
    start: np.ndarray
    end: np.ndarray
    transfer_start: np.ndarray

    @property
    def makespan(self) -> np.ndarray:
        """End of the last action: a number, or one a replica."""
        return self.end.max(axis=0)

    @cached_property
    def busy(self) -> np.ndarray:
        """Compute time of each stage: [stages] or [stages, replicas]."""
        return self.stream_time("compute")

    def stream_time(self, stream: str) -> np.ndarray:
        """Time during which a stream of each stage works (transfers count at the sender): [stages, ...]."""
        graph = self.graph
        mine = (graph.stream == STREAMS.index(stream)) & ~np.isin(graph.kind, _RECEIVES)
        total = np.zeros((graph.schedule.stages, *self.end.shape[1:]))
        np.add.at(total, graph.stage[mine], (self.end - self.transfer_start)[mine])
        return total

    @property
    def bubble(self) -> np.ndarray:
        """Idle time of the busiest stage's compute stream over its busy time: (p-1)/(v m) in the ideal case."""
        busy = self.busy.max(axis=0)
        return (self.makespan - busy) / busy

    def idle_times(self) -> dict[str, np.ndarray]:
        """Idle time of each stage's compute stream by cause, [stages, ...]; with `busy` they add up to the makespan.

        send: a transfer or a full send buffer was moving bytes meanwhile; gather: parameters were being gathered;
        reduce: gradients were being reduced after the last compute; bubble: the rest, waiting for other stages.
        """
        graph, tail = self.graph, self.end.shape[1:]
        compute = np.flatnonzero(graph.kind <= ActionKind.BACKWARD)
        previous = graph.before[compute, 0]
        idle_from = np.where(_column(previous >= 0, tail), self.end[previous], 0.0)
        gap = self.start[compute] - idle_from
        stages = graph.stage[compute]
        out = {name: np.zeros((graph.schedule.stages, *tail)) for name in ("send", "gather", "reduce", "bubble")}
        for name, columns in (("gather", (2,)), ("send", (1, 3, 5, 6))):
            for column in columns:
                cause = graph.before[compute, column]
                over = np.minimum(self.end[cause], self.start[compute]) - np.maximum(
                    self.transfer_start[cause], idle_from
                )
                share = np.minimum(np.where(_column(cause >= 0, tail), np.maximum(over, 0.0), 0.0), gap)
                np.add.at(out[name], stages, share)
                gap = gap - share
        np.add.at(out["bubble"], stages, gap)
        last = np.zeros_like(self.busy)
        np.maximum.at(last, stages, self.end[compute])
        reduces = np.flatnonzero(graph.kind == ActionKind.REDUCE_GRADS)
        reduced = last.copy()
        np.maximum.at(reduced, graph.stage[reduces], self.end[reduces])
        out["reduce"] += reduced - last
        out["bubble"] += self.makespan - reduced
        return out

    def overlap(self, stream: str, other: str) -> np.ndarray:
        """For each action on `stream`, the time during which `other` of the same stage works: [actions], 0 elsewhere.

        What a model of mutual slow-down needs: stretch durations by it and replay again. One replica only.
        """
        graph = self.graph
        out = np.zeros(graph.actions)
        real = ~np.isin(graph.kind, _RECEIVES)
        for s in range(graph.schedule.stages):
            here = (graph.stage == s) & real
            mine = np.flatnonzero(here & (graph.stream == STREAMS.index(stream)))
            theirs = np.flatnonzero(here & (graph.stream == STREAMS.index(other)))
            if len(mine) and len(theirs):
                out[mine] = _busy_between(
                    self.transfer_start[theirs], self.end[theirs], self.transfer_start[mine], self.end[mine]
                )
        return out


def replay(schedule: Schedule | Graph, durations: np.ndarray | DurationOf) -> Timeline:
    """Run a schedule against durations.

    Args:
        schedule: a Schedule, or a Graph to replay again without compiling.
        durations: [actions] or [actions, replicas] in the Graph's order, or a function of (stage, action). A
            transfer's duration is its SEND's; a RECV's own is not used.
    """
    graph = schedule if isinstance(schedule, Graph) else Graph.of(schedule)
    if callable(durations):
        pairs = ((s, action) for s, actions in enumerate(graph.schedule) for action in actions)
        durations = np.array([durations(s, action) for s, action in pairs], dtype=float)
    durations = np.asarray(durations, dtype=float)
    if durations.shape[0] != graph.actions:
        raise ValueError(f"durations of {durations.shape[0]} actions for a schedule of {graph.actions}")
    tail = durations.shape[1:]
    # One more row, always zero, stands for "awaits nothing": index -1 reads it.
    end = np.zeros((graph.actions + 1, *tail))
    before = graph.before
    for level in graph.levels:
        end[level] = end[before[level]].max(axis=1) + durations[level]
    moving = end[:-1] - durations
    receives = np.flatnonzero(np.isin(graph.kind, _RECEIVES))
    sends = graph.partner[receives]
    end[receives] = end[sends]
    moving[receives] = moving[sends]
    start = moving.copy()
    # A side has posted when its own compute has ended and its stream is free, though the other side may be late.
    ends = np.flatnonzero(graph.partner >= 0)
    start[ends] = np.maximum(end[before[ends, 0]], end[before[ends, 4]])
    return Timeline(graph, start, end[:-1], moving)


def what_if(graph: Graph, durations: np.ndarray) -> dict[str, np.ndarray]:
    """Exposed (non-overlapped) time of each stream but compute: how much sooner the step ends were its work free."""
    base = replay(graph, durations).makespan
    out = {}
    for index, stream in enumerate(STREAMS[1:], start=1):
        without = durations.copy()
        without[graph.stream == index] = 0.0
        out[stream] = base - replay(graph, without).makespan
    return out


def _column(mask: np.ndarray, tail: tuple[int, ...]) -> np.ndarray:
    return mask.reshape(-1, *([1] * len(tail)))


def _busy_between(starts: np.ndarray, ends: np.ndarray, from_: np.ndarray, to: np.ndarray) -> np.ndarray:
    """Measure of the union of intervals (disjoint but for shared streams) within each [from_, to]."""
    times = np.concatenate([starts, ends])
    change = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    times, depth = times[order], change[order].cumsum()
    busy = np.concatenate([[0.0], np.cumsum(np.diff(times) * (depth[:-1] > 0))])
    return np.interp(to, times, busy) - np.interp(from_, times, busy)


def _previous(marks: np.ndarray, group: np.ndarray) -> np.ndarray:
    """For each position the latest earlier marked position of the same group (groups contiguous), or -1."""
    position = np.arange(len(marks))
    latest = np.maximum.accumulate(np.where(marks, position, -1))
    earlier = np.concatenate([[-1], latest[:-1]])
    first = np.searchsorted(group, group)
    return np.where(earlier >= first, earlier, -1)


def _key(schedule: Schedule, stage: np.ndarray, chunk: np.ndarray, microbatch: np.ndarray) -> np.ndarray:
    return (stage * schedule.virtual_stages + chunk) * schedule.microbatches + microbatch


def _partners(
    schedule: Schedule, stage: np.ndarray, kind: np.ndarray, chunk: np.ndarray, microbatch: np.ndarray
) -> np.ndarray:
    """Index of the other side of each transfer (Schedule.peer, vectorised). ValueError if there is none."""
    p = schedule.stages
    partner = np.full(len(kind), -1)
    pairs = (
        (ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD, 1),
        (ActionKind.SEND_BACKWARD, ActionKind.RECV_BACKWARD, -1),
    )
    for send, receive, step in pairs:
        sends, receives = np.flatnonzero(kind == send), np.flatnonzero(kind == receive)
        target = chunk[sends] * p + stage[sends] + step
        wanted = _key(schedule, target % p, target // p, microbatch[sends])
        offered = _key(schedule, stage[receives], chunk[receives], microbatch[receives])
        order = np.argsort(offered)
        if len(sends) != len(receives) or not np.array_equal(np.sort(wanted), offered[order]):
            raise ValueError(f"the schedule {schedule.name} has a send without its receive")
        match = receives[order[np.searchsorted(offered[order], wanted)]]
        partner[sends], partner[match] = match, sends
    return partner


def _dependencies(
    schedule: Schedule,
    stage: np.ndarray,
    kind: np.ndarray,
    chunk: np.ndarray,
    microbatch: np.ndarray,
    partner: np.ndarray,
) -> np.ndarray:
    """The array `Graph.before`."""
    before = np.full((len(kind), 7), -1)
    before[:, 0] = _previous(kind <= ActionKind.BACKWARD, stage)
    size = schedule.stages * schedule.virtual_stages * schedule.microbatches
    key = _key(schedule, stage, chunk, np.maximum(microbatch, 0))
    at: dict[ActionKind, np.ndarray] = {}
    for k in ActionKind:
        where = np.flatnonzero(kind == k)
        at[k] = np.full(size, -1)
        at[k][key[where]] = where
        if k > ActionKind.BACKWARD:
            # Work of one kind on a stage is one stream: its channel, its gathers or its reductions.
            before[where, 4] = np.where(np.diff(stage[where], prepend=-1) == 0, np.roll(where, 1), -1)
    for compute, send, receive in (
        (ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD),
        (ActionKind.BACKWARD, ActionKind.SEND_BACKWARD, ActionKind.RECV_BACKWARD),
    ):
        where = np.flatnonzero(kind == compute)
        received = at[receive][key[where]]
        before[where, 1] = np.where(received >= 0, partner[received], -1)
        sends = np.flatnonzero(kind == send)
        # The send that held this buffer: SEND_SLOTS earlier among the stage's sends of this kind.
        slots = SEND_SLOTS
        held = np.full(len(sends), -1)
        held[slots:] = np.where(stage[sends[slots:]] == stage[sends[:-slots]], sends[:-slots], -1)
        before[at[compute][key[sends]], 3] = held
    reduces, backwards = np.flatnonzero(kind == ActionKind.REDUCE_GRADS), np.flatnonzero(kind == ActionKind.BACKWARD)
    # A chunk's next backward after the reduction in the list: of all sorted by chunk, then position.
    by_chunk = np.lexsort((backwards, stage[backwards] * schedule.virtual_stages + chunk[backwards]))
    place = (stage * schedule.virtual_stages + chunk) * len(kind) + np.arange(len(kind))
    before[reduces, 0] = backwards[by_chunk][np.searchsorted(place[backwards][by_chunk], place[reduces])]
    # The first forward of a chunk awaits its gather.
    forwards = np.flatnonzero(kind == ActionKind.FORWARD)
    _, first = np.unique(stage[forwards] * schedule.virtual_stages + chunk[forwards], return_index=True)
    first = forwards[first]
    gathers = np.flatnonzero(kind == ActionKind.GATHER_PARAMS)
    gathered = np.full(schedule.chunks, -1)
    gathered[stage[gathers] * schedule.virtual_stages + chunk[gathers]] = gathers
    before[first, 2] = gathered[stage[first] * schedule.virtual_stages + chunk[first]]
    # A transfer also awaits the compute before its RECV on the other side.
    sends = np.flatnonzero(np.isin(kind, _SENDS))
    before[sends, 1] = before[partner[sends], 0]
    if schedule.exposed:
        for column, send in enumerate(_SENDS, start=5):
            before[:, column] = _last_send(kind, stage, send)
    return before


def _last_send(kind: np.ndarray, stage: np.ndarray, send: ActionKind) -> np.ndarray:
    """For each compute the last send of this kind of its stage before it: [actions], -1 where none."""
    sends = np.flatnonzero(kind == send)
    computes = np.flatnonzero(kind <= ActionKind.BACKWARD)
    last = np.searchsorted(sends, computes) - 1
    found = sends[np.maximum(last, 0)] if len(sends) else np.zeros_like(computes)
    waits = np.full(len(kind), -1)
    waits[computes] = np.where((last >= 0) & (stage[found] == stage[computes]), found, -1)
    return waits


def _levels(before: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, ...]:
    """Peel the graph of the `real` actions into topological levels. ValueError if it has a cycle."""
    rows = np.flatnonzero(real)
    needs = before[rows]
    target = np.repeat(rows, needs.shape[1])[needs.ravel() >= 0]
    source = needs.ravel()[needs.ravel() >= 0]
    waiting = np.bincount(target, minlength=len(real))
    order = np.argsort(source, kind="stable")
    successors = target[order]
    first = np.searchsorted(source[order], np.arange(len(real) + 1))
    count = np.diff(first)
    level = rows[waiting[rows] == 0]
    levels = []
    while len(level):
        levels.append(level)
        n = count[level]
        offsets = np.repeat(first[level] - np.concatenate([[0], n[:-1].cumsum()]), n)
        reached = successors[offsets + np.arange(len(offsets))]
        np.subtract.at(waiting, reached, 1)
        free = reached[waiting[reached] == 0]
        # An action reached twice in one level would stand twice in the next.
        waiting[free] = -1
        level = np.unique(free) if len(free) > 1 else free
    if sum(map(len, levels)) != len(rows):
        raise ValueError("the schedule has a cycle of waits: it deadlocks")
    return tuple(levels)
