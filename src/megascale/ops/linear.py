"""The three GEMMs of a linear layer y = x @ weight.T + bias: forward, gradient of x (dgrad) and of weight (wgrad).

`Gemms` runs these GEMMs in the type of their inputs, and adds the weight's gradient in float32 within the GEMM.
Subclasses of `Gemms` run them in other types, such as float8. parallel/linear.py chooses the class.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale.ops.dispatch import CURRENT


class Operand(NamedTuple):
    """A matrix in the form that GEMMs read, with one row per token. Tensor-parallel ranks gather it with its scales.

    Attributes:
        data: stored numbers [..., N]. If ranks gather the matrix, this rank's rows of the sequence.
        scale: factors by which `data` is multiplied: None (no scaling), one per matrix [] (equal on all ranks that
            share the matrix), one per row [..., 1], or one per block of a row [..., blocks].
        wgrad: form of the matrix that the wgrad GEMM reads; None: this operand.
    """

    data: Tensor
    scale: Tensor | None = None
    wgrad: Operand | None = None

    def select_rows(self, start: int, stop: int) -> Operand:
        """Return entries `start:stop` of dimension 0, with their scales."""
        scale = self.scale
        if scale is not None and scale.dim():
            scale = scale[start:stop]
        return Operand(self.data[start:stop], scale)

    def flatten_rows(self) -> Operand:
        """Return the operand as a matrix [rows, N], with scales [rows, 1] if each row has one."""
        scale = self.scale
        if scale is not None and scale.dim():
            scale = scale.flatten(0, -2)
        return Operand(self.data.flatten(0, -2), scale)

    def select_columns(self, columns: slice) -> Operand:
        """Return some columns of an operand without scales."""
        if self.scale is not None:
            raise ValueError("columns of an operand with scales have no scales of their own; select from its data")
        return Operand(self.data[..., columns])

    def for_wgrad(self) -> Operand:
        """Return the form that the wgrad GEMM reads. For an input this is what forward saves for backward."""
        return self if self.wgrad is None else self.wgrad


def accumulate_mm(target: Tensor, a: Tensor, b: Tensor, overwrite: bool = False) -> None:
    """Compute target [M, N] += a [M, K] @ b [K, N], summed in float32 at least if target has 32 bits or more.

    With `overwrite` the product replaces target. On CUDA one GEMM has float32 output and adds to target. If torch lacks
    such a GEMM, the product is rounded to a's type, and the record of operators says so. On other devices a and b are
    converted to target's type.

    A target of 16 bits, or narrower than a, takes the rounded product, and only with `overwrite`. If cuBLAS divides K,
    it may add the parts in 16 bits, as in other GEMMs (`allow_bf16_reduced_precision_reduction` of torch).
    """
    if target.dtype.itemsize < max(4, a.dtype.itemsize):
        if not overwrite:
            raise ValueError(f"sums in {target.dtype} would be rounded at each product; set overwrite=True")
        if target.dtype == a.dtype:
            torch.mm(a, b, out=target)
        else:
            target.copy_(a @ b)
        return
    if not (target.is_cuda and target.dtype == torch.float32) or target.dtype == a.dtype:
        a, b = a.to(target.dtype), b.to(target.dtype)
        if overwrite:
            torch.mm(a, b, out=target)
        else:
            target.addmm_(a, b)
        return
    kernels = CURRENT.get()
    if kernels.wide_gemm is None:
        try:
            _accumulate_float32(target, a, b, overwrite)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            kernels.wide_gemm = False
            kernels.record_choice("weight gradient", f"GEMM in {a.dtype}, then added ({error})")
        else:
            kernels.wide_gemm = True
            kernels.record_choice("weight gradient", "added in float32 inside the GEMM")
            return
    if kernels.wide_gemm:
        _accumulate_float32(target, a, b, overwrite)
    elif overwrite:
        target.copy_(a @ b)
    else:
        target.add_(a @ b)


def multiply_wide(a: Tensor, b: Tensor) -> Tensor:
    """Return a [M, K] @ b [K, N] in float32 at least. The product is not rounded to the type of a and b.

    If torch has no CUDA GEMM with float32 output, a and b are converted first.
    """
    product = a.new_empty(a.shape[0], b.shape[1], dtype=torch.promote_types(a.dtype, torch.float32))
    kernels = CURRENT.get()
    if kernels.wide_gemm is not False:
        accumulate_mm(product, a, b, overwrite=True)  # The first call finds out whether the GEMM exists.
    if kernels.wide_gemm is False:
        torch.mm(a.to(product.dtype), b.to(product.dtype), out=product)
    return product


def _accumulate_float32(target: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    if overwrite:
        torch.mm(a, b, out_dtype=torch.float32, out=target)
    else:
        torch.addmm(target, a, b, out_dtype=torch.float32, out=target)


class Gemms:
    """GEMMs in the type of their inputs. Inputs x are [..., I], output gradients dy [..., O], weights [O, I].

    If `out` is given, the result is written to it, or added to it with `add`. It is returned, flattened to rows.

    Attributes:
        can_round_wgrad: whether a weight's gradient can overwrite memory of 16 bits.
    """

    can_round_wgrad = True

    def prepare_input(self, x: Tensor, weight: Tensor, amax: Any = None, for_gather: bool = False) -> Operand:
        """Return x in the form that `forward` and `accumulate_wgrad` read.

        Args:
            amax: amax of x if the operator that wrote x has collected it.
            for_gather: whether x has whole rows of this rank's part of the sequence, which tensor-parallel ranks
                gather. Otherwise x has this rank's columns of all rows.
        """
        return Operand(x)

    def prepare_gradient(self, dy: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        """Return dy in the form that `dgrad` and `accumulate_wgrad` read, or with `for_gather` that ranks gather."""
        return Operand(dy)

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """Compute x @ weight.T + bias. With `add` the bias is left out."""
        if out is None:
            return F.linear(x.data, weight, bias)
        out, rows = out.flatten(0, -2), x.data.flatten(0, -2)
        if add:
            return out.addmm_(rows, weight.t())
        if bias is None:
            return torch.mm(rows, weight.t(), out=out)
        return torch.addmm(bias, rows, weight.t(), out=out)

    def dgrad(self, dy: Operand, weight: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
        if out is None:
            return torch.matmul(dy.data, weight)
        out, rows = out.flatten(0, -2), dy.data.flatten(0, -2)
        if add:
            return out.addmm_(rows, weight)
        return torch.mm(rows, weight, out=out)

    def accumulate_wgrad(self, main_grad: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        """Add the weight's gradient dy.T @ x to main_grad [O, I] (float32 or wider), or overwrite main_grad.

        Args:
            main_grad: may have 16 bits with `overwrite` if `can_round_wgrad`.
            dy, x: results of `Operand.for_wgrad`.
        """
        accumulate_mm(main_grad, dy.data.flatten(0, -2).t(), x.data.flatten(0, -2), overwrite)
