"""Times of one stage: its kernels, launches, transfers and collectives, for both levels of the simulator.

One pass of array arithmetic prices one layout or a million.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megascale.simulate.calibration import Constants
from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.exposed_communication import (
    PassSeconds,
    count_hops_on_host,
    estimate_contention,
    expert_exchange_seconds,
    exposed_sharding_seconds,
    exposed_tensor_seconds,
    head_exchange_seconds,
    tensor_collective_seconds,
)
from megascale.simulate.kernel_times import LayerTimes, layer_times, logits_seconds, optimizer_seconds
from megascale.simulate.network import Network, RingNetwork
from megascale.simulate.software import RECOMPUTE, RECOMPUTED, RECOMPUTED_ATTENTION

# Exponent p of the p-norm that combines the GPU's time and the host's time of a layer. 1 would give their sum, infinity
# the larger of the two. The value is fitted to Megatron-Core in TP2 at micro-batch 2 (dev/log.md, peers).
HOST_SHARPNESS = 12.0


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on a stage and of its transfers; both levels use them.

    A middle stage is any stage but the last. Values are numbers or arrays.

    Attributes:
        forward, backward: kernels and exposed tensor-parallel communication of all chunks of a middle stage.
        last_forward, last_backward: additional time on the last stage, below 0 if it has fewer layers.
        layer_forward, layer_backward: the same of one layer.
        transfer: one activation between neighbouring stages, over the slowest hop. A hop is the path between two
            neighbouring stages.
        mean_transfer: the same, on average over the hops of a model.
        near_transfer: the same, within a host.
        blocking_exchange: one blocking exchange with a neighbouring stage (0 if transfers overlap).
        blocking_exchange_count: number of such exchanges per micro-batch.
        residual: exposed time per micro-batch of transfers that overlap.
        scatter, gather: complete gradient reduction and parameter gather of a stage; 0 if layers are fully sharded.
        tied: sum of a tied embedding's gradient over first and last stage.
        sharded: wait per micro-batch for parameters and gradients of a middle stage's fully sharded layers.
        sharded_ends: wait per step for parameters and gradients of the first layer, the last layer and the embeddings.
        forward_kernels: kernels of a middle stage's forward, without communication.
        parts: seconds of forward and backward by part, from `gemm` to `exchange` in `closed.StepParts`.
    """

    forward: Any
    backward: Any
    last_forward: Any
    last_backward: Any
    layer_forward: Any
    layer_backward: Any
    transfer: Any
    mean_transfer: Any
    near_transfer: Any
    blocking_exchange: Any
    blocking_exchange_count: Any
    residual: Any
    scatter: Any
    gather: Any
    tied: Any
    sharded: Any
    sharded_ends: Any
    optimizer: Any
    forward_kernels: Any
    parts: dict[str, Any]


class _LayerSeconds(NamedTuple):
    """Seconds of one layer for one micro-batch.

    Attributes:
        kernels: kernels by kind, before they are multiplied by `scale`.
        scale: factor on the kernels' time: the calibrated constant times the slow-down of the slowest GPU.
        forward, backward: kernels, exposed communication and exposed launches.
        recompute: repeated forward, with its tensor-parallel communication.
        tensor: exposed tensor-parallel communication of forward and backward.
        exchange: exchanges of heads and tokens in forward and backward.
        launches: time by which kernel launches on the host exceed the time of the kernels.
    """

    kernels: LayerTimes
    scale: Any
    forward: Any
    backward: Any
    recompute: Any
    tensor: Any
    exchange: Any
    launches: Any


class _TransferSeconds(NamedTuple):
    """Transfers between stages; the fields are those of StageTimes."""

    transfer: Any
    mean_transfer: Any
    near_transfer: Any
    blocking_exchange: Any
    blocking_exchange_count: Any
    residual: Any


class _WeightSeconds(NamedTuple):
    """Communication and update of a stage's weights; the fields are those of StageTimes."""

    scatter: Any
    gather: Any
    tied: Any
    optimizer: Any


def compute_stage_times(
    cluster: ClusterSpec,
    case: Case,
    constants: Constants = Constants(),
    network: Network | None = None,
    cap: Any = None,
) -> StageTimes:
    """Return the durations of all work of a stage, from which a schedule gives the time of the step.

    Args:
        network: model of the network; default: rings at the cluster's bandwidths.
        cap: share of peak that GEMMs reach under the power limit; None: `compute_gemm_cap`.
    """
    network = network or RingNetwork(cluster, constants.dp_efficiency)
    if cap is None:
        cap = compute_gemm_cap(cluster, case, constants, network)
    layer = _compute_layer(cluster, case, constants, network=network, cap=cap)
    last = _compute_last_stage(cluster, case, network, scale=layer.scale, cap=cap)
    transfers = _compute_transfers(cluster, case, constants, network)
    tensor_groups_per_host = cluster.gpus_per_host // np.minimum(case.tensor, cluster.gpus_per_host)
    replicas_per_host = np.maximum(1, np.minimum(case.replicas, tensor_groups_per_host))
    weights = _compute_weight_times(cluster, case, network, replicas_per_host)
    is_fully_sharded = np.asarray(case.full_sharding, dtype=bool)
    sharding = exposed_sharding_seconds(
        cluster, case, network, replicas_per_host=replicas_per_host, forward=layer.forward, backward=layer.backward
    )
    layers = case.middle_layers
    extra_layers = case.last_layers - layers
    kernels, scale = layer.kernels, layer.scale
    return StageTimes(
        forward=layers * layer.forward,
        backward=layers * layer.backward,
        last_forward=last.forward + extra_layers * layer.forward,
        last_backward=last.backward + extra_layers * layer.backward,
        layer_forward=layer.forward,
        layer_backward=layer.backward,
        transfer=transfers.transfer,
        mean_transfer=transfers.mean_transfer,
        near_transfer=transfers.near_transfer,
        blocking_exchange=transfers.blocking_exchange,
        blocking_exchange_count=transfers.blocking_exchange_count,
        residual=transfers.residual,
        scatter=np.where(is_fully_sharded, 0.0, weights.scatter),
        gather=np.where(is_fully_sharded, 0.0, weights.gather),
        tied=weights.tied,
        sharded=np.where(is_fully_sharded, layers * sharding.per_layer, 0.0),
        sharded_ends=np.where(is_fully_sharded, sharding.per_step, 0.0),
        optimizer=weights.optimizer,
        forward_kernels=layers * scale * kernels.forward,
        parts={
            "gemm": layers * scale * (kernels.gemm_forward + kernels.gemm_backward),
            "attention": layers * scale * (kernels.attention_forward + kernels.attention_backward),
            "elementwise": layers * scale * (kernels.elementwise_forward + kernels.elementwise_backward),
            "recompute": layers * layer.recompute,
            "host": layers * layer.launches,
            "tensor": layers * layer.tensor,
            "exchange": layers * layer.exchange,
        },
    )


def _compute_layer(
    cluster: ClusterSpec, case: Case, constants: Constants, *, network: Network, cap: Any
) -> _LayerSeconds:
    """Return the times of one layer; `cap` as in `compute_stage_times`."""
    scale = constants.compute * (1.0 + cluster.stragglers.spread * estimate_slowest_deviation(case.gpus))
    kernels = layer_times(cluster, case, constants.overhead, cap)
    elementwise_share = np.asarray(RECOMPUTED)[np.asarray(case.recompute)]
    is_full = np.asarray(case.recompute) == RECOMPUTE.index("full")
    attention_share = np.asarray(RECOMPUTED_ATTENTION)[np.asarray(case.recompute)]
    recomputed_kernels = elementwise_share * kernels.elementwise_forward + attention_share * kernels.attention_forward
    # Recomputation of the MLP or of the attention repeats its share of the layer's GEMMs, which is taken as its share
    # of the layer's weights.
    mlp_share = case.expert_parameters / case.layer_parameters
    recomputes_mlp = np.asarray(case.recompute) == RECOMPUTE.index("mlp")
    recomputes_attention = np.asarray(case.recompute) == RECOMPUTE.index("attention")
    gemm_share = np.where(recomputes_mlp, mlp_share, np.where(recomputes_attention, 1 - mlp_share, 0.0))
    recompute = scale * np.where(is_full, kernels.forward, recomputed_kernels + gemm_share * kernels.gemm_forward)

    tp_forward, tp_backward = exposed_tensor_seconds(cluster, case, constants, network)
    recomputes_half = recomputes_mlp | recomputes_attention
    tp_recompute = np.where(is_full, tp_forward, np.where(recomputes_half, tp_forward / 2, 0.0))
    head_exchange = head_exchange_seconds(cluster, case, network)
    exchange_pass = head_exchange + expert_exchange_seconds(cluster, case, network)  # the same in forward and backward
    tp_recompute = tp_recompute + np.where(attention_share > 0, head_exchange, 0.0)
    # Attention and MLP each enter and leave a tensor-parallel region, in forward and in backward: four times. In a
    # parallel block they share one region.
    crossings = np.where(case.tensor > 1, 4.0, 0.0) * np.where(case.parallel_block, 1.0, 2.0)
    launches = (kernels.kernel_count * case.launch_us + crossings * case.region_host_us) * 1e-6 * cluster.host_slowness
    busy = scale * (kernels.forward + kernels.backward) + recompute + tp_forward + tp_backward + tp_recompute
    # Full recomputation repeats the forward, whose launches are taken here as half of the layer's launches.
    host = exposed_launches(launches * np.where(is_full, 1.5, 1.0), busy)
    # A third of the exposed launches is in forward.
    layer_forward = scale * kernels.forward + tp_forward + exchange_pass + host / 3
    layer_backward = scale * kernels.backward + tp_backward + exchange_pass + recompute + tp_recompute + host * 2 / 3
    return _LayerSeconds(
        kernels=kernels,
        scale=scale,
        forward=layer_forward,
        backward=layer_backward,
        recompute=recompute + tp_recompute,
        tensor=tp_forward + tp_backward,
        exchange=2 * exchange_pass,
        launches=host,
    )


def _compute_last_stage(cluster: ClusterSpec, case: Case, network: Network, *, scale: Any, cap: Any) -> PassSeconds:
    """Return the times of the last stage's logits and loss; `cap` as in `compute_stage_times`.

    Args:
        scale: factor on the kernels' time.
    """
    forward, backward = (scale * seconds for seconds in logits_seconds(cluster, case, cap))
    # With sequence parallelism the last hidden states are gathered in forward; backward overlaps its two collectives.
    collective = tensor_collective_seconds(cluster, case, network)
    gathered = np.where(case.sequence_parallel, collective, 0.0)
    exposed_count = np.where(case.sequence_parallel, 2.0 * cluster.overlap.slowdown, 1.0)
    return PassSeconds(forward + gathered, backward + exposed_count * collective)


def _compute_transfers(cluster: ClusterSpec, case: Case, constants: Constants, network: Network) -> _TransferSeconds:
    """Return the times of transfers between stages."""
    overlap = cluster.overlap
    activation_bytes = 2.0 * case.tokens * case.hidden / case.tensor
    has_transfers = case.pipeline > 1
    # The p-1 hops between stages all cross hosts if a stage fills a host, and none does if all stages share a host.
    # In the steady state every stage waits for the slowest hop.
    near_hops = count_hops_on_host(cluster, case)
    hops = np.maximum(case.pipeline - 1, 1)
    all_near = near_hops >= hops
    contention = estimate_contention(cluster, case)
    slowdown = np.where(all_near, 1.0, contention)
    transfer = np.where(has_transfers, network.p2p(activation_bytes, all_near) * slowdown, 0.0)
    transfer_pair = np.where(has_transfers, network.p2p(2 * activation_bytes, all_near) * slowdown, 0.0)
    near_transfer = network.p2p(activation_bytes, True)
    far_transfer = network.p2p(activation_bytes, False)
    all_hops = near_hops * near_transfer + (hops - near_hops) * far_transfer * contention
    mean_transfer = np.where(has_transfers, all_hops / hops, 0.0)
    blocking = has_transfers & ~np.asarray(case.pp_overlap, dtype=bool)
    # With interleaved chunks, one exchange sends an activation and a gradient.
    exchange_seconds = np.where(case.virtual > 1, transfer_pair, transfer) + overlap.blocking_us * 1e-6
    exchange_count = np.where(case.virtual > 1, case.virtual, 2)
    if constants.pp_residual is None:
        residual_share = overlap.pp_residual
    else:
        residual_share = constants.pp_residual
    residual = np.where(has_transfers & ~blocking, residual_share * 2 * case.virtual * transfer, 0.0)
    return _TransferSeconds(
        transfer=transfer,
        mean_transfer=mean_transfer,
        near_transfer=np.where(has_transfers, near_transfer, 0.0),
        blocking_exchange=np.where(blocking, exchange_seconds, 0.0),
        blocking_exchange_count=np.where(blocking, exchange_count, 0),
        residual=residual,
    )


def _compute_weight_times(cluster: ClusterSpec, case: Case, network: Network, replicas_per_host: Any) -> _WeightSeconds:
    """Return the times of the communication and the update of a stage's weights, as without full sharding."""
    layers = case.middle_layers
    embedding = case.vocab * case.hidden / case.tensor
    parameters = layers * case.layer_parameters / case.tensor + embedding
    expert_weights = layers * case.expert_parameters / case.tensor

    def collective_seconds(bytes_per_parameter: Any) -> Any:
        """Return the time of a reduce-scatter or all-gather of all weights of a stage.

        It runs over all replicas, for experts over the replicas that hold the same experts.
        """
        dense_bytes = (parameters - expert_weights) * bytes_per_parameter
        dense = network.collective(dense_bytes, case.replicas, replicas_per_host)
        expert_replicas = case.replicas / case.expert_parallel
        experts = network.collective(expert_weights * bytes_per_parameter, expert_replicas, 1)
        all_weights = network.collective(parameters * bytes_per_parameter, case.replicas, replicas_per_host)
        return np.where(case.expert_parallel > 1, dense + experts, all_weights)

    scatter = collective_seconds(case.reduce_bytes)
    # Layers are gathered in `gather_bytes` per parameter, embeddings in 2.
    mean_bytes_below_2 = (2 - case.gather_bytes) * (parameters - embedding) / parameters
    # A replicated optimizer needs an all-reduce, which is a reduce-scatter and an all-gather of the gradients.
    gather = np.where(case.distributed_optimizer, collective_seconds(2.0 - mean_bytes_below_2), scatter)
    scatter = scatter * np.where(case.reduces_each_microbatch, case.microbatches, 1)
    embedding_bytes = embedding * case.reduce_bytes / np.where(case.tied_shards, case.replicas, 1)
    all_near = count_hops_on_host(cluster, case) >= np.maximum(case.pipeline - 1, 1)
    tied = np.where(
        (case.pipeline > 1) & np.asarray(case.tied, dtype=bool), network.p2p(embedding_bytes, all_near), 0.0
    )
    # The weights of adapters are so few that their communication and update are left out.
    share = np.where(case.trains_adapters, 0.0, 1.0)
    return _WeightSeconds(
        scatter=share * scatter,
        gather=share * gather,
        tied=share * tied,
        optimizer=share * optimizer_seconds(cluster, case, parameters),
    )


def exposed_launches(launches: Any, busy: Any) -> Any:
    """Return the exposed seconds of kernel launches per layer.

    The longer of the two times bounds the layer. Neither the host nor the GPU runs at an even pace, so if the two times
    are similar, each waits for the other at times.

    Args:
        launches: seconds that the host takes to launch the layer's kernels.
        busy: seconds that the GPU takes to run them.
    """
    longer = np.maximum(np.maximum(launches, busy), 1e-30)
    shorter = np.minimum(launches, busy)
    return longer * (1.0 + (shorter / longer) ** HOST_SHARPNESS) ** (1.0 / HOST_SHARPNESS) - busy


def estimate_slowest_deviation(ranks: Any) -> Any:
    """Return the expected maximum of `ranks` normally distributed step times, in standard deviations above the mean.

    GPUs of one kind differ permanently in speed, and all GPUs of a step wait for each other. Blom's approximation takes
    the normal quantile at (n - 0.375) / (n + 0.25). Formula 26.2.22 of Abramowitz and Stegun gives it within 0.003.
    """
    # Names and coefficients as in Abramowitz and Stegun.
    n = np.maximum(np.asarray(ranks, dtype=float), 1.0)
    t = np.sqrt(-2.0 * np.log(0.625 / (n + 0.25)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    return np.where(n > 1, np.maximum(z, 0.0), 0.0)


def compute_gemm_cap(cluster: ClusterSpec, case: Case, constants: Constants, network: Network) -> Any:
    """Return the share of peak that a GEMM reaches under the power limit.

    The limit holds for the mean power over tens of milliseconds, so GEMMs run faster if they pause in between. Only
    pauses in every micro-batch count (exposed transfers, launches), not the ends of the step. Other kernels are assumed
    to draw as much power as GEMMs.

    During pauses a GPU draws the share `idle` of the limit. The rest is left for GEMMs, whose power grows as their rate
    to the power of `exponent`.
    """
    power = cluster.power
    if power is None:
        return 1.0
    times = compute_stage_times(cluster, case, constants, network, power.gemm_sustained)
    busy = times.parts["gemm"]
    exchanges = times.blocking_exchange * times.blocking_exchange_count
    pauses = times.parts["tensor"] + times.parts["host"] + exchanges + times.residual
    return power.gemm_sustained * (1.0 + (1.0 - power.idle) * pauses / busy) ** (1.0 / power.exponent)
