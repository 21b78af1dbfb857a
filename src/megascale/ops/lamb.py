"""LAMB (You et al. 2020, Algorithm 2) on a flat shard, in two passes around the caller's all-reduce.

Pass 1 makes Adam's direction and the sums of squares of weights and directions, one pair a logical tensor. The
caller sums the pairs over the ranks that share a tensor. Pass 2 applies the direction times the trust ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.adamw import adam_moments_, adam_tile, correction, device_hyper, is_live, read_hyper
from megascale.ops.dispatch import jit, tl, use_fused
from megascale.ops.segments import (
    TILE,
    Segments,
    load_tile,
    read_tile,
    square_sums_reference,
    store_tile,
    sums_by_tensor,
)


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
    for row in segments.rows:
        part = slice(row.start, row.stop)
        m, v = exp_avg[part].clone(), exp_avg_sq[part].clone()
        adam_moments_(m, v, grad[part], beta1, beta2, grad_scale)
        c1, c2 = (correction(beta1, step), correction(beta2, step)) if bias_correction else (1.0, 1.0)
        direction = (m / c1) / ((v / c2).sqrt() + eps)
        if row.decay:
            direction = direction + weight_decay * master[part]
        for target, new in ((exp_avg, m), (exp_avg_sq, v)):
            target[part] = new if skip is None else torch.where(skip.bool(), target[part], new)
        update[part] = direction.to(update.dtype)
    return torch.stack((square_sums_reference(master, segments), square_sums_reference(update, segments)))


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
    """clamp(||w||, trust_min, trust_max) / ||u|| of each tensor, 1 where either norm is 0; sums [2, tensors].

    With bounds of 0 and infinity it is the identity that You et al. train with; their phi of Algorithm 2 allows others.
    """
    weight, update = sums.sqrt()
    ratio = weight.clamp(trust_min, trust_max) / update.where(update > 0, 1)
    return ratio.where((weight > 0) & (update > 0), 1)


@jit
def _direction_tile(
    w_ptr,
    m_ptr,
    v_ptr,
    grad_ptr,
    update_ptr,
    base,
    low,
    high,
    scale,
    beta1,
    beta2,
    c1,
    c2,
    eps,
    decay,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Moments and update of one tile in place; returns the sums of squares of its weights and updates."""
    offset = tl.arange(0, TILE)
    u = adam_tile(
        m_ptr + base, v_ptr + base, grad_ptr + base, offset, low, high, scale, beta1, beta2, c1, c2, eps, FULL
    )
    w = load_tile(w_ptr + base, offset, low, high, FULL)
    u += decay * w
    store_tile(update_ptr + base, offset, u, low, high, FULL)
    if not FULL:
        u = tl.where((offset >= low) & (offset < high), u, 0.0)
    return tl.sum(w * w, 0), tl.sum(u * u, 0)


@jit
def _direction_kernel(
    w_ptr,
    m_ptr,
    v_ptr,
    grad_ptr,
    update_ptr,
    tile_ptr,
    part_ptr,
    scale_ptr,
    skip_ptr,
    hyper_ptr,
    c1,
    c2,
    beta1,
    beta2,
    eps,
    weight_decay,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HYPER_ON_DEVICE: tl.constexpr,
    TILE: tl.constexpr,
):
    base, low, high, decays, _ = read_tile(tile_ptr)
    _, c1, c2 = read_hyper(hyper_ptr, 0.0, c1, c2, HYPER_ON_DEVICE)
    scale = 1.0
    if HAS_SCALE:
        scale = tl.load(scale_ptr).to(tl.float32)
    decay = weight_decay * decays
    to = part_ptr + tl.program_id(0)
    if is_live(skip_ptr, HAS_SKIP) != 0:
        if (low == 0) & (high == TILE):
            weight, update = _direction_tile(
                w_ptr,
                m_ptr,
                v_ptr,
                grad_ptr,
                update_ptr,
                base,
                low,
                high,
                scale,
                beta1,
                beta2,
                c1,
                c2,
                eps,
                decay,
                TILE,
                True,
            )
        else:
            weight, update = _direction_tile(
                w_ptr,
                m_ptr,
                v_ptr,
                grad_ptr,
                update_ptr,
                base,
                low,
                high,
                scale,
                beta1,
                beta2,
                c1,
                c2,
                eps,
                decay,
                TILE,
                False,
            )
        tl.store(to, weight)
        tl.store(to + tl.num_programs(0), update)
    else:
        tl.store(to, 0.0)
        tl.store(to + tl.num_programs(0), 0.0)


@jit
def _apply_tile(
    w_ptr, update_ptr, out_ptr, base, low, high, rate, HAS_OUT: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr
):
    offset = tl.arange(0, TILE)
    w = load_tile(w_ptr + base, offset, low, high, FULL)
    w -= rate * load_tile(update_ptr + base, offset, low, high, FULL)
    store_tile(w_ptr + base, offset, w, low, high, FULL)
    if HAS_OUT:
        store_tile(out_ptr + base, offset, w, low, high, FULL)


@jit
def _apply_kernel(
    w_ptr,
    update_ptr,
    out_ptr,
    tile_ptr,
    sums_ptr,
    skip_ptr,
    lr_ptr,
    lr,
    trust_min,
    trust_max,
    tensors,
    HAS_OUT: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    TILE: tl.constexpr,
):
    base, low, high, _, tensor = read_tile(tile_ptr)
    if LR_ON_DEVICE:
        lr = tl.load(lr_ptr).to(tl.float32)
    weight = tl.sqrt(tl.load(sums_ptr + tensor).to(tl.float32))
    update = tl.sqrt(tl.load(sums_ptr + tensors + tensor).to(tl.float32))
    bounded = tl.minimum(tl.maximum(weight, trust_min), trust_max)
    both = (weight > 0.0) & (update > 0.0)
    rate = lr * tl.where(both, bounded / tl.where(both, update, 1.0), 1.0)
    if is_live(skip_ptr, HAS_SKIP) != 0:
        if (low == 0) & (high == TILE):
            _apply_tile(w_ptr, update_ptr, out_ptr, base, low, high, rate, HAS_OUT, TILE, True)
        else:
            _apply_tile(w_ptr, update_ptr, out_ptr, base, low, high, rate, HAS_OUT, TILE, False)


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
    update may be `grad` itself when that is float32; in a skipped step it and the sums mean nothing. Other
    arguments as `ops.adamw.adamw_apply`.
    """
    if not (segments.rows and use_fused("lamb", master, exp_avg, exp_avg_sq, grad, update)):
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
    hyper, _, c1, c2 = device_hyper(0.0, step, beta1, beta2, bias_correction, master.device)
    tiles = segments.tiles
    partial = torch.empty((2, tiles.shape[0]), dtype=torch.float32, device=master.device)
    _direction_kernel[(tiles.shape[0],)](
        *(master, exp_avg, exp_avg_sq, grad, update, tiles, partial, grad_scale, skip, hyper),
        *(c1, c2, beta1, beta2, eps, weight_decay),
        HAS_SCALE=grad_scale is not None,
        HAS_SKIP=skip is not None,
        HYPER_ON_DEVICE=hyper is not None,
        TILE=TILE,
        num_warps=8,
    )
    return sums_by_tensor(partial, segments)


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
    if not (segments.rows and use_fused("lamb", master, update, param_out)):
        return lamb_apply_reference(
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
    on_device = isinstance(lr, Tensor)
    tiles = segments.tiles
    _apply_kernel[(tiles.shape[0],)](
        *(master, update, param_out, tiles, sums, skip, lr if on_device else None, 0.0 if on_device else lr),
        *(trust_min, trust_max, segments.tensors),
        HAS_OUT=param_out is not None,
        HAS_SKIP=skip is not None,
        LR_ON_DEVICE=on_device,
        TILE=TILE,
        num_warps=8,
    )
