"""Seconds of a layer's kernels from their FLOPs and bytes on one GPU: GEMMs, attention, element-wise operations.

All functions take a `Case` (numbers or arrays) and broadcast. Times are seconds for one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.software import ATTENTION_KERNELS

# GEMM tiles a library may choose from: rows, columns, share of the best tile's speed.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8))
# Share of its speed that a GEMM keeps whose widths are multiples of 1, 2, 4 or 8 values: tensor cores are fed 16 bytes
# at a time. 1: padding a vocabulary of 50,257 to 50,304 made training of GPT-2 124M, a third of whose time are the
# logits, about 25% faster (Karpathy, nanoGPT). Between that and 8 it is assumed.
ALIGNMENT = {1: 0.55, 2: 0.7, 4: 0.85, 8: 1.0}
# Share of a copy's bandwidth that batched GEMMs reach where memory bounds them: scores of 32 heads, 2,048 x 2,048,
# times head dimensions of 64 to 128 on an H200 (dev/log.md, 2026-11-24).
BATCHED_MEMORY = 0.82
# Rows of a flash-attention tile.
ATTENTION_ROWS = 128

# Passes over a tensor of b s h values (norm and residual regions, "n"), over the QKV tensor ("a") and over the MLP's
# inner tensor ("f"), counted per kernel from what each reads and writes. Eager: bias, GeLU, residual addition one
# kernel each, q, k and v copied for the attention kernel. Fused: bias + residual one kernel, bias + GeLU one kernel,
# attention reads strided inputs. A parallel block has one norm and one residual addition instead of two.
EAGER_FORWARD = {"norm": 2.0, "residual": 5.0, "qkv": 6.0, "mlp": 4.0}
EAGER_BACKWARD = {"norm": 5.0, "residual": 4.0, "qkv": 7.0, "mlp": 4.0}
FUSED_FORWARD = {"norm": 2.0, "residual": 3.0, "qkv": 0.0, "mlp": 2.0}
FUSED_BACKWARD = {"norm": 4.0, "residual": 3.0, "qkv": 1.0, "mlp": 3.0}
EAGER_KERNELS = (18, 32)
FUSED_KERNELS = (11, 20)
# Passes over the s x s scores of unfused attention between its products: mask + softmax in one kernel (it reads the
# lower triangle alone and writes the whole square), dropout with its mask of a byte a value; and their gradients.
SCORE_PASSES = (4.0, 4.5)
# The same where Megatron-LM's softmax kernel does not apply (matrices of scores on a rank no multiple of four): widened
# to float32, scaled, masked, softmax, narrowed, one kernel each.
PLAIN_SCORE_PASSES = (20.5, 22.5)
SOFTMAX_MATRICES = 4
# Bytes moved a value of the logits by the cross-entropy, forward and backward. Eager, vocabulary-parallel
# (Megatron-LM's): logits widened to float32, their maximum, subtracted, exponentials, their sum, divided, two passes
# for the gradient, narrowed. Fused (this engine's, `ops/cross_entropy.py`): read once for the statistics, read and
# overwritten once.
LOSS_BYTES, FUSED_LOSS_BYTES = 60.0, 6.0
# Exponentials of flash attention take this share of its time at a head dimension of HEAD: FlashAttention-3 counts them
# as half of forward's two products; backward does five products and one more set.
EXPONENTIALS, HEAD = 2.0 / 9.0, 128.0
# Bytes that a value's cast to float8 is worth. One scale a tensor: both orientations, of activations once a forward, of
# their gradients once a backward (83.9 M values in 91.7 us on an H200, dev/log.md), and a quarter of the passes for
# the largest magnitude (2.3 each), which the makers of other tensors collect. One scale a row: read once, written once.
FLOAT8_CAST_BYTES = 4.6 + 2.3 / 4
FLOAT8_ROW_CAST_BYTES = 3.0
# With one scale per tensor, what a tensor-parallel group gathers is cast by shards and travels as bytes; each rank then
# transposes all of it: one byte read and one written per value.
FLOAT8_TRANSPOSE_BYTES = 2.0
# Of weights, once a step: read, written in both orientations.
FLOAT8_WEIGHT_BYTES = 4.0
# Bytes moved a parameter by the optimizer: gradient, master, two moments read, three written, weight written.
OPTIMIZER_BYTES = 30.0


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer's kernels, one micro-batch, forward and backward (recomputation not included)."""

    gemm_forward: Any
    gemm_backward: Any
    attention_forward: Any
    attention_backward: Any
    elementwise_forward: Any
    elementwise_backward: Any
    kernels: Any

    @property
    def forward(self) -> Any:
        """Return the seconds of a layer's forward."""
        return self.gemm_forward + self.attention_forward + self.elementwise_forward

    @property
    def backward(self) -> Any:
        """Return the seconds of a layer's backward."""
        return self.gemm_backward + self.attention_backward + self.elementwise_backward


def wave_efficiency(rows: Any, columns: Any, processors: int, batch: Any = 1) -> Any:
    """Return the share of peak that whole tiles in whole waves reach, for the best tile that a library would choose.

    The tiles of all `batch` products of a batched GEMM share waves.
    """
    best: Any = 0.0
    for tall, wide, rate in TILES:
        tiles = batch * np.ceil(rows / tall) * np.ceil(columns / wide)
        waves = np.ceil(tiles / processors)
        best = np.maximum(best, rate * batch * rows * columns / (waves * processors * tall * wide))
    return best


def alignment_efficiency(columns: Any, depth: Any) -> Any:
    """Return the share of a GEMM's speed that its widths leave: by the largest power of two, up to 8, in both."""
    divisor = np.gcd(np.gcd(np.rint(columns).astype(np.int64), np.rint(depth).astype(np.int64)), 8)
    return np.select([divisor == width for width in ALIGNMENT], list(ALIGNMENT.values()), default=1.0)


def gemm_seconds(
    cluster: ClusterSpec,
    rows: Any,
    columns: Any,
    depth: Any,
    accumulate: Any = None,
    cap: Any = 1.0,
    float8: Any = False,
    batch: Any = 1,
    fused: Any = True,
) -> Any:
    """Return the time of one bf16 GEMM [rows, depth] x [depth, columns], or of `batch` GEMMs in one launch.

    `accumulate`: bytes of a gradient value that the result is added to, None for a plain bf16 output; `fused`: by the
    GEMM itself, else by a kernel of its own that reads both and writes the sum. `cap`: share of peak that the power
    limit leaves. `float8`: operands in float8, already cast.
    """
    kernels, gpu = cluster.kernels, cluster.gpu
    waves = wave_efficiency(rows, columns, gpu.processors, batch)
    burst = kernels.gemm * depth / (depth + kernels.gemm_half_depth) * waves * alignment_efficiency(columns, depth)
    # GEMMs that fill the processors better draw more power and clock down: none holds more than the cap.
    peak = np.where(float8, gpu.float8_tflops or gpu.peak_tflops, gpu.peak_tflops)
    # The multipliers of float8 reach the power limit at another share of their peak.
    power = cluster.power
    if power and power.float8_sustained:
        sustained = power.float8_sustained / power.gemm_sustained
    else:
        sustained = 1.0
    rate = peak * 1e12 * np.minimum(np.minimum(burst, kernels.gemm_best), cap * np.where(float8, sustained, 1.0))
    compute = 2.0 * batch * rows * columns * depth / rate + (kernels.gemm_gap_us or 0.0) * 1e-6
    bandwidth = gpu.memory_gbs * 1e9 * kernels.memory * np.where(np.asarray(batch) > 1, BATCHED_MEMORY, 1.0)
    inputs = 2.0 * batch * (rows + columns) * depth
    values = batch * rows * columns
    if accumulate is None:
        return np.maximum(compute, (inputs + 2.0 * values) / bandwidth)
    output = values * 2.0 * accumulate
    added = np.maximum(compute + kernels.accumulate_exposed * output / bandwidth, (inputs + output) / bandwidth)
    separate = np.maximum(compute, (inputs + values * accumulate) / bandwidth) + 3.0 * values * accumulate / bandwidth
    return np.where(fused, added, separate)


def gathers_bytes(case: Case) -> Any:
    """Return where tensor-parallel groups gather float8 instead of bfloat16: one scale per tensor, cut sequences."""
    tensorwise = np.logical_and(case.float8, np.logical_not(case.bf16_weight_gradients))
    return tensorwise & np.asarray(case.sequence_parallel, dtype=bool) & (np.asarray(case.tensor) > 1)


def _gemms(cluster: ClusterSpec, case: Case, cap: Any) -> tuple[Any, Any]:
    """Forward and backward seconds of a layer's GEMMs."""
    tokens = case.tokens
    t, h = case.tensor, case.hidden
    qkv = (case.query + 2 * case.kv) / t
    inner = case.ffn / t
    up = inner * np.where(case.gated, 2, 1)
    bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory
    cast_bytes = np.where(case.bf16_weight_gradients, FLOAT8_ROW_CAST_BYTES, FLOAT8_CAST_BYTES)
    shared = np.where(gathers_bytes(case), FLOAT8_CAST_BYTES / t + FLOAT8_TRANSPOSE_BYTES, cast_bytes)
    cast_bytes = np.where(case.float8, cast_bytes, 0.0) / bandwidth
    shared = np.where(case.float8, shared, 0.0) / bandwidth

    def pair_seconds(
        columns: Any, depth: Any, rows: Any = tokens, times: Any = 1.0, enters: bool = True
    ) -> tuple[Any, Any]:
        """Return forward and backward of a linear layer that `enters` a tensor-parallel region or leaves it."""
        of_input, of_gradient = (shared, cast_bytes) if enters else (cast_bytes, shared)
        forward = gemm_seconds(cluster, rows, columns, depth, None, cap, case.float8) + of_input * rows * depth
        backward = gemm_seconds(cluster, rows, depth, columns, None, cap, case.float8) + of_gradient * rows * columns
        weight_gradient = np.logical_and(case.float8, np.logical_not(case.bf16_weight_gradients))
        backward = backward + gemm_seconds(
            cluster, depth, columns, rows, case.gradient_bytes, cap, weight_gradient, fused=case.fused_accumulation
        )
        return times * forward, times * backward

    # A rank's experts share the tokens that its group sends it, evenly; a dense MLP is one expert that sees all.
    local_experts = case.experts / case.expert_parallel
    tokens_per_expert = tokens * case.top_k / local_experts
    serial = [
        pair_seconds(qkv, h),
        pair_seconds(h, case.query / t, enters=False),
        pair_seconds(up, h, tokens_per_expert, local_experts),
        pair_seconds(h, inner, tokens_per_expert, local_experts, enters=False),
    ]
    # The parallel block feeds [QKV | MLP-in] from one GEMM and sums both results in one.
    parallel = [pair_seconds(qkv + up, h), pair_seconds(h, case.query / t + inner, enters=False)]
    # Experts see other tokens than attention, so their GEMMs stay their own.
    choose = np.asarray(case.parallel_block, dtype=bool) & (np.asarray(case.experts) == 1)
    totals = [np.where(choose, sum(p[i] for p in parallel), sum(s[i] for s in serial)) for i in (0, 1)]
    return totals[0], totals[1]


def padding(kernel: str, head: Any) -> Any:
    """Work added by padding the head dimension to what the kernel has: 32, 64, 128 for FlashAttention-1."""
    sizes: tuple[int, ...] = (32, 64, 96, 128, 256)
    if kernel == "flash1":
        sizes = (32, 64, 128)
    padded: Any = head
    for size in reversed(sizes):
        padded = np.where(head <= size, size, padded)
    return padded / head


def attention_rate(cluster: ClusterSpec, kernel: str, sequence: Any) -> Any:
    """FLOP/s of the causal half, forward and backward, at full occupancy; interpolated in the logarithm of length."""
    table = np.array(cluster.kernels.attention[kernel])
    return 1e12 * np.interp(np.log(sequence), np.log(table[:, 0]), table[:, 1])


def _attention(cluster: ClusterSpec, case: Case) -> tuple[Any, Any]:
    """Forward and backward seconds of a layer's attention."""
    width = case.query / case.tensor
    heads = case.heads / case.tensor
    s = case.sequence
    half = 2.0 * case.tokens * s * width * case.share
    # A window shortens the rows of keys a tile visits, so it runs at the rate of a shorter sequence.
    length = np.maximum(s * case.share, 1.0)
    tiles = case.micro * heads * np.ceil(s / case.context / ATTENTION_ROWS)
    occupancy = np.minimum(1.0, tiles / (np.ceil(tiles / cluster.gpu.processors) * cluster.gpu.processors))
    forward: Any = 0.0
    backward: Any = 0.0
    for index, kernel in enumerate(ATTENTION_KERNELS):
        chosen = np.asarray(case.attention) == index
        if not np.any(chosen):
            continue
        if kernel == "unfused":
            scores = 2.0 * case.tokens * heads * s
            bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory
            local_sequence = s / case.context
            size = width / heads
            matrices = case.micro * heads
            # Two products a pass are as wide as the sequence and as deep as a head, two the other way round.
            wide = gemm_seconds(cluster, local_sequence, s, size, batch=matrices)
            deep = gemm_seconds(cluster, local_sequence, size, s, batch=matrices)
            plain = np.asarray(matrices) % SOFTMAX_MATRICES != 0
            passes = [np.where(plain, p, q) for p, q in zip(PLAIN_SCORE_PASSES, SCORE_PASSES, strict=True)]
            f = wide + deep + scores * passes[0] / bandwidth
            b = wide + 3 * deep + scores * passes[1] / bandwidth
        else:
            if kernel not in cluster.kernels.attention:
                continue
            seconds = 3.5 * half / (attention_rate(cluster, kernel, length) * occupancy)
            size = case.query / case.heads
            padded = padding(kernel, size)
            # Products grow with the padded head dimension, exponentials do not.
            seconds = seconds * ((1.0 - EXPONENTIALS) * padded + EXPONENTIALS * HEAD / size)
            # Forward kernels run faster than backward ones: a quarter of the time for 2/7 of the FLOPs.
            f, b = 0.25 * seconds, 0.75 * seconds
        forward, backward = np.where(chosen, f, forward), np.where(chosen, b, backward)
    return forward, backward


def _elementwise(cluster: ClusterSpec, case: Case) -> tuple[Any, Any, Any]:
    """Forward and backward seconds of norms, activations, biases and copies; number of kernels of a layer."""
    fused = np.asarray(case.fused_operators, dtype=bool)
    blocks = np.where(case.parallel_block, 1.0, 2.0)
    value = 2.0 * case.tokens
    stream = value * case.hidden / np.where(case.sequence_parallel, case.tensor, 1)
    qkv = value * (case.query + 2 * case.kv) / case.tensor / 3.0
    inner = value * case.top_k * case.ffn * np.where(case.gated, 1.5, 1.0) / case.tensor
    bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory

    def seconds(eager: dict[str, float], tight: dict[str, float], launches: tuple[int, int]) -> Any:
        moved = {key: np.where(fused, tight[key], eager[key] * case.passes) for key in eager}
        volume = (moved["norm"] + moved["residual"]) * blocks * stream + moved["qkv"] * 3 * qkv + moved["mlp"] * inner
        return volume / bandwidth + np.where(fused, launches[1], launches[0]) * cluster.kernels.launch_us * 1e-6

    forward = seconds(EAGER_FORWARD, FUSED_FORWARD, (EAGER_KERNELS[0], FUSED_KERNELS[0]))
    backward = seconds(EAGER_BACKWARD, FUSED_BACKWARD, (EAGER_KERNELS[1], FUSED_KERNELS[1]))
    return forward, backward, np.where(fused, sum(FUSED_KERNELS), sum(EAGER_KERNELS))


def layer_times(cluster: ClusterSpec, case: Case, overhead: float = 1.0, cap: Any = 1.0) -> LayerTimes:
    """Return the kernels of one layer per micro-batch. Non-GEMM kernels take `overhead` times their seconds."""
    gemm, attention = _gemms(cluster, case, cap), _attention(cluster, case)
    forward, backward, kernels = _elementwise(cluster, case)
    return LayerTimes(
        gemm[0],
        gemm[1],
        overhead * attention[0],
        overhead * attention[1],
        overhead * forward,
        overhead * backward,
        kernels,
    )


def logits_seconds(cluster: ClusterSpec, case: Case, cap: Any = 1.0) -> tuple[Any, Any]:
    """Forward and backward seconds of the output GEMM and the loss, which only the last stage has."""
    tokens, columns = case.tokens, case.vocab / case.tensor
    bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory
    loss = np.where(case.fused_loss, FUSED_LOSS_BYTES, LOSS_BYTES) * tokens * columns / bandwidth
    forward = gemm_seconds(cluster, tokens, columns, case.hidden, None, cap) + loss / 2
    backward = gemm_seconds(cluster, tokens, case.hidden, columns, None, cap) + loss / 2
    weights = gemm_seconds(
        cluster, case.hidden, columns, tokens, case.gradient_bytes, cap, fused=case.fused_accumulation
    )
    return forward, backward + weights


def optimizer_seconds(cluster: ClusterSpec, case: Case, parameters: Any) -> Any:
    """Update of a rank's share of `parameters` (all of a GPU's; sharded over replicas by the distributed optimizer)."""
    share = parameters / np.where(case.distributed_optimizer, case.replicas, 1)
    clear = parameters * (case.gradient_bytes + np.where(case.float8, FLOAT8_WEIGHT_BYTES, 0.0))
    return (share * OPTIMIZER_BYTES + clear) / (cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory)
