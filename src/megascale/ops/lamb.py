"""LAMB (You et al. 2020, Algorithm 2) on a flat shard, in two passes around the caller's all-reduce.

Pass 1 makes Adam's direction and the sums of squares of weights and directions, one pair a logical tensor. The
caller sums the pairs over the ranks that share a tensor. Pass 2 applies the direction times the trust ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.adamw import adam_moments_, correction
from megascale.ops.segments import Segments, square_sums


def lamb_direction_reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    update: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int | Tensor,
    segments: Segments,
    bias_correction: bool = True,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """Plain PyTorch of `lamb_direction`."""
    wide = master.dtype
    for row in segments.rows:
        part = slice(row.start, row.stop)
        m, v = exp_avg[part].clone(), exp_avg_sq[part].clone()
        adam_moments_(m, v, grad[part], beta1, beta2, grad_scale)
        c1, c2 = (correction(beta1, step), correction(beta2, step)) if bias_correction else (1.0, 1.0)
        direction = (m / c1).to(wide) / ((v / c2).to(wide).sqrt() + eps)
        if row.decay:
            direction = direction + weight_decay * master[part]
        for target, new in ((exp_avg, m), (exp_avg_sq, v)):
            target[part] = new if skip is None else torch.where(skip.bool(), target[part], new)
        update[part] = direction.to(update.dtype)
    return torch.stack((square_sums(master, segments), square_sums(update, segments)))


def lamb_apply_reference(
    master: Tensor,
    update: Tensor,
    param_out: Tensor | None,
    sums: Tensor,
    *,
    lr: float | Tensor,
    trust_min: float,
    trust_max: float,
    segments: Segments,
    skip: Tensor | None = None,
) -> None:
    """Plain PyTorch of `lamb_apply`."""
    ratio = trust_ratio(sums, trust_min, trust_max).to(master.dtype)
    for row in segments.rows:
        part = slice(row.start, row.stop)
        new = master[part] - lr * ratio[row.tensor] * update[part].to(master.dtype)
        master[part] = new if skip is None else torch.where(skip.bool(), master[part], new)
        if param_out is not None:
            param_out[part] = master[part].to(param_out.dtype)


def trust_ratio(sums: Tensor, trust_min: float, trust_max: float) -> Tensor:
    """clamp(||w||, trust_min, trust_max) / ||u|| of each tensor, 1 where either norm is 0; sums [2, tensors]."""
    weight, update = sums.sqrt()
    ratio = weight.clamp(trust_min, trust_max) / update.where(update > 0, 1)
    return ratio.where((weight > 0) & (update > 0), 1)


def lamb_direction(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    update: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int | Tensor,
    segments: Segments,
    bias_correction: bool = True,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """Pass 1: moments in place, update [n] <- m^ / (sqrt(v^) + eps) + weight_decay w (decaying segments).

    Returns float64 sums of squares [2, tensors]: row 0 of the weights, row 1 of the updates, of this shard only.
    update may be `grad` itself when that is float32. Other arguments as `ops.adamw.adamw_apply`.
    """
    return lamb_direction_reference(
        master,
        exp_avg,
        exp_avg_sq,
        grad,
        update,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        segments=segments,
        bias_correction=bias_correction,
        grad_scale=grad_scale,
        skip=skip,
    )


def lamb_apply(
    master: Tensor,
    update: Tensor,
    param_out: Tensor | None,
    sums: Tensor,
    *,
    lr: float | Tensor,
    trust_min: float,
    trust_max: float,
    segments: Segments,
    skip: Tensor | None = None,
) -> None:
    """Pass 2: master <- master - lr x trust ratio x update, and param_out from it.

    sums: `lamb_direction`'s, summed over every rank that holds a part of the tensors. The ratio is
    clamp(||w||, trust_min, trust_max) / ||u||, and 1 where either norm is 0. No host synchronisation.
    """
    lamb_apply_reference(
        master,
        update,
        param_out,
        sums,
        lr=lr,
        trust_min=trust_min,
        trust_max=trust_max,
        segments=segments,
        skip=skip,
    )
