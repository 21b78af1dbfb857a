"""x @ weight.T + bias whose weight gradient accumulates in float32 inside the GEMM.

A parameter may carry `main_grad`, a float32 (or float64) view into a gradient buffer. Then the backward pass
adds the gradient there, hands None to autograd and calls `parameter.grad_ready()` if that attribute is set. Where
`parameter.overwrite_main_grad` is true, `main_grad` holds nothing yet: the GEMM writes it and is not added to zeros,
which saves making them and reading them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale.ops import dispatch, side_stream
from megascale.ops.reduce import bias_gradient, finish

_float32_output: bool | None = None  # whether this torch's CUDA GEMM adds into float32; None until the first call


def accumulate_mm(target: Tensor, a: Tensor, b: Tensor, overwrite: bool = False) -> None:
    """target [M, N] (float32 or wider) += a [M, K] @ b [K, N], summed in float32 at least; = where `overwrite`,
    whatever target holds.

    On CUDA one GEMM with a float32 output does it (a torch without that forms the result in a's type, and
    `dispatch.active` says so); elsewhere the result is formed in target's type.
    """
    global _float32_output
    if not (target.is_cuda and target.dtype == torch.float32) or target.dtype == a.dtype:
        a, b = a.to(target.dtype), b.to(target.dtype)
        torch.mm(a, b, out=target) if overwrite else target.addmm_(a, b)
    elif _float32_output:
        _add_float32(target, a, b, overwrite)
    elif _float32_output is None:
        try:
            _add_float32(target, a, b, overwrite)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            _float32_output = False
            dispatch.note("weight gradient", f"GEMM in {a.dtype}, then added ({error})")
            target.copy_(a @ b) if overwrite else target.add_(a @ b)
        else:
            _float32_output = True
            dispatch.note("weight gradient", "added in float32 inside the GEMM")
    else:
        target.copy_(a @ b) if overwrite else target.add_(a @ b)


def _add_float32(target: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    if overwrite:
        torch.mm(a, b, out_dtype=torch.float32, out=target)
    else:
        torch.addmm(target, a, b, out_dtype=torch.float32, out=target)


def weight_gradient(weight: Tensor, dy: Tensor, x: Tensor | Callable[[], Tensor], after: Any = None) -> Tensor | None:
    """dy [..., O], x [..., I] -> the gradient of weight [O, I], or None where `weight.main_grad` takes it.

    Then it is made on the side stream (ops/side_stream.py), from the event `after` on. x may be a function that waits.
    """
    main = getattr(weight, "main_grad", None)

    def factors() -> tuple[Tensor, Tensor]:
        given = x if isinstance(x, Tensor) else x()
        return dy.reshape(-1, dy.shape[-1]).t(), given.reshape(-1, given.shape[-1])

    if main is None:
        return torch.mm(*factors())
    overwrite = getattr(weight, "overwrite_main_grad", False)
    weight.overwrite_main_grad = False  # type: ignore[attr-defined]  # that it has one says that a GEMM makes its gradient
    side_stream.current.run(lambda: accumulate_mm(main, *factors(), overwrite), after)
    finish(weight)
    return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias = weight, bias  # the parameters themselves carry main_grad
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0]
        ready = side_stream.current.record_event()
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dw = weight_gradient(ctx.weight, dy, x, ready) if ctx.needs_input_grad[1] else None
        db = bias_gradient(ctx.bias, dy) if ctx.needs_input_grad[2] else None
        return dx, dw, db


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., I] @ weight [O, I].T + bias [O] -> [..., O]; gradients go to `main_grad` where a parameter has it."""
    if hasattr(weight, "main_grad") or (bias is not None and hasattr(bias, "main_grad")):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)
