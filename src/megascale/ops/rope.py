"""Rotary positions (Su et al. 2021), full or partial, and the split of the QKV projection.

A rotation pairs element i with element i + half of the rotated width (Llama, GPT-NeoX), or elements 2i and 2i + 1
(GPT-J, "interleaved"). `split_qkv` rotates queries and keys in place within the projection's output, so forward copies
nothing. Backward writes the gradients of q, k and v into one tensor in one pass. If attention's backward has already
written these gradients into one tensor, backward rotates them in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.config.rotary_scaling import RotaryScaling
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.rope_scaling import scale_frequencies


def make_rotary_tables(
    length: int,
    rotary_dim: int,
    base: float,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    scaling: RotaryScaling | None = None,
    is_extended: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, rotary_dim / 2] of position * base^(-2i / rotary_dim), computed in float64.

    With `scaling` the frequencies are scaled, and both tables are multiplied by the attention factor. Frequencies of
    longrope depend on `is_extended`: whether the input is longer than the original context.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    frequencies = base**-exponent
    factor = 1.0
    if scaling is not None:
        frequencies, factor = scale_frequencies(frequencies, base, scaling, is_extended)
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequencies
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def apply_rotary_reference(x_SBND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first 2 x cos.shape[-1] entries of the last dimension by the tables' angles; copy the others."""
    width = 2 * cos.shape[-1]
    wide = torch.promote_types(x_SBND.dtype, cos.dtype)
    rotated, unrotated = x_SBND[..., :width].to(wide), x_SBND[..., width:]
    if cos.dim() == 2:
        cos, sin = cos[:, None], sin[:, None]
    cos, sin = cos[:, :, None], sin[:, :, None]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        out = torch.stack(pair, dim=-1).flatten(-2)
    else:
        out = torch.cat(pair, dim=-1)
    return torch.cat((out.to(x_SBND.dtype), unrotated), dim=-1)


def split_qkv_reference(
    qkv_SBC: Tensor, heads: int, groups: int, cos: Tensor | None, sin: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `split_qkv` in plain PyTorch, out of place."""
    qkv_SBND = qkv_SBC.unflatten(-1, (heads + 2 * groups, -1))
    q, k, v = qkv_SBND.split((heads, groups, groups), dim=2)
    if cos is not None and sin is not None:
        q, k = (apply_rotary_reference(t, cos, sin, interleaved) for t in (q, k))
    return q, k, v


@jit
def _rotate_kernel(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    table_s,
    table_b,
    batch,
    heads,
    x_s,
    x_b,
    x_n,
    out_s,
    out_b,
    out_n,
    HALF: tl.constexpr,
    PASS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    """Rotate the first 2 x HALF entries of each head in a tile of one token's heads, and copy the next PASS entries."""
    s = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row = x_ptr + s * x_s + b * x_b + head[:, None] * x_n
    out_row = out_ptr + s * out_s + b * out_b + head[:, None] * out_n
    if HALF > 0:
        pair = tl.arange(0, BLOCK_HALF)
        angle = s * table_s + b * table_b + pair
        cos = tl.load(cos_ptr + angle, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + angle, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        if INVERSE:
            sin = -sin
        if INTERLEAVED:
            column = tl.arange(0, 2 * BLOCK_HALF)
            inside = (head[:, None] < heads) & (column[None, :] < 2 * HALF)
            x = tl.load(x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(x, (BLOCK_N, BLOCK_HALF, 2)))
            rotated = tl.join(first * cos - second * sin, second * cos + first * sin)
            tl.store(out_row + column[None, :], tl.reshape(rotated, (BLOCK_N, 2 * BLOCK_HALF)), mask=inside)
        else:
            inside = (head[:, None] < heads) & (pair[None, :] < HALF)
            first = tl.load(x_row + pair[None, :], mask=inside, other=0.0).to(tl.float32)
            second = tl.load(x_row + HALF + pair[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(out_row + pair[None, :], first * cos - second * sin, mask=inside)
            tl.store(out_row + HALF + pair[None, :], second * cos + first * sin, mask=inside)
    if PASS > 0:
        column = tl.arange(0, BLOCK_PASS)
        inside = (head[:, None] < heads) & (column[None, :] < PASS)
        x = tl.load(x_row + 2 * HALF + column[None, :], mask=inside, other=0.0)
        tl.store(out_row + 2 * HALF + column[None, :], x, mask=inside)


def _rotate(x: Tensor, out: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool, inverse: bool) -> None:
    """Write x [S, B, N, D] into out, rotated by the tables' angles, or by their opposites if `inverse`.

    Without tables x is copied. `out` may be x.
    """
    S, B, N, D = x.shape
    # Without tables nothing is rotated. Strides of the tables along sequence and batch are 0 then.
    half = table_s = table_b = 0
    if cos is not None:
        half = cos.shape[-1]
        table_s = cos.stride(0)
        table_b = cos.stride(1) if cos.dim() == 3 else 0
    is_in_place = out.data_ptr() == x.data_ptr()
    copied_width = 0 if is_in_place else D - 2 * half
    if x.numel() == 0 or (half == 0 and copied_width == 0):
        return
    block_half = next_power_of_2(max(half, 1))
    block_pass = next_power_of_2(max(copied_width, 1))
    block_n = min(next_power_of_2(N), max(1, 4096 // max(block_half, block_pass)))
    _rotate_kernel[(S * B, cdiv(N, block_n))](
        x,
        out,
        cos,
        sin,
        table_s,
        table_b,
        B,
        N,
        *x.stride()[:3],
        *out.stride()[:3],
        HALF=half,
        PASS=copied_width,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        BLOCK_N=block_n,
        BLOCK_HALF=block_half,
        BLOCK_PASS=block_pass,
    )


def make_heads_contiguous(x: Tensor) -> Tensor:
    """Return x [..., D] with adjacent elements of the last dimension, copied if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_tables(cos: Tensor, sin: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return contiguous tables. Raises ValueError unless they are [S, ...] or [S, B, ...] for `shape` = [S, B, ...]."""
    if cos.shape != sin.shape or cos.shape[:-1] not in (shape[:1], shape[:2]):
        raise ValueError(f"rotary tables {tuple(cos.shape)}, {tuple(sin.shape)} do not have {shape[0]} rows")
    return cos.contiguous(), sin.contiguous()


@torch_private.call_directly
class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _rotate(make_heads_contiguous(x), out, cos, sin, interleaved, inverse=False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dx = torch.empty(grads[0].shape, dtype=grads[0].dtype, device=grads[0].device)
        _rotate(make_heads_contiguous(grads[0]), dx, cos, sin, ctx.interleaved, inverse=True)
        return dx, None, None, None


def find_packed_gradients(parts: tuple[Tensor, ...]) -> Tensor | None:
    """Return the contiguous [S, B, heads, D] tensor of which `parts` are views of adjacent heads, or None."""
    first = parts[0]
    S, B, _, D = first.shape
    heads = sum([part.shape[2] for part in parts])
    strides = (B * heads * D, heads * D, D, 1)
    offset = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        # Compare strides first, because they differ most often, and access to storages is slow.
        if part.stride() != strides or part.storage_offset() != offset:
            return None
        if part is not first and part.untyped_storage().data_ptr() != storage:
            return None
        offset += part.shape[2] * D
    return first.as_strided((S, B, heads, D), strides, first.storage_offset())


def rotate_and_split(
    x_SBND: Tensor, heads: int, groups: int, tables: tuple[Tensor | None, Tensor | None], interleaved: bool
) -> tuple[Tensor, ...]:
    """Rotate queries and keys of [q | k | v] in place, unless `tables` is (None, None). Return views of q, k and v."""
    cos, sin = tables
    if cos is not None:
        rotated = x_SBND[:, :, : heads + groups]
        _rotate(rotated, rotated, cos, sin, interleaved, inverse=False)
    return x_SBND.split((heads, groups, groups), dim=2)


def rotate_gradients(
    grads: tuple[Tensor, ...], out_SBND: Tensor, tables: tuple[Tensor | None, Tensor | None], interleaved: bool
) -> None:
    """Rotate the gradients of q and k back, and write them and the gradient of v into their heads of `out_SBND`."""
    dq, dk, dv = grads
    out_q, out_k, out_v = out_SBND.split([grad.shape[2] for grad in grads], dim=2)
    cos, sin = tables
    _rotate(make_heads_contiguous(dq), out_q, cos, sin, interleaved, inverse=True)
    _rotate(make_heads_contiguous(dk), out_k, cos, sin, interleaved, inverse=True)
    _rotate(make_heads_contiguous(dv), out_v, None, None, interleaved, inverse=True)


@torch_private.call_directly
class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_SBC: Tensor,
        heads: int,
        groups: int,
        cos: Tensor | None,
        sin: Tensor | None,
        interleaved: bool,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.rotated_heads, ctx.interleaved = heads + groups, interleaved
        return rotate_and_split(qkv_SBC.unflatten(-1, (heads + 2 * groups, -1)), heads, groups, (cos, sin), interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        packed = find_packed_gradients(grads)
        if packed is None and cos is None:
            packed = torch.cat(grads, 2)  # One launch suffices without a rotation.
        elif packed is None:
            S, B, _, D = grads[0].shape
            heads = sum(grad.shape[2] for grad in grads)
            packed = torch.empty((S, B, heads, D), dtype=grads[0].dtype, device=grads[0].device)
            rotate_gradients(grads, packed, (cos, sin), ctx.interleaved)
        elif cos is not None:
            rotated = packed[:, :, : ctx.rotated_heads]
            _rotate(rotated, rotated, cos, sin, ctx.interleaved, inverse=True)
        return packed.flatten(2), None, None, None, None, None


def apply_rotary(x_SBND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return queries or keys with rotary positions, in a new contiguous tensor.

    Args:
        x_SBND: [sequence, batch, heads, head size], with any strides.
        cos, sin: rows of `make_rotary_tables` for the S positions of x, [S, ...], or [S, B, ...] if positions differ
            between samples. The first 2 x cos.shape[-1] entries of a head are rotated.
        interleaved: whether neighbouring elements are rotated together (GPT-J) instead of the two halves.
    """
    cos, sin = check_tables(cos, sin, x_SBND.shape)
    if use_fused("rotary", x_SBND, cos):
        return _Rotary.apply(x_SBND, cos, sin, interleaved)
    return apply_rotary_reference(x_SBND, cos, sin, interleaved)


def allocate_qkv_gradients(q_SBND: Tensor, k_SBGD: Tensor) -> tuple[Tensor, ...]:
    """Allocate the gradients of q, k and v as adjacent heads of one tensor.

    The backward of `split_qkv` uses such gradients without a copy.
    """
    S, B, N, D = q_SBND.shape
    G = k_SBGD.shape[2]
    return torch.empty((S, B, N + 2 * G, D), dtype=q_SBND.dtype, device=q_SBND.device).split((N, G, G), dim=2)


def allocate_attention_gradients(q_SBND: Tensor, k_TBGD: Tensor) -> tuple[Tensor, ...]:
    """Allocate the gradients of q, k and v, in one tensor (`allocate_qkv_gradients`) if lengths are equal."""
    if q_SBND.shape[0] == k_TBGD.shape[0]:
        return allocate_qkv_gradients(q_SBND, k_TBGD)
    shapes = (q_SBND.shape, k_TBGD.shape, k_TBGD.shape)
    return tuple(torch.empty(shape, dtype=q_SBND.dtype, device=q_SBND.device) for shape in shapes)


def split_qkv(
    qkv_SBC: Tensor,
    heads: int,
    groups: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the projection [q | k | v] into rotated queries [S, B, heads, D] and keys, and values [S, B, groups, D].

    The fused kernel rotates in place and returns views, so qkv_SBC must have no other reader. Backward returns one
    contiguous gradient. If attention's backward has written into one tensor (`allocate_qkv_gradients`), nothing is
    copied.

    Args:
        qkv_SBC: output of the projection [S, B, (heads + 2 groups) x D]; the heads of q, of k and of v are adjacent.
        cos, sin, interleaved: as in `apply_rotary`. Without tables nothing is rotated.
    """
    if cos is not None and sin is not None:
        cos, sin = check_tables(cos, sin, qkv_SBC.shape)
    if qkv_SBC.is_contiguous() and use_fused("split qkv", qkv_SBC, cos):
        return _SplitQKV.apply(qkv_SBC, heads, groups, cos, sin, interleaved)
    return split_qkv_reference(qkv_SBC, heads, groups, cos, sin, interleaved)
