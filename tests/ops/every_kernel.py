"""Calls that between them launch every kernel of ops/, on tensors of torch's default device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from megascale.ops import (
    activation,
    adam,
    cross_entropy,
    dispatch,
    dropout,
    fused_projection,
    grouped_gemm,
    grouped_gradients,
    lamb,
    norm,
    norm_rotary,
    rope,
    routing_kernels,
    segments,
)
from megascale.ops.amax import AmaxPool
from megascale.ops.embedding import add_sorted_rows, sort_tokens
from megascale.ops.float8 import cast, grouped, stacks
from megascale.ops.float8.formats import E4M3, E5M2, Format, allocate_scales
from megascale.ops.gradient_sink import GradientSink, SinkParameter, attach
from megascale.ops.peer_max import WORD_BYTES, PeerMax
from megascale.ops.peer_sum import PeerSum, sum_over_peers, sum_parts
from megascale.parallel.linear import DEFAULT_PRECISION
from megascale.parallel.tensor import linear_scatter

BF16 = torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=dtype == BF16)


def collecting(*shape: int) -> torch.Tensor:
    """A parameter that collects its gradient in float32."""
    built = SinkParameter(zeros(*shape).detach())
    attach(built, GradientSink(torch.zeros(shape)))
    return built


def both_passes(function: Callable[..., object], *inputs: torch.Tensor) -> None:
    out = function(*inputs)
    parts = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(parts, [torch.zeros_like(t) for t in parts])


def rotary(interleaved: bool) -> None:
    cos, sin = rope.make_rotary_tables(8, 128, 1e4, torch.get_default_device())
    both_passes(lambda qkv: rope.split_qkv(qkv, 32, 8, cos, sin, interleaved), zeros(8, 2, 48 * 128))


def norm_rotary_split() -> None:
    cos, sin = rope.make_rotary_tables(8, 128, 1e4, torch.get_default_device())
    both_passes(
        lambda qkv, q, k: norm_rotary.split_norm_rotary(qkv, 32, 8, q, k, 1e-6, cos, sin),
        zeros(8, 2, 48 * 128),
        zeros(128),
        zeros(128),
    )


def head(promised: bool) -> None:
    w = zeros(64000, 16)
    targets, token_grad = torch.zeros(4, dtype=torch.long), torch.tensor(0.5)
    loss = cross_entropy.linear_cross_entropy(
        zeros(4, 16), w, targets, vocab=63990, token_grad=token_grad if promised else None
    )
    loss.backward(token_grad.expand(4))


def optimizer(on_device: bool) -> None:
    table = segments.Segments([(0, 10000, True, 0), (10000, 20001, False, 1)], 2, torch.get_default_device())
    w, m, v, g = (torch.zeros(20001) for _ in range(4))
    out = torch.zeros(20001, dtype=BF16)
    o = SimpleNamespace(lr=torch.tensor(0.1), step=torch.tensor(2)) if on_device else SimpleNamespace(lr=0.1, step=2)
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "segments": table, "step": o.step}
    options |= {"grad_scale": torch.tensor(1.0), "skip": torch.tensor(False)}
    adam.adamw_apply(w, m, v, g, out, lr=o.lr, **options)
    sums = lamb.lamb_direction(w, m, v, g, g, **options)
    lamb.lamb_apply(w, g, out, sums, lr=o.lr, trust_min=0.0, trust_max=10.0, segments=table, skip=options["skip"])


def recomputed_activation(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    *_, inner, recompute_fn = fused_projection.split_fused_projection(
        x, 40, 40, 128, "gelu", fused_bias=bias, recompute=True
    )
    return linear_scatter(DEFAULT_PRECISION, inner, weight, recompute_fns=(recompute_fn,))


def add_norm(width: int) -> None:
    both_passes(
        lambda x, r, w: norm.add_norm(x, r, w, w, 1e-5, "layernorm", w),
        zeros(8, 2, width),
        zeros(8, 2, width),
        zeros(width),
    )


def with_amax(call: Callable[[], None]) -> Callable[[], None]:
    """The same call, whose kernels collect the largest magnitude of what they make."""

    def capture() -> None:
        kernels = dispatch.CURRENT.get()
        kernels.amaxes = AmaxPool()
        try:
            call()
        finally:
            kernels.amaxes = None

    return capture


def float8_casts(kind: Format) -> None:
    x = zeros(4096, 5120)
    counts = torch.zeros(2, dtype=torch.long)
    cast.cast_by_amax(x, kind)
    cast.cast_by_amax(x, kind, counts=counts)
    cast.cast_by_amax(x, kind, columns=False)
    cast.cast_rows(x, kind, columns=True, counts=counts)
    cast.cast_rows(x, kind, row_amax=cast.compute_row_amaxes(x), counts=counts)


def largest_over_peers() -> None:
    arguments = [torch.zeros(PeerMax.count_memory_bytes(2) // WORD_BYTES, dtype=torch.int64) for _ in range(2)]
    PeerMax(0, arguments)(torch.ones(()))


def sums_over_peers() -> None:
    local = torch.zeros(4096)
    sum_over_peers(local, torch.zeros(3, 8192)[:, :4096], 1, local)
    sum_over_peers(zeros(4096).detach(), zeros(3, 4096).detach(), 1, zeros(4096).detach())
    sum_over_peers(local, torch.zeros(3, 8192, dtype=BF16)[:, :4096], 1, torch.zeros(4096), accumulate=True)


def sums_of_parts() -> None:
    for ranks in (2, 3, 4, 8):
        for dtype in (BF16, torch.float32):
            *parts, out = torch.zeros(ranks + 1, 1 << 16, dtype=dtype)
            sum_parts(parts, out, programs=8)
            words = torch.zeros(ranks, ranks, dtype=torch.int64)
            PeerSum(0, list(words))(parts, out, lambda launch: launch())


def grouped_gemms() -> None:
    x, dy = zeros(512, 2048).detach(), zeros(1024, 1536).detach()
    weights, main_grad = zeros(8, 1536, 2048).detach(), torch.zeros(8, 1536, 2048)
    offsets, index = torch.zeros(9, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    grouped_gemm.multiply_groups(x, weights, offsets, index)
    grouped_gemm.multiply_groups(dy, weights, offsets, transposed=True)
    grouped_gemm.multiply_groups(dy, weights.transpose(1, 2).contiguous(), offsets, by_blocks=True)
    grouped_gemm.multiply_groups(dy, weights, offsets, transposed=True, by_blocks=True)
    grouped_gradients.accumulate_group_gradients(main_grad, dy, x, offsets, index)
    narrow_dy = torch.zeros(512, 1536, dtype=BF16)
    grouped_gradients.accumulate_group_gradients(main_grad, narrow_dy, dy, offsets, dy_index=index)


def float8_experts() -> None:
    matrices = stacks.cast_stack(zeros(2, 28672, 4096).detach())
    x = cast.cast_rows(zeros(512, 4096).detach(), E4M3)
    dy = cast.cast_rows(zeros(512, 28672).detach(), E4M3)
    offsets = torch.zeros(3, dtype=torch.int32)
    for precise in (False, True):
        grouped.multiply_float8_groups(
            x.rows, x.rows_scale, matrices.rows, matrices.rows_scale, offsets, dtype=BF16, precise=precise
        )
    grouped.multiply_float8_groups(
        dy.rows, dy.rows_scale, matrices.columns, matrices.columns_scale, offsets, dtype=BF16
    )
    stacks.cast_activation("swiglu", zeros(512, 28672).detach())


def routing() -> None:
    scores, weights = torch.zeros(64, 128), torch.zeros(64, 8)
    indices = routing_kernels.select_top_experts(scores, None, 8)
    routing_kernels.select_top_experts(scores, torch.zeros(128), 8)
    routing_kernels.count_choices(indices, 128)
    routing_kernels.split_float32(scores)
    offsets, token, slot, row, _ = routing_kernels.sort_choices(indices, 0, 32, 512)
    rows = zeros(512, 2048).detach()
    routing_kernels.sum_rows(rows, row, None)
    routing_kernels.sum_rows(rows, row, weights)
    for kind, (gated, _) in routing_kernels.FUSED_ACTIVATIONS.items():
        inner, dy = zeros(512, 1536 if gated else 768).detach(), zeros(512, 768).detach()
        routing_kernels.compute_activation_gradient(kind, inner, dy, weights, token, slot, offsets[-1:])


def float8_shards() -> None:
    flat, scales = zeros(100_000).detach(), allocate_scales(2, torch.get_default_device())
    table = segments.Segments([(0, 60_000, True, 0), (60_000, 99_001, True, 1)], 2, torch.get_default_device())
    out, amax = torch.zeros(100_000, dtype=torch.uint8), torch.zeros(2)
    cast.compute_shard_amaxes(flat, table, amax)
    cast.compute_shard_scales(amax, E4M3, scales)
    cast.cast_shard(flat, table, scales, E4M3, out)
    rows = torch.zeros(512, 256, dtype=torch.uint8).view(E4M3.dtype)
    cast.transpose_rows(rows)
    cast.transpose_scaled_rows(rows, torch.ones(512, 1))


CASES: dict[str, Callable[[], None]] = {
    "layer norm": lambda: both_passes(
        lambda x, w, b: norm.layer_norm(x, w, b, 1e-5), zeros(8, 2, 5120), zeros(5120), zeros(5120)
    ),
    "layer norm, collected": lambda: both_passes(
        lambda x, w, b: norm.layer_norm(x, w, b, 1e-5), zeros(8, 2, 5120), collecting(5120), collecting(5120)
    ),
    "rms norm": lambda: both_passes(lambda x, w: norm.rms_norm(x, w, 1e-5), zeros(8, 2, 4096), zeros(4096)),
    "add norm": lambda: add_norm(5120),
    "add norm, narrow": lambda: add_norm(2048),
    "add norm, small": lambda: add_norm(768),
    "add norm, 6,144": lambda: add_norm(6144),
    "add norm, 12,288": lambda: add_norm(12288),
    **{
        f"add norm, {width:,}, with amax": with_amax(lambda width=width: add_norm(width))
        for width in (768, 2048, 4096, 5120, 12288)
    },
    "layer norm, with amax": with_amax(
        lambda: both_passes(lambda x, w, b: norm.layer_norm(x, w, b, 1e-5), zeros(8, 2, 5120), zeros(5120), zeros(5120))
    ),
    "gelu, with amax": with_amax(lambda: both_passes(activation.gelu, zeros(8, 2, 20480), zeros(20480))),
    "swiglu, with amax": with_amax(lambda: both_passes(activation.swiglu, zeros(8, 2, 28672))),
    "gelu": lambda: both_passes(activation.gelu, zeros(8, 2, 20480), zeros(20480)),
    "gelu tanh": lambda: both_passes(lambda x: activation.gelu(x, None, "tanh"), zeros(8, 2, 20480)),
    "swiglu": lambda: both_passes(activation.swiglu, zeros(8, 2, 28672)),
    "clamped swiglu": lambda: both_passes(lambda x: activation.activate("swiglu_clamped", x), zeros(8, 2, 5760)),
    "geglu": lambda: both_passes(lambda x: activation.activate("geglu_tanh", x), zeros(8, 2, 28672)),
    "rotary halves": lambda: rotary(False),
    "rotary interleaved": lambda: rotary(True),
    "split, norms and rotary": norm_rotary_split,
    "split fused projection": lambda: both_passes(
        lambda x, b: fused_projection.split_fused_projection(x, 40, 40, 128, "gelu", b)[:4],
        zeros(8, 2, 15360 + 20480),
        zeros(20480),
    ),
    "gelu, bias in already": lambda: both_passes(
        lambda x, b: activation.gelu(x, b, is_bias_added=True), zeros(8, 2, 20480), collecting(20480)
    ),
    "split fused projection, its GEMM's bias": lambda: both_passes(
        lambda x, b: fused_projection.split_fused_projection(x, 40, 40, 128, "gelu", fused_bias=b)[:4],
        zeros(8, 2, 15360 + 20480),
        collecting(15360 + 20480),
    ),
    "split fused projection, its activation recomputed": lambda: both_passes(
        recomputed_activation,
        zeros(8, 2, 15360 + 20480),
        collecting(15360 + 20480),
        zeros(5120, 20480),
    ),
    "swiglu again": lambda: both_passes(
        lambda x, w: linear_scatter(
            DEFAULT_PRECISION, x, w, recompute_fns=(activation.RecomputedActivation("swiglu"),)
        ),
        zeros(8, 2, 28672),
        zeros(4096, 14336),
    ),
    "dropout add": lambda: both_passes(
        lambda x, b, r: dropout.dropout_add(x, b, r, 0.1, 1 << 50, 0, 0),
        zeros(8, 2, 5120),
        zeros(5120),
        zeros(8, 2, 5120),
    ),
    "dropout on device keys": lambda: both_passes(
        lambda x: dropout.dropout(x, 0.1, torch.tensor([5]), 0, torch.tensor([7])), zeros(8, 2, 5120)
    ),
    "head": lambda: head(False),
    "head, promised": lambda: head(True),
    "embedding": lambda: add_sorted_rows(
        torch.zeros(64, 5120), sort_tokens(torch.tensor([3] * 40)), torch.zeros(40, 5120, dtype=BF16)
    ),
    "float8 casts, e4m3": lambda: float8_casts(E4M3),
    "float8 casts, e5m2": lambda: float8_casts(E5M2),
    "float8 of shards": float8_shards,
    "largest over peers": largest_over_peers,
    "grouped GEMMs": grouped_gemms,
    "experts in float8": float8_experts,
    "sums over peers": sums_over_peers,
    "sums of parts": sums_of_parts,
    "routing": routing,
    "optimizers": lambda: optimizer(False),
    "optimizers on device numbers": lambda: optimizer(True),
}
