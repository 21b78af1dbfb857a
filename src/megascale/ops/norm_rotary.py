"""Split of the QKV projection, with RMSNorm and rotary positions of query and key heads, in one pass.

As separate operators, norms and rotations read and write queries and keys four times in each direction. These kernels
hold a head in registers. Forward reads and writes each head once. Backward reads the head and its gradient, and writes
one gradient. Sums are float32. Gradients of the norms' weights are partial sums in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.gradient_sink import get_tracked
from megascale.ops.norm import rms_norm_reference
from megascale.ops.reduce import MAX_PARTIAL_SUMS, accumulate_gradients
from megascale.ops.rope import (
    apply_rotary_reference,
    check_tables,
    find_packed_gradients,
    make_heads_contiguous,
)

TILE_ELEMENTS = 2048  # A tile of heads and its gradient fit the registers of four warps.
# Eight programs per SM. With two, an H100 reaches only a quarter of the rate of a copy.
MAX_BACKWARD_PROGRAMS = 4 * MAX_PARTIAL_SUMS


@jit
def _load_weights(q_weight_ptr, k_weight_ptr, column, inside, is_query):
    """Return the norm's weights [heads, columns] for a tile of query and key heads in float32."""
    q_weight = tl.load(q_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q_weight[None, :], k_weight[None, :])


@jit
def _load_gradient(dq_row, dk_row, column, inside, is_query):
    """Return the gradients of a tile of query and key heads in float32.

    Two masked loads read whole vectors. One load through a selected pointer would read single elements.
    """
    dq = tl.load(dq_row + column[None, :], mask=inside & is_query, other=0.0)
    dk = tl.load(dk_row + column[None, :], mask=inside & (is_query == 0), other=0.0)
    return dq.to(tl.float32) + dk.to(tl.float32)


@jit
def _load_normed(x_row, column, inside, inverse_rms):
    """Return a tile of heads in float32, normed without weights."""
    return tl.load(x_row + column[None, :], mask=inside, other=0.0).to(tl.float32) * inverse_rms[:, None]


@jit
def _load_rotation(cos_ptr, sin_ptr, angle, is_pair):
    """Return the cosines and sines of a token's pairs [1, pairs] in float32."""
    cos = tl.load(cos_ptr + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    return cos, sin


@jit
def _choose_columns(pair, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the columns of the first and of the second entry of each pair."""
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1
    return pair, HALF + pair


@jit
def _norm_rotary_forward_kernel(
    x_ptr,
    out_ptr,
    inverse_rms_ptr,
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
    """Norm and rotate BLOCK_N query and key heads of one token.

    HALF: half of the rotated width. The first and the second entry of each pair are rotated together. The other entries
    of a head ("passed") are only normed.
    """
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
    cos, sin = _load_rotation(cos_ptr, sin_ptr, s * table_s + b * table_b + pair, is_pair)
    first_column, second_column = _choose_columns(pair, HALF, INTERLEAVED)
    inside = is_head[:, None] & is_pair[None, :]
    first = tl.load(x_row + first_column[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_row + second_column[None, :], mask=inside, other=0.0).to(tl.float32)
    square_sum = tl.sum(first * first + second * second, 1)
    if 2 * HALF < D:
        passed_column = 2 * HALF + tl.arange(0, BLOCK_PASS)
        is_passed = passed_column < D
        inside_passed = is_head[:, None] & is_passed[None, :]
        passed = tl.load(x_row + passed_column[None, :], mask=inside_passed, other=0.0).to(tl.float32)
        square_sum += tl.sum(passed * passed, 1)
    inverse_rms = 1.0 / tl.sqrt(square_sum / D + eps)
    tl.store(inverse_rms_ptr + token * heads + head, inverse_rms, mask=is_head)
    first *= inverse_rms[:, None] * _load_weights(q_weight_ptr, k_weight_ptr, first_column, is_pair, is_query)
    second *= inverse_rms[:, None] * _load_weights(q_weight_ptr, k_weight_ptr, second_column, is_pair, is_query)
    tl.store(out_row + first_column[None, :], first * cos - second * sin, mask=inside)
    tl.store(out_row + second_column[None, :], second * cos + first * sin, mask=inside)
    if 2 * HALF < D:
        passed *= inverse_rms[:, None] * _load_weights(q_weight_ptr, k_weight_ptr, passed_column, is_passed, is_query)
        tl.store(out_row + passed_column[None, :], passed, mask=inside_passed)


@jit
def _norm_rotary_backward_kernel(
    dq_ptr,
    dk_ptr,
    x_ptr,
    dx_ptr,
    inverse_rms_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    partial_ptr,
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
    program_tokens,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    """Compute the gradients of query and key heads of `program_tokens` tokens, and partial sums for the weights.

    Names are those of `_norm_rotary_forward_kernel`. `g_` is the gradient of the rotated head, and `d_` that of the
    normed head.
    q_first, q_second, q_passed (and k_...) are sums for the gradient of the weight of the query (key) norm.
    """
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = pair < HALF
    first_column, second_column = _choose_columns(pair, HALF, INTERLEAVED)
    passed_column = 2 * HALF + tl.arange(0, BLOCK_PASS)
    is_passed = passed_column < D
    # Gradients of the weights are summed over heads after the loop, because such sums exchange data between warps.
    q_first = tl.zeros((BLOCK_N, BLOCK_HALF), tl.float32)
    q_second = tl.zeros((BLOCK_N, BLOCK_HALF), tl.float32)
    k_first = tl.zeros((BLOCK_N, BLOCK_HALF), tl.float32)
    k_second = tl.zeros((BLOCK_N, BLOCK_HALF), tl.float32)
    q_passed = tl.zeros((BLOCK_N, BLOCK_PASS), tl.float32)
    k_passed = tl.zeros((BLOCK_N, BLOCK_PASS), tl.float32)
    start = tl.program_id(0).to(tl.int64) * program_tokens
    for token in range(start, tl.minimum(start + program_tokens, tokens)):
        s = token // batch
        b = token % batch
        cos, sin = _load_rotation(cos_ptr, sin_ptr, s * table_s + b * table_b + pair, is_pair)
        for first_head in range(0, heads, BLOCK_N):
            head = first_head + tl.arange(0, BLOCK_N)
            is_head = head < heads
            is_query = head < query_heads
            inside = is_head[:, None] & is_pair[None, :]
            inverse_rms = tl.load(inverse_rms_ptr + token * heads + head, mask=is_head, other=0.0)
            query = is_query[:, None]
            dq_row = dq_ptr + s * dq_s + b * dq_b + head[:, None] * dq_n
            dk_row = dk_ptr + s * dk_s + b * dk_b + (head[:, None] - query_heads) * dk_n
            x_row = x_ptr + s * x_s + b * x_b + head[:, None] * x_n
            dx_row = dx_ptr + token * dx_token + head[:, None] * D
            g_first = _load_gradient(dq_row, dk_row, first_column, inside, query)
            g_second = _load_gradient(dq_row, dk_row, second_column, inside, query)
            d_first = g_first * cos + g_second * sin
            d_second = g_second * cos - g_first * sin
            x_first = _load_normed(x_row, first_column, inside, inverse_rms)
            x_second = _load_normed(x_row, second_column, inside, inverse_rms)
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
                x_passed = _load_normed(x_row, passed_column, inside_passed, inverse_rms)
                q_passed += tl.where(query, d_passed * x_passed, 0.0)
                k_passed += tl.where(query, 0.0, d_passed * x_passed)
                d_passed *= _load_weights(q_weight_ptr, k_weight_ptr, passed_column, is_passed, is_query)
                mean += tl.sum(d_passed * x_passed, 1)
            mean = mean[:, None] / D
            tl.store(dx_row + first_column[None, :], (d_first - x_first * mean) * inverse_rms[:, None], mask=inside)
            tl.store(dx_row + second_column[None, :], (d_second - x_second * mean) * inverse_rms[:, None], mask=inside)
            if 2 * HALF < D:
                dx_passed = (d_passed - x_passed * mean) * inverse_rms[:, None]
                tl.store(dx_row + passed_column[None, :], dx_passed, mask=inside_passed)
    partial_row = partial_ptr + tl.program_id(0).to(tl.int64) * 2 * D
    tl.store(partial_row + first_column, tl.sum(q_first, 0), mask=is_pair)
    tl.store(partial_row + second_column, tl.sum(q_second, 0), mask=is_pair)
    tl.store(partial_row + D + first_column, tl.sum(k_first, 0), mask=is_pair)
    tl.store(partial_row + D + second_column, tl.sum(k_second, 0), mask=is_pair)
    if 2 * HALF < D:
        tl.store(partial_row + passed_column, tl.sum(q_passed, 0), mask=is_passed)
        tl.store(partial_row + D + passed_column, tl.sum(k_passed, 0), mask=is_passed)


def _get_table_strides(cos: Tensor) -> tuple[int, int]:
    """Return the strides of a table of cosines along sequence and batch; 0 if samples share positions."""
    return cos.stride(0), cos.stride(1) if cos.dim() == 3 else 0


def _choose_tile(head_size: int, half: int, heads: int) -> dict[str, int]:
    """Return the kernels' constants for tiles of heads. `half`: half of the rotated width."""
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
        normed_heads = heads + groups
        out = torch.empty((S, B, normed_heads, D), dtype=qkv_SBC.dtype, device=qkv_SBC.device)
        inverse_rms = torch.empty((S, B, normed_heads), dtype=torch.float32, device=qkv_SBC.device)
        tile = _choose_tile(D, cos.shape[-1], normed_heads)
        _norm_rotary_forward_kernel[(S * B, cdiv(normed_heads, tile["BLOCK_N"]))](
            x_SBND,
            out,
            inverse_rms,
            q_weight,
            k_weight,
            cos,
            sin,
            *_get_table_strides(cos),
            B,
            heads,
            normed_heads,
            *x_SBND.stride()[:3],
            eps,
            INTERLEAVED=interleaved,
            **tile,
        )
        ctx.save_for_backward(qkv_SBC, inverse_rms, cos, sin)
        ctx.args = heads, groups, q_weight, k_weight, interleaved
        q, k = out.split((heads, groups), dim=2)
        return q, k, x_SBND[:, :, normed_heads:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_SBC, inverse_rms, cos, sin = ctx.saved_tensors
        heads, groups, q_weight, k_weight, interleaved = ctx.args
        x_SBND = qkv_SBC.unflatten(-1, (heads + 2 * groups, -1))
        S, B, N, D = x_SBND.shape
        dq, dk, dv = (make_heads_contiguous(grad) for grad in grads)
        packed = find_packed_gradients((dq, dk, dv))
        if packed is None:
            packed = torch.empty((S, B, N, D), dtype=qkv_SBC.dtype, device=qkv_SBC.device)
            packed[:, :, heads + groups :].copy_(dv)
        program_tokens = cdiv(S * B, MAX_BACKWARD_PROGRAMS)
        programs = cdiv(S * B, program_tokens)
        partial = torch.empty((programs, 2 * D), dtype=torch.float32, device=qkv_SBC.device)
        # If dq and dk are packed already, they change in place: a program reads a tile before it writes the tile.
        _norm_rotary_backward_kernel[(programs,)](
            dq,
            dk,
            x_SBND,
            packed,
            inverse_rms,
            q_weight,
            k_weight,
            cos,
            sin,
            partial,
            *_get_table_strides(cos),
            B,
            S * B,
            heads,
            heads + groups,
            *dq.stride()[:3],
            *dk.stride()[:3],
            *x_SBND.stride()[:3],
            N * D,
            program_tokens,
            INTERLEAVED=interleaved,
            **_choose_tile(D, cos.shape[-1], heads + groups),
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
    """Split the projection [q | k | v], and apply RMSNorm and rotary positions to each head of queries and keys.

    Args:
        qkv_SBC: output of the projection [S, B, (heads + 2 groups) x D]; the heads of q, of k and of v are adjacent.
        q_weight, k_weight: weights [D] of the RMSNorm over a head.
        cos, sin, interleaved: as in `rope.apply_rotary`.

    Returns:
        Queries [S, B, heads, D], keys and values [S, B, groups, D]. Values are a view of the projection.
    """
    cos, sin = check_tables(cos, sin, qkv_SBC.shape)
    if qkv_SBC.is_contiguous() and qkv_SBC.numel() and use_fused("split, norm and rotary", qkv_SBC, q_weight, cos):
        args = heads, groups, q_weight, k_weight, eps, cos, sin, interleaved
        return _SplitNormRotary.apply(  # type: ignore[no-any-return]
            qkv_SBC, get_tracked(qkv_SBC, q_weight), get_tracked(qkv_SBC, k_weight), args
        )
    return split_norm_rotary_reference(qkv_SBC, heads, groups, q_weight, k_weight, eps, cos, sin, interleaved)
