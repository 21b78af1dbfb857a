"""Records of a model's inventory (inventory.py): logical tensors, saved activations, parts and blocks. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from megascale.config import ModelConfig
from megascale.config.parts import NORMS
from megascale.core.layer_spec import LayerSpec
from megascale.core.tensors import Box, Piece, is_decayed


@dataclass(frozen=True)
class LogicalTensor:
    """One tensor of the model, independent of the layout.

    Attributes:
        name: such as `layers.3.attention.query.weight`.
        shape: shape without padding.
        partition_dim: dimension that tensor-parallel ranks divide; None: replicated on all of them.
        init_std: standard deviation of the initial values; None: the constant `init_value`.
        is_gemm_weight: whether every token is multiplied with it.
        padded_rows: size of the first dimension in memory, if that is padded. Rows beyond `shape` have no meaning.
        other_cuts: pairs of an axis besides the tensor axis, and the dimension that its ranks divide.
        is_trained: False for state of the model that no gradient changes, such as the bias of a router.
    """

    name: str
    shape: tuple[int, ...]
    partition_dim: int | None = None
    init_std: float | None = None
    init_value: float = 0.0
    is_gemm_weight: bool = False
    padded_rows: int | None = None
    other_cuts: tuple[tuple[str, int], ...] = ()
    is_trained: bool = True

    @property
    def cuts(self) -> dict[str, int]:
        """Dimension that the ranks of each axis divide, for the axes that cut the tensor."""
        if self.partition_dim is None:
            return dict(self.other_cuts)
        return {"tensor": self.partition_dim, **dict(self.other_cuts)}

    @property
    def decay(self) -> bool:
        """True if weight decay applies (and LAMB adapts): for matrices, not for biases and norms."""
        return is_decayed(self.name, self.shape)

    @property
    def is_unit_matrix(self) -> bool:
        """True for a matrix without copies along the tensor axis; from ZeRO-2 on it is in a unit of the forward."""
        return self.decay and self.partition_dim is not None

    @property
    def is_expert_stack(self) -> bool:
        """True for a stack of experts' matrices."""
        return ".mlp.experts." in self.name and self.name.endswith(".weight")

    @property
    def elements(self) -> int:
        """Number of trained elements."""
        return prod(self.shape) if self.is_trained else 0

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape with padding."""
        if self.padded_rows is None:
            return self.shape
        return (self.padded_rows, *self.shape[1:])

    def local_shape(self, ranks: int, expert: int = 1) -> tuple[int, ...]:
        """Return the padded shape on one of `ranks` tensor-parallel ranks and one of `expert` expert ranks."""
        return self.cut_shape({"tensor": ranks, "expert": expert})

    def cut_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the padded shape on one rank. `sizes`: ranks by axis; an axis that is left out has one rank."""
        shape = list(self.padded_shape)
        for axis, dim in self.cuts.items():
            shape[dim] //= sizes.get(axis, 1)
        return tuple(shape)

    def cut_piece(self, positions: Mapping[str, tuple[int, int]]) -> Piece:
        """Return a rank's piece of the tensor. `positions`: the rank's (index, number of ranks) by axis."""
        sizes = list(self.padded_shape)
        offsets = [0] * len(sizes)
        for axis, dim in self.cuts.items():
            index, ranks = positions.get(axis, (0, 1))
            sizes[dim] //= ranks
            offsets[dim] += index * sizes[dim]
        # The piece has no padding rows.
        first_row = min(offsets[0], self.shape[0])
        row_count = max(0, min(sizes[0], self.shape[0] - first_row))
        box = Box((first_row, *offsets[1:]), (row_count, *sizes[1:]))
        return Piece(self.name, self.shape, box, self.decay)


@dataclass(frozen=True)
class SavedActivation:
    """An activation [sequence, batch, width] of a micro-batch that a forward saves for its backward.

    Attributes:
        name: name in messages and tests.
        width: values per token, over all tensor-parallel ranks.
        split_along: dimension that tensor-parallel ranks divide; "none": each of them has all of it.
        is_statistic: whether it is stored in float32 at least.
        recompute_name: value of parallel.recompute under which backward recomputes it; "" if it never does.
        has_gradient: whether a gradient of its size exists during the part's backward.
        gemm_input: whether a GEMM's weight gradient reads it: "no", "only" (nothing else does), "also" (others do too).
    """

    name: str
    width: int
    split_along: Literal["sequence", "columns", "none"]
    is_statistic: bool = False
    recompute_name: str = ""
    has_gradient: bool = False
    gemm_input: Literal["no", "only", "also"] = "no"


@dataclass(frozen=True)
class PartInventory:
    """Inventory of an attention or an MLP.

    Attributes:
        tensors: maps (layer, name of the layer) to the part's logical tensors.
        saved_activations: activations that the part saves, without those of the norm before it.
        flops: maps (layer, sequence length) to forward FLOPs per token, without those of tensors with `is_gemm_weight`.
        splits_fused_projection: whether the part can read its columns of a parallel block's fused projection.
        make_spec: makes the part's specification from the model's settings; None: the built-in part's function.
        saves_norm_output: whether backward keeps the output of the norm before it even if norms are recomputed.
        workspace: values per token, over all tensor-parallel ranks, that exist only during backward, beyond the
            gradients of saved activations.
    """

    tensors: Callable[[LayerSpec, str], list[LogicalTensor]]
    saved_activations: Callable[[LayerSpec], list[SavedActivation]]
    flops: Callable[[LayerSpec, int], float] = lambda layer, sequence: 0.0
    splits_fused_projection: bool = False
    make_spec: Callable[[ModelConfig], Any] | None = None
    saves_norm_output: bool = False
    workspace: Callable[[LayerSpec], int] = lambda layer: 0


@dataclass(frozen=True)
class BlockInventory:
    """Composition of a block from its parts.

    Attributes:
        norm_count: number of norms; the second one stands before the MLP.
        collectives: (gathers, scatters) of its forward under tensor parallelism.
        is_parallel: whether both parts read the same residual stream and go backward at once. If not, the stream
            between them is saved.
        can_split: whether attention and MLP may lie in different chunks of the model.
    """

    norm_count: Callable[[ModelConfig], int]
    collectives: Callable[[LayerSpec], tuple[int, int]]
    is_parallel: bool
    can_split: bool = False


def linear_tensors(
    name: str, rows: int, columns: int, partition_dim: int, bias: bool, std: float
) -> list[LogicalTensor]:
    """Return the weight [rows, columns] and bias [rows] of a linear layer, divided by rows (0) or by columns (1)."""
    tensors = [LogicalTensor(f"{name}.weight", (rows, columns), partition_dim, std, is_gemm_weight=True)]
    if bias:
        tensors.append(LogicalTensor(f"{name}.bias", (rows,), 0 if partition_dim == 0 else None))
    return tensors


def norm_tensors(norm: str, hidden: int, name: str) -> list[LogicalTensor]:
    """Return the tensors of one norm, whose kind is a value of model.norm."""
    facts = NORMS[norm]
    tensors = [LogicalTensor(f"{name}.weight", (hidden,), init_value=facts.initial_weight)]
    if facts.bias:
        tensors.append(LogicalTensor(f"{name}.bias", (hidden,)))
    return tensors
