"""Dependencies between the operations (nodes) of one step of a recorded job, and the groups that synchronise.

A node starts when the nodes that it awaits on its stage have ended. The dependencies:

- The computes of a stage run one after another. So do its sends and receives of one kind, and its data-parallel
  collectives.
- A send awaits its compute. A compute awaits the receive of its input and the gather of its chunk.
- A receive awaits an earlier compute: the one directly before the compute that needs the received input. A reduction
  that overlaps with compute awaits the last backward of its chunk. In some recordings such a node begins before the
  awaited compute ends. The node then awaits the last compute that had ended when the node began.
- After the last compute, garbage collection, all-reduces of norms and embedding, reductions, the norm of the gradients
  and the optimizer follow in the recorded order.

A group holds the two sides of a transfer, or all stages' nodes of one all-reduce of the gradients' norm or of the tied
embedding's gradient. Every other node is a group of its own. Replicas and tensor peers share a node (see
`trace_graph`). The model follows the dependency model of StragglerAnalysis.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megascale.errors import DataError
from megascale.observe.analysis.operation_trace import (
    BACKWARD,
    CLIP,
    COMPUTE,
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
_CLOCK_TOLERANCE_S = 5e-4
# Some profilers record transfers that never took place: sends that end before a stage's first compute ends, and
# receives that begin after the last compute begins. They are dropped if they do so by more than this margin in seconds.
_TRANSFER_MARGIN_S = 5e-5


class StepDependencies:
    """Dependencies and groups of the nodes of a graph.

    Args:
        trace: the recorded operations.
        rows: the nodes' rows in the first step, replica and tensor peer, [nodes].
        stages: number of pipeline stages.
        start, end: recorded, seconds, [nodes, steps, replicas, tensor].

    Attributes:
        kind, stage, chunk, microbatch, sequence: columns of the trace for each node, [nodes].
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
        # The first step and replica give the order of operations.
        self.begins = start[:, 0, 0, 0]
        self.ends = end[:, 0, 0, 0]
        # Position of each node's chunk in the model: as recorded, or for chunks that are dealt to the stages in turn.
        recorded_position = trace.global_chunk[rows]
        derived_position = np.maximum(self.chunk, 0) * stages + self.stage
        self.global_chunk = np.where(recorded_position >= 0, recorded_position, derived_position)
        self.last_chunk = int(self.global_chunk.max())
        is_compute = np.isin(self.kind, COMPUTE)
        # Stage of each chunk that computes, by global chunk.
        self.stage_of_chunk: dict[int, int] = dict(
            zip(self.global_chunk[is_compute].tolist(), self.stage[is_compute].tolist(), strict=True)
        )
        self.awaited: list[list[int]] = [[] for _ in rows]
        # Nodes of sends and receives, by kind, and by global chunk and micro-batch of the compute on the same stage.
        self.transfers: dict[tuple[str, int, int], int] = {}
        # The same global chunk and micro-batch, by node.
        self.transfer_keys: dict[int, tuple[int, int]] = {}
        self.computes: Array = np.zeros(0, int)  # of the stage that `_add_stage` handles

    def build(self) -> tuple[list[list[int]], Array]:
        """Return the nodes that each node awaits, and the number of its group, [nodes]."""
        for stage in range(self.stages):
            self._add_stage(stage)
        group = np.arange(len(self.kind))
        self._pair_transfers(group)
        for kind in (CLIP, EMBEDDING):
            for sequence in set(self.sequence[self.kind == kind].tolist()):
                members = np.flatnonzero((self.kind == kind) & (self.sequence == sequence))
                group[members] = members[0]
        # Number the groups consecutively.
        _, group_numbers = np.unique(group, return_inverse=True)
        return self.awaited, group_numbers.ravel()

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
        """Let a node await a compute of its stage.

        If the node usually began before that compute had ended, it awaits the last compute that had ended by then, or
        none.
        """
        gap = float(np.median(self.start[node] - self.end[compute]))
        if gap < -_CLOCK_TOLERANCE_S:
            gaps = np.median(self.start[node] - self.end[self.computes], axis=(1, 2, 3))
            ended = self.computes[gaps >= -_CLOCK_TOLERANCE_S]
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
        self._chain(self._select_nodes(stage, GATHER, REDUCE))
        tail = self._add_tail(stage)
        self._add_reductions(stage, tail)
        self._add_gathers(stage)
        is_unknown_kind = ~np.isin(self.kind, KINDS)
        for node in np.flatnonzero((self.stage == stage) & is_unknown_kind).tolist():
            self._await_compute(node, int(self.computes[-1]))

    def _add_gathers(self, stage: int) -> None:
        """Let the first forward of each chunk await the last gather of the chunk's parameters."""
        last_gathers = {int(self.chunk[node]): node for node in self._select_nodes(stage, GATHER).tolist()}
        forwards = self.computes[self.kind[self.computes] == FORWARD]
        for chunk, gather in last_gathers.items():
            # A gather without a chunk (-1) gathers the parameters of all chunks.
            forwards_of_chunk = forwards[(self.chunk[forwards] == chunk) | (chunk < 0)]
            if len(forwards_of_chunk):
                self.awaited[int(forwards_of_chunk[0])].append(gather)

    def _match_transfers(self, stage: int, kind: str) -> None:
        """Put each send after its compute and each receive before the compute that it feeds."""
        compute_kind, is_send, offset = TRANSFERS[kind]
        computes = self._select_nodes(stage, compute_kind)
        nodes = self._select_nodes(stage, kind)
        if not len(computes):
            raise DataError(f"stage {stage} has no {compute_kind}")
        previous = {later: earlier for earlier, later in pairwise(computes.tolist())}  # in the order of execution
        microbatches = self._number_microbatches(computes)
        # From here on, the order is that of `sequence`, in which transfers correspond to computes.
        computes = computes[np.argsort(self.sequence[computes], kind="stable")]
        if is_send:
            nodes = nodes[self.ends[nodes] >= self.ends[computes].min() - _TRANSFER_MARGIN_S]
        else:
            nodes = nodes[self.begins[nodes] <= self.begins[computes].max() + _TRANSFER_MARGIN_S]
        peer_chunk = self.global_chunk[computes] + offset
        has_peer = (peer_chunk >= 0) & (peer_chunk <= self.last_chunk) & (self.stages > 1)
        # A chunk hands its result to a neighbour on the same stage without a message.
        has_peer &= np.array([self.stage_of_chunk.get(chunk) != stage for chunk in peer_chunk.tolist()], dtype=bool)
        # Profilers record a transfer for each compute, for each compute with a peer, or for all computes but the last
        # (sends) or the first (receives).
        if len(nodes) == len(computes):
            selected = np.ones(len(computes), bool)
        elif len(nodes) == has_peer.sum():
            selected = has_peer
        elif len(nodes) + 1 == len(computes):
            selected = np.ones(len(computes), bool)
            if is_send:
                selected[-1] = False
            else:
                selected[0] = False
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
        """Return whether reductions overlap with compute. Only traces of such jobs have the kind SEPARATE."""
        return bool((self.kind == SEPARATE).any())

    def _add_tail(self, stage: int) -> Array:
        """Chain the operations after the last compute in the recorded order, and return their nodes."""
        kinds = [kind for kind in TAIL if not (self._is_overlapped and kind == REDUCE)]
        nodes = self._select_nodes(stage, *kinds)
        order = np.array([TAIL.index(str(kind)) for kind in self.kind[nodes]], dtype=int)
        # Operations that began within the clocks' tolerance are in the order of TAIL.
        rounded_begins = np.round(self.begins[nodes] / _CLOCK_TOLERANCE_S)
        nodes = nodes[np.lexsort((self.sequence[nodes], order, rounded_begins))]
        self._chain(nodes)
        if len(nodes):
            self.awaited[int(nodes[0])].append(int(self.computes[np.argmax(self.ends[self.computes])]))
        return nodes

    def _add_reductions(self, stage: int, tail: Array) -> None:
        """Let overlapped reductions await the last backward of their chunk, and the tail await the last reduction.

        Garbage collection, the first operation of the tail, does not await the reductions.
        """
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
