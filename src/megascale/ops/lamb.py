"""LAMB updates of flat shards (You et al. 2020, Algorithm 2), in two passes.

The first pass computes Adam's direction and two sums per logical tensor: the squares of its weights and of its
directions. The caller sums them over the ranks that share a tensor. The second pass applies the direction times the
trust ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.adam import (
    Coefficients,
    compute_bias_corrections,
    compute_direction_reference,
    launch_adam,
    load_apply_flag,
    subtract_update_reference,
)
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
    """Compute `lamb_direction` in plain PyTorch."""
    corrections = compute_bias_corrections(beta1, beta2, step, bias_correction)
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
        subtract_update_reference(master, param_out, segment, lr * ratio[segment.tensor_index] * direction, skip)


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
    if load_apply_flag(skip_ptr, HAS_SKIP) != 0:
        if (low == 0) & (high == TILE):
            _lamb_apply_tile(w_ptr + base, update_ptr + base, out_ptr, low, high, rate, HAS_OUT, TILE, True)
        else:
            _lamb_apply_tile(w_ptr + base, update_ptr + base, out_ptr, low, high, rate, HAS_OUT, TILE, False)


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
    launch_adam(
        master,
        exp_avg,
        exp_avg_sq,
        grad,
        update,
        partial,
        lr=0.0,
        coefficients=Coefficients(beta1, beta2, eps, weight_decay),
        corrections=compute_bias_corrections(beta1, beta2, step, bias_correction),
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
