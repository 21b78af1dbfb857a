"""Split of a fused projection with an RMSNorm of each query and key head before its rotation, in one pass.

Separately, the norms and the rotations read and write queries and keys four times in each direction. The kernels hold a
head in registers: forward reads and writes it once, backward reads the head and its gradient and writes one gradient.
Sums are in float32; gradients of the norms' weights are partial sums in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.gradient_sink import tracked
from megascale.ops.norm import rms_norm_reference
from megascale.ops.reduce import PARTS, accumulate_gradients
from megascale.ops.rope import apply_rotary_reference, check_tables, find_packed

TILE_ELEMENTS = 2048  # A tile of heads and its gradient then fit the registers of four warps.
BACKWARD_PARTS = 4 * PARTS  # eight programs per SM: with two, a quarter of the copy rate on an H100


@jit
def _load_weights(q_weight_ptr, k_weight_ptr, column, inside, is_query):
    """Return the weights [heads, columns] of a tile of query and key heads in float32."""
    query = tl.load(q_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(k_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], query[None, :], key[None, :])


@jit
def _load_gradient(dq_row, dk_row, column, inside, query):
    """Return a tile of the gradients of query and key heads in float32.

    Two loads read whole vectors; one load through a selected pointer reads element by element.
    """
    dq = tl.load(dq_row + column[None, :], mask=inside & query, other=0.0)
    dk = tl.load(dk_row + column[None, :], mask=inside & (query == 0), other=0.0)
    return dq.to(tl.float32) + dk.to(tl.float32)


@jit
def _forward_kernel(
    x_ptr,
    out_ptr,
    inverse_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    table_s,
    table_b,
    batch,
    query_heads,
    heads,
    x_s,
    x_b,
    x_n,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s = token // batch
    b = token % batch
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_head = head < heads
    is_query = head < query_heads
    x_row = x_ptr + s * x_s + b * x_b + head[:, None] * x_n
    out_row = out_ptr + (token * heads + head[:, None]) * D
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = pair < HALF
    angle = s * table_s + b * table_b + pair
    cos = tl.load(cos_ptr + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    if INTERLEAVED:
        first_column = 2 * pair
        second_column = 2 * pair + 1
    else:
        first_column = pair
        second_column = HALF + pair
    inside = is_head[:, None] & is_pair[None, :]
    first = tl.load(x_row + first_column[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_row + second_column[None, :], mask=inside, other=0.0).to(tl.float32)
    square_sum = tl.sum(first * first + second * second, 1)
    if 2 * HALF < D:
        passed_column = 2 * HALF + tl.arange(0, BLOCK_PASS)
        is_passed = passed_column < D
        passed = tl.load(x_row + passed_column[None, :], mask=is_head[:, None] & is_passed[None, :], other=0.0).to(
            tl.float32
        )
        square_sum += tl.sum(passed * passed, 1)
    inverse = 1.0 / tl.sqrt(square_sum / D + eps)
    tl.store(inverse_ptr + token * heads + head, inverse, mask=is_head)
    first *= inverse[:, None] * _load_weights(q_weight_ptr, k_weight_ptr, first_column, is_pair, is_query)
    second *= inverse[:, None] * _load_weights(q_weight_ptr, k_weight_ptr, second_column, is_pair, is_query)
    tl.store(out_row + first_column[None, :], first * cos - second * sin, mask=inside)
    tl.store(out_row + second_column[None, :], second * cos + first * sin, mask=inside)
    if 2 * HALF < D:
        passed *= inverse[:, None] * _load_weights(q_weight_ptr, k_weight_ptr, passed_column, is_passed, is_query)
        tl.store(out_row + passed_column[None, :], passed, mask=is_head[:, None] & is_passed[None, :])


@jit
def _backward_kernel(
    dq_ptr,
    dk_ptr,
    x_ptr,
    dx_ptr,
    inverse_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    part_ptr,
    table_s,
    table_b,
    batch,
    tokens,
    query_heads,
    heads,
    dq_s,
    dq_b,
    dq_n,
    dk_s,
    dk_b,
    dk_n,
    x_s,
    x_b,
    x_n,
    dx_token,
    part_tokens,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = pair < HALF
    if INTERLEAVED:
        first_column = 2 * pair
        second_column = 2 * pair + 1
    else:
        first_column = pair
        second_column = HALF + pair
    passed_column = 2 * HALF + tl.arange(0, BLOCK_PASS)
    is_passed = passed_column < D
    # Tiles are summed over their heads at the end only, because each sum over heads exchanges between warps.
    q_first = tl.zeros((BLOCK_N, BLOCK_HALF), tl.float32)
    q_second = tl.zeros((BLOCK_N, BLOCK_HALF), tl.float32)
    k_first = tl.zeros((BLOCK_N, BLOCK_HALF), tl.float32)
    k_second = tl.zeros((BLOCK_N, BLOCK_HALF), tl.float32)
    q_passed = tl.zeros((BLOCK_N, BLOCK_PASS), tl.float32)
    k_passed = tl.zeros((BLOCK_N, BLOCK_PASS), tl.float32)
    start = tl.program_id(0).to(tl.int64) * part_tokens
    for token in range(start, tl.minimum(start + part_tokens, tokens)):
        s = token // batch
        b = token % batch
        angle = s * table_s + b * table_b + pair
        cos = tl.load(cos_ptr + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        for first_head in range(0, heads, BLOCK_N):
            head = first_head + tl.arange(0, BLOCK_N)
            is_head = head < heads
            is_query = head < query_heads
            inside = is_head[:, None] & is_pair[None, :]
            inverse = tl.load(inverse_ptr + token * heads + head, mask=is_head, other=0.0)
            query = is_query[:, None]
            dq_row = dq_ptr + s * dq_s + b * dq_b + head[:, None] * dq_n
            dk_row = dk_ptr + s * dk_s + b * dk_b + (head[:, None] - query_heads) * dk_n
            x_row = x_ptr + s * x_s + b * x_b + head[:, None] * x_n
            dx_row = dx_ptr + token * dx_token + head[:, None] * D
            g_first = _load_gradient(dq_row, dk_row, first_column, inside, query)
            g_second = _load_gradient(dq_row, dk_row, second_column, inside, query)
            d_first = g_first * cos + g_second * sin
            d_second = g_second * cos - g_first * sin
            x_first = tl.load(x_row + first_column[None, :], mask=inside, other=0.0).to(tl.float32) * inverse[:, None]
            x_second = tl.load(x_row + second_column[None, :], mask=inside, other=0.0).to(tl.float32)
            x_second *= inverse[:, None]
            q_first += tl.where(query, d_first * x_first, 0.0)
            q_second += tl.where(query, d_second * x_second, 0.0)
            k_first += tl.where(query, 0.0, d_first * x_first)
            k_second += tl.where(query, 0.0, d_second * x_second)
            d_first *= _load_weights(q_weight_ptr, k_weight_ptr, first_column, is_pair, is_query)
            d_second *= _load_weights(q_weight_ptr, k_weight_ptr, second_column, is_pair, is_query)
            mean = tl.sum(d_first * x_first + d_second * x_second, 1)
            if 2 * HALF < D:
                inside_passed = is_head[:, None] & is_passed[None, :]
                d_passed = _load_gradient(dq_row, dk_row, passed_column, inside_passed, query)
                x_passed = tl.load(x_row + passed_column[None, :], mask=inside_passed, other=0.0).to(tl.float32)
                x_passed *= inverse[:, None]
                q_passed += tl.where(query, d_passed * x_passed, 0.0)
                k_passed += tl.where(query, 0.0, d_passed * x_passed)
                d_passed *= _load_weights(q_weight_ptr, k_weight_ptr, passed_column, is_passed, is_query)
                mean += tl.sum(d_passed * x_passed, 1)
            mean = mean[:, None] / D
            tl.store(dx_row + first_column[None, :], (d_first - x_first * mean) * inverse[:, None], mask=inside)
            tl.store(dx_row + second_column[None, :], (d_second - x_second * mean) * inverse[:, None], mask=inside)
            if 2 * HALF < D:
                dx_passed = (d_passed - x_passed * mean) * inverse[:, None]
                tl.store(dx_row + passed_column[None, :], dx_passed, mask=inside_passed)
    part = part_ptr + tl.program_id(0).to(tl.int64) * 2 * D
    tl.store(part + first_column, tl.sum(q_first, 0), mask=is_pair)
    tl.store(part + second_column, tl.sum(q_second, 0), mask=is_pair)
    tl.store(part + D + first_column, tl.sum(k_first, 0), mask=is_pair)
    tl.store(part + D + second_column, tl.sum(k_second, 0), mask=is_pair)
    if 2 * HALF < D:
        tl.store(part + passed_column, tl.sum(q_passed, 0), mask=is_passed)
        tl.store(part + D + passed_column, tl.sum(k_passed, 0), mask=is_passed)


def _table_strides(cos: Tensor) -> tuple[int, int]:
    return cos.stride(0), cos.stride(1) if cos.dim() == 3 else 0


def _tile(head_size: int, half: int, heads: int) -> dict[str, int]:
    """Return the constants of a tile of heads."""
    block_n = max(1, min(next_power_of_2(heads), TILE_ELEMENTS // next_power_of_2(head_size)))
    return {
        "D": head_size,
        "HALF": half,
        "BLOCK_N": block_n,
        "BLOCK_HALF": next_power_of_2(half),
        "BLOCK_PASS": next_power_of_2(max(1, head_size - 2 * half)),
    }


@torch_private.call_directly
class _SplitNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_SBC: Tensor,
        tracked_q_weight: Tensor | None,
        tracked_k_weight: Tensor | None,
        args: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        heads, groups, q_weight, k_weight, eps, cos, sin, interleaved = args
        x_SBND = qkv_SBC.unflatten(-1, (heads + 2 * groups, -1))
        S, B, _, D = x_SBND.shape
        normed = heads + groups
        out = torch.empty((S, B, normed, D), dtype=qkv_SBC.dtype, device=qkv_SBC.device)
        inverse = torch.empty((S, B, normed), dtype=torch.float32, device=qkv_SBC.device)
        tile = _tile(D, cos.shape[-1], normed)
        _forward_kernel[(S * B, cdiv(normed, tile["BLOCK_N"]))](
            x_SBND,
            out,
            inverse,
            q_weight,
            k_weight,
            cos,
            sin,
            *_table_strides(cos),
            B,
            heads,
            normed,
            *x_SBND.stride()[:3],
            eps,
            INTERLEAVED=interleaved,
            **tile,
        )
        ctx.save_for_backward(qkv_SBC, inverse, cos, sin)
        ctx.args = heads, groups, q_weight, k_weight, interleaved
        q, k = out.split((heads, groups), dim=2)
        return q, k, x_SBND[:, :, normed:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_SBC, inverse, cos, sin = ctx.saved_tensors
        heads, groups, q_weight, k_weight, interleaved = ctx.args
        x_SBND = qkv_SBC.unflatten(-1, (heads + 2 * groups, -1))
        S, B, N, D = x_SBND.shape
        dq, dk, dv = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        packed = find_packed((dq, dk, dv))
        if packed is None:
            packed = torch.empty((S, B, N, D), dtype=qkv_SBC.dtype, device=qkv_SBC.device)
            packed[:, :, heads + groups :].copy_(dv)
        part_tokens = cdiv(S * B, BACKWARD_PARTS)
        parts = cdiv(S * B, part_tokens)
        partial = torch.empty((parts, 2 * D), dtype=torch.float32, device=qkv_SBC.device)
        # A program reads a tile of gradients before it writes the tile, so gradients that are packed change in place.
        _backward_kernel[(parts,)](
            dq,
            dk,
            x_SBND,
            packed,
            inverse,
            q_weight,
            k_weight,
            cos,
            sin,
            partial,
            *_table_strides(cos),
            B,
            S * B,
            heads,
            heads + groups,
            *dq.stride()[:3],
            *dk.stride()[:3],
            *x_SBND.stride()[:3],
            N * D,
            part_tokens,
            INTERLEAVED=interleaved,
            **_tile(D, cos.shape[-1], heads + groups),
        )
        d_q_weight, d_k_weight = accumulate_gradients(partial, q_weight, k_weight)
        return packed.flatten(2), d_q_weight, d_k_weight, None


def split_norm_rotary_reference(
    qkv_SBC: Tensor,
    heads: int,
    groups: int,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `split_norm_rotary` in plain PyTorch."""
    q, k, v = qkv_SBC.unflatten(-1, (heads + 2 * groups, -1)).split((heads, groups, groups), dim=2)
    q = apply_rotary_reference(rms_norm_reference(q, q_weight, eps), cos, sin, interleaved)
    k = apply_rotary_reference(rms_norm_reference(k, k_weight, eps), cos, sin, interleaved)
    return q, k, v


def split_norm_rotary(
    qkv_SBC: Tensor,
    heads: int,
    groups: int,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection [q | k | v], norm each head of queries and keys, and rotate it.

    Args:
        qkv_SBC: the projection's output [S, B, (heads + 2 groups) x D], heads of each part adjacent.
        q_weight, k_weight: weights of the RMSNorm over a head [D].
        cos, sin, interleaved: as in `rope.apply_rotary`.

    Returns:
        Queries [S, B, heads, D], keys and values [S, B, groups, D]. Values are a view of the projection.
    """
    cos, sin = check_tables(cos, sin, qkv_SBC.shape)
    if qkv_SBC.is_contiguous() and qkv_SBC.numel() and use_fused("split, norm and rotary", qkv_SBC, q_weight, cos):
        args = heads, groups, q_weight, k_weight, eps, cos, sin, interleaved
        return _SplitNormRotary.apply(  # type: ignore[no-any-return]
            qkv_SBC, tracked(qkv_SBC, q_weight), tracked(qkv_SBC, k_weight), args
        )
    return split_norm_rotary_reference(qkv_SBC, heads, groups, q_weight, k_weight, eps, cos, sin, interleaved)
