"""Linear layers in float8: `train.linear_precision` = "float8" (tensor-wise scales) or "float8_rowwise".

All three GEMMs of attention and MLP matrices run in float8. Embedding, norms, attention and logits stay in
`train.precision`. Activations and weights are E4M3; gradients are E5M2, or E4M3 row-wise as in torchao. Scales are
those of the present tensor ("current"), so that nothing is saved between steps, and a recomputed tensor is cast as in
forward. Weights are cast once per step, by their first reader.

Tensor-wise, the ranks that share a tensor agree on its amax, so that results do not depend on the layout. Tensors
that tensor parallelism gathers travel as bytes, half of bfloat16's, and are transposed on arrival. The same holds for
weights that data-parallel ranks gather as bytes (parallel/float8_gather.py). Backward keeps the transposed float8 copy
of an activation, half of its size in bfloat16.

Row-wise, a rank casts whole rows alone: an input travels as bytes with its rows' scales, and a gradient, which its
weight's gradient reads in `train.precision`, is cast on arrival. Only the ranks that share rows agree on their amaxes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import ConfigError, TrainingError
from megascale.ops import dispatch
from megascale.ops.amax import get_attached_amax
from megascale.ops.float8 import gemm
from megascale.ops.float8.cast import (
    cast_by_amax,
    cast_rows,
    compute_amax,
    compute_column_amaxes,
    compute_row_amaxes,
    transpose_rows,
)
from megascale.ops.float8.formats import ALIGNED, E4M3, E5M2, Float8, Format
from megascale.ops.linear import Gemms, Operand
from megascale.parallel.collectives import SINGLE_RANK, Axis, all_reduce_amax, all_reduce_small
from megascale.parallel.linear_precision import LinearPrecision
from megascale.parallel.parameters import spec_of


class _Float8Linears(LinearPrecision, ABC):
    """Common parts of the recipes: weights cast once per step, logits without float8, checks at the start.

    Casts of activations and gradients are counted, casts of weights are not.
    """

    recipe = ""
    gradient_format = E4M3
    copies_weights = True

    def __init__(self, axis: Axis = SINGLE_RANK) -> None:
        super().__init__(axis)
        self._logits = LinearPrecision(axis)
        self._weights: dict[int, tuple[Tensor, Float8]] = {}
        self._pinned: dict[int, Float8] = {}
        self._counts: Tensor | None = None
        self._is_counting = False
        self._cast_numbers = 0

    @property
    def logits(self) -> Gemms:
        return self._logits

    def invalidate_weights(self) -> None:
        self._weights.clear()

    def prepare_weights(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            self.weight(weight)

    def pin_weights(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            cast = self.weight(weight)
            pinned = self._pinned.setdefault(id(weight), cast)
            if pinned is cast:
                continue
            for name, target in vars(pinned).items():
                source = getattr(cast, name)
                if target is not None and target is not source:
                    target.copy_(source)
            self._weights[id(weight)] = weight, pinned

    def check(self, matrices: Mapping[str, Tensor], tokens: int, device: torch.device) -> None:
        dispatch.record_choice(
            "linear layers", f"float8, {self.recipe}: {len(matrices)} matrices; embedding and logits are not"
        )
        if device.type != "cuda":
            return
        gemm.check_device(device)
        for name, weight in matrices.items():
            if weight.dtype != torch.bfloat16:
                raise ConfigError(
                    f"train.linear_precision='float8' needs bfloat16 operators on a GPU, and train.precision is "
                    f"{str(weight.dtype).removeprefix('torch.')}; set --train.precision=bfloat16 or "
                    "--train.linear_precision=default"
                )
            gemm.check_shape(name, tokens, weight.shape[1], weight.shape[0])

    def weight(self, weight: Tensor) -> Float8:
        """Return a weight [O, I] in float8, rows and columns, cast once after `invalidate_weights`."""
        entry = self._weights.get(id(weight))
        if entry is None:
            entry = weight, self._make_weight(weight)
            self._weights[id(weight)] = entry
        return entry[1]

    def _make_weight(self, weight: Tensor) -> Float8:
        return self.cast_weight(weight.detach())

    @abstractmethod
    def cast_weight(self, weight: Tensor) -> Float8:
        """Cast a weight [O, I] to float8, rows and columns."""

    @abstractmethod
    def rows(self, x: Operand, kind: Format) -> tuple[Tensor, Tensor]:
        """Return an operand's float8 rows [rows, N], of `kind`, and their scale [] or scales [rows, 1]."""

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        w = self.weight(weight)
        return self._multiply(x, E4M3, w.rows, w.rows_scale, weight.dtype, out, add, fast=True, bias=bias)

    def dgrad(self, dy: Operand, weight: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
        w = self.weight(weight)
        return self._multiply(dy, self.gradient_format, w.columns, w.columns_scale, weight.dtype, out, add)

    def _multiply(
        self,
        x: Operand,
        kind: Format,
        w: Tensor | None,
        w_scale: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None,
        add: bool,
        fast: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Multiply x @ w.T, into `out` if given."""
        assert w is not None
        assert w_scale is not None
        rows, scale = self.rows(x, kind)
        if out is None:
            y = gemm.matmul(rows, scale, w, w_scale, dtype=dtype, fast=fast, bias=bias)
            return y.view(*x.data.shape[:-1], -1)
        return gemm.matmul_out(out.flatten(0, -2), rows, scale, w, w_scale, fast=fast, bias=bias, add=add)

    def count_casts(self, on: bool) -> None:
        self._is_counting = on
        self._counts = None
        self._cast_numbers = 0

    def cast_counts(self) -> Tensor | None:
        if self._counts is None:
            return None
        counts = torch.zeros(3, dtype=torch.float64, device=self._counts.device)
        counts[:2] += self._counts
        counts[2] = self._cast_numbers
        return counts

    def _counts_for(self, x: Tensor) -> Tensor | None:
        """Return the counts that a cast of x adds to, int64 [2], or None if casts are not counted."""
        if not self._is_counting:
            return None
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.int64, device=x.device)
        self._cast_numbers += x.numel()
        return self._counts


class TensorWiseFloat8(_Float8Linears):
    """One scale per matrix, from its own amax.

    An operand's data are float8 [..., N], and its weight's gradient reads their transpose, float8 [N, rows]. An operand
    that will be gathered has its data as bytes and no transpose, which `finish_gather` makes of all rows.
    """

    recipe = "one scale a matrix"
    gradient_format = E5M2
    collects_amax = True

    def __init__(self, axis: Axis = SINGLE_RANK) -> None:
        super().__init__(axis)
        # Rows and scale of gathered weights; None while neither they nor the whole weight is on this rank.
        self._gathered: dict[int, tuple[Tensor, Tensor] | None] = {}
        self._in_slots: dict[int, Float8] = {}

    def set_slot_weight(self, weight: Tensor, cast: Float8) -> None:
        """Read the weight [O, I] as `cast` from now on, which is gathered before each use (ZeRO-3)."""
        self._in_slots[id(weight)] = cast
        self.copies_weights = False

    def set_gathered_rows(self, weight: Tensor, rows: Tensor, scale: Tensor) -> None:
        """Read the weight [O, I] as these rows (E4M3) and scale from now on, instead of casting it.

        They must lie in the same memory each time, where CUDA graphs read them without a copy.
        """
        self._gathered[id(weight)] = rows, scale
        self._weights.pop(id(weight), None)

    def invalidate_rows(self, weight: Tensor) -> None:
        """Make reading the weight an error until it is gathered, because ranks have updated their shards of it."""
        self._gathered[id(weight)] = None
        self._weights.pop(id(weight), None)

    def set_weight_gathered(self, weight: Tensor) -> None:
        """Record that the weight itself has been gathered, so that it is cast unless its rows are here."""
        if self._gathered.get(id(weight)) is None:
            self._gathered.pop(id(weight), None)

    def _make_weight(self, weight: Tensor) -> Float8:
        in_slot = self._in_slots.get(id(weight))
        if in_slot is not None:
            return in_slot
        if id(weight) not in self._gathered:
            return super()._make_weight(weight)
        gathered = self._gathered[id(weight)]
        if gathered is None:
            raise TrainingError(
                f"a weight {list(weight.shape)} is read after its update and before it was gathered; call "
                "Engine.start_gather before a step, Engine.gather_parameters before anything else"
            )
        rows, scale = gathered
        pinned = self._pinned.get(id(weight))
        if pinned is None or pinned.rows is not rows or pinned.columns is None:
            return Float8(rows, scale, transpose_rows(rows), scale)
        transpose_rows(rows, pinned.columns)
        return pinned

    def cast_weight(self, weight: Tensor) -> Float8:
        return cast_by_amax(weight, E4M3, all_reduce_amax(compute_amax(weight), self.axis))

    def _operand(self, x: Tensor, kind: Format, amax: Tensor | None, for_gather: bool) -> Operand:
        if amax is None:
            amax = get_attached_amax(x)
        x = x.detach()
        if amax is None:
            amax = compute_amax(x)
        amax = all_reduce_amax(amax, self.axis)
        for_gather = for_gather and self.axis.size > 1
        q = cast_by_amax(x, kind, amax, columns=not for_gather, counts=self._counts_for(x))
        assert q.rows is not None
        assert q.rows_scale is not None
        rows = q.rows.view(x.shape)
        if for_gather:
            return Operand(rows.view(torch.uint8), q.rows_scale)
        assert q.columns is not None
        return Operand(rows, q.rows_scale, wgrad=Operand(q.columns, q.rows_scale))

    def prepare_input(self, x: Tensor, weight: Tensor, amax: Tensor | None = None, for_gather: bool = False) -> Operand:
        """See Gemms. amax: x's largest magnitude, float32 []."""
        return self._operand(x, E4M3, amax, for_gather)

    def prepare_gradient(self, dy: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        return self._operand(dy, E5M2, None, for_gather)

    def finish_gather(self, x: Operand) -> Operand:
        return Operand(transpose_rows(x.data.flatten(0, -2)), x.scale)

    def rows(self, x: Operand, kind: Format) -> tuple[Tensor, Tensor]:
        assert x.scale is not None
        return x.data.flatten(0, -2).view(kind.dtype), x.scale

    def accumulate_wgrad(self, main_grad: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        assert dy.scale is not None
        assert x.scale is not None
        dy_columns, x_columns = dy.data.view(E5M2.dtype), x.data.view(E4M3.dtype)
        gemm.matmul_into(main_grad, dy_columns, dy.scale, x_columns, x.scale, overwrite=overwrite)


class RowWiseFloat8(_Float8Linears):
    """A power-of-two scale for each row that a GEMM reads; weight gradients stay in `train.precision`.

    An operand's data are float8 bytes [..., N] with scales [..., 1], and its weight's gradient reads the tensor itself.
    A gradient that will be gathered is that tensor alone.
    """

    recipe = "a scale a row, weight gradients in train.precision"

    def _make_weight(self, weight: Tensor) -> Float8:
        """Cast a weight; ranks that hold parts of a row, or of a column, agree on its amax."""
        if self.axis.size == 1:
            return self.cast_weight(weight.detach())
        cut = spec_of(weight).cut_dimension
        values = weight.detach()
        row_amax = column_amax = None
        if cut == 1:
            row_amax = self._agree(compute_row_amaxes(values))
        elif cut == 0:
            column_amax = self._agree(compute_column_amaxes(values))
        return cast_rows(values, E4M3, columns=True, row_amax=row_amax, column_amax=column_amax)

    def cast_weight(self, weight: Tensor) -> Float8:
        return cast_rows(weight, E4M3, columns=True)

    def _agree(self, amaxes: Tensor) -> Tensor:
        """Return the amaxes of rows (or columns) that tensor-parallel ranks hold parts of."""
        return all_reduce_small(amaxes, self.axis, dist.ReduceOp.MAX)

    def _operand(self, x: Tensor, is_cut: bool) -> Operand:
        """Cast x; is_cut: each tensor-parallel rank holds a part of every row."""
        x = x.detach()
        row_amax = None
        if is_cut and self.axis.size > 1:
            row_amax = self._agree(compute_row_amaxes(x))
        q = cast_rows(x, E4M3, row_amax=row_amax, counts=self._counts_for(x))
        assert q.rows is not None
        assert q.rows_scale is not None
        rows, scales = q.rows.view(torch.uint8).view(x.shape), q.rows_scale.view(*x.shape[:-1], 1)
        return Operand(rows, scales, wgrad=Operand(x))

    def prepare_input(self, x: Tensor, weight: Tensor, amax: object = None, for_gather: bool = False) -> Operand:
        return self._operand(x, is_cut=not for_gather)

    def prepare_gradient(self, dy: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        if for_gather and self.axis.size > 1:
            return Operand(dy.detach())
        return self._operand(dy, is_cut=not for_gather)

    def prepare_gathered_gradient(self, dy: Operand) -> Operand:
        return self._operand(dy.data, is_cut=False)

    def prepare_recomputed(self, x: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        return Operand(x.detach())

    def rows(self, x: Operand, kind: Format) -> tuple[Tensor, Tensor]:
        assert x.scale is not None
        scales = x.scale.view(-1, 1)
        if scales.data_ptr() % ALIGNED:
            scales = scales.clone()  # of a part of the rows, at an address that cuBLASLt rejects
        return x.data.flatten(0, -2).view(kind.dtype), scales
