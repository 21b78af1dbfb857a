"""Muon on shards: orthogonalised momentum for the layers' matrices, AdamW for all other tensors.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/) update the matrices of the layers by
W <- W - lr NewtonSchulz(Nesterov momentum). Embeddings, output, norms and biases use AdamW. Liu et al. 2025 ("Muon is
scalable for LLM training", arXiv 2502.16982, section 2.2) add decoupled weight decay, and multiply updates by
0.2 sqrt(max(rows, columns)). Updates then have the RMS of AdamW's updates, so both rules share learning rate and decay.

A shard holds ranges of matrices (extents), but orthogonalisation needs a whole logical matrix. A fused projection
counts as several matrices. A matrix that tensor parallelism splits is reassembled. The result therefore does not depend
on the layout. Each matrix has one owner among the ranks whose shards make up the stage (with ZeRO-0 among the
tensor-parallel ranks). The choice of owners balances the work.

One all-to-all sends directions (Nesterov momentum) to the owners, and another returns the orthogonalised directions.
The parameters with AdamW are updated during the first all-to-all. A rank sends and receives about twice its shard of
the matrices, in the type of the GEMMs. Data parallelism moves much more for gradients and parameters.
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
from megascale.ops.newton_schulz import newton_schulz
from megascale.optim.base import Shards, ShardState, StatePart, UpdateRule, UpdateStep
from megascale.optim.sharded_adamw import apply_adamw
from megascale.parallel.buffers import FlatShard
from megascale.parallel.collectives import Axis, all_to_all

Shape = tuple[int, ...]
# Maximum number of elements per batch of matrices. Batches save kernel launches, and the limit bounds their memory.
MAX_BATCH_ELEMENTS = 2**26


@dataclass(frozen=True)
class MatrixFragment:
    """Contiguous elements of a rank's shard that lie in one logical matrix.

    Attributes:
        box: block of the matrix that the rank's parameter holds.
        first: index of the fragment's first element within `box`, row-major.
    """

    name: str
    shape: Shape
    box: Box
    first: int
    length: int


@dataclass(frozen=True)
class _LocalFragment:
    """A fragment of this rank's shards, which lies in elements `start:stop` of a part."""

    fragment: MatrixFragment
    part: StatePart
    start: int
    stop: int


class ShardedMuon(UpdateRule):
    """Muon with a momentum for each hidden matrix and AdamW's moments for other tensors.

    All ranks of the stage must construct the rule together, because the constructor gathers their fragments.

    Attributes:
        batches: shape and names of the matrices that this rank orthogonalises in one call.
        matrix_observer: called instead of `orthogonalise_stack` with the index and the stack of each batch. The
            observer must call `orthogonalise_stack` itself. None: not called.
    """

    has_collective_init = True

    def __init__(self, config: OptimizerConfig, shards: Shards) -> None:
        super().__init__(config, shards)
        self.matrix_observer: Callable[[int, torch.Tensor], None] | None = None
        rank = shards.stage.rank
        # The parts of this rank's shards that hold elements of matrices, each with the state of its shard.
        self._matrix_parts: list[tuple[ShardState, StatePart]] = []
        for state in shards.states:
            self._matrix_parts += [(state, part) for part in state.parts if "momentum" in part.state]
        local_fragments = self._list_fragments()
        fragments_by_rank = _gather_fragments([local.fragment for local in local_fragments], shards.stage)
        all_fragments = [fragment for rank_fragments in fragments_by_rank for fragment in rank_fragments]
        shapes = {fragment.name: fragment.shape for fragment in all_fragments}
        owners = assign_owners(shapes, shards.stage.size)
        self._total_length = sum(fragment.length for fragment in all_fragments)
        # An all-to-all sends elements in the order of their destinations. The sort is stable.
        self._sent_fragments = sorted(local_fragments, key=lambda local: owners[local.fragment.name])
        self._send_lengths = [0] * shards.stage.size
        for local in local_fragments:
            self._send_lengths[owners[local.fragment.name]] += local.fragment.length
        self._received_fragments: list[MatrixFragment] = []
        self._receive_lengths = []
        for rank_fragments in fragments_by_rank:
            owned_fragments = [fragment for fragment in rank_fragments if owners[fragment.name] == rank]
            self._received_fragments += owned_fragments
            self._receive_lengths.append(sum(fragment.length for fragment in owned_fragments))
        owned_shapes = {name: shape for name, shape in sorted(shapes.items()) if owners[name] == rank}
        self.batches = batch_matrices(owned_shapes)

    def _list_fragments(self) -> list[_LocalFragment]:
        """Return the fragments of matrices in this rank's shards, in the order of parts."""
        local_fragments = []
        for _, part in self._matrix_parts:
            for extent in part.extents:
                # Offset of the piece's first element from the part's start.
                piece_offset = extent.start - extent.piece_start - part.start
                piece_stop = extent.piece_start + extent.stop - extent.start
                for matrix in matrix_ranges(extent.piece, extent.piece_start, piece_stop):
                    length = matrix.stop - matrix.start
                    fragment = MatrixFragment(
                        matrix.name, matrix.shape, box=matrix.box, first=matrix.first, length=length
                    )
                    start = matrix.start + piece_offset
                    local_fragments.append(_LocalFragment(fragment, part, start=start, stop=start + length))
        return local_fragments

    def update(self, step: UpdateStep, on_updated: Callable[[FlatShard], None]) -> None:
        """Send directions to the owners, update AdamW's parts meanwhile, return the results and apply them."""
        stage = self.shards.stage
        # By id(part), because parts are not hashable.
        directions = {id(part): self._update_momentum(state, part, step) for state, part in self._matrix_parts}
        if self.observer is not None:
            self._notify_observer("direction", directions)
        sent_views = [directions[id(local.part)][local.start : local.stop] for local in self._sent_fragments]
        sent = _concatenate(sent_views, self.shards.states[0])
        exchange = all_to_all(sent, self._send_lengths, self._receive_lengths, stage, self._total_length)
        for state in self.shards.update_order:
            for part in state.parts:
                if "momentum" not in part.state:
                    apply_adamw(self.config, state, part, step)
        orthogonal = self._orthogonalise_fragments(exchange.wait())
        exchange = all_to_all(orthogonal, self._receive_lengths, self._send_lengths, stage, self._total_length)
        returned = exchange.wait()
        if sent_views:
            # Views of `directions`, which now become the orthogonalised directions.
            torch_private.foreach_copy_(sent_views, list(returned.split([len(view) for view in sent_views])))
        if self.observer is not None:
            self._notify_observer("orthogonal direction", directions)
        for state in self.shards.update_order:
            for part in state.parts:
                direction = directions.get(id(part))
                if direction is not None:
                    self._apply_direction(state, part, direction, step)
            on_updated(state.shard)

    def list_inputs(self, state_names: tuple[str, ...]) -> tuple[str, ...]:
        """Name the direction that a matrix's owner has orthogonalised, see `UpdateRule.list_inputs`."""
        return ("orthogonal direction",) if "momentum" in state_names else ()

    def list_results(self, state_names: tuple[str, ...]) -> tuple[str, ...]:
        """Name the direction that is sent to a matrix's owner, see `UpdateRule.list_results`."""
        return ("direction",) if "momentum" in state_names else ()

    def recompute(self, state: ShardState, part: StatePart, step: UpdateStep) -> dict[str, torch.Tensor]:
        """Repeat the update on copied elements except the orthogonalisation, see `UpdateRule.recompute`."""
        if "momentum" not in part.state:
            apply_adamw(self.config, state, part, step)
            return {}
        direction = self._update_momentum(state, part, step)
        self._apply_direction(state, part, part.state["orthogonal direction"], step)
        return {"direction": direction}

    def _notify_observer(self, name: str, directions: Mapping[int, torch.Tensor]) -> None:
        """Pass the directions of all matrix parts, by id(part), to the observer under `name`."""
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

    def _orthogonalise_fragments(self, received: torch.Tensor) -> torch.Tensor:
        """Orthogonalise this rank's matrices, whose fragments are concatenated in `received`, in place."""
        matrices: dict[str, torch.Tensor] = {}
        stacks = []
        for shape, names in self.batches:
            stack = received.new_empty((len(names), *shape))
            stacks.append(stack)
            for index, name in enumerate(names):
                matrices[name] = stack[index]
        # Views of the same elements in the matrices and in `received`, pair by pair.
        matrix_boxes = []
        received_boxes = []
        offset = 0
        for fragment in self._received_fragments:
            for box, first, stop in flat_boxes(fragment.box, fragment.first, fragment.first + fragment.length):
                row, column = box.offsets
                row_count, column_count = box.sizes
                matrix_boxes.append(matrices[fragment.name][row : row + row_count, column : column + column_count])
                flat = received[offset + first - fragment.first : offset + stop - fragment.first]
                received_boxes.append(flat.view(box.sizes))
            offset += fragment.length
        if not matrix_boxes:
            return received
        torch_private.foreach_copy_(matrix_boxes, received_boxes)
        for index, stack in enumerate(stacks):
            if self.matrix_observer is None:
                self.orthogonalise_stack(stack)
            else:
                self.matrix_observer(index, stack)
        torch_private.foreach_copy_(received_boxes, matrix_boxes)
        return received

    def orthogonalise_stack(self, stack: torch.Tensor) -> None:
        """Replace directions [matrices, rows, columns] in place by orthogonalised directions with AdamW's RMS."""
        rows, columns = stack.shape[1:]
        is_tall = rows > columns
        # `newton_schulz` needs rows <= columns.
        orthogonal = newton_schulz(stack.mT if is_tall else stack, self.config.muon_steps)
        if is_tall:
            orthogonal = orthogonal.mT
        stack.copy_(orthogonal * (self.config.muon_rms * max(rows, columns) ** 0.5))

    def _apply_direction(self, state: ShardState, part: StatePart, direction: torch.Tensor, step: UpdateStep) -> None:
        """Apply weight decay and the orthogonalised direction to a part's weights."""
        master = part.view(state.master)
        new_master = master * (1 - step.learning_rate * self.config.weight_decay)
        new_master.sub_(direction.to(master.dtype), alpha=step.learning_rate)
        master.copy_(torch.where(step.skip, master, new_master))
        if state.param_out is not None:
            part.view(state.param_out).copy_(master)


def assign_owners(shapes: Mapping[str, Shape], rank_count: int) -> dict[str, int]:
    """Return the rank that orthogonalises each matrix, such that ranks have about the same work.

    The matrices with the most work are assigned first, each to the rank with the least work so far. The result does not
    depend on the order of `shapes`, so all ranks agree.
    """
    # The work of Newton-Schulz is proportional to rows x columns x min(rows, columns).
    work = {name: rows * columns * min(rows, columns) for name, (rows, columns) in shapes.items()}
    loads = [(0, rank) for rank in range(rank_count)]
    owners = {}
    for name in sorted(work, key=lambda name: (-work[name], name)):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + work[name], rank))
    return owners


def batch_matrices(shapes: Mapping[str, Shape]) -> list[tuple[Shape, list[str]]]:
    """Group matrices of one shape into batches (shape, names) of at most MAX_BATCH_ELEMENTS, or of one matrix."""
    names_by_shape: dict[Shape, list[str]] = {}
    for name, shape in shapes.items():
        names_by_shape.setdefault(shape, []).append(name)
    batches = []
    for shape, names in names_by_shape.items():
        batch_size = max(1, MAX_BATCH_ELEMENTS // (shape[0] * shape[1]))
        for start in range(0, len(names), batch_size):
            batches.append((shape, names[start : start + batch_size]))
    return batches


def _gemm_dtype(state: ShardState) -> torch.dtype:
    """Return the type in which directions are sent and orthogonalised: that of the weights in use."""
    return state.shard.params.dtype


def _concatenate(views: Sequence[torch.Tensor], state: ShardState) -> torch.Tensor:
    """Concatenate views. Without views return an empty tensor with the state's device and GEMM type."""
    if views:
        return torch.cat(list(views))
    return torch.empty(0, dtype=_gemm_dtype(state), device=state.master.device)


def _gather_fragments(fragments: list[MatrixFragment], axis: Axis) -> list[list[MatrixFragment]]:
    if axis.size == 1:
        return [fragments]
    gathered: list[list[MatrixFragment]] = [[] for _ in range(axis.size)]
    dist.all_gather_object(gathered, fragments, group=axis.group)
    return gathered
