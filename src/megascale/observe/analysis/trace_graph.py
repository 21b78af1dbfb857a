"""What an operation of a recorded job waited for, and the replay of its steps with other durations.

A step's operations (nodes) are the same in every step and replica, so the graph is made once, and the replay handles
all steps, replicas and questions at once: each array has the axes [node, ..., step, replica, tensor]. Steps whose
operations differ from each other's (a schedule that changed) make graphs of their own; steps whose replicas differ
among themselves are left out and named.

A node starts when what it awaits on its stage has ended, and ends when its own duration has passed since all members
of its group had started:

- computes of a stage run one after another; so do its sends and receives of one kind, and its data-parallel
  collectives;
- a send awaits its compute, a compute its receive and the gather of its chunk; a receive awaits the compute before the
  one it feeds, a reduction that overlaps with compute the last backward of its chunk. Where the recording contradicts
  (receives posted earlier, buckets that leave within a backward), the last compute that had ended when it began;
- after the last compute: garbage collection, all-reduces of norms and embedding, reductions, the norm of the
  gradients, the optimizer, in the order recorded.

Groups: the two sides of a transfer; the replicas of a stage in a data-parallel collective; first and last stage for the
embedding; everyone for the gradients' norm; the tensor peers of a compute. A transfer's own duration runs from the last
start in its group to its own end. The model follows the dependency model of StragglerAnalysis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megascale.errors import DataError
from megascale.observe.analysis.operation_trace import (
    BACKWARD,
    CLIP,
    COMPUTE,
    DATA_PARALLEL,
    EMBEDDING,
    FORWARD,
    GATHER,
    REDUCE,
    SEPARATE,
    TAIL,
    TRANSFERS,
    Array,
    OperationTrace,
)

# An operation may seem to start this long before what it awaits has ended (s): clocks and rounding of the recording.
BLUR = 5e-4
# Transfers that never took place are recorded by some profilers before a stage's first and after its last compute.
_OUTSIDE = 5e-5
# A time more negative than this is no rounding, but a clock that is wrong: it counts as zero.
_MOST_NEGATIVE = 1e-2
# Which of an operation's ranks end together.
_SYNC_REPLICAS, _SYNC_TENSOR, _SYNC_ALL = 1, 2, 3


@dataclass(frozen=True, eq=False)
class TraceGraph:
    """Steps of a job that do the same operations.

    Attributes:
        steps: their numbers.
        ranks: [stages, replicas, tensor] global ranks.
        kind, stage, chunk, microbatch, sequence: [nodes].
        start, duration: recorded, seconds, [nodes, steps, replicas, tensor]; starts from each step's first.
        own: duration once all who take part are there (of a compute: without waits for tensor peers).
        gap: from the end of what a node awaits to its start; negative where a step's order was another for once.
        before: for each node the nodes whose end its start awaits.
        group: [nodes] nodes of one number end together.
        levels: nodes in topological order, whole groups at a time: (nodes sorted by group, [k, nodes] awaited nodes
            with `len(kind)` for none, where a group begins, which ranks end together).
    """

    steps: tuple[int, ...]
    ranks: Array
    kind: Array
    stage: Array
    chunk: Array
    microbatch: Array
    sequence: Array
    start: Array
    duration: Array
    own: Array
    gap: Array
    before: tuple[tuple[int, ...], ...]
    group: Array
    levels: tuple[tuple[Array, Array, Array, Array], ...]

    @property
    def nodes(self) -> int:
        """Operations of a step in one replica."""
        return len(self.kind)

    def recorded(self) -> Array:
        """Recorded seconds of each step."""
        found: Array = (self.start + self.duration).max(axis=(0, 2, 3))
        return found

    def replay(self, own: Array | None = None, gaps: bool = False) -> tuple[Array, Array]:
        """Starts and ends of all nodes, [nodes, ..., steps, replicas, tensor].

        Args:
            own: durations [nodes, ..., steps, replicas, tensor]; by default as recorded.
            gaps: whether launch gaps are kept.
        """
        own = self.own if own is None else own
        start = np.empty(own.shape)
        end = np.zeros((self.nodes + 1, *own.shape[1:]))
        self._run(end, lambda nodes: own[nodes], gaps, start)
        return start, end[:-1]

    def seconds(self, own_of: Callable[[Array], Array], end: Array, gaps: bool = False) -> Array:
        """Seconds of each step, [..., steps].

        Args:
            own_of: durations of some nodes, [k] -> [k, ..., steps, replicas, tensor].
            end: memory to work in, [nodes + 1, ..., steps, replicas, tensor].
            gaps: whether launch gaps are kept.
        """
        end[-1] = 0.0
        self._run(end, own_of, gaps, None)
        found: Array = end.max(axis=(0, -2, -1))
        return found

    def _run(self, end: Array, own_of: Callable[[Array], Array], gaps: bool, start: Array | None) -> None:
        """Fill `end`, whose last row is zero and stands for "awaits nothing", and `start`."""
        for nodes, awaited, first, sync in self.levels:
            begin = end[awaited[0]]
            for row in awaited[1:]:
                np.maximum(begin, end[row], out=begin)
            if gaps:
                begin += self.gap[nodes].reshape(len(nodes), *[1] * (end.ndim - 4), *self.gap.shape[1:])
            if start is not None:
                start[nodes] = begin
            ready = begin
            if len(first) < len(nodes):
                sizes = np.diff(np.r_[first, len(nodes)])
                ready = np.repeat(np.maximum.reduceat(begin, first, axis=0), sizes, axis=0)
            ready = _together(ready, sync, self.start.shape[2:])
            took = ready + own_of(nodes)
            if self.start.shape[3] > 1 and (sync == _SYNC_TENSOR).any():
                peers = sync == _SYNC_TENSOR
                took[peers] = took[peers].max(axis=-1, keepdims=True)
            end[nodes] = took


def build_graphs(trace: OperationTrace) -> tuple[list[TraceGraph], dict[int, str]]:
    """The graphs of a job, and the steps left out with the reason.

    DataError if no step can be replayed: an operation recorded twice, transfers without their other side, waits in a
    circle.
    """
    tensor = trace.tensor_indices()
    replicas, stages, width = int(trace.replica.max()) + 1, int(trace.stage.max()) + 1, int(tensor.max()) + 1
    ranks = np.full((stages, replicas, width), -1)
    ranks[trace.stage, trace.replica, tensor] = trace.rank
    if (ranks < 0).any():
        stage, replica, peer = map(int, np.argwhere(ranks < 0)[0])
        raise DataError(
            f"the trace has no operations of stage {stage} in data-parallel replica {replica}"
            + (f", tensor peer {peer}" if width > 1 else "")
            + ": it needs those of all ranks"
        )
    names, kind = trace.encode_kinds()
    node = np.ravel_multi_index(
        (trace.stage, kind, trace.sequence), (stages, len(names), int(trace.sequence.max()) + 1)
    )
    cell = trace.replica * width + tensor
    order = np.lexsort((node, cell, trace.step))
    step, node, cell = trace.step[order], node[order], cell[order]
    signature = np.stack([node, trace.chunk[order], trace.microbatch[order]])
    alike: dict[bytes, list[tuple[int, Array]]] = {}
    left_out: dict[int, str] = {}
    cells = replicas * width
    numbers, firsts = np.unique(step, return_index=True)
    for number, begin, stop in zip(numbers.tolist(), firsts, [*firsts[1:], len(step)], strict=True):
        here = slice(begin, stop)
        if ((np.diff(node[here]) == 0) & (np.diff(cell[here]) == 0)).any():
            left_out[number] = "an operation is recorded twice: kind and seq_id must tell a rank's operations apart"
            continue
        size, rest = divmod(stop - begin, cells)
        found = signature[:, here]
        if rest or not (cell[here].reshape(cells, size) == np.arange(cells)[:, None]).all():
            left_out[number] = "its replicas do different numbers of operations"
            continue
        found = found.reshape(3, cells, size)
        if not (found == found[:, :1]).all():
            left_out[number] = "its replicas do different operations"
            continue
        alike.setdefault(found[:, 0].tobytes(), []).append((number, order[here].reshape(cells, size).T))
    graphs = []
    for members in alike.values():
        rows = np.stack([rows for _, rows in members], axis=1)
        rows = rows.reshape(rows.shape[0], len(members), replicas, width)
        try:
            graphs.append(_graph(trace, tuple(number for number, _ in members), ranks, rows))
        except DataError as error:
            left_out |= {number: str(error) for number, _ in members}
    if not graphs:
        number, why = next(iter(left_out.items()))
        raise DataError(f"none of the trace's {len(left_out)} steps can be replayed; step {number}: {why}")
    return graphs, left_out


def _graph(trace: OperationTrace, steps: tuple[int, ...], ranks: Array, rows: Array) -> TraceGraph:
    one = rows[:, 0, 0, 0]
    start = trace.start[rows]
    start = start - start.min(axis=(0, 2, 3), keepdims=True)
    duration = trace.duration[rows]
    chunk = trace.chunk[one]
    known = trace.global_chunk[one]
    whole = np.where(known >= 0, known, np.maximum(chunk, 0) * ranks.shape[0] + trace.stage[one])
    builder = _Builder(
        trace.kind[one], trace.stage[one], chunk, trace.microbatch[one], trace.sequence[one],
        whole, start, start + duration,
    )  # fmt: skip
    before, group = builder.build()
    sync = np.zeros(len(one), dtype=np.int64)
    sync[np.isin(builder.kind, DATA_PARALLEL)] = _SYNC_REPLICAS
    sync[builder.kind == CLIP] = _SYNC_ALL
    compute = np.isin(builder.kind, COMPUTE)
    if ranks.shape[2] > 1:
        sync[compute] = _SYNC_TENSOR
    levels = _levels(before, group, sync)
    waited = trace.waited[rows]
    own = duration - waited + waited.min(axis=3, keepdims=True)
    end = start + duration
    for nodes, _, first, kinds in levels:
        ready = np.repeat(np.maximum.reduceat(start[nodes], first, axis=0), np.diff(np.r_[first, len(nodes)]), axis=0)
        ready = _together(ready, kinds, start.shape[2:])
        moves = builder.moves[nodes]
        took = end[nodes] - ready
        own[nodes[moves]] = np.where(took <= -_MOST_NEGATIVE, 0.0, took)[moves]
    gap = start - _latest(end, before)
    return TraceGraph(
        steps, ranks, builder.kind, builder.stage, chunk, builder.microbatch, builder.sequence, start, duration, own,
        gap, tuple(map(tuple, before)), group, levels,
    )  # fmt: skip


def _together(ready: Array, sync: Array, ranks: tuple[int, ...]) -> Array:
    """When all ranks that take part are ready: [nodes, ..., steps, replicas, tensor]."""
    if ranks[0] > 1 and (sync == _SYNC_REPLICAS).any():
        ready = ready.copy()
        ready[sync == _SYNC_REPLICAS] = ready[sync == _SYNC_REPLICAS].max(axis=-2, keepdims=True)
    everyone = sync == _SYNC_ALL
    if max(ranks) > 1 and everyone.any():
        ready = ready.copy()
        ready[everyone] = ready[everyone].max(axis=(-2, -1), keepdims=True)
    return ready


def _latest(end: Array, before: list[list[int]]) -> Array:
    """When what each node awaits has ended, 0 where it awaits nothing."""
    found = np.zeros(end.shape)
    for node, awaited in enumerate(before):
        if awaited:
            found[node] = end[awaited].max(axis=0)
    return found


def _levels(before: list[list[int]], group: Array, sync: Array) -> tuple[tuple[Array, Array, Array, Array], ...]:
    """Topological levels of whole groups. DataError if they wait in a circle."""
    count = int(group.max()) + 1
    awaited: list[set[int]] = [set() for _ in range(count)]
    for node, earlier in enumerate(before):
        awaited[group[node]] |= {int(group[other]) for other in earlier}
    followers: list[list[int]] = [[] for _ in range(count)]
    for number, others in enumerate(awaited):
        for other in others:
            followers[other].append(number)
    missing = [len(others) for others in awaited]
    members: list[list[int]] = [[] for _ in range(count)]
    for node, number in enumerate(group.tolist()):
        members[number].append(node)
    level = [number for number in range(count) if not missing[number]]
    levels, done = [], 0
    while level:
        done += len(level)
        nodes = [node for number in level for node in members[number]]
        sizes = [len(members[number]) for number in level]
        depth = max(1, max(len(before[node]) for node in nodes))
        table = np.array([before[node] + [len(before)] * (depth - len(before[node])) for node in nodes]).T
        first = np.cumsum([0, *sizes[:-1]])
        levels.append((np.array(nodes), table, first, sync[nodes]))
        reached: list[int] = []
        for number in level:
            for follower in followers[number]:
                missing[follower] -= 1
                if not missing[follower]:
                    reached.append(follower)
        level = reached
    if done < count:
        raise DataError("its operations wait for each other in a circle: sends and receives do not pair")
    return tuple(levels)


class _Builder:
    """Dependencies and groups of one step's nodes."""

    def __init__(
        self,
        kind: Array,
        stage: Array,
        chunk: Array,
        microbatch: Array,
        sequence: Array,
        whole: Array,
        start: Array,
        end: Array,
    ) -> None:
        self.kind, self.stage, self.chunk, self.microbatch = kind, stage, chunk, microbatch
        self.sequence, self.whole, self.start, self.end = sequence, whole, start, end
        self.begins, self.ends = start[:, 0, 0, 0], end[:, 0, 0, 0]  # of one replica in one step
        self.stages = int(stage.max()) + 1
        self.last = int(whole.max())
        self.before: list[list[int]] = [[] for _ in kind]
        self.moves = np.isin(kind, [*TRANSFERS, *DATA_PARALLEL, EMBEDDING, CLIP])
        # Sides of transfers by kind, the model's chunk and the micro-batch at this end, and back.
        self.sides: dict[tuple[str, int, int], int] = {}
        self.of: dict[int, tuple[int, int]] = {}
        self.computes: Array = np.zeros(0, int)

    def build(self) -> tuple[list[list[int]], Array]:
        """(what each node awaits, [nodes] number of its group)."""
        group = np.arange(len(self.kind))
        for stage in range(self.stages):
            self._stage(stage)
        for (direction, _, _), node in self.sides.items():
            if direction.endswith("send"):
                _, _, step = TRANSFERS[direction]
                chunk, number = self.of[node]
                receive = self.sides.get((direction.replace("send", "recv"), chunk + step, number))
                if receive is None:
                    raise DataError(
                        f"{direction} {self.sequence[node]} of stage {self.stage[node]} has no receive on stage "
                        f"{(self.stage[node] + step) % self.stages}"
                    )
                group[receive] = group[node]
        taken = {group[node] for (direction, _, _), node in self.sides.items() if direction.endswith("send")}
        for (direction, _, _), node in self.sides.items():
            if group[node] not in taken:
                raise DataError(
                    f"{direction} {self.sequence[node]} of stage {self.stage[node]} has no send on the stage before it"
                )
        for kind in (CLIP, EMBEDDING):
            for number in set(self.sequence[self.kind == kind].tolist()):
                alike = np.flatnonzero((self.kind == kind) & (self.sequence == number))
                group[alike] = alike[0]
        return self.before, np.unique(group, return_inverse=True)[1].ravel()

    def _on(self, stage: int, *kinds: str) -> Array:
        """Nodes of a stage, in the order they began."""
        found = np.flatnonzero((self.stage == stage) & np.isin(self.kind, kinds))
        return found[np.lexsort((self.kind[found], self.sequence[found], self.begins[found]))]

    def _chain(self, nodes: Array) -> None:
        for earlier, later in pairwise(nodes.tolist()):
            self.before[later].append(earlier)

    def _await(self, node: int, compute: int) -> None:
        """A node awaits a compute of its stage, or, where that had not ended when it began, the last that had."""
        gap = float(np.median(self.start[node] - self.end[compute]))
        if gap < -BLUR:
            lag = np.median(self.start[node] - self.end[self.computes], axis=(1, 2, 3))
            ended = self.computes[lag >= -BLUR]
            if not len(ended):
                return
            compute = int(ended[-1])
        self.before[node].append(compute)

    def _stage(self, stage: int) -> None:
        self.computes = self._on(stage, *COMPUTE)
        if not len(self.computes):
            raise DataError(f"stage {stage} has no {FORWARD} or {BACKWARD}")
        self._chain(self.computes)
        for kind in TRANSFERS:
            self._chain(self._on(stage, kind))
            self._match(stage, kind)
        self._first_backwards(stage)
        self._collectives(stage)
        known = [*COMPUTE, *TRANSFERS, GATHER, *TAIL]
        for node in np.flatnonzero((self.stage == stage) & ~np.isin(self.kind, known)).tolist():
            self._await(node, int(self.computes[-1]))

    def _match(self, stage: int, kind: str) -> None:
        """Put each send behind the compute that made it, each receive before the compute that it feeds."""
        compute_kind, sends, step = TRANSFERS[kind]
        computes = self._on(stage, compute_kind)
        nodes = self._on(stage, kind)
        if not len(computes):
            raise DataError(f"stage {stage} has no {compute_kind}")
        computes = computes[np.argsort(self.sequence[computes], kind="stable")]
        if sends:
            nodes = nodes[self.ends[nodes] >= self.ends[computes].min() - _OUTSIDE]
        else:
            nodes = nodes[self.begins[nodes] <= self.begins[computes].max() + _OUTSIDE]
        peer = self.whole[computes] + step
        real = (peer >= 0) & (peer <= self.last) & (self.stages > 1)
        if len(nodes) == len(computes):
            pass
        elif len(nodes) == real.sum():
            computes, real = computes[real], real[real]
        elif len(nodes) + 1 == len(computes):
            computes, real = (computes[:-1], real[:-1]) if sends else (computes[1:], real[1:])
        else:
            raise DataError(
                f"stage {stage} has {len(nodes)} {kind} for {len(computes)} {compute_kind}, of which {int(real.sum())} "
                "have a stage at the other end: rows are missing"
            )
        numbers = self._microbatches(stage, compute_kind)
        previous = {int(c): int(e) for e, c in pairwise(self._on(stage, compute_kind).tolist())}
        for node, compute, takes_place in zip(nodes.tolist(), computes.tolist(), real.tolist(), strict=True):
            if sends:
                self.before[node].append(compute)
            else:
                self.before[compute].append(node)
                if compute in previous:
                    self._await(node, previous[compute])
            if takes_place:
                self.of[node] = (int(self.whole[compute]), numbers[compute])
                self.sides[kind, *self.of[node]] = node

    def _microbatches(self, stage: int, kind: str) -> dict[int, int]:
        """Which micro-batch each compute handles; where it is not said, by order within the chunk."""
        seen: dict[int, int] = {}
        found = {}
        for node in self._on(stage, kind).tolist():
            chunk = int(self.whole[node])
            position = seen[chunk] = seen.get(chunk, -1) + 1
            found[node] = int(self.microbatch[node]) if self.microbatch[node] >= 0 else position
        return found

    def _first_backwards(self, stage: int) -> None:
        """The first backward's transfers are posted with the forward before the last of the warm-up."""
        first = int(np.argmax(self.kind[self.computes] == BACKWARD))
        if first < 2:
            return
        for kind in ("backward-recv", "backward-send"):
            nodes = self._on(stage, kind)
            nodes = nodes[self.sequence[nodes] == 0]
            if len(nodes):
                self._await(int(nodes[0]), int(self.computes[first - 2]))

    def _collectives(self, stage: int) -> None:
        overlapped = bool((self.kind == SEPARATE).any())
        shared = self._on(stage, GATHER, REDUCE)
        self._chain(shared)
        of_chunk: dict[int, int] = {int(self.chunk[node]): node for node in self._on(stage, GATHER).tolist()}
        forwards = self.computes[self.kind[self.computes] == FORWARD]
        for chunk, gather in of_chunk.items():
            fed = forwards[(self.chunk[forwards] == chunk) | (chunk < 0)]
            if len(fed):
                self.before[int(fed[0])].append(gather)
        reduces = self._on(stage, REDUCE).tolist()
        last = int(self.computes[np.argmax(self.ends[self.computes])])
        tail = [kind for kind in TAIL if not (overlapped and kind == REDUCE)]
        nodes = self._on(stage, *tail)
        order = np.array([TAIL.index(str(kind)) for kind in self.kind[nodes]], dtype=int)
        nodes = nodes[np.lexsort((self.sequence[nodes], order, np.round(self.begins[nodes] / BLUR)))]
        self._chain(nodes)
        if len(nodes):
            self.before[int(nodes[0])].append(last)
        if overlapped:
            done: set[int] = set()
            for node in reduces:
                chunk = int(self.chunk[node])
                mine = self.computes[(self.kind[self.computes] == BACKWARD) & (self.chunk[self.computes] == chunk)]
                if chunk not in done and len(mine):
                    self._await(node, int(mine[np.argmax(self.ends[mine])]))
                done.add(chunk)
            if reduces and len(nodes):
                second = [node for node in nodes.tolist() if self.kind[node] != "gc"][:1]
                for node in second:
                    self.before[node].append(reduces[-1])
