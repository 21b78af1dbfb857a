"""The three GEMMs of a linear layer y = x @ weight.T + bias: forward, dgrad (of the input) and wgrad (of the weight).

`ComputeType` does them in the type that its inputs have, with the weight's gradient added in float32 inside the GEMM.
What does them otherwise, in float8 say, is another `Gemms` (parallel/linear.py chooses).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale.ops.dispatch import CURRENT

# A matrix as GEMMs read it. The first tensor has a row for each token: that one travels between tensor-parallel ranks.
# The others, such as a scale, hold for all rows.
Operand = tuple[Tensor, ...]


def accumulate_mm(target: Tensor, a: Tensor, b: Tensor, overwrite: bool = False) -> None:
    """target [M, N] (float32 or wider) += a [M, K] @ b [K, N], summed in float32 at least; = where `overwrite`,
    whatever target holds.

    On CUDA one GEMM with a float32 output does it (a torch without that forms the result in a's type, and
    `dispatch.active` says so); elsewhere the result is formed in target's type.
    """
    if not (target.is_cuda and target.dtype == torch.float32) or target.dtype == a.dtype:
        a, b = a.to(target.dtype), b.to(target.dtype)
        if overwrite:
            torch.mm(a, b, out=target)
        else:
            target.addmm_(a, b)
    elif (kernels := CURRENT.get()).wide_gemm:
        _add_float32(target, a, b, overwrite)
    elif kernels.wide_gemm is None:
        try:
            _add_float32(target, a, b, overwrite)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            kernels.wide_gemm = False
            kernels.note("weight gradient", f"GEMM in {a.dtype}, then added ({error})")
            _write_or_add(target, a @ b, overwrite)
        else:
            kernels.wide_gemm = True
            kernels.note("weight gradient", "added in float32 inside the GEMM")
    else:
        _write_or_add(target, a @ b, overwrite)


def _write_or_add(target: Tensor, value: Tensor, overwrite: bool) -> None:
    if overwrite:
        target.copy_(value)
    else:
        target.add_(value)


def _add_float32(target: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    if overwrite:
        torch.mm(a, b, out_dtype=torch.float32, out=target)
    else:
        torch.addmm(target, a, b, out_dtype=torch.float32, out=target)


class Gemms(Protocol):
    """How the GEMMs of a linear layer are done. Activations are [..., I], their gradients [..., O], weights [O, I].

    `out`, where given, is filled (or, with `add`, added to) and returned, flattened to rows.
    """

    def prepare_input(self, x: Tensor, weight: Tensor, given: Any = None, travels: bool = False) -> Operand:
        """x as `forward` and `accumulate` read it. given: what x's producer knows of it, such as its amax. travels:
        it is a part of what tensor-parallel ranks gather."""
        ...

    def gradient(self, dy: Tensor, weight: Tensor, travels: bool = False) -> Operand:
        """dy as `dgrad` and `accumulate` read it."""
        ...

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """x @ weight.T + bias. A bias is not added to what `add` adds."""
        ...

    def dgrad(self, dy: Operand, weight: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
        """dy @ weight."""
        ...

    def accumulate(self, main: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        """wgrad: dy.T @ x is added to main [O, I], float32 or wider, or written there, whatever it holds."""
        ...


class ComputeType:
    """GEMMs in the type of their inputs."""

    def input(self, x: Tensor, weight: Tensor, given: Any = None, travels: bool = False) -> Operand:
        """See Gemms."""
        return (x,)

    def gradient(self, dy: Tensor, weight: Tensor, travels: bool = False) -> Operand:
        """See Gemms."""
        return (dy,)

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """See Gemms."""
        if out is None:
            return F.linear(x[0], weight, bias)
        out, rows = flat(out), flat(x[0])
        if add:
            return out.addmm_(rows, weight.t())
        if bias is None:
            return torch.mm(rows, weight.t(), out=out)
        return torch.addmm(bias, rows, weight.t(), out=out)

    def dgrad(self, dy: Operand, weight: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
        """See Gemms."""
        if out is None:
            return torch.matmul(dy[0], weight)
        out, rows = flat(out), flat(dy[0])
        return out.addmm_(rows, weight) if add else torch.mm(rows, weight, out=out)

    def accumulate(self, main: Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        """See Gemms."""
        accumulate_mm(main, flat(dy[0]).t(), flat(x[0]), overwrite)


def flat(x: Tensor) -> Tensor:
    """x [..., C] as rows."""
    return x.flatten(0, -2)
