"""The three GEMMs of a linear layer y = x @ weight.T + bias: forward, dgrad (of the input) and wgrad (of the weight).

`Gemms` runs them in the type of their inputs and adds the weight's gradient in float32 inside the GEMM. Its
subclasses run them in other types, such as float8 (parallel/linear.py chooses).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale.ops.dispatch import CURRENT


class Operand(NamedTuple):
    """A matrix as GEMMs read it: a row for each token, which travels between tensor-parallel ranks with its scales.

    Attributes:
        data: [..., N], cut along the sequence where ranks gather it.
        scale: the factors from `data` to the values: None, one for the matrix [] (the same on all ranks that share the
            matrix), one per row [..., 1], or one per block of a row [..., blocks].
        wgrad: the matrix as the weight's gradient reads it; None if that reads this operand.
    """

    data: Tensor
    scale: Tensor | None = None
    wgrad: Operand | None = None

    def select_rows(self, start: int, stop: int) -> Operand:
        """Return the rows from `start` to `stop` of dimension 0, with their scales."""
        scale = self.scale
        if scale is not None and scale.dim():
            scale = scale[start:stop]
        return Operand(self.data[start:stop], scale)

    def for_wgrad(self) -> Operand:
        """Return the operand that the weight's gradient reads, which backward keeps of an input."""
        return self if self.wgrad is None else self.wgrad


def accumulate_mm(target: Tensor, a: Tensor, b: Tensor, overwrite: bool = False) -> None:
    """Compute target [M, N] (float32 or wider) += a [M, K] @ b [K, N], summed in float32 at least.

    With `overwrite` the product replaces target. On CUDA one GEMM with a float32 output does it. A torch without that
    forms the product in a's type, and `dispatch.active` reports it. Elsewhere the product is formed in target's type.
    """
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
            kernels.note("weight gradient", f"GEMM in {a.dtype}, then added ({error})")
        else:
            kernels.wide_gemm = True
            kernels.note("weight gradient", "added in float32 inside the GEMM")
            return
    if kernels.wide_gemm:
        _accumulate_float32(target, a, b, overwrite)
    elif overwrite:
        target.copy_(a @ b)
    else:
        target.add_(a @ b)


def multiply_wide(a: Tensor, b: Tensor) -> Tensor:
    """Return a [M, K] @ b [K, N] in float32 at least. The product is never rounded to the factors' type.

    Factors are converted first only where torch's CUDA GEMM has no float32 result.
    """
    product = a.new_empty(a.shape[0], b.shape[1], dtype=torch.promote_types(a.dtype, torch.float32))
    kernels = CURRENT.get()
    if kernels.wide_gemm is not False:
        accumulate_mm(product, a, b, overwrite=True)  # the first call learns whether the GEMM exists
    if kernels.wide_gemm is False:
        torch.mm(a.to(product.dtype), b.to(product.dtype), out=product)
    return product


def _accumulate_float32(target: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    if overwrite:
        torch.mm(a, b, out_dtype=torch.float32, out=target)
    else:
        torch.addmm(target, a, b, out_dtype=torch.float32, out=target)


class Gemms:
    """GEMMs in the type of their inputs. Activations are [..., I], their gradients [..., O], weights [O, I].

    `out` is filled (or, with `add`, added to) and returned, flattened to rows.
    """

    def prepare_input(self, x: Tensor, weight: Tensor, amax: Any = None, for_gather: bool = False) -> Operand:
        """Return x as `forward` and `accumulate_wgrad` read it.

        Args:
            amax: amax of x, if its producer collected it.
            for_gather: x holds whole rows of this rank's part of the sequence, which tensor-parallel ranks gather.
                Otherwise it holds this rank's columns of every row.
        """
        return Operand(x)

    def prepare_gradient(self, dy: Tensor, weight: Tensor, for_gather: bool = False) -> Operand:
        """Return dy as `dgrad` and `accumulate_wgrad` read it, or with `for_gather` as ranks gather it."""
        return Operand(dy)

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """Compute x @ weight.T + bias; with `add` without the bias."""
        if out is None:
            return F.linear(x.data, weight, bias)
        out, rows = out.flatten(0, -2), x.data.flatten(0, -2)
        if add:
            return out.addmm_(rows, weight.t())
        if bias is None:
            return torch.mm(rows, weight.t(), out=out)
        return torch.addmm(bias, rows, weight.t(), out=out)

    def dgrad(self, dy: Operand, weight: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
        """Compute dy @ weight."""
        if out is None:
            return torch.matmul(dy.data, weight)
        out, rows = out.flatten(0, -2), dy.data.flatten(0, -2)
        return out.addmm_(rows, weight) if add else torch.mm(rows, weight, out=out)

    def accumulate_wgrad(self, main_grad: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        """Add wgrad dy.T @ x to main_grad [O, I], float32 or wider, or overwrite it.

        Args:
            dy, x: as `Operand.for_wgrad` returns them.
        """
        accumulate_mm(main_grad, dy.data.flatten(0, -2).t(), x.data.flatten(0, -2), overwrite)
