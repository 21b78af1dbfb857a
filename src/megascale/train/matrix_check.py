"""Recomputation of Muon's orthogonalisation of sampled matrices on another replica's rank.

Each matrix has one owner, and no other rank computes its update. In a checked step each rank copies some of its
matrices before and after the orthogonalisation, and a rank of another replica repeats the orthogonalisation. A copy
keeps its index in a stack of the same number of matrices, because a batched GEMM may choose its kernel by that number.

A check copies as many matrices as an element budget holds, and at least one. A copy has as many elements as the largest
matrix, in the type of the weights in use. A recomputation also needs the memory of a stack of matrices, as an update
does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.checkpoint.object_collectives import Peers
from megascale.ops.segments import TILE
from megascale.optim.sharded_muon import ShardedMuon
from megascale.train.weights import sum_bits_of_rows


class _Position(NamedTuple):
    """Position of a checked matrix, zeros for no matrix.

    Attributes:
        batch: index of its stack in the `batches` of the rank's rule.
        matrix_count: matrices in its stack.
    """

    batch: int = 0
    matrix_count: int = 0
    rows: int = 0
    columns: int = 0
    stack_index: int = 0


class MatrixCheck:
    """Recomputes matrices of other ranks' updates. Construction is collective over the world.

    Args:
        rule: orthogonalises this rank's matrices.
        shift: sends a tensor to the replica at a distance after this one, and returns the tensor of the replica at
            that distance before.
        peers: all ranks.
        budget_elements: largest number of elements of a check's copies, unless one matrix has more.

    Attributes:
        matrices_per_check: copies of a check, the same on all ranks.
    """

    def __init__(
        self, rule: ShardedMuon, shift: Callable[[Tensor, int], Tensor], peers: Peers, budget_elements: int
    ) -> None:
        self._rule = rule
        self._shift = shift
        reference = rule.shards.states[0].shard.params
        self._dtype, self._device = reference.dtype, reference.device
        largest = max((rows * columns for (rows, columns), _ in rule.batches), default=0)
        sizes = peers.all_gather((largest, len(self._list_matrices())), tuple[int, int])
        largest = max(size for size, _ in sizes)
        most_matrices = max(count for _, count in sizes)
        self._copy_elements = -(-largest // TILE) * TILE
        budgeted = budget_elements // max(1, self._copy_elements)
        self.matrices_per_check = max(1, min(budgeted, most_matrices))
        # At most `matrices_per_check` pairs: index of the stack in `rule.batches`, index in the stack.
        self._checked: list[tuple[int, int]] = []
        self._before_MT = self._allocate(0)
        self._after_MT = self._allocate(0)

    def _list_matrices(self) -> list[tuple[int, int]]:
        """Return (stack, index in the stack) of this rank's matrices. Consecutive ones come from different stacks."""
        matrices = []
        for batch, (_, names) in enumerate(self._rule.batches):
            matrices += [(index, batch) for index in range(len(names))]
        return [(batch, index) for index, batch in sorted(matrices)]

    def _allocate(self, count: int) -> Tensor:
        return torch.zeros(count, self._copy_elements, dtype=self._dtype, device=self._device)

    def begin(self, number: int) -> None:
        """Copy matrices during the next update. The check's `number` chooses them."""
        self._before_MT = self._allocate(self.matrices_per_check)
        self._after_MT = torch.zeros_like(self._before_MT)
        matrices = self._list_matrices()
        count = min(self.matrices_per_check, len(matrices))
        first = number * self.matrices_per_check
        self._checked = [matrices[(first + i) % len(matrices)] for i in range(count)]
        self._rule.matrix_observer = self._observe

    @torch.no_grad()
    def _observe(self, batch: int, stack: Tensor) -> None:
        """Orthogonalise a stack in place of the rule, and copy its checked matrices before and after."""
        rows = [(row, index) for row, (checked_batch, index) in enumerate(self._checked) if checked_batch == batch]
        for row, index in rows:
            self._before_MT[row, : stack[index].numel()].copy_(stack[index].flatten())
        self._rule.orthogonalise_stack(stack)
        for row, index in rows:
            self._after_MT[row, : stack[index].numel()].copy_(stack[index].flatten())

    def sum_updated(self) -> Tensor:
        """Return the checksums of this rank's matrices after their orthogonalisation, int64 [matrices x tiles]."""
        return sum_bits_of_rows(self._after_MT.view(-1, TILE))

    @torch.no_grad()
    def recompute(self, distance: int) -> Tensor:
        """Repeat the orthogonalisations of the replica that is `distance` before this one. Collective.

        Return the checksums of the results, int64 [matrices x tiles].
        """
        positions_MF = torch.zeros(self.matrices_per_check, len(_Position._fields), dtype=torch.int64)
        for row, (batch, index) in enumerate(self._checked):
            (rows, columns), names = self._rule.batches[batch]
            positions_MF[row] = torch.tensor(_Position(batch, len(names), rows, columns, index))
        shifted_MF = self._shift(positions_MF.to(self._device), distance)
        before_MT = self._shift(self._before_MT, distance)
        after_MT = torch.zeros_like(before_MT)
        rows_by_batch: dict[int, list[tuple[int, _Position]]] = defaultdict(list)
        for row, fields in enumerate(shifted_MF.tolist()):
            position = _Position(*fields)
            if position.matrix_count:
                rows_by_batch[position.batch].append((row, position))
        for rows_and_positions in rows_by_batch.values():
            _, shape = rows_and_positions[0]
            elements = shape.rows * shape.columns
            stack = before_MT.new_zeros(shape.matrix_count, shape.rows, shape.columns)
            for row, position in rows_and_positions:
                stack[position.stack_index].view(-1).copy_(before_MT[row, :elements])
            self._rule.orthogonalise_stack(stack)
            for row, position in rows_and_positions:
                after_MT[row, :elements].copy_(stack[position.stack_index].view(-1))
        return sum_bits_of_rows(after_MT.view(-1, TILE))

    def find_name(self, index: int) -> str:
        """Return the name of the matrix that the checksum at `index` of `sum_updated` covers, "" for no matrix."""
        row = index // (self._copy_elements // TILE)
        if row >= len(self._checked):
            return ""
        batch, index_in_stack = self._checked[row]
        _, names = self._rule.batches[batch]
        return names[index_in_stack]

    def end(self) -> None:
        """Drop the copies, and let the next update run unobserved."""
        self._rule.matrix_observer = None
        self._before_MT = self._allocate(0)
        self._after_MT = self._allocate(0)
