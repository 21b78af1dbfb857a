"""Seconds of a layer's kernels from their FLOPs and bytes on one GPU: GEMMs, attention, element-wise operations.

All functions take a `Case` of numbers or arrays, which broadcast. Times are seconds per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.simulate.case import Case
from megascale.simulate.cluster import ATTENTION_KERNELS, ClusterSpec

# GEMM tiles from which a library may choose: rows, columns, share of the best tile's speed.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8))
# Share of a GEMM's speed if its widths are multiples of 1, 2, 4 or 8 values only: tensor cores read 16 bytes at a time.
# The value for 1 comes from nanoGPT (Karpathy): padding a vocabulary of 50,257 to 50,304 made training of GPT-2 124M
# about 25% faster, where logits take a third of the time. The values for 2 and 4 are assumed.
ALIGNMENT = {1: 0.55, 2: 0.7, 4: 0.85, 8: 1.0}
_ALIGNMENT_SHARES = np.array([ALIGNMENT.get(divisor, 1.0) for divisor in range(9)])  # by divisor
# Share of a copy's bandwidth that memory-bound batched GEMMs reach. Measured on an H200 with scores of 32 heads, 2,048
# x 2,048, and head dimensions of 64 to 128 (dev/log.md, 2026-11-24).
BATCHED_MEMORY = 0.82
# Rows of a flash-attention tile.
ATTENTION_ROWS = 128

# Passes over memory by element-wise kernels, counted from the tensors that each kernel reads and writes. Norms and
# residual additions pass over a tensor of b s h values, "qkv" over the QKV tensor, "mlp" over the MLP's inner tensor.
# In eager mode, bias, GeLU and residual addition are one kernel each, and q, k and v are copied for the attention
# kernel. In fused mode, bias and residual are one kernel, bias and GeLU are one kernel, and attention reads strided
# inputs. A parallel block has one norm and one residual addition instead of two.
EAGER_FORWARD = {"norm": 2.0, "residual": 5.0, "qkv": 6.0, "mlp": 4.0}
EAGER_BACKWARD = {"norm": 5.0, "residual": 4.0, "qkv": 7.0, "mlp": 4.0}
FUSED_FORWARD = {"norm": 2.0, "residual": 3.0, "qkv": 0.0, "mlp": 2.0}
FUSED_BACKWARD = {"norm": 4.0, "residual": 3.0, "qkv": 1.0, "mlp": 3.0}
# Kernels of a layer: (in forward, in backward).
EAGER_KERNELS = (18, 32)
FUSED_KERNELS = (11, 20)
# Passes over the s x s scores of unfused attention between its two products: (in forward, in backward). Mask and
# softmax are one kernel, which reads the lower triangle and writes the whole square. Dropout has a mask of one byte per
# value.
SCORE_PASSES = (4.0, 4.5)
# The same if Megatron-LM's softmax kernel does not apply: float32 cast, scale, mask, softmax and cast back are one
# kernel each. The kernel applies if the number of score matrices on a rank is a multiple of SOFTMAX_MATRICES.
PLAIN_SCORE_PASSES = (20.5, 22.5)
SOFTMAX_MATRICES = 4
# Bytes moved per logit by the cross-entropy, forward and backward. Eager, vocabulary-parallel (Megatron-LM's): cast to
# float32, maximum, subtraction, exponentials, sum, division, two passes for the gradient, cast back.
LOSS_BYTES = 60.0
# Fused (this engine's, `ops/cross_entropy.py`): one read for the statistics, then one read and one write.
FUSED_LOSS_BYTES = 6.0
# Exponentials take this share of the time of flash attention at a head dimension of REFERENCE_HEAD. FlashAttention-3
# counts the exponentials of forward as half of the time of its two products. Backward has five products and computes
# the exponentials again.
EXPONENTIALS = 2.0 / 9.0
REFERENCE_HEAD = 128.0
# Cost of a cast to float8 in bytes per value. With one scale per tensor, both orientations of activations are written
# in forward, and those of their gradients in backward (83.9 M values in 91.7 us on an H200, dev/log.md). A quarter of
# the tensors also needs a pass for the largest magnitude (2.3 bytes). For the other tensors, the kernels that write
# them compute the largest magnitude.
FLOAT8_CAST_BYTES = 4.6 + 2.3 / 4
# With one scale per row, a value is read once and written once.
FLOAT8_ROW_CAST_BYTES = 3.0
# With one scale per tensor, tensor-parallel ranks cast their shards and gather bytes. Each rank then transposes the
# gathered tensor: one byte read and one written per value.
FLOAT8_TRANSPOSE_BYTES = 2.0
# Weights are cast once per step: one read, and a write in both orientations.
FLOAT8_WEIGHT_BYTES = 4.0
# Bytes moved per parameter by the optimizer: gradient, master weight and two moments read, three written, weight
# written.
OPTIMIZER_BYTES = 30.0


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer's kernels for one micro-batch, without recomputation."""

    gemm_forward: Any
    gemm_backward: Any
    attention_forward: Any
    attention_backward: Any
    elementwise_forward: Any
    elementwise_backward: Any
    kernel_count: Any

    @property
    def forward(self) -> Any:
        """Seconds of a layer's forward."""
        return self.gemm_forward + self.attention_forward + self.elementwise_forward

    @property
    def backward(self) -> Any:
        """Seconds of a layer's backward."""
        return self.gemm_backward + self.attention_backward + self.elementwise_backward


def wave_efficiency(rows: Any, columns: Any, processors: int, batch: Any = 1) -> Any:
    """Return the share of a GEMM's peak that remains after partial tiles and partial waves, for the best tile of TILES.

    A wave is as many tiles as there are SMs. The tiles of all `batch` products of a batched GEMM share waves.

    Args:
        rows, columns: sizes of the result.
        processors: number of SMs.
    """
    best: Any = 0.0
    for tall, wide, rate in TILES:
        tiles = batch * np.ceil(rows / tall) * np.ceil(columns / wide)
        waves = np.ceil(tiles / processors)
        best = np.maximum(best, rate * batch * rows * columns / (waves * processors * tall * wide))
    return best


def alignment_efficiency(columns: Any, depth: Any) -> Any:
    """Return the share of a GEMM's speed that remains for the alignment of its widths (see ALIGNMENT)."""
    divisor = np.gcd(np.gcd(np.rint(columns).astype(np.int64), np.rint(depth).astype(np.int64)), 8)
    return _ALIGNMENT_SHARES[divisor]


def gemm_seconds(
    cluster: ClusterSpec,
    rows: Any,
    columns: Any,
    depth: Any,
    accumulator_bytes: Any = None,
    cap: Any = 1.0,
    float8: Any = False,
    batch: Any = 1,
    fused: Any = True,
) -> Any:
    """Return the seconds of one GEMM [rows, depth] x [depth, columns], or of `batch` GEMMs in one launch.

    Args:
        accumulator_bytes: bytes per value of a gradient to which the result is added; None: a bf16 output.
        cap: share of peak that GEMMs reach under the power limit.
        float8: whether operands are float8 (already cast) instead of bf16.
        fused: whether the GEMM itself adds to the gradient; False: a separate kernel adds the GEMM's result.
    """
    kernels, gpu = cluster.kernels, cluster.gpu
    waves = wave_efficiency(rows, columns, gpu.processors, batch)
    burst = kernels.gemm * depth / (depth + kernels.gemm_half_depth) * waves * alignment_efficiency(columns, depth)
    peak = np.where(float8, gpu.float8_tflops or gpu.peak_tflops, gpu.peak_tflops)
    # The multipliers of float8 reach the power limit at another share of their peak.
    power = cluster.power
    float8_cap_factor = 1.0
    if power and power.float8_sustained:
        float8_cap_factor = power.float8_sustained / power.gemm_sustained
    # GEMMs that fill the processors better draw more power and clock down, so no GEMM exceeds the cap.
    power_cap = cap * np.where(float8, float8_cap_factor, 1.0)
    rate = peak * 1e12 * np.minimum(np.minimum(burst, kernels.gemm_best), power_cap)
    compute = 2.0 * batch * rows * columns * depth / rate + (kernels.gemm_gap_us or 0.0) * 1e-6
    bandwidth = gpu.memory_gbs * 1e9 * kernels.memory * np.where(np.asarray(batch) > 1, BATCHED_MEMORY, 1.0)
    # A GEMM takes the time of its products or of its bytes, whichever is longer.
    input_bytes = 2.0 * batch * (rows + columns) * depth
    values = batch * rows * columns
    if accumulator_bytes is None:
        return np.maximum(compute, (input_bytes + 2.0 * values) / bandwidth)
    output_bytes = values * 2.0 * accumulator_bytes  # the gradient is read and written
    fused_seconds = np.maximum(
        compute + kernels.accumulate_exposed * output_bytes / bandwidth, (input_bytes + output_bytes) / bandwidth
    )
    # The separate kernel reads the result and the gradient, and writes the gradient.
    separate_seconds = (
        np.maximum(compute, (input_bytes + values * accumulator_bytes) / bandwidth)
        + 3.0 * values * accumulator_bytes / bandwidth
    )
    return np.where(fused, fused_seconds, separate_seconds)


def gathers_float8_activations(case: Case) -> Any:
    """Return whether tensor-parallel groups gather float8.

    They do with sequence parallelism and one scale per tensor. With bf16 weight gradients there is one scale per row.
    """
    has_tensor_scales = np.logical_and(case.float8, np.logical_not(case.bf16_weight_gradients))
    return has_tensor_scales & np.asarray(case.sequence_parallel, dtype=bool) & (np.asarray(case.tensor) > 1)


def _gemms(cluster: ClusterSpec, case: Case, cap: Any) -> tuple[Any, Any]:
    """Return the seconds of a layer's GEMMs: (forward, backward)."""
    tokens = case.tokens
    t, h = case.tensor, case.hidden
    # Widths of the projections on a rank.
    qkv = (case.query + 2 * case.kv + case.gate) / t  # with the gate of attention
    inner = case.ffn / t
    up = inner * np.where(case.gated, 2, 1)
    bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory
    cast_bytes = np.where(case.bf16_weight_gradients, FLOAT8_ROW_CAST_BYTES, FLOAT8_CAST_BYTES)
    gathered_cast_bytes = np.where(
        gathers_float8_activations(case), FLOAT8_CAST_BYTES / t + FLOAT8_TRANSPOSE_BYTES, cast_bytes
    )
    # Seconds per value of casts of tensors that a rank has, and of tensors that are gathered.
    local_cast = np.where(case.float8, cast_bytes, 0.0) / bandwidth
    gathered_cast = np.where(case.float8, gathered_cast_bytes, 0.0) / bandwidth

    def pair_seconds(
        columns: Any, depth: Any, rows: Any = tokens, times: Any = 1.0, enters: bool = True
    ) -> tuple[Any, Any]:
        """Return the seconds of `times` equal linear layers: (forward, backward).

        Args:
            columns, depth, rows: output width, input width and number of tokens of a layer.
            enters: whether the layer enters a tensor-parallel region, so that its input is gathered. Otherwise it
                leaves one, and the gradient of its output is gathered.
        """
        input_cast, gradient_cast = local_cast, gathered_cast
        if enters:
            input_cast, gradient_cast = gathered_cast, local_cast
        # Backward has a GEMM for the gradient of the input and one for the gradient of the weight.
        forward = gemm_seconds(cluster, rows, columns, depth, None, cap, case.float8) + input_cast * rows * depth
        backward = gemm_seconds(cluster, rows, depth, columns, None, cap, case.float8) + gradient_cast * rows * columns
        is_float8 = np.logical_and(case.float8, np.logical_not(case.bf16_weight_gradients))
        weight_gradient = gemm_seconds(
            cluster, depth, columns, rows, case.gradient_bytes, cap, is_float8, fused=case.fused_accumulation
        )
        backward = backward + np.where(case.trains_adapters, 0.0, weight_gradient)
        return times * forward, times * backward

    # The tokens that a rank receives are spread evenly over its experts. A dense MLP is one expert for all tokens.
    local_experts = case.experts / case.expert_parallel
    tokens_per_expert = tokens * case.top_k / local_experts
    serial = [
        pair_seconds(qkv, h),
        pair_seconds(h, case.query / t, enters=False),
        pair_seconds(up, h, tokens_per_expert, local_experts),
        pair_seconds(h, inner, tokens_per_expert, local_experts, enters=False),
    ]
    # A parallel block has one GEMM for [QKV | MLP-in], and one for the two output projections.
    parallel = [pair_seconds(qkv + up, h), pair_seconds(h, case.query / t + inner, enters=False)]
    # Experts have other tokens than attention, so their GEMMs are separate.
    is_fused = np.asarray(case.parallel_block, dtype=bool) & (np.asarray(case.experts) == 1)
    forward = np.where(is_fused, sum(pair[0] for pair in parallel), sum(pair[0] for pair in serial))
    backward = np.where(is_fused, sum(pair[1] for pair in parallel), sum(pair[1] for pair in serial))
    return forward, backward


def padding_factor(kernel: str, head: Any) -> Any:
    """Return by which factor the kernel's padding of the head dimension (to 32, 64, 128, ...) increases the work."""
    sizes: tuple[int, ...] = (32, 64, 96, 128, 256)
    if kernel == "flash1":
        sizes = (32, 64, 128)
    padded: Any = head
    for size in reversed(sizes):
        padded = np.where(head <= size, size, padded)
    return padded / head


def attention_rate(cluster: ClusterSpec, kernel: str, sequence: Any) -> Any:
    """Return the FLOP/s of forward and backward together at full occupancy; only the causal half counts.

    The cluster's table is interpolated in the logarithm of the length.
    """
    table = np.array(cluster.kernels.attention[kernel])
    return 1e12 * np.interp(np.log(sequence), np.log(table[:, 0]), table[:, 1])


def _attention(cluster: ClusterSpec, case: Case) -> tuple[Any, Any]:
    """Return the seconds of a layer's attention: (forward, backward)."""
    width = case.query / case.tensor
    heads = case.heads / case.tensor
    s = case.sequence
    causal_flops = 2.0 * case.tokens * s * width * case.causal_share
    # With a window, a tile visits fewer keys, so that the kernel runs at the rate of a shorter sequence.
    visited_length = np.maximum(s * case.causal_share, 1.0)
    tiles = case.micro * heads * np.ceil(s / case.context / ATTENTION_ROWS)
    occupancy = np.minimum(1.0, tiles / (np.ceil(tiles / cluster.gpu.processors) * cluster.gpu.processors))
    forward: Any = 0.0
    backward: Any = 0.0
    for index, kernel in enumerate(ATTENTION_KERNELS):
        uses_kernel = np.asarray(case.attention) == index
        if not np.any(uses_kernel):
            continue
        if kernel == "unfused":
            scores = 2.0 * case.tokens * heads * s
            bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory
            local_sequence = s / case.context
            head_size = width / heads
            matrices = case.micro * heads  # score matrices
            # Products that give scores are as wide as the sequence and as deep as a head; the others are the reverse.
            # Forward has one of each. Backward has one product of the first kind and three of the second.
            scores_product = gemm_seconds(cluster, local_sequence, s, head_size, batch=matrices)
            values_product = gemm_seconds(cluster, local_sequence, head_size, s, batch=matrices)
            is_plain = np.asarray(matrices) % SOFTMAX_MATRICES != 0
            forward_passes = np.where(is_plain, PLAIN_SCORE_PASSES[0], SCORE_PASSES[0])
            backward_passes = np.where(is_plain, PLAIN_SCORE_PASSES[1], SCORE_PASSES[1])
            kernel_forward = scores_product + values_product + scores * forward_passes / bandwidth
            kernel_backward = scores_product + 3 * values_product + scores * backward_passes / bandwidth
        else:
            if kernel not in cluster.kernels.attention:
                continue  # the time stays 0; `estimate_step` refuses such a kernel
            # `causal_flops` are those of forward's two products. Backward has five products, so that both passes have
            # 3.5 times as many.
            seconds = 3.5 * causal_flops / (attention_rate(cluster, kernel, visited_length) * occupancy)
            head_size = case.query / case.heads
            padding = padding_factor(kernel, head_size)
            # The time of products grows with the padded head dimension. The time of exponentials does not, so per FLOP
            # it is longer for smaller heads.
            seconds = seconds * ((1.0 - EXPONENTIALS) * padding + EXPONENTIALS * REFERENCE_HEAD / head_size)
            # Forward kernels run faster than backward ones: a quarter of the time for 2/7 of the FLOPs.
            kernel_forward = 0.25 * seconds
            kernel_backward = 0.75 * seconds
        forward = np.where(uses_kernel, kernel_forward, forward)
        backward = np.where(uses_kernel, kernel_backward, backward)
    return forward, backward


def _elementwise(cluster: ClusterSpec, case: Case) -> tuple[Any, Any, Any]:
    """Return the cost of norms, activations, biases and copies of a layer.

    Returns:
        (forward seconds, backward seconds, number of all kernels of the layer).
    """
    is_fused = np.asarray(case.fused_operators, dtype=bool)
    blocks = np.where(case.parallel_block, 1.0, 2.0)
    # Bytes of the tensors that kernels pass over, in 16 bit. With a gate, the MLP's inner tensor counts one and a half
    # times: the mean of its input of twice the width and its output.
    column_bytes = 2.0 * case.tokens
    residual_bytes = column_bytes * case.hidden / np.where(case.sequence_parallel, case.tensor, 1)
    qkv_bytes = column_bytes * (case.query + 2 * case.kv) / case.tensor / 3.0  # mean of query, key and value
    inner_bytes = column_bytes * case.top_k * case.ffn * np.where(case.gated, 1.5, 1.0) / case.tensor
    bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory

    def pass_seconds(
        eager_passes: dict[str, float], fused_passes: dict[str, float], eager_kernels: int, fused_kernels: int
    ) -> Any:
        """Return the seconds of the element-wise kernels of one pass, with the time that each launch adds."""
        passes = {}
        for key in eager_passes:
            passes[key] = np.where(is_fused, fused_passes[key], eager_passes[key] * case.elementwise_passes)
        moved_bytes = (
            (passes["norm"] + passes["residual"]) * blocks * residual_bytes
            + passes["qkv"] * 3 * qkv_bytes
            + passes["mlp"] * inner_bytes
        )
        launches = np.where(is_fused, fused_kernels, eager_kernels)
        return moved_bytes / bandwidth + launches * cluster.kernels.launch_us * 1e-6

    forward = pass_seconds(EAGER_FORWARD, FUSED_FORWARD, EAGER_KERNELS[0], FUSED_KERNELS[0])
    backward = pass_seconds(EAGER_BACKWARD, FUSED_BACKWARD, EAGER_KERNELS[1], FUSED_KERNELS[1])
    return forward, backward, np.where(is_fused, sum(FUSED_KERNELS), sum(EAGER_KERNELS))


def layer_times(cluster: ClusterSpec, case: Case, overhead: float = 1.0, cap: Any = 1.0) -> LayerTimes:
    """Return the times of one layer's kernels.

    Args:
        overhead: factor on the time of kernels other than GEMMs.
        cap: share of peak that GEMMs reach under the power limit.
    """
    gemm_forward, gemm_backward = _gemms(cluster, case, cap)
    attention_forward, attention_backward = _attention(cluster, case)
    elementwise_forward, elementwise_backward, kernel_count = _elementwise(cluster, case)
    return LayerTimes(
        gemm_forward=gemm_forward,
        gemm_backward=gemm_backward,
        attention_forward=overhead * attention_forward,
        attention_backward=overhead * attention_backward,
        elementwise_forward=overhead * elementwise_forward,
        elementwise_backward=overhead * elementwise_backward,
        kernel_count=kernel_count,
    )


def logits_seconds(cluster: ClusterSpec, case: Case, cap: Any = 1.0) -> tuple[Any, Any]:
    """Return the seconds of the output GEMM and the loss, which only the last stage has: (forward, backward).

    Args:
        cap: share of peak that GEMMs reach under the power limit.
    """
    tokens, columns = case.tokens, case.vocab / case.tensor
    bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory
    loss = np.where(case.fused_loss, FUSED_LOSS_BYTES, LOSS_BYTES) * tokens * columns / bandwidth
    forward = gemm_seconds(cluster, tokens, columns, case.hidden, None, cap) + loss / 2
    backward = gemm_seconds(cluster, tokens, case.hidden, columns, None, cap) + loss / 2
    weight_gradient = gemm_seconds(
        cluster, case.hidden, columns, tokens, case.gradient_bytes, cap, fused=case.fused_accumulation
    )
    return forward, backward + weight_gradient


def optimizer_seconds(cluster: ClusterSpec, case: Case, parameters: Any) -> Any:
    """Return the seconds of an update on a rank with `parameters` weights.

    With a distributed optimizer, the replicas divide the optimizer state and the update.
    """
    updated_parameters = parameters / np.where(case.distributed_optimizer, case.replicas, 1)
    # Gradients are cleared, and float8 weights are cast, for all parameters.
    other_bytes = parameters * (case.gradient_bytes + np.where(case.float8, FLOAT8_WEIGHT_BYTES, 0.0))
    return (updated_parameters * OPTIMIZER_BYTES + other_bytes) / (
        cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory
    )
