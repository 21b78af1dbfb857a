"""Linear layers in float8: "float8" (one scale per tensor), "float8_rowwise" or "float8_rowwise_wgrad".

These are values of `train.linear_precision`.

Attention and MLP matrices run their three GEMMs in float8: forward, the input's gradient (dgrad) and the weight's
gradient (wgrad). Embedding, norms, attention and logits stay in `train.precision`. Activations and weights are E4M3;
gradients are E5M2, or E4M3 row-wise as in torchao. A scale comes from the amax (largest magnitude) of the present
values of its tensor ("current" scaling). Nothing is therefore saved between steps, and a recomputed tensor is cast as
in forward. Weights are cast once per step, when a GEMM first reads them.

With one scale per tensor, the ranks that share a tensor agree on its amax, so that results do not depend on the layout.
Tensors that tensor parallelism gathers are sent as bytes and are transposed on arrival: half of the volume of bfloat16.
Data-parallel ranks may gather weights in the same way (parallel/float8_gather.py). For backward, the transposed float8
copy of an activation is saved, which has half the size of the activation in bfloat16.

Row-wise, a rank casts complete rows without communication. An input is sent as bytes with the scales of its rows. A
gradient is sent in `train.precision`, in which wgrad reads it, and is cast on arrival for dgrad. Only ranks that each
hold a part of the same rows agree on the amaxes of these rows. With "float8_rowwise_wgrad" gradients are sent as bytes
too, and wgrad reads the transpose of the float8 rows.

GEMMs of experts are row-wise with "float8" and "float8_rowwise" (ops/expert_gemms.py).
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
from megascale.ops.expert_gemms import ExpertGemms, Float8ExpertGemms
from megascale.ops.float8 import gemm
from megascale.ops.float8.cast import (
    cast_by_amax,
    cast_rows,
    compute_amax,
    compute_column_amaxes,
    compute_row_amaxes,
    transpose_rows,
    transpose_scaled_rows,
)
from megascale.ops.float8.formats import ALIGNED, E4M3, E5M2, SMALLEST_SCALE, Float8, Format, view_as_format
from megascale.ops.float8.stacks import cast_stack
from megascale.ops.linear import Gemms, Operand
from megascale.parallel.collectives import SINGLE_RANK, Axis, all_reduce_amax, all_reduce_small
from megascale.parallel.linear_precision import LinearPrecision
from megascale.parallel.parameters import get_spec


class _Float8Linears(LinearPrecision, ABC):
    """Base class of the two recipes: weights are cast once per step, and logits stay in `train.precision`.

    Casts of activations and gradients are counted; casts of weights are not.
    """

    recipe = ""  # phrase for the start-up lines
    gradient_format = E4M3
    copies_weights = True
    can_round_wgrad = False

    def __init__(self, axis: Axis = SINGLE_RANK) -> None:
        super().__init__(axis)
        self._logits = LinearPrecision(axis)
        self._weights: dict[int, tuple[Tensor, Float8]] = {}  # weight, kept alive, and its cast by id of the weight
        self._pinned: dict[int, Float8] = {}  # cast in the memory that CUDA graphs read, by id of the weight
        self._counts: Tensor | None = None  # number of clipped and of flushed values, int64 [2]
        self._is_counting = False
        self._cast_count = 0  # number of values that were cast while counting

    @property
    def logits(self) -> Gemms:
        return self._logits

    @property
    def expert_gemms(self) -> ExpertGemms:
        # A stored object would refer back to this one, and both would keep casts until the garbage collector runs.
        return Float8ExpertGemms(self.get_weight, self._get_counts)

    def invalidate_weights(self) -> None:
        self._weights.clear()

    def prepare_weights(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            self.get_weight(weight)

    def pin_weights(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            self._pinned.setdefault(id(weight), self.get_weight(weight))

    def _move_to_pinned(self, weight: Tensor, cast: Float8) -> Float8:
        """Return a new cast of a weight in the memory that CUDA graphs read, or as it is if there is none.

        Eager micro-batches before the first replay read it there too, so that the casts of a step exist once.
        """
        pinned = self._pinned.get(id(weight))
        if pinned is None or pinned is cast:
            return cast
        for name, target in vars(pinned).items():
            source = getattr(cast, name)
            if target is not None and target is not source:
                target.copy_(source)
        return pinned

    def reserve_pinned_weights(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            pinned = self._pinned.get(id(weight))
            if pinned is None:
                if _is_stack(weight):
                    pinned = _cast_parameter_stack(weight)
                else:
                    pinned = self._make_undefined_weight(weight)
                self._pinned[id(weight)] = pinned
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

    def check_experts(self, stacks: Mapping[str, Tensor], device: torch.device) -> None:
        if not stacks:
            return
        dispatch.record_choice("experts", "float8, one scale per row; gradients of matrices in train.precision")
        if device.type != "cuda":
            return
        for name, stack in stacks.items():
            matrix = stack.flatten(1, -2)
            gemm.check_shape(name, ALIGNED, matrix.shape[2], matrix.shape[1])

    def get_weight(self, weight: Tensor) -> Float8:
        """Return the cast of a weight [O, I] or of a stack of experts' matrices [experts, ..., I], rows and columns.

        It is made once after `invalidate_weights`, in pinned memory if the weight has it.
        """
        if id(weight) not in self._weights:
            if _is_stack(weight):
                cast = _cast_parameter_stack(weight)
            else:
                cast = self._make_weight(weight)
            self._weights[id(weight)] = weight, self._move_to_pinned(weight, cast)
        _, cast = self._weights[id(weight)]
        return cast

    def _make_weight(self, weight: Tensor) -> Float8:
        """Return a new cast of a weight for `get_weight`. Subclasses may get it from other ranks."""
        return self.cast_weight(weight.detach())

    def _make_undefined_weight(self, weight: Tensor) -> Float8:
        """Return a cast of the weight's present values, whether they have arrived or not."""
        return self._make_weight(weight)

    @abstractmethod
    def cast_weight(self, weight: Tensor) -> Float8:
        """Cast a weight [O, I] to float8, rows and columns."""

    @abstractmethod
    def get_rows(self, x: Operand, kind: Format) -> tuple[Tensor, Tensor]:
        """Return an operand's rows [rows, N] in the format `kind`, and their scale [] or scales [rows, 1]."""

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        w = self.get_weight(weight)
        return self._multiply(x, E4M3, w.rows, w.rows_scale, weight.dtype, out, add, fast=True, bias=bias)

    def dgrad(self, dy: Operand, weight: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
        w = self.get_weight(weight)
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
        """Return x @ w.T, written into `out` if that is given, or added there if `add`.

        Args:
            kind: format of x's float8 values.
            w, w_scale: float8 matrix with its scale or scales.
            dtype: type of the result.
            fast: whether the GEMM may accumulate with less precision, as is usual for forward.
        """
        assert w is not None
        assert w_scale is not None
        rows, scale = self.get_rows(x, kind)
        if out is None:
            y = gemm.matmul(rows, scale, w, w_scale, dtype=dtype, fast=fast, bias=bias)
            return y.view(*x.data.shape[:-1], -1)
        return gemm.matmul_out(out.flatten(0, -2), rows, scale, w, w_scale, fast=fast, bias=bias, add=add)

    def count_casts(self, on: bool) -> None:
        self._is_counting = on
        self._counts = None
        self._cast_count = 0

    def get_cast_counts(self) -> Tensor | None:
        if self._counts is None:
            return None
        counts = torch.zeros(3, dtype=torch.float64, device=self._counts.device)
        counts[:2] += self._counts
        counts[2] = self._cast_count
        return counts

    def _get_counts(self, x: Tensor) -> Tensor | None:
        """Return the tensor in which a cast of x counts clipped and flushed values, None if casts are not counted."""
        if not self._is_counting:
            return None
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.int64, device=x.device)
        self._cast_count += x.numel()
        return self._counts


def _is_stack(weight: Tensor) -> bool:
    """Return whether a parameter has matrices of several experts [experts, ..., I]."""
    return weight.dim() > 2


def _cast_parameter_stack(stack: Tensor) -> Float8:
    """Cast the matrices of a rank's experts [experts, ..., I], each as one matrix [O, I]."""
    return cast_stack(stack.detach().flatten(1, -2))


class TensorWiseFloat8(_Float8Linears):
    """One scale per matrix, from the matrix's amax.

    An operand has float8 data [..., N], and for wgrad their transpose, float8 [N, rows]. An operand that will be
    gathered has data as bytes and no transpose: `finish_gather` transposes the gathered rows.
    """

    recipe = "one scale per matrix"
    gradient_format = E5M2
    collects_amax = True

    def __init__(self, axis: Axis = SINGLE_RANK) -> None:
        super().__init__(axis)
        # By id of the weight: rows and scale of a weight that is gathered in float8. None if they are out of date and
        # the weight itself is not gathered either.
        self._gathered: dict[int, tuple[Tensor, Tensor] | None] = {}
        # By id of the weight: the same memory, which stays when it is out of date.
        self._gathered_memory: dict[int, tuple[Tensor, Tensor]] = {}
        # By id of the weight: cast that is gathered before each use (ZeRO-3).
        self._slot_casts: dict[int, Float8] = {}

    def set_slot_weight(self, weight: Tensor, cast: Float8) -> None:
        """Let GEMMs read `cast` instead of the weight [O, I]. It is gathered before each use (ZeRO-3)."""
        self._slot_casts[id(weight)] = cast
        self.copies_weights = False

    def set_gathered_rows(self, weight: Tensor, rows: Tensor, scale: Tensor) -> None:
        """Let GEMMs read these rows (E4M3) and this scale instead of a cast of the weight [O, I].

        Each call for a weight must pass the same memory, because CUDA graphs read it without a copy.
        """
        self._gathered[id(weight)] = rows, scale
        self._gathered_memory[id(weight)] = rows, scale
        self._weights.pop(id(weight), None)

    def invalidate_rows(self, weight: Tensor) -> None:
        """Let a read of the weight raise TrainingError until it is gathered: ranks have updated their shards."""
        self._gathered[id(weight)] = None
        self._weights.pop(id(weight), None)

    def set_weight_gathered(self, weight: Tensor) -> None:
        """Record that the weight itself has been gathered. It is then cast, unless its rows are valid."""
        if self._gathered.get(id(weight)) is None:
            self._gathered.pop(id(weight), None)

    def _make_weight(self, weight: Tensor) -> Float8:
        in_slot = self._slot_casts.get(id(weight))
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
        transpose_rows(rows, pinned.columns)  # into the memory that CUDA graphs read
        return pinned

    def _make_undefined_weight(self, weight: Tensor) -> Float8:
        memory = self._gathered_memory.get(id(weight))
        if memory is None or id(weight) not in self._gathered:
            return self._make_weight(weight)
        rows, scale = memory
        return Float8(rows, scale, transpose_rows(rows), scale)

    def cast_weight(self, weight: Tensor) -> Float8:
        return cast_by_amax(weight, E4M3, all_reduce_amax(compute_amax(weight), self.axis))

    def _make_operand(self, x: Tensor, kind: Format, amax: Tensor | None, for_gather: bool) -> Operand:
        """Cast x to an operand. amax: largest magnitude on this rank, float32 []; None if unknown."""
        if amax is None:  # the operator that made x may have attached it
            amax = get_attached_amax(x)
        if x.requires_grad and torch.is_grad_enabled():
            x = x.detach()
        if amax is None:
            amax = compute_amax(x)
        amax = all_reduce_amax(amax, self.axis)
        will_be_gathered = for_gather and self.axis.size > 1
        cast = cast_by_amax(x, kind, amax, columns=not will_be_gathered, counts=self._get_counts(x))
        assert cast.rows is not None
        assert cast.rows_scale is not None
        rows = cast.rows.view(x.shape)
        if will_be_gathered:
            return Operand(rows.view(torch.uint8), cast.rows_scale)
        assert cast.columns is not None
        return Operand(rows, cast.rows_scale, wgrad=Operand(cast.columns, cast.rows_scale))

    def prepare_input(self, x: Tensor, weight: Tensor, amax: Tensor | None = None, for_gather: bool = False) -> Operand:
        """Cast x as `Gemms.prepare_input` says.

        Args:
            amax: largest magnitude of x on this rank, float32 []; None if unknown.
        """
        return self._make_operand(x, E4M3, amax, for_gather)

    def prepare_gradient(self, dy: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        return self._make_operand(dy, E5M2, None, for_gather)

    def finish_gather(self, x: Operand) -> Operand:
        return Operand(transpose_rows(x.data.flatten(0, -2)), x.scale)

    def get_rows(self, x: Operand, kind: Format) -> tuple[Tensor, Tensor]:
        assert x.scale is not None
        return view_as_format(x.data.flatten(0, -2), kind), x.scale

    def accumulate_wgrad(self, main_grad: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        assert dy.scale is not None
        assert x.scale is not None
        dy_columns = view_as_format(dy.data, E5M2)
        x_columns = view_as_format(x.data, E4M3)
        gemm.matmul_into(main_grad, dy_columns, dy.scale, x_columns, x.scale, overwrite=overwrite)


class RowWiseFloat8(_Float8Linears):
    """One power-of-two scale per row that a GEMM reads. Weight gradients are computed in `train.precision`.

    An operand has float8 bytes [..., N] with scales [..., 1], and for wgrad the original tensor. A gradient that will
    be gathered has only the original tensor.
    """

    recipe = "one scale per row, weight gradients in train.precision"
    empty_scale = 1.0  # scale of a row of zeros

    def _make_weight(self, weight: Tensor) -> Float8:
        """Cast a weight. Ranks that hold parts of the same row, or of the same column, agree on its amax."""
        if self.axis.size == 1:
            return self.cast_weight(weight.detach())
        cut = get_spec(weight).cut_dimension
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
        """Return the maximum over tensor-parallel ranks of the amaxes of rows or columns that they share."""
        return all_reduce_small(amaxes, self.axis, dist.ReduceOp.MAX)

    def _make_operand(self, x: Tensor, is_cut: bool) -> Operand:
        """Cast x to an operand, with x itself for wgrad; see `_cast_operand`."""
        return self._cast_operand(x, is_cut)._replace(wgrad=Operand(x.detach()))

    def _cast_operand(self, x: Tensor, is_cut: bool) -> Operand:
        """Cast x to an operand without a form for wgrad.

        Args:
            is_cut: whether each tensor-parallel rank has a part of every row.
        """
        x = x.detach()
        row_amax = None
        if is_cut and self.axis.size > 1:
            row_amax = self._agree(compute_row_amaxes(x))
        cast = cast_rows(x, E4M3, row_amax=row_amax, counts=self._get_counts(x), empty_scale=self.empty_scale)
        assert cast.rows is not None
        assert cast.rows_scale is not None
        return Operand(cast.rows.view(torch.uint8).view(x.shape), cast.rows_scale.view(*x.shape[:-1], 1))

    def prepare_input(self, x: Tensor, weight: Tensor, amax: object = None, for_gather: bool = False) -> Operand:
        # A gathered input has complete rows. Any other input belongs to a row-parallel layer, whose ranks cut its rows.
        return self._make_operand(x, is_cut=not for_gather)

    def prepare_gradient(self, dy: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        if for_gather and self.axis.size > 1:
            return Operand(dy.detach())
        return self._make_operand(dy, is_cut=not for_gather)

    def prepare_gathered_gradient(self, dy: Operand) -> Operand:
        return self._make_operand(dy.data, is_cut=False)

    def prepare_recomputed(self, x: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        return Operand(x.detach())  # wgrad reads it in train.precision

    def get_rows(self, x: Operand, kind: Format) -> tuple[Tensor, Tensor]:
        assert x.scale is not None
        scales = x.scale.view(-1, 1)
        if scales.data_ptr() % ALIGNED:
            scales = scales.clone()  # scales of some of the rows may start at an address that cuBLASLt rejects
        return view_as_format(x.data.flatten(0, -2), kind), scales


class RowWiseFloat8Wgrad(RowWiseFloat8):
    """One power-of-two scale per row. Weight gradients are float8 GEMMs too, whose operands have one scale per matrix.

    A scale per row cannot be applied to the result of such a GEMM, because the GEMM sums over rows. The operand is
    therefore the transpose of the float8 rows, with the largest of their scales (`transpose_scaled_rows`).

    An operand has float8 bytes [..., N] with scales [..., 1], and for wgrad their transpose, float8 [N, rows]. An
    operand that will be gathered has no transpose: `finish_gather` transposes the gathered rows.
    """

    recipe = "one scale per row, weight gradients with one scale per matrix"
    empty_scale = SMALLEST_SCALE  # a row of zeros must not determine the scale of the matrix

    def prepare_input(self, x: Tensor, weight: Tensor, amax: object = None, for_gather: bool = False) -> Operand:
        return self._make_operand_for_wgrad(x, for_gather)

    def prepare_gradient(self, dy: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        return self._make_operand_for_wgrad(dy, for_gather)

    def _make_operand_for_wgrad(self, x: Tensor, for_gather: bool) -> Operand:
        rows = self._cast_operand(x, is_cut=not for_gather)
        if for_gather and self.axis.size > 1:
            return rows
        return rows._replace(wgrad=self.finish_gather(rows))

    def prepare_gathered_gradient(self, dy: Operand) -> Operand:
        return dy

    def prepare_recomputed(self, x: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        return LinearPrecision.prepare_recomputed(self, x, weight, for_gather)

    def finish_gather(self, x: Operand) -> Operand:
        return Operand(*transpose_scaled_rows(*self.get_rows(x, E4M3)))

    def accumulate_wgrad(self, main_grad: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        assert dy.scale is not None
        assert x.scale is not None
        gemm.matmul_into(main_grad, dy.data, dy.scale, x.data, x.scale, overwrite=overwrite)
