"""AdamW updates of flat shards, and Adam's direction, which LAMB uses too (lamb.py).

AdamW (Loshchilov and Hutter 2019) is one pass over master weights, moments and gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale.ops.dispatch import jit, tl, use_fused
from megascale.ops.segments import TILE, Segment, Segments, load_tile, read_tile, store_tile


class Coefficients(NamedTuple):
    """Settings of Adam's direction (Kingma and Ba 2015) and of decoupled weight decay."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def compute_bias_correction(beta: float, step: int | Tensor) -> Any:
    """Return 1 - beta^step, by which a moving average that began with 0 is divided; float or 0-d float64 tensor."""
    if isinstance(step, Tensor):
        return 1 - torch.full((), beta, dtype=torch.float64, device=step.device) ** step
    return 1 - beta**step


def compute_bias_corrections(
    beta1: float, beta2: float, step: int | Tensor, is_enabled: bool = True
) -> tuple[Any, Any]:
    """Return the bias corrections of the first and the second moment; 1 each if disabled."""
    if not is_enabled:
        return 1.0, 1.0
    return compute_bias_correction(beta1, step), compute_bias_correction(beta2, step)


def compute_direction_reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    segment: Segment,
    *,
    coefficients: Coefficients,
    corrections: tuple[Any, Any],
    grad_scale: Tensor | None,
    skip: Tensor | None,
) -> Tensor:
    """Update the moments of one segment. Return Adam's direction, plus weight decay if it applies to the segment."""
    elements = slice(segment.start, segment.stop)
    scaled_grad = grad[elements].to(exp_avg.dtype)
    if grad_scale is not None:
        scaled_grad = scaled_grad * grad_scale.to(exp_avg.dtype)
    beta1, beta2, eps, weight_decay = coefficients
    m = exp_avg[elements].lerp(scaled_grad, 1 - beta1)
    v = (exp_avg_sq[elements] * beta2).addcmul_(scaled_grad, scaled_grad, value=1 - beta2)
    _assign(exp_avg[elements], m, skip)
    _assign(exp_avg_sq[elements], v, skip)
    direction = (m / corrections[0]) / ((v / corrections[1]).sqrt() + eps)
    if segment.decay:
        direction = direction + weight_decay * master[elements]
    return direction


def _assign(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    """Copy value into target, unless `skip` is true."""
    target.copy_(value if skip is None else torch.where(skip.bool(), target, value))


def subtract_update_reference(
    master: Tensor, param_out: Tensor | None, segment: Segment, update: Tensor, skip: Tensor | None
) -> None:
    """Subtract the update of one segment from the weights."""
    elements = slice(segment.start, segment.stop)
    _assign(master[elements], master[elements] - update, skip)
    if param_out is not None:
        param_out[elements] = master[elements].to(param_out.dtype)


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
    """Compute `adamw_apply` in plain PyTorch, in master's type (float64 for differential tests)."""
    corrections = compute_bias_corrections(beta1, beta2, step)
    coefficients = Coefficients(beta1, beta2, eps, weight_decay)
    for segment in segments.ranges:
        direction = compute_direction_reference(
            master,
            exp_avg,
            exp_avg_sq,
            grad,
            segment,
            coefficients=coefficients,
            corrections=corrections,
            grad_scale=grad_scale,
            skip=skip,
        )
        subtract_update_reference(master, param_out, segment, lr * direction, skip)


@jit
def load_apply_flag(skip_ptr, HAS_SKIP: tl.constexpr):
    """Return 1 if this step is applied, 0 if the flag at `skip_ptr` skips the step."""
    apply_flag = 1
    if HAS_SKIP:
        apply_flag = tl.where(tl.load(skip_ptr) != 0, 0, 1)
    return apply_flag


@jit
def _adam_tile(
    w_ptr,
    m_ptr,
    v_ptr,
    grad_ptr,
    out_ptr,
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
    LAMB: tl.constexpr,
    HAS_OUT: tl.constexpr,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Update the moments of one tile in place, and apply AdamW's step or store LAMB's direction.

    c1 and c2 are the bias corrections, and `decay` is the weight decay of the tile's segment.

    Returns the sums of squares of the tile's weights and directions, for LAMB.
    """
    offset = tl.arange(0, TILE)
    grad = load_tile(grad_ptr, offset, low, high, FULL) * scale
    m = load_tile(m_ptr, offset, low, high, FULL)
    v = load_tile(v_ptr, offset, low, high, FULL)
    m += (1.0 - beta1) * (grad - m)
    v = beta2 * v + (1.0 - beta2) * grad * grad
    store_tile(m_ptr, offset, m, low, high, FULL)
    store_tile(v_ptr, offset, v, low, high, FULL)
    direction = (m / c1) / (tl.sqrt(v / c2) + eps)
    w = load_tile(w_ptr, offset, low, high, FULL)
    direction += decay * w
    if LAMB:
        store_tile(out_ptr, offset, direction, low, high, FULL)
        if not FULL:
            direction = tl.where((offset >= low) & (offset < high), direction, 0.0)
    else:
        w -= lr * direction
        store_tile(w_ptr, offset, w, low, high, FULL)
        if HAS_OUT:
            store_tile(out_ptr, offset, w, low, high, FULL)
    return tl.sum(w * w, 0), tl.sum(direction * direction, 0)


@jit
def _adam_kernel(
    w_ptr,
    m_ptr,
    v_ptr,
    grad_ptr,
    out_ptr,
    tile_ptr,
    partial_ptr,
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
    LAMB: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HYPER_ON_DEVICE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Run AdamW, or LAMB's first pass, on one tile.

    out_ptr: AdamW's weights in use, or LAMB's direction. hyper_ptr: lr, c1 and c2, if they are on the device.
    partial_ptr: LAMB's sums of squares per tile, of weights and then of directions.
    """
    base, low, high, decay_flag, _ = read_tile(tile_ptr)
    if HYPER_ON_DEVICE:
        lr = tl.load(hyper_ptr).to(tl.float32)
        c1 = tl.load(hyper_ptr + 1).to(tl.float32)
        c2 = tl.load(hyper_ptr + 2).to(tl.float32)
    scale = 1.0
    if HAS_SCALE:
        scale = tl.load(scale_ptr).to(tl.float32)
    decay = weight_decay * decay_flag
    w_ptr += base
    m_ptr += base
    v_ptr += base
    grad_ptr += base
    if HAS_OUT:
        out_ptr += base
    weight_sum = 0.0
    direction_sum = 0.0
    if load_apply_flag(skip_ptr, HAS_SKIP) != 0:
        if (low == 0) & (high == TILE):
            weight_sum, direction_sum = _adam_tile(
                w_ptr, m_ptr, v_ptr, grad_ptr, out_ptr, low, high, scale, lr, beta1, beta2, c1, c2, eps, decay,
                LAMB, HAS_OUT, TILE, True,
            )  # fmt: skip
        else:
            weight_sum, direction_sum = _adam_tile(
                w_ptr, m_ptr, v_ptr, grad_ptr, out_ptr, low, high, scale, lr, beta1, beta2, c1, c2, eps, decay,
                LAMB, HAS_OUT, TILE, False,
            )  # fmt: skip
    if LAMB:
        tl.store(partial_ptr + tl.program_id(0), weight_sum)
        tl.store(partial_ptr + tl.program_id(0) + tl.num_programs(0), direction_sum)


def _make_device_scalar(number: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a 0-d float64 tensor on the device."""
    if not isinstance(number, Tensor):
        number = torch.full((), number, device=device)
    return number.double().reshape(())


def launch_adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    partial: Tensor | None,
    *,
    lr: float | Tensor,
    coefficients: Coefficients,
    corrections: tuple[Any, Any],
    segments: Segments,
    grad_scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Launch AdamW, or LAMB's first pass if there is memory for its partial sums, `partial` [2, tiles].

    `out` is AdamW's weights in use, or LAMB's direction.
    """
    c1, c2 = corrections
    hyper: Tensor | None = None
    if isinstance(lr, Tensor) or isinstance(c1, Tensor):
        hyper = torch.stack([_make_device_scalar(number, master.device) for number in (lr, c1, c2)])
        # The kernel reads `hyper` instead of these arguments.
        lr = 0.0
        c1 = c2 = 1.0
    tiles = segments.tiles
    _adam_kernel[(tiles.shape[0],)](
        master,
        exp_avg,
        exp_avg_sq,
        grad,
        out,
        tiles,
        partial,
        grad_scale,
        skip,
        hyper,
        lr,
        c1,
        c2,
        coefficients.beta1,
        coefficients.beta2,
        coefficients.eps,
        coefficients.weight_decay,
        LAMB=partial is not None,
        HAS_OUT=out is not None,
        HAS_SCALE=grad_scale is not None,
        HAS_SKIP=skip is not None,
        HYPER_ON_DEVICE=hyper is not None,
        TILE=TILE,
        num_warps=8,
    )


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
    """Run one AdamW step on flat shards, in place: w <- w - lr (m^ / (sqrt(v^) + eps) + weight_decay w).

    The host does not wait for the device. lr and step may be 0-d device tensors, which a captured CUDA graph reads at
    each replay.

    Args:
        master, exp_avg, exp_avg_sq: [n] float32 (float64 in tests).
        grad: [n], any float type.
        param_out: [n], the weights in use (bfloat16), written from master, or None.
        weight_decay: applies to segments with `decay`.
        step: number of the update, from 1.
        grad_scale: 0-d device tensor by which grad is multiplied (clipping), or None.
        skip: 0-d device tensor; if it is not 0, the step changes nothing.
    """
    if not (segments.ranges and use_fused("adamw", master, exp_avg, exp_avg_sq, grad, param_out)):
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
        return
    launch_adam(
        master,
        exp_avg,
        exp_avg_sq,
        grad,
        param_out,
        None,
        lr=lr,
        coefficients=Coefficients(beta1, beta2, eps, weight_decay),
        corrections=compute_bias_corrections(beta1, beta2, step),
        segments=segments,
        grad_scale=grad_scale,
        skip=skip,
    )
