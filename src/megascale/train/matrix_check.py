"""Recomputation of Muon's orthogonalisation of a sampled matrix on another replica's rank.

Each matrix has one owner, and no other rank computes its update. In a checked step each rank copies one of its matrices
before and after the orthogonalisation, and a rank of another replica repeats the orthogonalisation. The copy keeps its
index in a stack of the same number of matrices, because a batched GEMM may choose its kernel by that number.

A copy has as many elements as the largest matrix, in the type of the weights in use. A recomputation also needs the
memory of a stack of matrices, as an update does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megascale.checkpoint.object_collectives import Peers
from megascale.ops.segments import TILE
from megascale.optim.sharded_muon import ShardedMuon
from megascale.train.weights import sum_bits_of_rows


class MatrixCheck:
    """Recomputes matrices of other ranks' updates. Construction is collective over the world.

    Args:
        rule: orthogonalises this rank's matrices.
        shift: sends a tensor to the replica at a distance after this one, and returns the tensor of the replica at
            that distance before.
        peers: all ranks.
    """

    def __init__(self, rule: ShardedMuon, shift: Callable[[Tensor, int], Tensor], peers: Peers) -> None:
        self._rule = rule
        self._shift = shift
        reference = rule.shards.states[0].shard.params
        self._dtype, self._device = reference.dtype, reference.device
        largest = max((rows * columns for (rows, columns), _ in rule.batches), default=0)
        largest = max(peers.all_gather(largest, int))
        self._elements = -(-largest // TILE) * TILE
        # Matrices in the stack, rows, columns, index of the checked matrix; zeros on a rank without matrices.
        self._position = (0, 0, 0, 0)
        self._batch = -1  # index of the checked matrix's stack in `rule.batches`, -1 without matrices
        self._before = self._after = self._allocate()

    def _allocate(self) -> Tensor:
        return torch.empty(0, dtype=self._dtype, device=self._device)

    def begin(self, number: int) -> None:
        """Copy a matrix during the next update. The check's `number` chooses the matrix."""
        batches = self._rule.batches
        self._before = torch.zeros(self._elements, dtype=self._dtype, device=self._device)
        self._after = torch.zeros_like(self._before)
        self._position, self._batch = (0, 0, 0, 0), -1
        if batches:
            self._batch = number % len(batches)
            (rows, columns), names = batches[self._batch]
            self._position = (len(names), rows, columns, number // len(batches) % len(names))
        self._rule.matrix_observer = self._observe

    @torch.no_grad()
    def _observe(self, batch: int, stack: Tensor) -> None:
        """Orthogonalise a stack in place of the rule, and copy the checked matrix before and after."""
        if batch != self._batch:
            self._rule.orthogonalise_stack(stack)
            return
        matrix = stack[self._position[-1]]
        self._before[: matrix.numel()].copy_(matrix.flatten())
        self._rule.orthogonalise_stack(stack)
        self._after[: matrix.numel()].copy_(matrix.flatten())

    def sum_updated(self) -> Tensor:
        """Return the checksums of this rank's matrix after its orthogonalisation, int64 [tiles]."""
        return sum_bits_of_rows(self._after.view(-1, TILE))

    @torch.no_grad()
    def recompute(self, distance: int) -> Tensor:
        """Repeat the orthogonalisation of the replica that is `distance` before this one. Collective.

        Return the checksums of the result, int64 [tiles].
        """
        position = torch.tensor(self._position, device=self._device)
        matrix_count, rows, columns, index = self._shift(position, distance).tolist()
        before = self._shift(self._before, distance)
        after = torch.zeros_like(before)
        if matrix_count:
            stack = before.new_zeros(matrix_count, rows, columns)
            stack[index].view(-1).copy_(before[: rows * columns])
            self._rule.orthogonalise_stack(stack)
            after[: rows * columns].copy_(stack[index].view(-1))
        return sum_bits_of_rows(after.view(-1, TILE))

    @property
    def name(self) -> str:
        """Name of this rank's checked matrix, "" without one."""
        if self._batch < 0:
            return ""
        _, names = self._rule.batches[self._batch]
        return names[self._position[-1]]

    def end(self) -> None:
        """Drop the copies, and let the next update run unobserved."""
        self._rule.matrix_observer = None
        self._before = self._after = self._allocate()
