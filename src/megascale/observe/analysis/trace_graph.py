"""Dependencies between the operations of a recorded job, and the replay of its steps with other durations.

The operations (nodes) of a step are the same in every step and replica. The graph is therefore built once. A replay
handles all steps and replicas at once, with several sets of durations ("questions"): each array has the axes
[node, question, step, replica, tensor], or no question axis. Steps whose operations differ (because the schedule
changed) form graphs of their own. Steps whose replicas differ from each other are skipped and reported.

A node starts when the nodes that it awaits on its stage have ended. It ends when its own duration has passed since the
start of the last member of its group. The dependencies:

- The computes of a stage run one after another. So do its sends and receives of one kind, and its data-parallel
  collectives.
- A send awaits its compute. A compute awaits the receive of its input and the gather of its chunk.
- A receive awaits an earlier compute: the one directly before the compute that needs the received input. A reduction
  that overlaps with compute awaits the last backward of its chunk. In some recordings such a node begins before the
  awaited compute ends. The node then awaits the last compute that had ended when the node began.
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

# Errors of clocks may let an operation start this many seconds before the end of an operation that it awaits.
CLOCK_TOLERANCE_S = 5e-4
# Some profilers record transfers that never took place: sends that end before a stage's first compute ends, and
# receives that begin after the last compute begins. They are dropped if they do so by more than this margin in seconds.
_TRANSFER_MARGIN_S = 5e-5
# Rounding makes the duration of a transfer negative by less than this. A more negative duration comes from a wrong
# clock, and counts as zero.
_ROUNDING_S = 1e-2
# Which ranks of an operation synchronise. Replicas, or all ranks, start their transfer together. Tensor peers start a
# compute separately and end it together. Zero: no synchronisation.
_SYNC_REPLICAS, _SYNC_TENSOR, _SYNC_ALL = 1, 2, 3


class Level(NamedTuple):
    """Whole groups of nodes that can be replayed at once, since they await nodes of earlier levels only.

    Attributes:
        nodes: numbers of the nodes, sorted by group, [k].
        awaited: nodes that each node awaits, [depth, k]; padded with the number of nodes of the graph.
        group_begins: index in `nodes` at which each group begins.
        sync: which ranks of each node synchronise, [k]; 0 or one of _SYNC_REPLICAS, _SYNC_TENSOR and _SYNC_ALL.
    """

    nodes: Array
    awaited: Array
    group_begins: Array
    sync: Array

    def reduce_groups(self, start: Array) -> Array:
        """Return the last start of each node's group, [k, ...], for the starts of the nodes, [k, ...]."""
        sizes = np.diff(np.r_[self.group_begins, len(self.nodes)])
        return np.repeat(np.maximum.reduceat(start, self.group_begins, axis=0), sizes, axis=0)


@dataclass(frozen=True, eq=False)
class TraceGraph:
    """Steps of a job with the same operations.

    Attributes:
        steps: step numbers.
        ranks: global ranks, [stages, replicas, tensor].
        kind, stage, chunk, microbatch, sequence: columns of OperationTrace for each node, [nodes]. `sequence` counts a
            rank's operations of one kind in a step.
        start, duration: as recorded, seconds, [nodes, steps, replicas, tensor]. Starts count from a step's first start.
        own_duration: duration from the last start in the group; of a compute: without waits for tensor peers.
        gap: seconds from the end of the awaited nodes to the start; negative in a step with another order.
        awaited: nodes that each node awaits.
        group: number of each node's group, [nodes].
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
    awaited: tuple[tuple[int, ...], ...]
    group: Array
    levels: tuple[Level, ...]

    @property
    def node_count(self) -> int:
        """Number of operations of a step in one replica."""
        return len(self.kind)

    def get_recorded_seconds(self) -> Array:
        """Return the recorded seconds of each step, [steps]."""
        seconds: Array = (self.start + self.duration).max(axis=(0, 2, 3))
        return seconds

    def replay(self, own_duration: Array | None = None, keep_gaps: bool = False) -> tuple[Array, Array]:
        """Return starts and ends of all nodes in seconds, [nodes, ..., steps, replicas, tensor].

        Args:
            own_duration: durations, [nodes, ..., steps, replicas, tensor]; by default as recorded.
            keep_gaps: keep the recorded launch gaps.
        """
        if own_duration is None:
            durations = self.own_duration
        else:
            durations = own_duration
        start = np.empty(durations.shape)
        end = np.zeros((self.node_count + 1, *durations.shape[1:]))
        self._run(end, lambda nodes: durations[nodes], keep_gaps, start)
        return start, end[:-1]

    def replay_seconds(self, get_durations: Callable[[Array], Array], end: Array, keep_gaps: bool = False) -> Array:
        """Return the seconds of each step in a replay, [..., steps].

        Args:
            get_durations: returns the durations of some nodes, [k] -> [k, ..., steps, replicas, tensor].
            end: buffer for the ends, [nodes + 1, ..., steps, replicas, tensor].
            keep_gaps: keep the recorded launch gaps.
        """
        end[-1] = 0.0
        self._run(end, get_durations, keep_gaps, start=None)
        seconds: Array = end.max(axis=(0, -2, -1))
        return seconds

    def _run(self, end: Array, get_durations: Callable[[Array], Array], keep_gaps: bool, start: Array | None) -> None:
        """Fill `end` and, unless it is None, `start`.

        The last row of `end` is zero, because the padding of Level.awaited refers to it.
        """
        for level in self.levels:
            nodes = level.nodes
            begin = end[level.awaited[0]]
            for row in level.awaited[1:]:
                np.maximum(begin, end[row], out=begin)
            if keep_gaps:
                question_axes = [1] * (end.ndim - 4)
                begin += self.gap[nodes].reshape(len(nodes), *question_axes, *self.gap.shape[1:])
            if start is not None:
                start[nodes] = begin
            ready = begin
            if len(level.group_begins) < len(nodes):
                ready = level.reduce_groups(begin)
            ready = _synchronise(ready, level.sync, self.start.shape[2:])
            node_end = ready + get_durations(nodes)
            if self.start.shape[3] > 1 and (level.sync == _SYNC_TENSOR).any():
                # Tensor peers exchange data during a compute, so they end together although each starts when it can.
                is_tensor_parallel = level.sync == _SYNC_TENSOR
                node_end[is_tensor_parallel] = node_end[is_tensor_parallel].max(axis=-1, keepdims=True)
            end[nodes] = node_end


def build_graphs(trace: OperationTrace) -> tuple[list[TraceGraph], dict[int, str]]:
    """Return the graphs of a job, and the reason for each skipped step.

    Raises DataError if a rank is missing, or if no step can be replayed: an operation is recorded twice, a transfer
    lacks its other side, or waits form a cycle.
    """
    tensor = trace.index_tensor_peers()
    replicas = int(trace.replica.max()) + 1
    stages = int(trace.stage.max()) + 1
    tensor_size = int(tensor.max()) + 1
    ranks = np.full((stages, replicas, tensor_size), -1)
    ranks[trace.stage, trace.replica, tensor] = trace.rank
    if (ranks < 0).any():
        stage, replica, peer = map(int, np.argwhere(ranks < 0)[0])
        peer_text = f", tensor peer {peer}" if tensor_size > 1 else ""
        raise DataError(
            f"the trace has no operations of stage {stage} in data-parallel replica {replica}{peer_text}: it must "
            "contain all ranks"
        )
    names, kind = trace.encode_kinds()
    node_sizes = (stages, len(names), int(trace.sequence.max()) + 1)
    node = np.ravel_multi_index((trace.stage, kind, trace.sequence), node_sizes)
    # The ranks with the same replica and tensor coordinate, one per stage, form a pipeline.
    pipeline = trace.replica * tensor_size + tensor
    pipeline_count = replicas * tensor_size
    order = np.lexsort((node, pipeline, trace.step))
    step, node, pipeline = trace.step[order], node[order], pipeline[order]
    operation = np.stack([node, trace.chunk[order], trace.microbatch[order]])
    # Step numbers and rows of the trace, [nodes, pipelines], of steps with the same operations.
    steps_by_operations: dict[bytes, list[tuple[int, Array]]] = {}
    skipped_steps: dict[int, str] = {}
    step_numbers, first_rows = np.unique(step, return_index=True)
    end_rows = [*first_rows[1:], len(step)]
    for number, first_row, end_row in zip(step_numbers.tolist(), first_rows, end_rows, strict=True):
        rows = slice(first_row, end_row)
        if ((np.diff(node[rows]) == 0) & (np.diff(pipeline[rows]) == 0)).any():
            skipped_steps[number] = "an operation is recorded twice: kind and seq_id must identify a rank's operations"
            continue
        node_count, remainder = divmod(end_row - first_row, pipeline_count)
        expected_pipelines = np.arange(pipeline_count)[:, None]
        if remainder or not (pipeline[rows].reshape(pipeline_count, node_count) == expected_pipelines).all():
            skipped_steps[number] = "its replicas do different numbers of operations"
            continue
        operations_by_pipeline = operation[:, rows].reshape(3, pipeline_count, node_count)
        if not (operations_by_pipeline == operations_by_pipeline[:, :1]).all():
            skipped_steps[number] = "its replicas do different operations"
            continue
        equal_steps = steps_by_operations.setdefault(operations_by_pipeline[:, 0].tobytes(), [])
        equal_steps.append((number, order[rows].reshape(pipeline_count, node_count).T))
    graphs = []
    for equal_steps in steps_by_operations.values():
        numbers = tuple(number for number, _ in equal_steps)
        graph_rows = np.stack([rows for _, rows in equal_steps], axis=1)
        graph_rows = graph_rows.reshape(graph_rows.shape[0], len(equal_steps), replicas, tensor_size)
        try:
            graphs.append(_build_graph(trace, numbers, ranks, graph_rows))
        except DataError as error:
            skipped_steps |= dict.fromkeys(numbers, str(error))
    if not graphs:
        number = min(skipped_steps)
        raise DataError(
            f"none of the trace's {len(skipped_steps)} steps can be replayed; step {number}: {skipped_steps[number]}"
        )
    return graphs, skipped_steps


def _build_graph(trace: OperationTrace, steps: tuple[int, ...], ranks: Array, rows: Array) -> TraceGraph:
    """Build the graph of steps with the same operations; `rows` of the trace are [nodes, steps, replicas, tensor]."""
    start = trace.start[rows]
    start = start - start.min(axis=(0, 2, 3), keepdims=True)
    duration = trace.duration[rows]
    end = start + duration
    dependencies = _Dependencies(trace, rows[:, 0, 0, 0], ranks.shape[0], start, end)
    awaited, group = dependencies.build()
    kind = dependencies.kind
    sync = np.zeros(len(rows), dtype=np.int64)
    sync[np.isin(kind, DATA_PARALLEL)] = _SYNC_REPLICAS
    sync[kind == CLIP] = _SYNC_ALL
    if ranks.shape[2] > 1:
        sync[np.isin(kind, COMPUTE)] = _SYNC_TENSOR
    levels = _make_levels(awaited, group, sync)
    waited = trace.waited[rows]
    # The tensor peer that waited least waited only for the transfer, which belongs to the compute.
    own_duration = duration - waited + waited.min(axis=3, keepdims=True)
    is_communication = np.isin(kind, [*TRANSFERS, *DATA_PARALLEL, EMBEDDING, CLIP])
    for level in levels:
        ready = _synchronise(level.reduce_groups(start[level.nodes]), level.sync, start.shape[2:])
        transfer = end[level.nodes] - ready
        selected = is_communication[level.nodes]
        own_duration[level.nodes[selected]] = np.where(transfer <= -_ROUNDING_S, 0.0, transfer)[selected]
    awaited_end = np.zeros(end.shape)
    for node, awaited_nodes in enumerate(awaited):
        if awaited_nodes:
            awaited_end[node] = end[awaited_nodes].max(axis=0)
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
        awaited=tuple(map(tuple, awaited)),
        group=group,
        levels=levels,
    )


def _synchronise(ready: Array, sync: Array, sizes: tuple[int, ...]) -> Array:
    """Return the time at which all ranks that start together are ready, [nodes, ..., steps, replicas, tensor].

    Args:
        ready: time at which each rank is ready, of the same shape.
        sync: which ranks synchronise, [nodes].
        sizes: numbers of replicas and tensor peers.
    """
    if sizes[0] > 1 and (sync == _SYNC_REPLICAS).any():
        ready = ready.copy()
        ready[sync == _SYNC_REPLICAS] = ready[sync == _SYNC_REPLICAS].max(axis=-2, keepdims=True)
    if max(sizes) > 1 and (sync == _SYNC_ALL).any():
        ready = ready.copy()
        ready[sync == _SYNC_ALL] = ready[sync == _SYNC_ALL].max(axis=(-2, -1), keepdims=True)
    return ready


def _make_levels(awaited: list[list[int]], group: Array, sync: Array) -> tuple[Level, ...]:
    """Return topological levels of whole groups. Raises DataError if the groups await each other in a cycle.

    Args:
        awaited: nodes that each node awaits.
        group: number of each node's group, [nodes].
        sync: which ranks of each node synchronise, [nodes].
    """
    group_count = int(group.max()) + 1
    awaited_groups: list[set[int]] = [set() for _ in range(group_count)]
    members: list[list[int]] = [[] for _ in range(group_count)]
    for node, node_group in enumerate(group.tolist()):
        members[node_group].append(node)
        awaited_groups[node_group] |= {int(group[awaited_node]) for awaited_node in awaited[node]}
    followers: list[list[int]] = [[] for _ in range(group_count)]
    for follower, predecessors in enumerate(awaited_groups):
        for predecessor in predecessors:
            followers[predecessor].append(follower)
    unfinished_counts = [len(predecessors) for predecessors in awaited_groups]
    ready_groups = [number for number in range(group_count) if not unfinished_counts[number]]
    levels = []
    finished_count = 0
    while ready_groups:
        finished_count += len(ready_groups)
        nodes = [node for number in ready_groups for node in members[number]]
        depth = max(1, max(len(awaited[node]) for node in nodes))
        padded = [awaited[node] + [len(awaited)] * (depth - len(awaited[node])) for node in nodes]
        group_begins = np.cumsum([0] + [len(members[number]) for number in ready_groups[:-1]])
        levels.append(Level(np.array(nodes), awaited=np.array(padded).T, group_begins=group_begins, sync=sync[nodes]))
        next_groups: list[int] = []
        for number in ready_groups:
            for follower in followers[number]:
                unfinished_counts[follower] -= 1
                if not unfinished_counts[follower]:
                    next_groups.append(follower)
        ready_groups = next_groups
    if finished_count < group_count:
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
        self.begins = start[:, 0, 0, 0]  # in the first step and replica, which give the order of operations
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
        self.awaited: list[list[int]] = [[] for _ in rows]
        # Sends and receives by kind, global chunk and micro-batch of the compute at the same end.
        self.transfers: dict[tuple[str, int, int], int] = {}
        # Global chunk and micro-batch by node.
        self.transfer_keys: dict[int, tuple[int, int]] = {}
        self.computes: Array = np.zeros(0, int)  # of the stage that `_add_stage` handles

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
        return self.awaited, np.unique(group, return_inverse=True)[1].ravel()

    def _pair_transfers(self, group: Array) -> None:
        """Put each receive into the group of its send. Raises DataError if a transfer lacks its other side."""
        sends = {node: kind for (kind, _, _), node in self.transfers.items() if kind.endswith("send")}
        for node, kind in sends.items():
            offset = TRANSFERS[kind].offset
            chunk, microbatch = self.transfer_keys[node]
            receive = self.transfers.get((kind.replace("send", "recv"), chunk + offset, microbatch))
            if receive is None:
                raise DataError(
                    f"{kind} {self.sequence[node]} of stage {self.stage[node]} has no receive on stage "
                    f"{(self.stage[node] + offset) % self.stages}"
                )
            group[receive] = group[node]
        send_groups = {group[node] for node in sends}
        for (kind, _, _), node in self.transfers.items():
            if group[node] not in send_groups:
                raise DataError(
                    f"{kind} {self.sequence[node]} of stage {self.stage[node]} has no send on the neighbouring stage"
                )

    def _select_nodes(self, stage: int, *kinds: str) -> Array:
        """Return the nodes of these kinds on a stage, in the order in which they began."""
        nodes = np.flatnonzero((self.stage == stage) & np.isin(self.kind, kinds))
        return nodes[np.lexsort((self.kind[nodes], self.sequence[nodes], self.begins[nodes]))]

    def _chain(self, nodes: Array) -> None:
        """Let each node await the node before it."""
        for earlier, later in pairwise(nodes.tolist()):
            self.awaited[later].append(earlier)

    def _await_compute(self, node: int, compute: int) -> None:
        """Let a node await a compute of its stage, or the last compute that had ended when the node began."""
        gap = float(np.median(self.start[node] - self.end[compute]))
        if gap < -CLOCK_TOLERANCE_S:
            gaps = np.median(self.start[node] - self.end[self.computes], axis=(1, 2, 3))
            ended = self.computes[gaps >= -CLOCK_TOLERANCE_S]
            if not len(ended):
                return
            compute = int(ended[-1])
        self.awaited[node].append(compute)

    def _add_stage(self, stage: int) -> None:
        """Add the dependencies within a stage. Raises DataError if the stage has no computes."""
        self.computes = self._select_nodes(stage, *COMPUTE)
        if not len(self.computes):
            raise DataError(f"stage {stage} has no {FORWARD} or {BACKWARD}")
        self._chain(self.computes)
        for kind in TRANSFERS:
            self._chain(self._select_nodes(stage, kind))
            self._match_transfers(stage, kind)
        self._add_first_backward(stage)
        self._add_reductions(stage, self._add_tail(stage))
        last_gathers = {int(self.chunk[node]): node for node in self._select_nodes(stage, GATHER).tolist()}
        forwards = self.computes[self.kind[self.computes] == FORWARD]
        for chunk, gather in last_gathers.items():
            forwards_of_chunk = forwards[(self.chunk[forwards] == chunk) | (chunk < 0)]
            if len(forwards_of_chunk):
                self.awaited[int(forwards_of_chunk[0])].append(gather)
        is_unknown_kind = ~np.isin(self.kind, KINDS)
        for node in np.flatnonzero((self.stage == stage) & is_unknown_kind).tolist():
            self._await_compute(node, int(self.computes[-1]))

    def _match_transfers(self, stage: int, kind: str) -> None:
        """Put each send after its compute and each receive before the compute that it feeds."""
        compute_kind, is_send, offset = TRANSFERS[kind]
        computes = self._select_nodes(stage, compute_kind)
        nodes = self._select_nodes(stage, kind)
        if not len(computes):
            raise DataError(f"stage {stage} has no {compute_kind}")
        previous = {later: earlier for earlier, later in pairwise(computes.tolist())}  # in the order of execution
        microbatches = self._number_microbatches(computes)
        # From here on in the order of the recorded numbers, in which transfers correspond to computes.
        computes = computes[np.argsort(self.sequence[computes], kind="stable")]
        if is_send:
            nodes = nodes[self.ends[nodes] >= self.ends[computes].min() - _TRANSFER_MARGIN_S]
        else:
            nodes = nodes[self.begins[nodes] <= self.begins[computes].max() + _TRANSFER_MARGIN_S]
        peer_chunk = self.global_chunk[computes] + offset
        has_peer = (peer_chunk >= 0) & (peer_chunk <= self.last_chunk) & (self.stages > 1)
        # A chunk hands its result to a neighbour on the same stage without a message.
        has_peer &= np.array([self.stage_of_chunk.get(chunk) != stage for chunk in peer_chunk.tolist()], dtype=bool)
        # Profilers record a transfer for each compute, for each compute with a peer, or for all but one compute.
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
        for node, compute, has_other_side in pairs:
            if is_send:
                self.awaited[node].append(compute)
            else:
                self.awaited[compute].append(node)
                if compute in previous:
                    self._await_compute(node, previous[compute])
            if has_other_side:
                self.transfer_keys[node] = (int(self.global_chunk[compute]), microbatches[compute])
                self.transfers[kind, *self.transfer_keys[node]] = node

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
        """Let the first backward's transfers await the second-last forward before it.

        The schedule posts these transfers after that forward.
        """
        first = int(np.argmax(self.kind[self.computes] == BACKWARD))
        if first < 2:
            return
        for kind in ("backward-recv", "backward-send"):
            nodes = self._select_nodes(stage, kind)
            nodes = nodes[self.sequence[nodes] == 0]
            if len(nodes):
                self._await_compute(int(nodes[0]), int(self.computes[first - 2]))

    @property
    def _is_overlapped(self) -> bool:
        """Return whether reductions overlap with compute."""
        return bool((self.kind == SEPARATE).any())

    def _add_tail(self, stage: int) -> Array:
        """Chain the operations after the last compute in the recorded order, and return their nodes."""
        self._chain(self._select_nodes(stage, GATHER, REDUCE))
        nodes = self._select_nodes(stage, *(kind for kind in TAIL if not (self._is_overlapped and kind == REDUCE)))
        order = np.array([TAIL.index(str(kind)) for kind in self.kind[nodes]], dtype=int)
        # Operations that began within the clocks' tolerance are in the order of TAIL.
        rounded_begins = np.round(self.begins[nodes] / CLOCK_TOLERANCE_S)
        nodes = nodes[np.lexsort((self.sequence[nodes], order, rounded_begins))]
        self._chain(nodes)
        if len(nodes):
            self.awaited[int(nodes[0])].append(int(self.computes[np.argmax(self.ends[self.computes])]))
        return nodes

    def _add_reductions(self, stage: int, tail: Array) -> None:
        """Let overlapped reductions await the last backward of their chunk, and the tail await the last reduction."""
        reductions = self._select_nodes(stage, REDUCE).tolist()
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
            self.awaited[after_garbage[0]].append(reductions[-1])
