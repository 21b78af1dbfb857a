"""Low-rank adapters (LoRA) of linear layers, sharded like the layers' matrices over the tensor-parallel ranks.

An adapter has the factors A [rank, I] and B [O, rank]. `AdapterSpec.make_pair` shards the factor that shares the
matrix's sharded dimension, and replicates the other.

The adapter of a column-parallel layer gathers A x, which has only `rank` columns, instead of the layer's input x. The
adapter of a row-parallel layer reduce-scatters A x, and multiplies by B on each rank's part of the sequence.

Letters in names: S sequence, L this rank's part of the sequence (S/t), B batch, H hidden width, C columns of this rank
in a column-parallel output, K columns of this rank in a row-parallel input, R columns of A x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from megascale.core.adapters import AdapterSpec
from megascale.core.inventory_records import LogicalTensor
from megascale.parallel.collectives import Axis, gather_sequence, scatter_sequence
from megascale.parallel.module import DirectModule
from megascale.parallel.parameters import local_parameter


class ColumnAdapter(DirectModule):
    """Adapters of the matrices that a column-parallel layer stacks, with one gather for all of them.

    A is replicated, and B is sharded like the matrix.

    Args:
        matrices: stacked logical matrices [O_i, I] of the layer, some of which are targets.
    """

    def __init__(self, matrices: Sequence[LogicalTensor], spec: AdapterSpec, axis: Axis, dtype: torch.dtype) -> None:
        super().__init__()
        self.axis = axis
        self.adapter_rank = spec.rank  # width of A x; `axis.rank` is this process's rank in the group
        self.scale = spec.scale
        self.local_rows: list[tuple[int, bool]] = []  # number of local rows of each matrix, and whether it is a target
        pairs = []
        for matrix in matrices:
            is_target = spec.is_target(matrix)
            self.local_rows.append((matrix.local_shape(axis.size)[0], is_target))
            if is_target:
                pairs.append(spec.make_pair(matrix))
        self.a = local_parameter([a for a, _ in pairs], axis.rank, axis.size, dtype)
        self.b = local_parameter([b for _, b in pairs], axis.rank, axis.size, dtype)

    def add(self, y_SBC: torch.Tensor, x_LBH: torch.Tensor) -> torch.Tensor:
        """Return y [s, b, columns/t] plus the adapters' outputs for x [s/t, b, h]."""
        inner_LBR = F.linear(x_LBH, self.a)
        inner_SBR = gather_sequence(inner_LBR, self.axis)
        outputs: list[torch.Tensor] = []
        first_row = 0
        adapter = 0
        for row_count, is_target in self.local_rows:
            if not is_target:
                outputs.append(y_SBC.new_zeros((*y_SBC.shape[:-1], row_count)))
                continue
            first_column = adapter * self.adapter_rank
            adapter_inner_SBR = inner_SBR[..., first_column : first_column + self.adapter_rank]
            outputs.append(F.linear(adapter_inner_SBR, self.b[first_row : first_row + row_count]))
            first_row += row_count
            adapter += 1
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return torch.add(y_SBC, output, alpha=self.scale)


class RowAdapter(DirectModule):
    """Adapter of a row-parallel layer's matrix [h, k]: A is sharded like the matrix, B is replicated."""

    def __init__(self, matrix: LogicalTensor, spec: AdapterSpec, axis: Axis, dtype: torch.dtype) -> None:
        super().__init__()
        self.axis = axis
        self.scale = spec.scale
        a, b = spec.make_pair(matrix)
        self.a = local_parameter([a], axis.rank, axis.size, dtype)
        self.b = local_parameter([b], axis.rank, axis.size, dtype)

    def add(self, y_LBH: torch.Tensor, x_SBK: torch.Tensor) -> torch.Tensor:
        """Return y [s/t, b, h], the layer's sum over ranks, plus the adapter's output for x [s, b, k/t]."""
        inner_SBR = F.linear(x_SBK, self.a)
        inner_LBR = scatter_sequence(inner_SBR, self.axis)
        return torch.add(y_LBH, F.linear(inner_LBR, self.b), alpha=self.scale)
