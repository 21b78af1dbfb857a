"""Optimizer updates on flat shards: AdamW, LAMB, and Muon's Newton-Schulz iteration.

AdamW (Loshchilov and Hutter 2019) is one pass over master weights, moments and gradient. LAMB (You et al. 2020,
Algorithm 2) is two passes. The first pass computes Adam's direction and two sums per logical tensor: the squares of its
weights and of its directions. The caller sums them over the ranks that share a tensor. The second pass applies the
direction times the trust ratio.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale.ops.dispatch import jit, tl, use_fused
from megascale.ops.segments import (
    TILE,
    Segment,
    Segments,
    load_tile,
    read_tile,
    square_sums_reference,
    store_tile,
    sums_by_tensor,
)

# Coefficients of the Newton-Schulz iteration a x + b x^3 + c x^5 (Jordan et al. 2024).
NEWTON_SCHULZ_A = 3.4445
NEWTON_SCHULZ_B = -4.7750
NEWTON_SCHULZ_C = 2.0315


def compute_bias_correction(beta: float, step: int | Tensor) -> Any:
    """Return 1 - beta^step, by which a moving average that began with 0 is divided; float or 0-d float64 tensor."""
    if isinstance(step, Tensor):
        return 1 - torch.full((), beta, dtype=torch.float64, device=step.device) ** step
    return 1 - beta**step


def _compute_bias_corrections(
    beta1: float, beta2: float, step: int | Tensor, is_enabled: bool = True
) -> tuple[Any, Any]:
    """Return the bias corrections of the first and the second moment; 1 each if disabled."""
    if not is_enabled:
        return 1.0, 1.0
    return compute_bias_correction(beta1, step), compute_bias_correction(beta2, step)


def _adam_direction_reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    segment: Segment,
    *,
    beta1: float,
    beta2: float,
    corrections: tuple[Any, Any],
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None,
    skip: Tensor | None,
) -> Tensor:
    """Update the moments of one segment. Return Adam's direction, plus weight decay if it applies to the segment."""
    elements = slice(segment.start, segment.stop)
    scaled_grad = grad[elements].to(exp_avg.dtype)
    if grad_scale is not None:
        scaled_grad = scaled_grad * grad_scale.to(exp_avg.dtype)
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
    corrections = _compute_bias_corrections(beta1, beta2, step)
    for segment in segments.ranges:
        direction = _adam_direction_reference(
            master,
            exp_avg,
            exp_avg_sq,
            grad,
            segment,
            beta1=beta1,
            beta2=beta2,
            corrections=corrections,
            eps=eps,
            weight_decay=weight_decay,
            grad_scale=grad_scale,
            skip=skip,
        )
        _apply_reference(master, param_out, segment, lr * direction, skip)


def _apply_reference(
    master: Tensor, param_out: Tensor | None, segment: Segment, update: Tensor, skip: Tensor | None
) -> None:
    """Subtract the update of one segment from the weights."""
    elements = slice(segment.start, segment.stop)
    _assign(master[elements], master[elements] - update, skip)
    if param_out is not None:
        param_out[elements] = master[elements].to(param_out.dtype)


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
    """Compute `lamb_direction` in plain PyTorch."""
    corrections = _compute_bias_corrections(beta1, beta2, step, bias_correction)
    for segment in segments.ranges:
        direction = _adam_direction_reference(
            master,
            exp_avg,
            exp_avg_sq,
            grad,
            segment,
            beta1=beta1,
            beta2=beta2,
            corrections=corrections,
            eps=eps,
            weight_decay=weight_decay,
            grad_scale=grad_scale,
            skip=skip,
        )
        update[segment.start : segment.stop] = direction.to(update.dtype)
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
    """Compute `lamb_apply` in plain PyTorch."""
    ratio = trust_ratio(sums, trust_min, trust_max).to(master.dtype)
    for segment in segments.ranges:
        direction = update[segment.start : segment.stop].to(master.dtype)
        _apply_reference(master, param_out, segment, lr * ratio[segment.tensor_index] * direction, skip)


def trust_ratio(sums: Tensor, trust_min: float, trust_max: float) -> Tensor:
    """Return clamp(||w||, trust_min, trust_max) / ||u|| of each tensor, or 1 where either norm is 0.

    The clamp is phi in Algorithm 2 of You et al., who use the identity in training (bounds 0 and infinity).

    Args:
        sums: sums of squares of weights w (row 0) and updates u (row 1) [2, tensors].
    """
    weight_norm, update_norm = sums.sqrt()
    ratio = weight_norm.clamp(trust_min, trust_max) / update_norm.where(update_norm > 0, 1)
    return ratio.where((weight_norm > 0) & (update_norm > 0), 1)


@jit
def _load_apply_flag(skip_ptr, HAS_SKIP: tl.constexpr):
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

    out_ptr: AdamW's weights in use, or LAMB's direction. partial_ptr: sums of squares per tile, of weights and then of
    directions (LAMB). hyper_ptr: lr, c1 and c2, if they are on the device. For other names see `_adam_tile`.
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
    if _load_apply_flag(skip_ptr, HAS_SKIP) != 0:
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


@jit
def _lamb_apply_tile(
    w_ptr, update_ptr, out_ptr, low, high, rate, HAS_OUT: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr
):
    offset = tl.arange(0, TILE)
    w = load_tile(w_ptr, offset, low, high, FULL)
    w -= rate * load_tile(update_ptr, offset, low, high, FULL)
    store_tile(w_ptr, offset, w, low, high, FULL)
    if HAS_OUT:
        store_tile(out_ptr, offset, w, low, high, FULL)


@jit
def _lamb_apply_kernel(
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
    weight_norm = tl.sqrt(tl.load(sums_ptr + tensor).to(tl.float32))
    update_norm = tl.sqrt(tl.load(sums_ptr + tensors + tensor).to(tl.float32))
    bounded_norm = tl.minimum(tl.maximum(weight_norm, trust_min), trust_max)
    # The trust ratio of a tensor with a norm of 0 is 1.
    are_positive = (weight_norm > 0.0) & (update_norm > 0.0)
    rate = lr * tl.where(are_positive, bounded_norm / tl.where(are_positive, update_norm, 1.0), 1.0)
    if HAS_OUT:
        out_ptr += base
    if _load_apply_flag(skip_ptr, HAS_SKIP) != 0:
        if (low == 0) & (high == TILE):
            _lamb_apply_tile(w_ptr + base, update_ptr + base, out_ptr, low, high, rate, HAS_OUT, TILE, True)
        else:
            _lamb_apply_tile(w_ptr + base, update_ptr + base, out_ptr, low, high, rate, HAS_OUT, TILE, False)


def _make_device_scalar(number: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as a 0-d float64 tensor on the device."""
    if not isinstance(number, Tensor):
        number = torch.full((), number, device=device)
    return number.double().reshape(())


def _launch_adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    partial: Tensor | None,
    *,
    lr: float | Tensor,
    corrections: tuple[Any, Any],
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
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
        beta1,
        beta2,
        eps,
        weight_decay,
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
    _launch_adam(
        master,
        exp_avg,
        exp_avg_sq,
        grad,
        param_out,
        None,
        lr=lr,
        corrections=_compute_bias_corrections(beta1, beta2, step),
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        segments=segments,
        grad_scale=grad_scale,
        skip=skip,
    )


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
    """Run LAMB's first pass: update the moments, and write update [n] <- m^ / (sqrt(v^) + eps) + weight_decay w.

    The other arguments are those of `adamw_apply`. `update` may be `grad` if `grad` is float32. In a skipped step
    `update` and the result are undefined.

    Returns:
        float64 sums of squares [2, tensors] of this shard: row 0 of the weights, row 1 of the updates.
    """
    if not (segments.ranges and use_fused("lamb", master, exp_avg, exp_avg_sq, grad, update)):
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
    partial = torch.empty((2, segments.tiles.shape[0]), dtype=torch.float32, device=master.device)
    _launch_adam(
        master,
        exp_avg,
        exp_avg_sq,
        grad,
        update,
        partial,
        lr=0.0,
        corrections=_compute_bias_corrections(beta1, beta2, step, bias_correction),
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        segments=segments,
        grad_scale=grad_scale,
        skip=skip,
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
    """Run LAMB's second pass: master <- master - lr x trust ratio x update, and copy the weights to param_out.

    The ratio is that of `trust_ratio`. The host does not wait for the device.

    Args:
        sums: result of `lamb_direction`, summed over all ranks that hold a part of the tensors.
    """
    if not (segments.ranges and use_fused("lamb", master, update, param_out)):
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
        return
    is_on_device = isinstance(lr, Tensor)
    tiles = segments.tiles
    _lamb_apply_kernel[(tiles.shape[0],)](
        master,
        update,
        param_out,
        tiles,
        sums,
        skip,
        lr if is_on_device else None,
        0.0 if is_on_device else lr,
        trust_min,
        trust_max,
        segments.tensor_count,
        HAS_OUT=param_out is not None,
        HAS_SKIP=skip is not None,
        LR_ON_DEVICE=is_on_device,
        TILE=TILE,
        num_warps=8,
    )


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Return approximately U V^T for each matrix U S V^T (singular value decomposition). A zero matrix stays zero.

    Each step applies a x + b x^3 + c x^5 to the singular values by three batched GEMMs in x's type (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/). These coefficients raise small singular values in few steps, which end
    between about 0.7 and 1.2 instead of at 1.

    Args:
        x: matrices [k, m, n] with m <= n.

    Raises ValueError if m > n.
    """
    if x.shape[-2] > x.shape[-1]:
        raise ValueError(f"matrices of {tuple(x.shape[-2:])} are tall: transpose them, so that x x^T is the small one")
    # Divide by the Frobenius norm, so that no singular value exceeds 1.
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=NEWTON_SCHULZ_B, alpha=NEWTON_SCHULZ_C)
        x = torch.baddbmm(x, polynomial, x, beta=NEWTON_SCHULZ_A)
    return x
