"""Rotary positions (Su et al. 2021), full or partial, and the way between the fused QKV projection and attention.

Pairs are halves of the rotated width (Llama, GPT-NeoX) or neighbours (GPT-J). `split_qkv` rotates queries and keys
in the projection's own output and gathers their gradients into one tensor again: no copy forward, one pass back,
none where attention's backward already wrote into such a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused


def rotary_tables(
    length: int, rotary_dim: int, base: float, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, rotary_dim / 2] of position * base^(-2i / rotary_dim), computed in float64."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * base**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rotary_reference(x_SBND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first 2 x cos.shape[1] of the last dimension by the tables' angles; the rest passes."""
    width = 2 * cos.shape[1]
    wide = torch.promote_types(x_SBND.dtype, cos.dtype)
    turned, rest = x_SBND[..., :width].to(wide), x_SBND[..., width:]
    cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((out.to(x_SBND.dtype), rest), dim=-1)


def split_qkv_reference(
    qkv_SBC: Tensor, heads: int, groups: int, cos: Tensor | None, sin: Tensor | None, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain PyTorch of `split_qkv`, out of place."""
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
    batch,
    heads,
    x_s,
    x_b,
    x_n,
    out_s,
    out_b,
    out_n,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """A tile of heads of one token: turn the first 2 x HALF entries, copy the REST (0: leave it alone)."""
    s = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row = x_ptr + s * x_s + b * x_b + head[:, None] * x_n
    out_row = out_ptr + s * out_s + b * out_b + head[:, None] * out_n
    if HALF > 0:
        pair = tl.arange(0, BLOCK_HALF)
        cos = tl.load(cos_ptr + s * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + s * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        if INVERSE:
            sin = -sin
        if INTERLEAVED:
            column = tl.arange(0, 2 * BLOCK_HALF)
            inside = (head[:, None] < heads) & (column[None, :] < 2 * HALF)
            x = tl.load(x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(x, (BLOCK_N, BLOCK_HALF, 2)))
            turned = tl.join(first * cos - second * sin, second * cos + first * sin)
            tl.store(out_row + column[None, :], tl.reshape(turned, (BLOCK_N, 2 * BLOCK_HALF)), mask=inside)
        else:
            inside = (head[:, None] < heads) & (pair[None, :] < HALF)
            first = tl.load(x_row + pair[None, :], mask=inside, other=0.0).to(tl.float32)
            second = tl.load(x_row + HALF + pair[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(out_row + pair[None, :], first * cos - second * sin, mask=inside)
            tl.store(out_row + HALF + pair[None, :], second * cos + first * sin, mask=inside)
    if REST > 0:
        column = tl.arange(0, BLOCK_REST)
        inside = (head[:, None] < heads) & (column[None, :] < REST)
        rest = tl.load(x_row + 2 * HALF + column[None, :], mask=inside, other=0.0)
        tl.store(out_row + 2 * HALF + column[None, :], rest, mask=inside)


def _rotate(x: Tensor, out: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool, inverse: bool) -> None:
    """out <- x rotated (by the opposite angles if `inverse`); out may be x. Without tables it is a copy."""
    S, B, N, D = x.shape
    half = 0 if cos is None else cos.shape[1]
    rest = 0 if out.data_ptr() == x.data_ptr() else D - 2 * half
    if x.numel() == 0 or (half == 0 and rest == 0):
        return
    block_half, block_rest = next_power_of_2(max(half, 1)), next_power_of_2(max(rest, 1))
    block_n = min(next_power_of_2(N), max(1, 4096 // max(block_half, block_rest)))
    _rotate_kernel[(S * B, cdiv(N, block_n))](
        *(x, out, cos, sin, B, N, *x.stride()[:3], *out.stride()[:3]),
        HALF=half,
        REST=rest,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        BLOCK_N=block_n,
        BLOCK_HALF=block_half,
        BLOCK_REST=block_rest,
    )


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def check_tables(cos: Tensor, sin: Tensor, positions: int) -> tuple[Tensor, Tensor]:
    if cos.shape != sin.shape or cos.shape[0] != positions:
        raise ValueError(f"rotary tables {tuple(cos.shape)}, {tuple(sin.shape)} do not have {positions} rows")
    return cos.contiguous(), sin.contiguous()


@torch_private.called_directly
class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _rotate(_adjacent(x), out, cos, sin, interleaved, inverse=False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dx = torch.empty(grads[0].shape, dtype=grads[0].dtype, device=grads[0].device)
        _rotate(_adjacent(grads[0]), dx, cos, sin, ctx.interleaved, inverse=True)
        return dx, None, None, None


def find_packed(parts: tuple[Tensor, ...]) -> Tensor | None:
    """The contiguous [S, B, heads, D] tensor that `parts` are adjacent head ranges of, or None if they are not."""
    first = parts[0]
    S, B, _, D = first.shape
    heads = sum([part.shape[2] for part in parts])
    strides = (B * heads * D, heads * D, D, 1)
    offset = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        # By strides first, which are another's most often: storages are slow to come by.
        if part.stride() != strides or part.storage_offset() != offset:
            return None
        if part is not first and part.untyped_storage().data_ptr() != storage:
            return None
        offset += part.shape[2] * D
    return first.as_strided((S, B, heads, D), strides, first.storage_offset())


def rotate_parts(
    x_SBND: Tensor, heads: int, groups: int, tables: tuple[Tensor | None, Tensor | None], interleaved: bool
) -> tuple[Tensor, ...]:
    """Turn the queries and keys of [q | k | v] in place (if there are tables) and return the three views."""
    cos, sin = tables
    if cos is not None:
        turning = x_SBND[:, :, : heads + groups]
        _rotate(turning, turning, cos, sin, interleaved, inverse=False)
    return x_SBND.split((heads, groups, groups), dim=2)


def gather_gradients(
    grads: tuple[Tensor, ...], whole_SBND: Tensor, tables: tuple[Tensor | None, Tensor | None], interleaved: bool
) -> None:
    """Write the gradients of q, k, v, turned back, into their places of `whole_SBND`."""
    places = whole_SBND.split([grad.shape[2] for grad in grads], dim=2)
    for i, (grad, place) in enumerate(zip(grads, places, strict=True)):
        cos, sin = tables if i < 2 else (None, None)
        _rotate(_adjacent(grad), place, cos, sin, interleaved, inverse=True)


@torch_private.called_directly
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
        ctx.turning, ctx.interleaved = heads + groups, interleaved
        return rotate_parts(qkv_SBC.unflatten(-1, (heads + 2 * groups, -1)), heads, groups, (cos, sin), interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        whole = find_packed(grads)
        if whole is None and cos is None:
            whole = torch.cat(grads, 2)  # in one launch
        elif whole is None:
            S, B, _, D = grads[0].shape
            heads = sum(grad.shape[2] for grad in grads)
            whole = torch.empty((S, B, heads, D), dtype=grads[0].dtype, device=grads[0].device)
            gather_gradients(grads, whole, (cos, sin), ctx.interleaved)
        elif cos is not None:
            turning = whole[:, :, : ctx.turning]
            _rotate(turning, turning, cos, sin, ctx.interleaved, inverse=True)
        return whole.flatten(2), None, None, None, None, None


def apply_rotary(x_SBND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary positions for queries or keys, into a new contiguous tensor (`split_qkv` does it in place).

    x_SBND: [sequence, batch, heads, head size], strided views welcome. cos, sin: rows of `rotary_tables` for the
    S positions of x (slice the tables to offset them: a cache, a sequence shard). Only the first
    2 x cos.shape[1] entries of a head turn. interleaved: neighbouring pairs (GPT-J) instead of halves.
    """
    cos, sin = check_tables(cos, sin, x_SBND.shape[0])
    if use_fused("rotary", x_SBND, cos):
        return _Rotary.apply(x_SBND, cos, sin, interleaved)
    return apply_rotary_reference(x_SBND, cos, sin, interleaved)


def empty_gradients(q_SBND: Tensor, k_SBGD: Tensor) -> tuple[Tensor, ...]:
    """Memory for the gradients of q, k and v: adjacent parts of one tensor, which `split_qkv` takes without a copy."""
    (S, B, N, D), G = q_SBND.shape, k_SBGD.shape[2]
    whole = torch.empty((S, B, N + 2 * G, D), dtype=q_SBND.dtype, device=q_SBND.device)
    return whole.split((N, G, G), dim=2)


def split_qkv(
    qkv_SBC: Tensor,
    heads: int,
    groups: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [S, B, heads, D], keys and values [S, B, groups, D] of a fused projection [q | k | v], rotated.

    qkv_SBC: the projection's output [S, B, (heads + 2 groups) x D], heads of each part adjacent. The fused path
    rotates in place and returns views, so nobody else may read or keep qkv_SBC (a linear layer does not). The
    backward pass gives one contiguous gradient; gradients that already are parts of one such tensor (written
    there by attention's backward) are taken without a copy. cos, sin, interleaved: as `apply_rotary`, or None.
    """
    if cos is not None and sin is not None:
        cos, sin = check_tables(cos, sin, qkv_SBC.shape[0])
    if qkv_SBC.is_contiguous() and use_fused("split qkv", qkv_SBC, cos):
        return _SplitQKV.apply(qkv_SBC, heads, groups, cos, sin, interleaved)
    return split_qkv_reference(qkv_SBC, heads, groups, cos, sin, interleaved)
