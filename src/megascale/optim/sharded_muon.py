"""Muon on shards: orthogonalised momentum for the layers' matrices, AdamW for all other tensors.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/): W <- W - lr NewtonSchulz(Nesterov momentum), for the
matrices of the layers; embeddings, output, norms and biases use AdamW. Liu et al. 2025 ("Muon is scalable for LLM
training", arXiv 2502.16982, section 2.2): decoupled weight decay, and updates times 0.2 sqrt(max(rows, columns)), the
RMS of AdamW's updates, so that both share learning rate and decay.

A shard holds parts of matrices, and orthogonalisation needs whole logical matrices (each one of a fused projection
separately, and across tensor-parallel cuts, so that the result does not depend on the layout). Each matrix has one
owner among the ranks whose shards make up the stage (ZeRO-0: among its tensor-parallel ranks), chosen for even work.
One all-to-all sends the momentum's parts to their owners and another returns the updates; AdamW's elements are updated
in the meantime. A rank sends and receives about twice its shard of the matrices, in the type of the GEMMs. That is
little compared with the gradients and parameters that data parallelism moves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.config import OptimizerConfig
from megascale.core.tensors import Box, flat_boxes, matrix_ranges
from megascale.ops.adam import newton_schulz
from megascale.optim.base import Shards, ShardState, StatePart, UpdateRule, UpdateStep
from megascale.optim.sharded_adamw import apply_adamw
from megascale.parallel.buffers import FlatShard
from megascale.parallel.collectives import Axis, all_to_all

Shape = tuple[int, ...]
# Maximum number of elements per batch of matrices. Small matrices need few launches, large ones bounded memory.
BATCH = 2**26


@dataclass(frozen=True)
class MatrixRun:
    """Run of a rank's shard within one logical matrix: elements first .. first + length of `box`, row-major."""

    name: str
    shape: Shape
    box: Box
    first: int
    length: int


@dataclass(frozen=True)
class _LocalRun:
    """Position of a run within a part of this rank's shards."""

    part: StatePart
    start: int
    stop: int


class ShardedMuon(UpdateRule):
    """Muon with a momentum for each hidden matrix and AdamW's moments for other tensors.

    Construction is collective over the stage.

    Attributes:
        batches: shape and names of the matrices that this rank orthogonalises at once.
        matrix_observer: called with the number and the stack of each batch. It replaces `orthogonalise_stack` and must
            call it itself. None: not called.
    """

    exchanges_at_start = True

    def __init__(self, config: OptimizerConfig, shards: Shards) -> None:
        super().__init__(config, shards)
        self.matrix_observer: Callable[[int, torch.Tensor], None] | None = None
        rank = shards.stage.rank
        runs: list[MatrixRun] = []
        local_runs: list[_LocalRun] = []
        self._matrix_parts: list[tuple[ShardState, StatePart]] = []
        for state in shards.states:
            for part in state.parts:
                if "momentum" not in part.state:
                    continue
                self._matrix_parts.append((state, part))
                for extent in part.extents:
                    shift = extent.start - extent.piece_start - part.start
                    stop = extent.piece_start + extent.stop - extent.start
                    for span in matrix_ranges(extent.piece, extent.piece_start, stop):
                        length = span.stop - span.start
                        runs.append(MatrixRun(span.name, span.shape, span.box, span.first, length))
                        local_runs.append(_LocalRun(part, span.start + shift, span.stop + shift))
        runs_by_rank = _gather_runs(runs, shards.stage)
        all_runs = [run for rank_runs in runs_by_rank for run in rank_runs]
        shapes = {run.name: run.shape for run in all_runs}
        owner = assign_owners(shapes, shards.stage.size)
        self._total_length = sum(run.length for run in all_runs)
        # Local runs in the order in which they are sent: by owner.
        send_order = sorted(range(len(runs)), key=lambda i: (owner[runs[i].name], i))
        self._sent_runs = [local_runs[i] for i in send_order]
        self._send_lengths = [0] * shards.stage.size
        for run in runs:
            self._send_lengths[owner[run.name]] += run.length
        self._received_runs = [run for run in all_runs if owner[run.name] == rank]
        self._receive_lengths = []
        for rank_runs in runs_by_rank:
            self._receive_lengths.append(sum(run.length for run in rank_runs if owner[run.name] == rank))
        owned_shapes = {name: shape for name, shape in sorted(shapes.items()) if owner[name] == rank}
        self.batches = batch_matrices(owned_shapes)

    def update(self, step: UpdateStep, on_updated: Callable[[FlatShard], None]) -> None:
        """Send momentum to the owners, update AdamW's parts meanwhile, return the updates, and apply them."""
        stage = self.shards.stage
        directions = {id(part): self._update_momentum(state, part, step) for state, part in self._matrix_parts}
        if self.observer is not None:
            self._notify_observer("direction", directions)
        sent_views = [directions[id(run.part)][run.start : run.stop] for run in self._sent_runs]
        sent = _concatenate(sent_views, self.shards.states[0])
        arriving = all_to_all(sent, self._send_lengths, self._receive_lengths, stage, self._total_length)
        for state in self.shards.update_order:
            for part in state.parts:
                if "momentum" not in part.state:
                    apply_adamw(self.config, state, part, step)
        updates = self._orthogonalise(arriving.wait())
        returning = all_to_all(updates, self._receive_lengths, self._send_lengths, stage, self._total_length)
        returned = returning.wait()
        if sent_views:
            torch_private.foreach_copy_(sent_views, list(returned.split([len(view) for view in sent_views])))
        if self.observer is not None:
            self._notify_observer("orthogonal direction", directions)
        for state in self.shards.update_order:
            for part in state.parts:
                direction = directions.get(id(part))
                if direction is not None:
                    self._apply(state, part, direction, step)
            on_updated(state.shard)

    def list_inputs(self, state_names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the direction that a matrix's owner has orthogonalised, see `UpdateRule.list_inputs`."""
        return ("orthogonal direction",) if "momentum" in state_names else ()

    def list_results(self, state_names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the direction that is sent to a matrix's owner, see `UpdateRule.list_results`."""
        return ("direction",) if "momentum" in state_names else ()

    def recompute(self, state: ShardState, part: StatePart, step: UpdateStep) -> dict[str, torch.Tensor]:
        """Repeat the update of a copy except the orthogonalisation, see `UpdateRule.recompute`."""
        if "momentum" not in part.state:
            apply_adamw(self.config, state, part, step)
            return {}
        direction = self._update_momentum(state, part, step)
        self._apply(state, part, part.state["orthogonal direction"], step)
        return {"direction": direction}

    def _notify_observer(self, name: str, directions: Mapping[int, torch.Tensor]) -> None:
        """Pass the directions of all matrices to the observer."""
        assert self.observer is not None
        for _, part in self._matrix_parts:
            self.observer(name, part, directions[id(part)])

    def _update_momentum(self, state: ShardState, part: StatePart, step: UpdateStep) -> torch.Tensor:
        """Update the part's momentum and return the direction to orthogonalise, in the type of the GEMMs."""
        momentum = part.state["momentum"]
        beta = self.config.muon_momentum
        grad = part.view(state.shard.grads).to(momentum.dtype)
        if step.grad_scale is not None:
            grad = grad * step.grad_scale.to(momentum.dtype)
        new_momentum = torch.add(grad, momentum, alpha=beta)
        direction = new_momentum
        if self.config.muon_nesterov:
            direction = torch.add(grad, new_momentum, alpha=beta)
        momentum.copy_(torch.where(step.skip, momentum, new_momentum))
        return direction.to(_gemm_dtype(state), copy=True)

    def _orthogonalise(self, received: torch.Tensor) -> torch.Tensor:
        """Replace the received runs of this rank's matrices, in place, by the same runs of their updates."""
        matrices: dict[str, torch.Tensor] = {}
        stacks = []
        for shape, names in self.batches:
            stack = received.new_empty((len(names), *shape))
            stacks.append(stack)
            for i, name in enumerate(names):
                matrices[name] = stack[i]
        matrix_boxes = []
        received_boxes = []
        offset = 0
        for run in self._received_runs:
            for box, first, stop in flat_boxes(run.box, run.first, run.first + run.length):
                ranges = zip(box.offsets, box.sizes, strict=True)
                matrix_boxes.append(matrices[run.name][tuple(slice(start, start + size) for start, size in ranges)])
                flat = received[offset + first - run.first : offset + stop - run.first]
                received_boxes.append(flat.view(box.sizes))
            offset += run.length
        if not matrix_boxes:
            return received
        torch_private.foreach_copy_(matrix_boxes, received_boxes)
        for number, stack in enumerate(stacks):
            if self.matrix_observer is None:
                self.orthogonalise_stack(stack)
            else:
                self.matrix_observer(number, stack)
        torch_private.foreach_copy_(received_boxes, matrix_boxes)
        return received

    def orthogonalise_stack(self, stack: torch.Tensor) -> None:
        """Replace matrices [matrices, rows, columns] by their updates, in place."""
        rows, columns = stack.shape[1:]
        is_tall = rows > columns
        orthogonal = newton_schulz(stack.mT if is_tall else stack, self.config.muon_steps)
        if is_tall:
            orthogonal = orthogonal.mT
        stack.copy_(orthogonal * (self.config.muon_rms * max(rows, columns) ** 0.5))

    def _apply(self, state: ShardState, part: StatePart, direction: torch.Tensor, step: UpdateStep) -> None:
        """Apply weight decay and the orthogonalised direction to a part's weights."""
        master = part.view(state.master)
        new_master = master * (1 - step.learning_rate * self.config.weight_decay)
        new_master.sub_(direction.to(master.dtype), alpha=step.learning_rate)
        master.copy_(torch.where(step.skip, master, new_master))
        if state.param_out is not None:
            part.view(state.param_out).copy_(master)


def assign_owners(shapes: Mapping[str, Shape], ranks: int) -> dict[str, int]:
    """Return the rank that orthogonalises each matrix, with even work (rows x columns x the smaller of both).

    The result does not depend on the order of `shapes`, so all ranks agree.
    """
    costs = sorted(((-a * b * min(a, b), name) for name, (a, b) in shapes.items()))
    loads = [(0, rank) for rank in range(ranks)]
    owner = {}
    for negative_cost, name in costs:
        load, rank = heapq.heappop(loads)
        owner[name] = rank
        heapq.heappush(loads, (load - negative_cost, rank))
    return owner


def batch_matrices(shapes: Mapping[str, Shape]) -> list[tuple[Shape, list[str]]]:
    """Group matrices of one shape into batches of at most BATCH elements: (shape, names)."""
    names_by_shape: dict[Shape, list[str]] = {}
    for name, shape in shapes.items():
        names_by_shape.setdefault(shape, []).append(name)
    batches = []
    for shape, names in names_by_shape.items():
        size = max(1, BATCH // (shape[0] * shape[1]))
        batches += [(shape, names[i : i + size]) for i in range(0, len(names), size)]
    return batches


def _gemm_dtype(state: ShardState) -> torch.dtype:
    """Return the type of the weights in use: bfloat16 (as published), or the master weights' type."""
    return state.shard.params.dtype


def _concatenate(views: Sequence[torch.Tensor], state: ShardState) -> torch.Tensor:
    if views:
        return torch.cat(list(views))
    return torch.empty(0, dtype=_gemm_dtype(state), device=state.master.device)


def _gather_runs(runs: list[MatrixRun], axis: Axis) -> list[list[MatrixRun]]:
    """Return the runs of all ranks of the axis, by rank."""
    if axis.size == 1:
        return [runs]
    gathered: list[list[MatrixRun]] = [[] for _ in range(axis.size)]
    dist.all_gather_object(gathered, runs, group=axis.group)
    return gathered
