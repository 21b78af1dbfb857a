"""Dropout whose mask is a function of a key and of global indices: position, sample and hidden index.

The random numbers are those of the counter-based generator Philox 4x32-10 (Salmon et al. 2011). Every layout (sequence
shards, micro-batches, data-parallel ranks) therefore has the mask of the one-process run, with equal bits on CPU and
CUDA. Backward computes the mask again, so forward saves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.reduce import divide_rows, flatten_rows, sum_partials

KEY_BITS = 62  # Two words of 31 bits. Triton would give a larger word another integer type.
_WORD_MASK = 0xFFFFFFFF
_COMPARED_BITS = 24  # of each random number, which are compared with p

BLOCK_ROWS = 4
BLOCK_COLUMNS = 1024
MAX_PROGRAMS = 1056  # about eight per SM of a large GPU


def make_dropout_key(*parts: int) -> int:
    """Hash integers such as (seed, step, layer, index of the sum) to a key of KEY_BITS bits by splitmix64."""
    state = 0
    for part in parts:
        state = (state ^ (part & ((1 << 64) - 1))) + 0x9E3779B97F4A7C15 & ((1 << 64) - 1)
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & ((1 << 64) - 1)
        state = (state ^ state >> 27) * 0x94D049BB133111EB & ((1 << 64) - 1)
        state ^= state >> 31
    return state >> (64 - KEY_BITS)


def _multiply_words(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of a x b, for unsigned 32-bit numbers stored as int64."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _WORD_MASK


def philox(c0: Tensor, c1: Tensor, c2: Tensor, key: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit numbers, as int64, for each counter (c0, c1, c2, 0), by Philox 4x32-10.

    The names are those of Salmon et al.: counter words c and key words k.
    """
    k0, k1 = key & 0x7FFFFFFF, key >> 31
    c3 = torch.zeros_like(c0)
    for _ in range(10):
        high_a, low_a = _multiply_words(0xD2511F53, c0)
        high_b, low_b = _multiply_words(0xCD9E8D57, c2)
        c0, c1 = high_b ^ c1 ^ k0, low_b
        c2, c3 = high_a ^ c3 ^ k1, low_a
        k0 = (k0 + 0x9E3779B9) & _WORD_MASK
        k1 = (k1 + 0xBB67AE85) & _WORD_MASK
    return c0, c1, c2, c3


def make_keep_mask_reference(
    shape: torch.Size,
    p: float,
    key: int | Tensor,
    sequence_start: int,
    sample_start: int | Tensor,
    device: torch.device,
) -> Tensor:
    """Return the mask [sequence, batch, hidden] of the elements that dropout keeps; see `dropout`."""
    S, B, H = shape
    position = (torch.arange(S, device=device) + sequence_start)[:, None, None]
    sample = (torch.arange(B, device=device) + sample_start)[None, :, None] & _WORD_MASK
    # Each counter gives the random numbers of four adjacent hidden elements.
    quad = torch.arange(-(-H // 4), device=device)[None, None, :]
    c0, c1, c2 = torch.broadcast_tensors(quad, sample, position)
    random_numbers = torch.stack(philox(c0, c1, c2, key), dim=-1).flatten(-2)[..., :H]
    return (random_numbers >> (32 - _COMPARED_BITS)) >= round(p * (1 << _COMPARED_BITS))


def _apply_mask(x: Tensor, p: float, key: int | Tensor, sequence_start: int, sample_start: int | Tensor) -> Tensor:
    keep = make_keep_mask_reference(x.shape, p, key, sequence_start, sample_start, x.device)
    return torch.where(keep, x * (1 / (1 - p)), 0)


@torch_private.call_directly
class _DropoutReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *mask_arguments: Any) -> Tensor:
        ctx.mask_arguments = mask_arguments
        return _apply_mask(x, *mask_arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _apply_mask(grads[0], *ctx.mask_arguments), None, None, None, None


@jit(do_not_specialize=["key_low", "key_high", "sequence_start", "sample_start"])
def _dropout_kernel(
    x_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
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
    program_rows,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DROP: tl.constexpr,
    KEY_ON_DEVICE: tl.constexpr,
    SAMPLE_ON_DEVICE: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute out = residual + dropout(x + bias). With SUM also compute partial column sums of dropout(x + bias)."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    quad = tl.program_id(0) * (BLOCK_C // 4) + tl.arange(0, BLOCK_C // 4)
    first_row = tl.program_id(1) * program_rows
    end_row = tl.minimum(first_row + program_rows, rows)
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
    for start in range(first_row, end_row, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row[:, None] < end_row) & (column[None, :] < width)
        row_64 = row[:, None].to(tl.int64)
        y = tl.load(x_ptr + row_64 * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += bias[None, :]
        if DROP:
            zero = tl.zeros((BLOCK_R, BLOCK_C // 4), tl.int32)
            sample = (sample_start + row % batch).to(tl.int32)[:, None] + zero
            position = (sequence_start + row // batch).to(tl.int32)[:, None] + zero
            r0, r1, r2, r3 = tl.philox(seed, quad[None, :] + zero, sample, position, zero)
            random_bits = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
            y = tl.where((random_bits >> 8).to(tl.int32) >= threshold, y * scale, 0.0)
        if SUM:
            total += y
        if HAS_RESIDUAL:
            residual = residual_ptr + row_64 * residual_stride + column[None, :]
            y += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row_64 * width + column[None, :], y, mask=inside)
    if SUM:
        tl.store(partial_ptr + tl.program_id(1) * width + column, tl.sum(total, 0), mask=column < width)


def _launch(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    mask_arguments: tuple[Any, ...],
    sum_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel on [S, B, H] tensors.

    Args:
        mask_arguments: (p, key, sequence_start, sample_start), see `dropout`.
        sum_dtype: type of the column sums; None: compute no sums.

    Returns:
        residual + dropout(x + bias), and the column sums [H] of dropout(x + bias) or None.
    """
    p, key, sequence_start, sample_start = mask_arguments
    x_TH = flatten_rows(x)
    residual_TH: Tensor | None = None
    residual_stride = 0
    if residual is not None:
        residual_TH = flatten_rows(residual)
        residual_stride = residual_TH.stride(0)
    T, H = x_TH.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(BLOCK_COLUMNS, max(16, next_power_of_2(H)))
    column_blocks = cdiv(H, block)
    program_rows, row_programs = divide_rows(T, BLOCK_ROWS, max(1, MAX_PROGRAMS // column_blocks))
    partial: Tensor | None = None
    if sum_dtype is not None:
        partial = torch.empty((row_programs, H), dtype=torch.float32, device=x.device)
    is_key_on_device = isinstance(key, Tensor)
    is_sample_on_device = isinstance(sample_start, Tensor)
    _dropout_kernel[(column_blocks, row_programs)](
        x_TH,
        bias,
        residual_TH,
        out,
        partial,
        key if is_key_on_device else None,
        sample_start if is_sample_on_device else None,
        0 if is_key_on_device else key & 0x7FFFFFFF,
        0 if is_key_on_device else key >> 31,
        sequence_start,
        0 if is_sample_on_device else sample_start,
        round(p * (1 << _COMPARED_BITS)),
        1 / (1 - p),
        T,
        x.shape[1],
        H,
        x_TH.stride(0),
        residual_stride,
        program_rows,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        DROP=p > 0,
        KEY_ON_DEVICE=is_key_on_device,
        SAMPLE_ON_DEVICE=is_sample_on_device,
        SUM=sum_dtype is not None,
        BLOCK_R=BLOCK_ROWS,
        BLOCK_C=block,
    )
    if partial is None or sum_dtype is None:
        return out, None
    return out, sum_partials(partial, sum_dtype)


@torch_private.call_directly
class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, *mask_arguments: Any) -> Tensor:
        ctx.mask_arguments = mask_arguments
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _launch(x, bias, residual, mask_arguments, None)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, d_bias = dy, None
        if ctx.mask_arguments[0] > 0 or ctx.bias_dtype is not None:
            dx, d_bias = _launch(dy, None, None, ctx.mask_arguments, ctx.bias_dtype)
        return dx, d_bias, dy if ctx.needs_input_grad[2] else None, None, None, None, None


def dropout(
    x_SBH: Tensor,
    p: float,
    key: int | Tensor,
    sequence_start: int,
    sample_start: int | Tensor,
    training: bool = True,
) -> Tensor:
    """Zero each element with probability p, and multiply the others by 1 / (1 - p).

    key and sample_start may be int64 tensors of one element on x's device. A captured CUDA graph then reads new values
    at each replay.

    Args:
        x_SBH: this rank's slice of [sequence, batch, hidden].
        key: `make_dropout_key` of seed, step, layer and index of the sum.
        sequence_start: index in the sequence of x's first row.
        sample_start: index in the global batch of x's first sample.
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
    """Compute residual + dropout(x + bias) in one pass. The bias is [H] or None; for other arguments see `dropout`."""
    if x_SBH.numel() and use_fused("dropout add", x_SBH, bias, residual_SBH):
        p = p if training else 0.0
        return _DropoutAdd.apply(x_SBH, bias, residual_SBH, p, key, sequence_start, sample_start)
    if bias is not None:
        x_SBH = x_SBH + bias
    return residual_SBH + dropout(x_SBH, p, key, sequence_start, sample_start, training)
