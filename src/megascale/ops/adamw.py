"""AdamW (Loshchilov and Hutter 2019) on a flat shard: one pass over master weights, moments and gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale.ops.dispatch import jit, tl, use_fused
from megascale.ops.segments import TILE, Segments, load_tile, read_tile, store_tile


def adam_moments_(
    exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, beta1: float, beta2: float, grad_scale: Tensor | None
) -> None:
    """exp_avg and exp_avg_sq <- moving averages of grad x grad_scale and its square."""
    scaled = grad.to(exp_avg.dtype) if grad_scale is None else grad.to(exp_avg.dtype) * grad_scale.to(exp_avg.dtype)
    exp_avg.lerp_(scaled, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)


def correction(beta: float, step: int | Tensor) -> Any:
    """1 - beta^step: what a moving average that began at zero lacks after `step` updates; float or 0-d float64."""
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
    for row in segments.rows:
        part = slice(row.start, row.stop)
        w, m, v = master[part].clone(), exp_avg[part].clone(), exp_avg_sq[part].clone()
        adam_moments_(m, v, grad[part], beta1, beta2, grad_scale)
        direction = (m / correction(beta1, step)) / ((v / correction(beta2, step)).sqrt() + eps)
        decay = weight_decay if row.decay else 0.0
        w = w - lr * (direction + decay * w)
        for target, new in ((master, w), (exp_avg, m), (exp_avg_sq, v)):
            target[part] = new if skip is None else torch.where(skip.bool(), target[part], new)
        if param_out is not None:
            param_out[part] = master[part].to(param_out.dtype)


@jit
def is_live(skip_ptr, HAS_SKIP: tl.constexpr):
    """Whether this step counts: 0 where the caller's flag says that it is to be skipped."""
    live = 1
    if HAS_SKIP:
        live = tl.where(tl.load(skip_ptr) != 0, 0, 1)
    return live


@jit
def read_hyper(hyper_ptr, lr, c1, c2, ON_DEVICE: tl.constexpr):
    """Learning rate and the two bias corrections, from the arguments or from the device."""
    if ON_DEVICE:
        lr = tl.load(hyper_ptr).to(tl.float32)
        c1 = tl.load(hyper_ptr + 1).to(tl.float32)
        c2 = tl.load(hyper_ptr + 2).to(tl.float32)
    return lr, c1, c2


@jit
def adam_tile(m_ptr, v_ptr, grad_ptr, offset, low, high, scale, beta1, beta2, c1, c2, eps, FULL: tl.constexpr):
    """Update the moments of one tile in place; returns Adam's direction."""
    grad = load_tile(grad_ptr, offset, low, high, FULL) * scale
    m = load_tile(m_ptr, offset, low, high, FULL)
    v = load_tile(v_ptr, offset, low, high, FULL)
    m += (1.0 - beta1) * (grad - m)
    v = beta2 * v + (1.0 - beta2) * grad * grad
    store_tile(m_ptr, offset, m, low, high, FULL)
    store_tile(v_ptr, offset, v, low, high, FULL)
    return (m / c1) / (tl.sqrt(v / c2) + eps)


@jit
def _adamw_tile(
    w_ptr,
    m_ptr,
    v_ptr,
    grad_ptr,
    out_ptr,
    base,
    low,
    high,
    scale,
    lr,
    beta1,
    beta2,
    c1,
    c2,
    eps,
    decay,
    HAS_OUT: tl.constexpr,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
):
    offset = tl.arange(0, TILE)
    u = adam_tile(
        m_ptr + base, v_ptr + base, grad_ptr + base, offset, low, high, scale, beta1, beta2, c1, c2, eps, FULL
    )
    w = load_tile(w_ptr + base, offset, low, high, FULL)
    w -= lr * (u + decay * w)
    store_tile(w_ptr + base, offset, w, low, high, FULL)
    if HAS_OUT:
        store_tile(out_ptr + base, offset, w, low, high, FULL)


@jit
def _adamw_kernel(
    w_ptr,
    m_ptr,
    v_ptr,
    grad_ptr,
    out_ptr,
    tile_ptr,
    scale_ptr,
    skip_ptr,
    hyper_ptr,
    lr,
    c1,
    c2,
    beta1,
    beta2,
    eps,
    weight_decay,
    HAS_OUT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HYPER_ON_DEVICE: tl.constexpr,
    TILE: tl.constexpr,
):
    base, low, high, decays, _ = read_tile(tile_ptr)
    lr, c1, c2 = read_hyper(hyper_ptr, lr, c1, c2, HYPER_ON_DEVICE)
    scale = 1.0
    if HAS_SCALE:
        scale = tl.load(scale_ptr).to(tl.float32)
    decay = weight_decay * decays
    if is_live(skip_ptr, HAS_SKIP) != 0:
        if (low == 0) & (high == TILE):
            _adamw_tile(
                w_ptr,
                m_ptr,
                v_ptr,
                grad_ptr,
                out_ptr,
                base,
                low,
                high,
                scale,
                lr,
                beta1,
                beta2,
                c1,
                c2,
                eps,
                decay,
                HAS_OUT,
                TILE,
                True,
            )
        else:
            _adamw_tile(
                w_ptr,
                m_ptr,
                v_ptr,
                grad_ptr,
                out_ptr,
                base,
                low,
                high,
                scale,
                lr,
                beta1,
                beta2,
                c1,
                c2,
                eps,
                decay,
                HAS_OUT,
                TILE,
                False,
            )


def device_hyper(
    lr: float | Tensor, step: int | Tensor, beta1: float, beta2: float, corrected: bool, device: torch.device
) -> tuple[Tensor | None, float, float, float]:
    """(tensor [lr, 1 - beta1^step, 1 - beta2^step] or None, and the same as numbers where they are numbers)."""
    c1, c2 = (correction(beta1, step), correction(beta2, step)) if corrected else (1.0, 1.0)
    if not isinstance(lr, Tensor) and not isinstance(step, Tensor):
        return None, lr, c1, c2
    numbers = [v if isinstance(v, Tensor) else torch.full((), v, device=device) for v in (lr, c1, c2)]
    return torch.stack([v.double().reshape(()) for v in numbers]), 0.0, 1.0, 1.0


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
    if not (segments.rows and use_fused("adamw", master, exp_avg, exp_avg_sq, grad, param_out)):
        return adamw_apply_reference(
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
    hyper, lr_number, c1, c2 = device_hyper(lr, step, beta1, beta2, True, master.device)
    tiles = segments.tiles
    _adamw_kernel[(tiles.shape[0],)](
        *(master, exp_avg, exp_avg_sq, grad, param_out, tiles, grad_scale, skip, hyper),
        *(lr_number, c1, c2, beta1, beta2, eps, weight_decay),
        HAS_OUT=param_out is not None,
        HAS_SCALE=grad_scale is not None,
        HAS_SKIP=skip is not None,
        HYPER_ON_DEVICE=hyper is not None,
        TILE=TILE,
        num_warps=8,
    )
