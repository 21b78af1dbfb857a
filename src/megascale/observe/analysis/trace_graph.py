"""Dependencies between the operations of a recorded job, and the replay of its steps with other durations.

The operations (nodes) of a step are the same in most steps and in all replicas. A graph is therefore built once for all
steps with equal operations. Steps in which the schedule was different form graphs of their own. Steps whose replicas
differ from each other are skipped and reported. A node stands for all tensor peers and replicas of its stage.

A replay handles all steps and replicas of a graph at once. It can use several sets of durations ("questions", as "what
if this rank were as fast as the others?"). Each array has the axes [node, question, step, replica, tensor], or no
question axis.

A node starts when the nodes that it awaits on its stage have ended. It ends when its own duration has passed since the
last start among the operations that synchronise with it. The dependencies within a stage
are those of `trace_dependencies`.

These operations synchronise:

- as nodes of one group: the two sides of a transfer; the first and last stage for the embedding; all stages for the
  gradients' norm;
- within one node: the replicas of a stage in a data-parallel collective; all ranks of a stage for the gradients' norm;
  the tensor peers of a compute, which start separately and end together.

The own duration of communication lasts from the last start among these operations to its own end. The model follows the
dependency model of StragglerAnalysis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megascale.errors import DataError
from megascale.observe.analysis.operation_trace import (
    CLIP,
    COMPUTE,
    DATA_PARALLEL,
    EMBEDDING,
    TRANSFERS,
    Array,
    OperationTrace,
)
from megascale.observe.analysis.trace_dependencies import StepDependencies

# Rounding makes the duration of a transfer negative by less than this. A more negative duration comes from a wrong
# clock, and counts as zero.
_ROUNDING_S = 1e-2
# Which ranks of a node synchronise. Replicas, or all ranks, start their communication together. Tensor peers start a
# compute separately and end it together. Zero: no synchronisation.
_SYNC_REPLICAS = 1
_SYNC_TENSOR = 2
_SYNC_ALL = 3


class Level(NamedTuple):
    """Groups of nodes that can be replayed at once, since they await nodes of earlier levels only.

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
        ranks: global ranks, [stages, replicas, tensor].
        kind, stage, chunk, microbatch, sequence: columns of OperationTrace for each node, [nodes]. `sequence` counts a
            rank's operations of one kind in a step.
        start, duration: as recorded, seconds, [nodes, steps, replicas, tensor]. Starts count from a step's first start.
        own_duration: of communication: from the last start among the synchronising ranks to the end; of a compute: its
            duration without waits for tensor peers; otherwise the duration.
        gap: recorded launch gap: seconds from the end of the awaited nodes to the start. It is negative in a step in
            which the node began before an awaited node had ended.
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

    def get_step_seconds(self) -> Array:
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

    def replay_seconds(self, get_durations: Callable[[Array], Array], end: Array) -> Array:
        """Return the seconds of each step in a replay, [..., steps].

        Args:
            get_durations: returns the durations of some nodes, [k] -> [k, ..., steps, replicas, tensor].
            end: buffer for the ends, [nodes + 1, ..., steps, replicas, tensor].
        """
        end[-1] = 0.0
        self._run(end, get_durations, keep_gaps=False, start=None)
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
                # `end` has four axes (node, step, replica, tensor), and more if there are questions.
                question_axes = [1] * (end.ndim - 4)
                begin += self.gap[nodes].reshape(len(nodes), *question_axes, *self.gap.shape[1:])
            if start is not None:
                start[nodes] = begin
            ready = begin
            if len(level.group_begins) < len(nodes):
                ready = level.reduce_groups(begin)
            ready = _synchronise(ready, level.sync, self.start.shape[2:])
            node_end = ready + get_durations(nodes)
            is_tensor_parallel = level.sync == _SYNC_TENSOR
            if self.start.shape[3] > 1 and is_tensor_parallel.any():
                # Tensor peers exchange data during a compute, so they end together although each starts when it can.
                node_end[is_tensor_parallel] = node_end[is_tensor_parallel].max(axis=-1, keepdims=True)
            end[nodes] = node_end


def build_graphs(trace: OperationTrace) -> tuple[list[TraceGraph], dict[int, str]]:
    """Return the graphs of a job, and the reason for each skipped step.

    Raises DataError if a rank is missing, or if no step can be replayed: an operation is recorded twice, a transfer
    lacks its other side, or waits form a cycle.
    """
    tensor = trace.index_tensor_peers()
    ranks = _map_ranks(trace, tensor)
    steps_by_operations, skipped_steps = _group_steps(trace, tensor, ranks.shape)
    graphs = []
    for equal_steps in steps_by_operations.values():
        step_numbers = tuple(equal_steps)
        rows = np.stack(list(equal_steps.values()), axis=1)
        rows = rows.reshape(rows.shape[0], len(step_numbers), *ranks.shape[1:])
        try:
            graphs.append(_build_graph(trace, step_numbers, ranks, rows))
        except DataError as error:
            skipped_steps |= dict.fromkeys(step_numbers, str(error))
    if not graphs:
        step = min(skipped_steps)
        raise DataError(
            f"none of the trace's {len(skipped_steps)} steps can be replayed; step {step}: {skipped_steps[step]}"
        )
    return graphs, skipped_steps


def _map_ranks(trace: OperationTrace, tensor: Array) -> Array:
    """Return the global rank at each location, [stages, replicas, tensor]. Raises DataError if a rank is missing.

    Args:
        tensor: tensor coordinate of each row of the trace.
    """
    ranks = np.full((int(trace.stage.max()) + 1, int(trace.replica.max()) + 1, int(tensor.max()) + 1), -1)
    ranks[trace.stage, trace.replica, tensor] = trace.rank
    if (ranks < 0).any():
        stage, replica, peer = map(int, np.argwhere(ranks < 0)[0])
        peer_text = f", tensor peer {peer}" if ranks.shape[2] > 1 else ""
        raise DataError(
            f"the trace has no operations of stage {stage} in data-parallel replica {replica}{peer_text}: it must "
            "contain all ranks"
        )
    return ranks


def _group_steps(
    trace: OperationTrace, tensor: Array, sizes: tuple[int, ...]
) -> tuple[dict[bytes, dict[int, Array]], dict[int, str]]:
    """Group the steps with the same operations.

    Args:
        tensor: tensor coordinate of each row of the trace.
        sizes: numbers of stages, replicas and tensor peers.

    Returns:
        For each group of steps: the rows of the trace, [nodes, pipelines], by step. And the reason for each skipped
        step.
    """
    stages, replicas, tensor_size = sizes
    names, kind = trace.encode_kinds()
    node_sizes = (stages, len(names), int(trace.sequence.max()) + 1)
    # Stage, kind and sequence in one number, which identifies the operation within its step and pipeline.
    operation = np.ravel_multi_index((trace.stage, kind, trace.sequence), node_sizes)
    # The ranks with the same replica and tensor coordinate, one per stage, form a pipeline.
    pipeline = trace.replica * tensor_size + tensor
    pipeline_count = replicas * tensor_size
    order = np.lexsort((operation, pipeline, trace.step))
    sorted_steps = trace.step[order]
    sorted_pipelines = pipeline[order]
    sorted_operations = np.stack([operation[order], trace.chunk[order], trace.microbatch[order]])
    steps_by_operations: dict[bytes, dict[int, Array]] = {}
    skipped_steps: dict[int, str] = {}
    step_numbers, first_rows = np.unique(sorted_steps, return_index=True)
    end_rows = [*first_rows[1:], len(sorted_steps)]
    for step, first_row, end_row in zip(step_numbers.tolist(), first_rows, end_rows, strict=True):
        rows = slice(first_row, end_row)
        is_repeated = np.diff(sorted_operations[0, rows]) == 0
        if (is_repeated & (np.diff(sorted_pipelines[rows]) == 0)).any():
            skipped_steps[step] = "an operation is recorded twice: kind and seq_id must identify a rank's operations"
            continue
        node_count, remainder = divmod(end_row - first_row, pipeline_count)
        expected_pipelines = np.arange(pipeline_count)[:, None]
        if remainder or not (sorted_pipelines[rows].reshape(pipeline_count, node_count) == expected_pipelines).all():
            skipped_steps[step] = "its replicas do different numbers of operations"
            continue
        operations_by_pipeline = sorted_operations[:, rows].reshape(3, pipeline_count, node_count)
        if not (operations_by_pipeline == operations_by_pipeline[:, :1]).all():
            skipped_steps[step] = "its replicas do different operations"
            continue
        equal_steps = steps_by_operations.setdefault(operations_by_pipeline[:, 0].tobytes(), {})
        equal_steps[step] = order[rows].reshape(pipeline_count, node_count).T
    return steps_by_operations, skipped_steps


def _build_graph(trace: OperationTrace, steps: tuple[int, ...], ranks: Array, rows: Array) -> TraceGraph:
    """Build the graph of steps with the same operations; `rows` of the trace are [nodes, steps, replicas, tensor]."""
    start = trace.start[rows]
    start = start - start.min(axis=(0, 2, 3), keepdims=True)
    duration = trace.duration[rows]
    end = start + duration
    dependencies = StepDependencies(trace, rows[:, 0, 0, 0], ranks.shape[0], start, end)
    awaited, group = dependencies.build()
    kind = dependencies.kind
    sync = np.zeros(len(rows), dtype=np.int64)
    sync[np.isin(kind, DATA_PARALLEL)] = _SYNC_REPLICAS
    sync[kind == CLIP] = _SYNC_ALL
    if ranks.shape[2] > 1:
        sync[np.isin(kind, COMPUTE)] = _SYNC_TENSOR
    levels = _make_levels(awaited, group, sync)
    peer_wait = trace.waited[rows]
    # The tensor peer with the shortest wait came last, so it waited only for the transfer, which belongs to the
    # compute.
    own_duration = duration - peer_wait + peer_wait.min(axis=3, keepdims=True)
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
    """Return the time at which the last of the ranks that start together is ready.

    The result has the shape of `ready`, [nodes, ..., steps, replicas, tensor].

    Args:
        ready: time at which each rank is ready; not changed.
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
    # Groups that await each group: the reverse of `awaited_groups`.
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
