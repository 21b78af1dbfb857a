"""Dependencies between the operations of a recorded job, and the replay of its steps with other durations.

The operations (nodes) of a step are the same in every step and replica. The graph is therefore built once, and the
replay handles all steps, replicas and questions at once: each array has the axes [node, ..., step, replica, tensor].
Steps whose operations differ (because the schedule changed) form graphs of their own. Steps whose replicas differ from
each other are skipped and reported.

A node starts when the nodes that it awaits on its stage have ended. It ends when its own duration has passed since all
members of its group have started:

- The computes of a stage run one after another. So do its sends and receives of one kind, and its data-parallel
  collectives.
- A send awaits its compute; a compute awaits its receive and the gather of its chunk. A receive awaits the compute
  before the one that it feeds. A reduction that overlaps with compute awaits the last backward of its chunk. If the
  recording contradicts this (receives posted earlier, buckets sent within a backward), the node awaits the last compute
  that had ended when the node began.
- After the last compute, garbage collection, all-reduces of norms and embedding, reductions, the norm of the gradients
  and the optimizer follow in the recorded order.

The groups are: the two sides of a transfer; the replicas of a stage in a data-parallel collective; the first and last
stage for the embedding; all ranks for the gradients' norm; the tensor peers of a compute. A transfer's own duration
lasts from the last start in its group to its own end. The model follows the dependency model of StragglerAnalysis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megascale.errors import DataError
from megascale.observe.analysis.operation_trace import (
    BACKWARD,
    CLIP,
    COMPUTE,
    DATA_PARALLEL,
    EMBEDDING,
    FORWARD,
    GARBAGE,
    GATHER,
    KINDS,
    REDUCE,
    SEPARATE,
    TAIL,
    TRANSFERS,
    WEIGHT,
    Array,
    OperationTrace,
)

# Clocks and rounding may let an operation start this long before the end of what it awaits (s).
BLUR = 5e-4
# Some profilers record transfers that never took place before a stage's first and after its last compute (s).
_OUTSIDE = 5e-5
# A more negative duration (s) comes from a wrong clock, not from rounding, and counts as zero.
_MOST_NEGATIVE = 1e-2
# The ranks of an operation that end together.
_SYNC_REPLICAS, _SYNC_TENSOR, _SYNC_ALL = 1, 2, 3


class Level(NamedTuple):
    """Nodes that can be replayed at once, whole groups at a time.

    Attributes:
        nodes: [k], sorted by group.
        awaited: [depth, k] awaited nodes; the number of all nodes stands for none.
        first: index in `nodes` at which each group begins.
        sync: [k], the ranks that end together.
    """

    nodes: Array
    awaited: Array
    first: Array
    sync: Array

    def reduce_groups(self, start: Array) -> Array:
        """Replace each node's start, [k, ...], by the last start of its group."""
        sizes = np.diff(np.r_[self.first, len(self.nodes)])
        return np.repeat(np.maximum.reduceat(start, self.first, axis=0), sizes, axis=0)


@dataclass(frozen=True, eq=False)
class TraceGraph:
    """Steps of a job with the same operations.

    Attributes:
        steps: their numbers.
        ranks: [stages, replicas, tensor] global ranks.
        kind, stage, chunk, microbatch, sequence: [nodes].
        start, duration: recorded, seconds, [nodes, steps, replicas, tensor]; starts count from each step's first.
        own: duration once all members of the group are ready (of a compute: without waits for tensor peers).
        gap: time from the end of what a node awaits to its start; negative in a step with another order.
        before: awaited nodes of each node.
        group: [nodes]; nodes with the same number end together.
        levels: the nodes in topological order.
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
    own_duration: Array
    gap: Array
    before: tuple[tuple[int, ...], ...]
    group: Array
    levels: tuple[Level, ...]

    @property
    def nodes(self) -> int:
        """Number of operations of a step in one replica."""
        return len(self.kind)

    def recorded(self) -> Array:
        """Return the recorded seconds of each step."""
        seconds: Array = (self.start + self.duration).max(axis=(0, 2, 3))
        return seconds

    def replay(self, own_duration: Array | None = None, gaps: bool = False) -> tuple[Array, Array]:
        """Return starts and ends of all nodes, [nodes, ..., steps, replicas, tensor].

        Args:
            own: durations [nodes, ..., steps, replicas, tensor]; by default as recorded.
            gaps: keep the recorded launch gaps.
        """
        if own_duration is None:
            own_duration = self.own_duration
        else:
            own_duration = own_duration
        start = np.empty(own_duration.shape)
        end = np.zeros((self.nodes + 1, *own_duration.shape[1:]))
        self._run(end, lambda nodes: own_duration[nodes], gaps, start)
        return start, end[:-1]

    def seconds(self, get_durations: Callable[[Array], Array], end: Array, gaps: bool = False) -> Array:
        """Return the seconds of each step, [..., steps].

        Args:
            get_durations: returns the durations of some nodes, [k] -> [k, ..., steps, replicas, tensor].
            end: buffer, [nodes + 1, ..., steps, replicas, tensor].
            gaps: keep the recorded launch gaps.
        """
        end[-1] = 0.0
        self._run(end, get_durations, gaps, start=None)
        seconds: Array = end.max(axis=(0, -2, -1))
        return seconds

    def _run(self, end: Array, get_durations: Callable[[Array], Array], gaps: bool, start: Array | None) -> None:
        """Fill `end`, whose last row is zero and stands for "awaits nothing", and `start`."""
        for level in self.levels:
            nodes = level.nodes
            begin = end[level.awaited[0]]
            for row in level.awaited[1:]:
                np.maximum(begin, end[row], out=begin)
            if gaps:
                question_axes = [1] * (end.ndim - 4)
                begin += self.gap[nodes].reshape(len(nodes), *question_axes, *self.gap.shape[1:])
            if start is not None:
                start[nodes] = begin
            ready = begin
            if len(level.first) < len(nodes):
                ready = level.reduce_groups(begin)
            ready = _synchronise(ready, level.sync, self.start.shape[2:])
            ended = ready + get_durations(nodes)
            if self.start.shape[3] > 1 and (level.sync == _SYNC_TENSOR).any():
                is_peer = level.sync == _SYNC_TENSOR
                ended[is_peer] = ended[is_peer].max(axis=-1, keepdims=True)
            end[nodes] = ended


def build_graphs(trace: OperationTrace) -> tuple[list[TraceGraph], dict[int, str]]:
    """Return the graphs of a job, and the reason for each skipped step.

    DataError if no step can be replayed: an operation is recorded twice, transfers lack their other side, or waits form
    a cycle.
    """
    tensor = trace.tensor_indices()
    replicas = int(trace.replica.max()) + 1
    stages = int(trace.stage.max()) + 1
    width = int(tensor.max()) + 1
    ranks = np.full((stages, replicas, width), -1)
    ranks[trace.stage, trace.replica, tensor] = trace.rank
    if (ranks < 0).any():
        stage, replica, peer = map(int, np.argwhere(ranks < 0)[0])
        peer_text = f", tensor peer {peer}" if width > 1 else ""
        raise DataError(
            f"the trace has no operations of stage {stage} in data-parallel replica {replica}{peer_text}: it must "
            "contain all ranks"
        )
    names, kind = trace.encode_kinds()
    node_sizes = (stages, len(names), int(trace.sequence.max()) + 1)
    node = np.ravel_multi_index((trace.stage, kind, trace.sequence), node_sizes)
    cell = trace.replica * width + tensor
    order = np.lexsort((node, cell, trace.step))
    step, node, cell = trace.step[order], node[order], cell[order]
    signature = np.stack([node, trace.chunk[order], trace.microbatch[order]])
    steps_by_signature: dict[bytes, list[tuple[int, Array]]] = {}
    skipped_steps: dict[int, str] = {}
    cells = replicas * width
    numbers, firsts = np.unique(step, return_index=True)
    for number, begin, stop in zip(numbers.tolist(), firsts, [*firsts[1:], len(step)], strict=True):
        rows = slice(begin, stop)
        if ((np.diff(node[rows]) == 0) & (np.diff(cell[rows]) == 0)).any():
            skipped_steps[number] = "an operation is recorded twice: kind and seq_id must identify a rank's operations"
            continue
        size, remainder = divmod(stop - begin, cells)
        if remainder or not (cell[rows].reshape(cells, size) == np.arange(cells)[:, None]).all():
            skipped_steps[number] = "its replicas do different numbers of operations"
            continue
        by_cell = signature[:, rows].reshape(3, cells, size)
        if not (by_cell == by_cell[:, :1]).all():
            skipped_steps[number] = "its replicas do different operations"
            continue
        members = steps_by_signature.setdefault(by_cell[:, 0].tobytes(), [])
        members.append((number, order[rows].reshape(cells, size).T))
    graphs = []
    for members in steps_by_signature.values():
        indices = np.stack([rows for _, rows in members], axis=1)
        indices = indices.reshape(indices.shape[0], len(members), replicas, width)
        try:
            graphs.append(_build_graph(trace, tuple(number for number, _ in members), ranks, indices))
        except DataError as error:
            skipped_steps |= {number: str(error) for number, _ in members}
    if not graphs:
        number, reason = next(iter(skipped_steps.items()))
        raise DataError(f"none of the trace's {len(skipped_steps)} steps can be replayed; step {number}: {reason}")
    return graphs, skipped_steps


def _build_graph(trace: OperationTrace, steps: tuple[int, ...], ranks: Array, rows: Array) -> TraceGraph:
    """Build the graph of steps with the same operations; `rows` of the trace are [nodes, steps, replicas, tensor]."""
    start = trace.start[rows]
    start = start - start.min(axis=(0, 2, 3), keepdims=True)
    duration = trace.duration[rows]
    end = start + duration
    dependencies = _Dependencies(trace, rows[:, 0, 0, 0], ranks.shape[0], start, end)
    before, group = dependencies.build()
    kind = dependencies.kind
    sync = np.zeros(len(rows), dtype=np.int64)
    sync[np.isin(kind, DATA_PARALLEL)] = _SYNC_REPLICAS
    sync[kind == CLIP] = _SYNC_ALL
    if ranks.shape[2] > 1:
        sync[np.isin(kind, COMPUTE)] = _SYNC_TENSOR
    levels = _make_levels(before, group, sync)
    waited = trace.waited[rows]
    own_duration = duration - waited + waited.min(axis=3, keepdims=True)
    is_communication = np.isin(kind, [*TRANSFERS, *DATA_PARALLEL, EMBEDDING, CLIP])
    for level in levels:
        ready = _synchronise(level.reduce_groups(start[level.nodes]), level.sync, start.shape[2:])
        transfer = end[level.nodes] - ready
        selected = is_communication[level.nodes]
        own_duration[level.nodes[selected]] = np.where(transfer <= -_MOST_NEGATIVE, 0.0, transfer)[selected]
    awaited_end = np.zeros(end.shape)
    for node, awaited in enumerate(before):
        if awaited:
            awaited_end[node] = end[awaited].max(axis=0)
    return TraceGraph(
        steps=steps,
        ranks=ranks,
        kind=kind,
        stage=dependencies.stage,
        chunk=dependencies.chunk,
        microbatch=dependencies.microbatch,
        sequence=dependencies.sequence,
        start=start,
        duration=duration,
        own_duration=own_duration,
        gap=start - awaited_end,
        before=tuple(map(tuple, before)),
        group=group,
        levels=levels,
    )


def _synchronise(ready: Array, sync: Array, ranks: tuple[int, ...]) -> Array:
    """Return the time at which all participating ranks are ready, [nodes, ..., steps, replicas, tensor]."""
    if ranks[0] > 1 and (sync == _SYNC_REPLICAS).any():
        ready = ready.copy()
        ready[sync == _SYNC_REPLICAS] = ready[sync == _SYNC_REPLICAS].max(axis=-2, keepdims=True)
    if max(ranks) > 1 and (sync == _SYNC_ALL).any():
        ready = ready.copy()
        ready[sync == _SYNC_ALL] = ready[sync == _SYNC_ALL].max(axis=(-2, -1), keepdims=True)
    return ready


def _make_levels(before: list[list[int]], group: Array, sync: Array) -> tuple[Level, ...]:
    """Return topological levels of whole groups. DataError if they form a cycle."""
    count = int(group.max()) + 1
    awaited_groups: list[set[int]] = [set() for _ in range(count)]
    members: list[list[int]] = [[] for _ in range(count)]
    for node, number in enumerate(group.tolist()):
        members[number].append(node)
        awaited_groups[number] |= {int(group[awaited]) for awaited in before[node]}
    followers: list[list[int]] = [[] for _ in range(count)]
    for number, awaited in enumerate(awaited_groups):
        for predecessor in awaited:
            followers[predecessor].append(number)
    missing = [len(awaited) for awaited in awaited_groups]
    ready = [number for number in range(count) if not missing[number]]
    levels = []
    done = 0
    while ready:
        done += len(ready)
        nodes = [node for number in ready for node in members[number]]
        depth = max(1, max(len(before[node]) for node in nodes))
        padded = [before[node] + [len(before)] * (depth - len(before[node])) for node in nodes]
        first = np.cumsum([0] + [len(members[number]) for number in ready[:-1]])
        levels.append(Level(np.array(nodes), awaited=np.array(padded).T, first=first, sync=sync[nodes]))
        reached: list[int] = []
        for number in ready:
            for follower in followers[number]:
                missing[follower] -= 1
                if not missing[follower]:
                    reached.append(follower)
        ready = reached
    if done < count:
        raise DataError("its operations wait for each other in a cycle: sends and receives do not match")
    return tuple(levels)


class _Dependencies:
    """Dependencies and groups of one step's nodes.

    Args:
        trace: the recorded operations.
        rows: the nodes' rows in one step and replica, [nodes].
        stages: number of pipeline stages.
        start, end: recorded, seconds, [nodes, steps, replicas, tensor].
    """

    def __init__(self, trace: OperationTrace, rows: Array, stages: int, start: Array, end: Array) -> None:
        self.kind = trace.kind[rows]
        self.stage = trace.stage[rows]
        self.chunk = trace.chunk[rows]
        self.microbatch = trace.microbatch[rows]
        self.sequence = trace.sequence[rows]
        self.stages = stages
        self.start = start
        self.end = end
        self.begins = start[:, 0, 0, 0]  # of one replica in one step
        self.ends = end[:, 0, 0, 0]
        recorded_chunk = trace.global_chunk[rows]
        derived_chunk = np.maximum(self.chunk, 0) * stages + self.stage
        self.global_chunk = np.where(recorded_chunk >= 0, recorded_chunk, derived_chunk)
        self.last_chunk = int(self.global_chunk.max())
        is_compute = np.isin(self.kind, COMPUTE)
        # Stage of each chunk that computes, by position in the model.
        self.stage_of_chunk: dict[int, int] = dict(
            zip(self.global_chunk[is_compute].tolist(), self.stage[is_compute].tolist(), strict=True)
        )
        self.before: list[list[int]] = [[] for _ in rows]
        # Sides of transfers by kind, global chunk and micro-batch at this end, and the reverse.
        self.sides: dict[tuple[str, int, int], int] = {}
        self.side_keys: dict[int, tuple[int, int]] = {}
        self.computes: Array = np.zeros(0, int)  # of the stage under way

    def build(self) -> tuple[list[list[int]], Array]:
        """Return the nodes that each node awaits, and the number of its group, [nodes]."""
        for stage in range(self.stages):
            self._add_stage(stage)
        group = np.arange(len(self.kind))
        self._pair_transfers(group)
        for kind in (CLIP, EMBEDDING):
            for number in set(self.sequence[self.kind == kind].tolist()):
                members = np.flatnonzero((self.kind == kind) & (self.sequence == number))
                group[members] = members[0]
        return self.before, np.unique(group, return_inverse=True)[1].ravel()

    def _pair_transfers(self, group: Array) -> None:
        """Put each receive into the group of its send. DataError if a transfer lacks its other side."""
        sends = {node: kind for (kind, _, _), node in self.sides.items() if kind.endswith("send")}
        for node, kind in sends.items():
            offset = TRANSFERS[kind][2]
            chunk, microbatch = self.side_keys[node]
            receive = self.sides.get((kind.replace("send", "recv"), chunk + offset, microbatch))
            if receive is None:
                raise DataError(
                    f"{kind} {self.sequence[node]} of stage {self.stage[node]} has no receive on stage "
                    f"{(self.stage[node] + offset) % self.stages}"
                )
            group[receive] = group[node]
        send_groups = {group[node] for node in sends}
        for (kind, _, _), node in self.sides.items():
            if group[node] not in send_groups:
                raise DataError(
                    f"{kind} {self.sequence[node]} of stage {self.stage[node]} has no send on the neighbouring stage"
                )

    def _select(self, stage: int, *kinds: str) -> Array:
        """Return the nodes of a stage, in the order in which they began."""
        nodes = np.flatnonzero((self.stage == stage) & np.isin(self.kind, kinds))
        return nodes[np.lexsort((self.kind[nodes], self.sequence[nodes], self.begins[nodes]))]

    def _chain(self, nodes: Array) -> None:
        for earlier, later in pairwise(nodes.tolist()):
            self.before[later].append(earlier)

    def _await_compute(self, node: int, compute: int) -> None:
        """Let a node await a compute of its stage, or the last compute that had ended when the node began."""
        gap = float(np.median(self.start[node] - self.end[compute]))
        if gap < -BLUR:
            gaps = np.median(self.start[node] - self.end[self.computes], axis=(1, 2, 3))
            ended = self.computes[gaps >= -BLUR]
            if not len(ended):
                return
            compute = int(ended[-1])
        self.before[node].append(compute)

    def _add_stage(self, stage: int) -> None:
        self.computes = self._select(stage, *COMPUTE)
        if not len(self.computes):
            raise DataError(f"stage {stage} has no {FORWARD} or {BACKWARD}")
        self._chain(self.computes)
        for kind in TRANSFERS:
            self._chain(self._select(stage, kind))
            self._match_transfers(stage, kind)
        self._add_first_backward(stage)
        self._add_reductions(stage, self._add_tail(stage))
        for chunk, gather in {int(self.chunk[node]): node for node in self._select(stage, GATHER).tolist()}.items():
            forwards = self.computes[self.kind[self.computes] == FORWARD]
            fed = forwards[(self.chunk[forwards] == chunk) | (chunk < 0)]
            if len(fed):
                self.before[int(fed[0])].append(gather)
        for node in np.flatnonzero((self.stage == stage) & ~np.isin(self.kind, KINDS)).tolist():
            self._await_compute(node, int(self.computes[-1]))

    def _match_transfers(self, stage: int, kind: str) -> None:
        """Put each send after its compute and each receive before the compute that it feeds."""
        compute_kind, is_send, offset = TRANSFERS[kind]
        computes = self._select(stage, compute_kind)
        nodes = self._select(stage, kind)
        if not len(computes):
            raise DataError(f"stage {stage} has no {compute_kind}")
        previous = {later: earlier for earlier, later in pairwise(computes.tolist())}
        microbatches = self._number_microbatches(computes)
        computes = computes[np.argsort(self.sequence[computes], kind="stable")]
        if is_send:
            nodes = nodes[self.ends[nodes] >= self.ends[computes].min() - _OUTSIDE]
        else:
            nodes = nodes[self.begins[nodes] <= self.begins[computes].max() + _OUTSIDE]
        peer_chunk = self.global_chunk[computes] + offset
        has_peer = (peer_chunk >= 0) & (peer_chunk <= self.last_chunk) & (self.stages > 1)
        # A chunk hands its result to a neighbour on the same stage without a message.
        has_peer &= np.array([self.stage_of_chunk.get(chunk) != stage for chunk in peer_chunk.tolist()], dtype=bool)
        if len(nodes) == len(computes):
            selected = np.ones(len(computes), bool)
        elif len(nodes) == has_peer.sum():
            selected = has_peer
        elif len(nodes) + 1 == len(computes):
            selected = np.ones(len(computes), bool)
            selected[-1 if is_send else 0] = False
        else:
            raise DataError(
                f"stage {stage} has {len(nodes)} {kind} for {len(computes)} {compute_kind}, of which "
                f"{int(has_peer.sum())} have a stage at the other end: rows are missing"
            )
        pairs = zip(nodes.tolist(), computes[selected].tolist(), has_peer[selected].tolist(), strict=True)
        for node, compute, takes_place in pairs:
            if is_send:
                self.before[node].append(compute)
            else:
                self.before[compute].append(node)
                if compute in previous:
                    self._await_compute(node, previous[compute])
            if takes_place:
                self.side_keys[node] = (int(self.global_chunk[compute]), microbatches[compute])
                self.sides[kind, *self.side_keys[node]] = node

    def _number_microbatches(self, computes: Array) -> dict[int, int]:
        """Return the micro-batch of each compute: as recorded, or by order within its chunk."""
        positions: dict[int, int] = {}
        numbers = {}
        for node in computes.tolist():
            chunk = int(self.global_chunk[node])
            position = positions.get(chunk, 0)
            positions[chunk] = position + 1
            if self.microbatch[node] >= 0:
                numbers[node] = int(self.microbatch[node])
            else:
                numbers[node] = position
        return numbers

    def _add_first_backward(self, stage: int) -> None:
        """Let the first backward's transfers await the forward before the last one of the warm-up, which posts them."""
        first = int(np.argmax(self.kind[self.computes] == BACKWARD))
        if first < 2:
            return
        for kind in ("backward-recv", "backward-send"):
            nodes = self._select(stage, kind)
            nodes = nodes[self.sequence[nodes] == 0]
            if len(nodes):
                self._await_compute(int(nodes[0]), int(self.computes[first - 2]))

    @property
    def _is_overlapped(self) -> bool:
        """Return whether reductions overlap with compute."""
        return bool((self.kind == SEPARATE).any())

    def _add_tail(self, stage: int) -> Array:
        """Chain the operations after the last compute in the recorded order; return them."""
        self._chain(self._select(stage, GATHER, REDUCE))
        nodes = self._select(stage, *(kind for kind in TAIL if not (self._is_overlapped and kind == REDUCE)))
        order = np.array([TAIL.index(str(kind)) for kind in self.kind[nodes]], dtype=int)
        nodes = nodes[np.lexsort((self.sequence[nodes], order, np.round(self.begins[nodes] / BLUR)))]
        self._chain(nodes)
        if len(nodes):
            self.before[int(nodes[0])].append(int(self.computes[np.argmax(self.ends[self.computes])]))
        return nodes

    def _add_reductions(self, stage: int, tail: Array) -> None:
        """Let overlapped reductions await the last backward of their chunk, and the tail await the last reduction."""
        reductions = self._select(stage, REDUCE).tolist()
        if not self._is_overlapped or not reductions:
            return
        visited: set[int] = set()
        for node in reductions:
            chunk = int(self.chunk[node])
            is_backward = np.isin(self.kind[self.computes], (BACKWARD, WEIGHT))
            backwards = self.computes[is_backward & (self.chunk[self.computes] == chunk)]
            if chunk not in visited and len(backwards):
                self._await_compute(node, int(backwards[np.argmax(self.ends[backwards])]))
            visited.add(chunk)
        after_garbage = [node for node in tail.tolist() if self.kind[node] != GARBAGE]
        if after_garbage:
            self.before[after_garbage[0]].append(reductions[-1])
