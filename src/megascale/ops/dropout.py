"""Dropout whose mask is a pure function of (key, global sequence, sample and hidden index): Philox 4x32-10.

Every layout (sequence shards, micro-batches, data-parallel ranks) draws the mask that one process would draw, on
CPU and CUDA, bit for bit; nothing is stored between forward and backward. Salmon et al. 2011.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.reduce import flat_rows, split_rows, sum_parts

KEY_BITS = 62  # a key is two 31-bit words, so that no integer type depends on its value
_WORD = 0xFFFFFFFF
_RESOLUTION = 24  # bits of a draw that are compared with p

BLOCK_ROWS, BLOCK_COLUMNS = 4, 1024
PROGRAMS = 1056  # about eight an SM of a large GPU


def dropout_key(*parts: int) -> int:
    """One key of KEY_BITS bits from integers such as (seed, step, layer, site); splitmix64 over the parts."""
    state = 0
    for part in parts:
        state = (state ^ (part & ((1 << 64) - 1))) + 0x9E3779B97F4A7C15 & ((1 << 64) - 1)
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & ((1 << 64) - 1)
        state = (state ^ state >> 27) * 0x94D049BB133111EB & ((1 << 64) - 1)
        state ^= state >> 31
    return state >> (64 - KEY_BITS)


def _mulhilo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a x b for 32-bit values held in int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _WORD


def philox(c0: Tensor, c1: Tensor, c2: Tensor, key: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 of counter (c0, c1, c2, 0) as four 32-bit draws in int64; counters broadcast."""
    k0, k1 = key & 0x7FFFFFFF, key >> 31
    c3 = torch.zeros_like(c0)
    for _ in range(10):
        high_a, low_a = _mulhilo(0xD2511F53, c0)
        high_b, low_b = _mulhilo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def keep_mask_reference(
    shape: torch.Size,
    p: float,
    key: int | Tensor,
    sequence_start: int,
    sample_start: int | Tensor,
    device: torch.device,
) -> Tensor:
    """True where an element of [sequence, batch, hidden] stays."""
    S, B, H = shape
    s = (torch.arange(S, device=device) + sequence_start)[:, None, None]
    b = (torch.arange(B, device=device) + sample_start)[None, :, None] & _WORD
    h = torch.arange(-(-H // 4), device=device)[None, None, :]
    c0, c1, c2 = torch.broadcast_tensors(h, b, s)
    draws = torch.stack(philox(c0, c1, c2, key), dim=-1).flatten(-2)[..., :H]
    return (draws >> (32 - _RESOLUTION)) >= round(p * (1 << _RESOLUTION))


def _masked(x: Tensor, p: float, key: int | Tensor, sequence_start: int, sample_start: int | Tensor) -> Tensor:
    keep = keep_mask_reference(x.shape, p, key, sequence_start, sample_start, x.device)
    return torch.where(keep, x * (1 / (1 - p)), 0)


@torch_private.call_directly
class _DropoutReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *draw: Any) -> Tensor:
        ctx.draw = draw
        return _masked(x, *draw)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _masked(grads[0], *ctx.draw), None, None, None, None


@jit(do_not_specialize=["key_low", "key_high", "sequence_start", "sample_start"])
def _dropout_kernel(
    x_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    part_ptr,
    key_ptr,
    sample_ptr,
    key_low,
    key_high,
    sequence_start,
    sample_start,
    threshold,
    scale,
    rows,
    batch,
    width,
    x_stride,
    residual_stride,
    rows_a_part,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DROP: tl.constexpr,
    KEY_ON_DEVICE: tl.constexpr,
    SAMPLE_ON_DEVICE: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out = residual + dropped(x + bias); with SUM also the partial column sums of what was dropped."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    quad = tl.program_id(0) * (BLOCK_C // 4) + tl.arange(0, BLOCK_C // 4)
    first = tl.program_id(1) * rows_a_part
    last = tl.minimum(first + rows_a_part, rows)
    if KEY_ON_DEVICE:
        key = tl.load(key_ptr).to(tl.int64)
        key_low = (key & 0x7FFFFFFF).to(tl.int32)
        key_high = (key >> 31).to(tl.int32)
    if SAMPLE_ON_DEVICE:
        sample_start = tl.load(sample_ptr).to(tl.int32)
    seed = (key_high.to(tl.int64) << 32) | key_low.to(tl.int64)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if SUM:
        total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row[:, None] < last) & (column[None, :] < width)
        row_64 = row[:, None].to(tl.int64)
        value = tl.load(x_ptr + row_64 * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += bias[None, :]
        if DROP:
            none = tl.zeros((BLOCK_R, BLOCK_C // 4), tl.int32)
            sample = (sample_start + row % batch).to(tl.int32)[:, None] + none
            position = (sequence_start + row // batch).to(tl.int32)[:, None] + none
            r0, r1, r2, r3 = tl.philox(seed, quad[None, :] + none, sample, position, none)
            draw = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
            value = tl.where((draw >> 8).to(tl.int32) >= threshold, value * scale, 0.0)
        if SUM:
            total += value
        if HAS_RESIDUAL:
            at = residual_ptr + row_64 * residual_stride + column[None, :]
            value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row_64 * width + column[None, :], value, mask=inside)
    if SUM:
        tl.store(part_ptr + tl.program_id(1) * width + column, tl.sum(total, 0), mask=column < width)


def _run(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, draw: tuple[Any, ...], sum_as: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel on [S, B, H] tensors; returns its output and the column sums where asked for."""
    p, key, sequence_start, sample_start = draw
    x_TH, r_TH = flat_rows(x), None if residual is None else flat_rows(residual)
    T, H = x_TH.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(BLOCK_COLUMNS, max(16, next_power_of_2(H)))
    columns = cdiv(H, block)
    a_part, parts = split_rows(T, BLOCK_ROWS, max(1, PROGRAMS // columns))
    partial = None if sum_as is None else torch.empty((parts, H), dtype=torch.float32, device=x.device)
    on_device, sample_on_device = isinstance(key, Tensor), isinstance(sample_start, Tensor)
    low, high = (0, 0) if on_device else (key & 0x7FFFFFFF, key >> 31)
    _dropout_kernel[(columns, parts)](
        *(x_TH, bias, r_TH, out, partial, key if on_device else None, sample_start if sample_on_device else None),
        *(low, high, sequence_start, 0 if sample_on_device else sample_start),
        *(round(p * (1 << _RESOLUTION)), 1 / (1 - p), T, x.shape[1], H),
        *(x_TH.stride(0), 0 if r_TH is None else r_TH.stride(0), a_part),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        DROP=p > 0,
        KEY_ON_DEVICE=on_device,
        SAMPLE_ON_DEVICE=sample_on_device,
        SUM=sum_as is not None,
        BLOCK_R=BLOCK_ROWS,
        BLOCK_C=block,
    )
    return out, None if partial is None or sum_as is None else sum_parts(partial, sum_as)


@torch_private.call_directly
class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, *draw: Any) -> Tensor:
        ctx.draw = draw
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _run(x, bias, residual, draw, None)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        p = ctx.draw[0]
        dy = grads[0]
        if p == 0 and ctx.bias_dtype is None:
            dx, d_bias = dy, None
        else:
            dx, d_bias = _run(dy, None, None, ctx.draw, ctx.bias_dtype)
        return dx, d_bias, dy if ctx.needs_input_grad[2] else None, None, None, None, None


def dropout(
    x_SBH: Tensor,
    p: float,
    key: int | Tensor,
    sequence_start: int,
    sample_start: int | Tensor,
    training: bool = True,
) -> Tensor:
    """Zero each element with probability p and scale the rest by 1 / (1 - p).

    x_SBH: this rank's part of [sequence, batch, hidden]; sequence_start, sample_start: global index of its first
    row and sample. key: `dropout_key(...)` of the step, layer and site. key and sample_start may be one-element
    int64 tensors on x's device, so that a captured graph draws new masks.
    """
    if p == 0 or not training:
        return x_SBH
    if x_SBH.numel() and use_fused("dropout", x_SBH):
        return _DropoutAdd.apply(x_SBH, None, None, p, key, sequence_start, sample_start)
    return _DropoutReference.apply(x_SBH, p, key, sequence_start, sample_start)


def dropout_add(
    x_SBH: Tensor,
    bias: Tensor | None,
    residual_SBH: Tensor,
    p: float,
    key: int | Tensor,
    sequence_start: int,
    sample_start: int | Tensor,
    training: bool = True,
) -> Tensor:
    """residual + dropout(x + bias) in one pass; bias [H] or None, the rest as `dropout`."""
    if x_SBH.numel() and use_fused("dropout add", x_SBH, bias, residual_SBH):
        p = p if training else 0.0
        return _DropoutAdd.apply(x_SBH, bias, residual_SBH, p, key, sequence_start, sample_start)
    x_SBH = x_SBH if bias is None else x_SBH + bias
    return residual_SBH + dropout(x_SBH, p, key, sequence_start, sample_start, training)
