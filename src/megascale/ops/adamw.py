"""AdamW (Loshchilov and Hutter 2019) on a flat shard: one pass over master weights, moments and gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.segments import Segments


def adam_moments_(
    exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, beta1: float, beta2: float, grad_scale: Tensor | None
) -> None:
    """exp_avg and exp_avg_sq <- moving averages of grad x grad_scale and its square."""
    scaled = grad.to(exp_avg.dtype) if grad_scale is None else grad.to(exp_avg.dtype) * grad_scale.to(exp_avg.dtype)
    exp_avg.lerp_(scaled, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)


def correction(beta: float, step: int | Tensor) -> float | Tensor:
    """1 - beta^step: what a moving average that began at zero lacks after `step` updates."""
    if isinstance(step, Tensor):
        return 1 - torch.full((), beta, dtype=torch.float64, device=step.device) ** step
    return 1 - beta**step


def adamw_apply_reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param_out: Tensor | None,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int | Tensor,
    segments: Segments,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Plain PyTorch of `adamw_apply`, in master's type (float64 for differential tests)."""
    wide = master.dtype
    for row in segments.rows:
        part = slice(row.start, row.stop)
        w, m, v = master[part].clone(), exp_avg[part].clone(), exp_avg_sq[part].clone()
        adam_moments_(m, v, grad[part], beta1, beta2, grad_scale)
        direction = (m / correction(beta1, step)).to(wide) / ((v / correction(beta2, step)).to(wide).sqrt() + eps)
        decay = weight_decay if row.decay else 0.0
        w = w - lr * (direction + decay * w)
        for target, new in ((master, w), (exp_avg, m), (exp_avg_sq, v)):
            target[part] = new if skip is None else torch.where(skip.bool(), target[part], new)
        if param_out is not None:
            param_out[part] = master[part].to(param_out.dtype)


def adamw_apply(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param_out: Tensor | None,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int | Tensor,
    segments: Segments,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """One AdamW step on flat shards, in place: w <- w - lr (m^ / (sqrt(v^) + eps) + weight_decay w).

    master, exp_avg, exp_avg_sq: [n] float32 (float64 in tests); grad: [n], any float type; param_out: [n], the
    weights in use (bfloat16), written from master, or None. weight_decay acts on the segments that ask for it.
    lr and step (1 at the first update) may be 0-d device tensors, so that a captured graph follows them.
    grad_scale: 0-d device tensor that multiplies grad (clipping), or None. skip: 0-d device tensor; where it is
    not 0 nothing changes (a step whose gradients are not finite). No host synchronisation.
    """
    adamw_apply_reference(
        master,
        exp_avg,
        exp_avg_sq,
        grad,
        param_out,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        segments=segments,
        grad_scale=grad_scale,
        skip=skip,
    )
