"""The closed level: the time of a step as a formula. One pass of array arithmetic prices one layout or a million.

An interleaved 1F1B pipeline of m micro-batches takes (m + (p-1)/v) times the time of its slowest stage (Megatron-LM,
Narayanan et al. 2021). The formula adds the exposed communication, the logits on the last stage, the delay by slow
hosts, and the work at the beginning and at the end of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megascale.simulate.calibration import Constants
from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.kernel_times import gathers_float8_activations, layer_times, logits_seconds, optimizer_seconds
from megascale.simulate.network import Network, RingNetwork, flow_slowdown
from megascale.simulate.software import RECOMPUTE, RECOMPUTED, RECOMPUTED_ATTENTION

# With blocking exchanges, all stages wait for the slowest one. A slot (one forward and one backward) takes longer by
# this share of its standard deviation. The value is fitted to the event level, and tests/simulate/test_levels.py
# compares both levels.
COUPLING = 0.45
# Mean of the largest of n exponential delays: ln n + EULER.
EULER = 0.5772
# Exponent p of the p-norm that combines the GPU's time and the host's time of a layer: 1 would be their sum, infinity
# the larger of the two. The value is fitted to Megatron-Core in TP2 at micro-batch 2 (dev/log.md, peers).
HOST_SHARPNESS = 12.0
# Bytes moved per parameter and micro-batch between shards and layers: gathered parameters are copied out for forward
# and for backward (read and written in 2 bytes), gradients are copied in (read in 2, written in 4).
SHARD_COPY_BYTES = 14.0
# Buckets of the gradients of a stage with one chunk. All but the last are reduced during the backward.
BUCKETS = 8


@dataclass(frozen=True)
class StepParts:
    """Seconds of the parts of a step, numbers or arrays; their sum is `total`.

    Attributes:
        gemm, attention, elementwise: kernels of a middle stage's layers (see `StageTimes`) over all micro-batches.
        recompute: repeated forward passes.
        host: time by which kernel launches on the host exceed the time of the kernels.
        exchange: exposed exchanges of heads between context ranks, and of tokens between expert ranks.
        tensor, pipeline, data: exposed communication by axis, with the slow-down of compute that it overlaps.
        logits: time of the last stage's output GEMM and loss, for which all stages wait.
        bubble: idle time while the pipeline fills and drains.
        stragglers: wait for slow hosts.
        optimizer: the update.
        fixed: preparation of batches and other work of the host.
    """

    gemm: Any
    attention: Any
    elementwise: Any
    recompute: Any
    host: Any
    tensor: Any
    exchange: Any
    pipeline: Any
    data: Any
    logits: Any
    bubble: Any
    stragglers: Any
    optimizer: Any
    fixed: Any

    @property
    def total(self) -> Any:
        """Seconds of the step."""
        return sum(getattr(self, f.name) for f in fields(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the seconds by part."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on a stage and of its transfers; both levels use them.

    A middle stage is any stage but the last. Values are numbers or arrays.

    Attributes:
        forward, backward: kernels and exposed tensor-parallel communication of all chunks of a middle stage.
        last_forward, last_backward: additional time on the last stage, below 0 if it has fewer layers.
        layer_forward, layer_backward: one layer.
        transfer: one activation between neighbouring stages, over the slowest hop.
        mean_transfer: the same, on average over the hops of a model.
        near_transfer: the same, within a host.
        blocking_exchange: one blocking exchange with a neighbouring stage (0 if transfers overlap).
        blocking_exchange_count: number of such exchanges per micro-batch.
        residual: exposed time per micro-batch of transfers that overlap.
        scatter, gather: complete gradient reduction and parameter gather of a stage.
        tied: sum of a tied embedding's gradient over first and last stage.
        sharded: wait per micro-batch for parameters and gradients of fully sharded layers.
        sharded_ends: wait per step for parameters and gradients of the first layer, the last layer and the embeddings.
        optimizer: the update.
        forward_kernels: kernels of a stage's forward, without communication.
        parts: seconds of forward and backward by part (see `StepParts`).
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
        cap: share of peak that GEMMs reach under the power limit; None: computed from the cluster's power and the
            step's own pauses.
    """
    network = network or RingNetwork(cluster, constants.dp_efficiency)
    if cap is None:
        cap = compute_gemm_cap(cluster, case, constants, network)
    scale = constants.compute * (1.0 + cluster.stragglers.spread * estimate_slowest_deviation(case.gpus))
    overlap = cluster.overlap
    layers = case.middle_layers
    layer = layer_times(cluster, case, constants.overhead, cap)
    elementwise_share = np.asarray(RECOMPUTED)[np.asarray(case.recompute)]
    is_full = np.asarray(case.recompute) == RECOMPUTE.index("full")
    attention_share = np.asarray(RECOMPUTED_ATTENTION)[np.asarray(case.recompute)]
    recomputed_kernels = elementwise_share * layer.elementwise_forward + attention_share * layer.attention_forward
    # Recomputation of one half of a layer repeats that half's share of the GEMMs, taken as its share of the weights.
    mlp_share = case.expert_parameters / case.layer_parameters
    recomputes_mlp = np.asarray(case.recompute) == RECOMPUTE.index("mlp")
    recomputes_attention = np.asarray(case.recompute) == RECOMPUTE.index("attention")
    gemm_share = np.where(recomputes_mlp, mlp_share, np.where(recomputes_attention, 1 - mlp_share, 0.0))
    recompute = scale * np.where(is_full, layer.forward, recomputed_kernels + gemm_share * layer.gemm_forward)

    tp_forward, tp_backward = _tensor_exposed(cluster, case, constants, network)
    recomputes_half = recomputes_mlp | recomputes_attention
    tp_recompute = np.where(is_full, tp_forward, np.where(recomputes_half, tp_forward / 2, 0.0))
    head_exchange = head_exchange_seconds(cluster, case, network)
    exchange_pass = head_exchange + expert_exchange_seconds(cluster, case, network)  # the same in forward and backward
    tp_recompute = tp_recompute + np.where(attention_share > 0, head_exchange, 0.0)
    # A block enters and leaves a tensor-parallel region in forward and in backward: four times.
    regions = np.where(case.tensor > 1, 4.0, 0.0) * np.where(case.parallel_block, 1.0, 2.0)
    launches = (layer.kernels * case.launch_us + regions * case.region_host_us) * 1e-6 * cluster.host_slowness
    busy = scale * (layer.forward + layer.backward) + recompute + tp_forward + tp_backward + tp_recompute
    # With full recomputation, a layer has half as many launches again.
    host = exposed_launches(launches * np.where(is_full, 1.5, 1.0), busy)
    # A third of the launches is in forward.
    layer_forward = scale * layer.forward + tp_forward + exchange_pass + host / 3
    layer_backward = scale * layer.backward + tp_backward + exchange_pass + recompute + tp_recompute + host * 2 / 3

    last_forward, last_backward = (scale * x for x in logits_seconds(cluster, case, cap))
    # With sequence parallelism the last hidden states are gathered in forward; backward overlaps its two collectives.
    collective = _tensor_collective(cluster, case, network)
    gathered = np.where(case.sequence_parallel, collective, 0.0)
    last_forward = last_forward + gathered
    last_backward = last_backward + np.where(case.sequence_parallel, 2.0 * overlap.slowdown, 1.0) * collective
    extra_layers = case.last_layers - case.middle_layers
    activation_bytes = 2.0 * case.tokens * case.hidden / case.tensor
    piped = case.pipeline > 1
    # Of the p-1 hops between stages some cross hosts: all where a stage fills one, none where all stages share one.
    # In the steady state every stage waits for the slowest hop.
    near_hops = count_hops_on_host(cluster, case)
    hops = np.maximum(case.pipeline - 1, 1)
    all_near = near_hops >= hops
    contention = estimate_contention(cluster, case)
    slowdown = np.where(all_near, 1.0, contention)
    transfer = np.where(piped, network.p2p(activation_bytes, all_near) * slowdown, 0.0)
    transfer_pair = np.where(piped, network.p2p(2 * activation_bytes, all_near) * slowdown, 0.0)
    near_transfer = network.p2p(activation_bytes, True)
    far_transfer = network.p2p(activation_bytes, False)
    all_hops = near_hops * near_transfer + (hops - near_hops) * far_transfer * contention
    mean_transfer = np.where(piped, all_hops / hops, 0.0)
    blocking = piped & ~np.asarray(case.pp_overlap, dtype=bool)
    # With interleaved chunks, one exchange sends an activation and a gradient.
    exchange_seconds = np.where(case.virtual > 1, transfer_pair, transfer) + overlap.blocking_us * 1e-6
    exchange_count = np.where(case.virtual > 1, case.virtual, 2)
    if constants.pp_residual is None:
        residual_share = overlap.pp_residual
    else:
        residual_share = constants.pp_residual
    residual = np.where(piped & ~blocking, residual_share * 2 * case.virtual * transfer, 0.0)

    embedding = case.vocab * case.hidden / case.tensor
    parameters = layers * case.layer_parameters / case.tensor + embedding
    tensor_groups_per_host = cluster.gpus_per_host // np.minimum(case.tensor, cluster.gpus_per_host)
    replicas_per_host = np.maximum(1, np.minimum(case.replicas, tensor_groups_per_host))
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
    bytes_below_2 = (2 - case.gather_bytes) * (parameters - embedding) / parameters  # mean per parameter
    # The all-reduce of a replicated optimizer is a reduce-scatter and an all-gather of the gradients.
    gather = np.where(case.distributed_optimizer, collective_seconds(2.0 - bytes_below_2), scatter)
    scatter = scatter * np.where(case.reduces_each_microbatch, case.microbatches, 1)
    is_fully_sharded = np.asarray(case.full_sharding, dtype=bool)
    sharded, sharded_ends = exposed_sharding_seconds(
        cluster, case, network, replicas_per_host=replicas_per_host, forward=layer_forward, backward=layer_backward
    )
    embedding_bytes = embedding * case.reduce_bytes / np.where(case.tied_shards, case.replicas, 1)
    tied = np.where(piped & np.asarray(case.tied, dtype=bool), network.p2p(embedding_bytes, all_near), 0.0)
    return StageTimes(
        forward=layers * layer_forward,
        backward=layers * layer_backward,
        last_forward=last_forward + extra_layers * layer_forward,
        last_backward=last_backward + extra_layers * layer_backward,
        layer_forward=layer_forward,
        layer_backward=layer_backward,
        transfer=transfer,
        mean_transfer=mean_transfer,
        near_transfer=np.where(piped, near_transfer, 0.0),
        blocking_exchange=np.where(blocking, exchange_seconds, 0.0),
        blocking_exchange_count=np.where(blocking, exchange_count, 0),
        residual=residual,
        scatter=np.where(is_fully_sharded, 0.0, scatter),
        gather=np.where(is_fully_sharded, 0.0, gather),
        tied=tied,
        sharded=np.where(is_fully_sharded, layers * sharded, 0.0),
        sharded_ends=np.where(is_fully_sharded, sharded_ends, 0.0),
        optimizer=optimizer_seconds(cluster, case, parameters),
        forward_kernels=layers * scale * layer.forward,
        parts={
            "gemm": layers * scale * (layer.gemm_forward + layer.gemm_backward),
            "attention": layers * scale * (layer.attention_forward + layer.attention_backward),
            "elementwise": layers * scale * (layer.elementwise_forward + layer.elementwise_backward),
            "recompute": layers * (recompute + tp_recompute),
            "host": layers * host,
            "tensor": layers * (tp_forward + tp_backward),
            "exchange": layers * 2 * exchange_pass,
        },
    )


def exposed_sharding_seconds(
    cluster: ClusterSpec, case: Case, network: Network, replicas_per_host: Any, forward: Any, backward: Any
) -> tuple[Any, Any]:
    """Return the exposed seconds of fully sharded data parallelism: (per layer and micro-batch, once per step).

    Each micro-batch gathers a layer's parameters for its forward and again for its backward, and reduces its
    gradients. These collectives overlap with the neighbouring layers. Always exposed are the first gather, the last
    reduction, and those of the embeddings.

    Args:
        forward, backward: seconds of one layer.
    """
    weights = case.layer_parameters / case.tensor
    embeddings = np.where(case.tied, 1.0, 2.0) * case.vocab * case.hidden / case.tensor
    gather = network.collective(weights * case.gather_bytes, case.replicas, replicas_per_host)
    reduce = network.collective(weights * case.reduce_bytes, case.replicas, replicas_per_host)
    # A collective that overlaps compute either slows it or, if it takes longer, is awaited.
    slowdown = cluster.overlap.slowdown
    in_forward = np.maximum(gather - forward, slowdown * np.minimum(gather, forward))
    in_backward = np.maximum(gather + reduce - backward, slowdown * np.minimum(gather + reduce, backward))
    bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory
    copies = np.where(case.shard_copies, SHARD_COPY_BYTES * weights / bandwidth, 0.0)
    embedding_gather = network.collective(embeddings * 2.0, case.replicas, replicas_per_host)
    embedding_reduce = network.collective(embeddings * case.reduce_bytes, case.replicas, replicas_per_host)
    # Half of the embeddings' collectives overlaps with layers.
    per_step = gather + reduce + case.microbatches * (embedding_gather + embedding_reduce) / 2.0
    return in_forward + in_backward + copies, per_step


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

    GPUs of one kind differ permanently in speed, and all GPUs of a step wait for each other. The maximum is Blom's
    approximation, its quantile that of Abramowitz and Stegun 26.2.22 (within 0.003).
    """
    # Names as in Abramowitz and Stegun.
    n = np.maximum(np.asarray(ranks, dtype=float), 1.0)
    t = np.sqrt(-2.0 * np.log(0.625 / (n + 0.25)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    return np.where(n > 1, np.maximum(z, 0.0), 0.0)


def count_hops_on_host(cluster: ClusterSpec, case: Case) -> Any:
    """Return how many of the p-1 hops between stages stay on a host, averaged over models and tensor ranks.

    Ranks are numbered along the tensor axis, then data, then pipeline (core/grid.py), so a neighbouring stage is
    tensor x data ranks away. If a stage fills at least one host, its neighbour is on another host.
    """
    stage_ranks = case.tensor * case.replicas
    stages_per_host = np.maximum(1, cluster.gpus_per_host // np.maximum(stage_ranks, 1))
    crossing_hops = np.ceil(case.pipeline / stages_per_host) - 1
    return np.where(stage_ranks < cluster.gpus_per_host, case.pipeline - 1 - crossing_hops, 0)


def estimate_contention(cluster: ClusterSpec, case: Case) -> Any:
    """Return the factor by which transfers between stages are slower because they leave their leaf switch together.

    The share of a leaf's hosts whose neighbouring stage is under another leaf grows with the hosts of a stage. Rings of
    data parallelism run along neighbouring hosts and leave a leaf only once, so they are not slowed.
    """
    full_slowdown = flow_slowdown(cluster.between)
    if full_slowdown == 1.0:
        return 1.0
    stage_hosts = case.tensor * case.replicas / cluster.gpus_per_host
    leaf_hosts = cluster.between.leaf_hosts
    uses_one_leaf = case.gpus / cluster.gpus_per_host <= leaf_hosts
    crossing_share = np.where(uses_one_leaf, 0.0, np.minimum(1.0, stage_hosts / leaf_hosts))
    return 1.0 + (full_slowdown - 1.0) * crossing_share


def compute_gemm_cap(cluster: ClusterSpec, case: Case, constants: Constants, network: Network) -> Any:
    """Return the share of peak that a GEMM reaches under the power limit.

    The limit holds for the mean power over tens of milliseconds, so GEMMs run faster if they pause in between. Only
    pauses in every micro-batch count (exposed transfers, launches), not the ends of the step. Other kernels are assumed
    to draw as much power as GEMMs.
    """
    power = cluster.power
    if power is None:
        return 1.0
    times = compute_stage_times(cluster, case, constants, network, power.gemm_sustained)
    busy = times.parts["gemm"]
    exchanges = times.blocking_exchange * times.blocking_exchange_count
    pauses = times.parts["tensor"] + times.parts["host"] + exchanges + times.residual
    return power.gemm_sustained * (1.0 + (1.0 - power.idle) * pauses / busy) ** (1.0 / power.exponent)


def _tensor_exposed(cluster: ClusterSpec, case: Case, constants: Constants, network: Network) -> tuple[Any, Any]:
    """Return the seconds of tensor-parallel communication that a layer's forward and backward wait for per micro-batch.

    With sequence parallelism, the forward of a block has an all-gather and a reduce-scatter. In its backward the gather
    of the output gradient is exposed. The scatter of the input gradient and the second gather of the input overlap with
    GEMMs and only slow them. A float8 gather has half the bytes.

    Without sequence parallelism, forward ends in an all-reduce. In backward the all-reduce of the input gradient
    overlaps with the GEMM of the weight gradient or, in older stacks, follows it.
    """
    overlap = cluster.overlap
    if constants.tp_residual is None:
        residual_share = overlap.tp_residual
    else:
        residual_share = constants.tp_residual
    collective = _tensor_collective(cluster, case, network)
    gather = _tensor_collective(cluster, case, network, np.where(gathers_float8_activations(case), 1.0, 2.0))
    blocks = np.where(case.parallel_block, 1.0, 2.0)
    exposed_share = np.where(case.tp_overlap, residual_share, 1.0)
    forward = blocks * (gather + collective) * exposed_share
    backward = blocks * (gather * exposed_share + (gather + collective) * overlap.slowdown)
    # Ranks agree on the float8 scales of four operands in forward and of four gradients in backward.
    scale_count = np.where(gathers_float8_activations(case) & np.asarray(case.float8_agrees, dtype=bool), 4.0, 0.0)
    scale_count = scale_count * np.where(case.parallel_block, 0.5, 1.0)
    agreement = scale_count * _scale_agreement_seconds(cluster, case, network)
    backward_share = np.where(case.tp_backward_overlap, overlap.slowdown, 1.0)
    backward = np.where(case.sequence_parallel, backward, blocks * 2.0 * collective * backward_share)
    return forward + agreement, backward + agreement


def _scale_agreement_seconds(cluster: ClusterSpec, case: Case, network: Network) -> Any:
    """Return the seconds of an all-reduce of one float32 over the tensor group."""
    return network.collective(4.0, case.tensor, np.minimum(case.tensor, cluster.gpus_per_host))


def _tensor_collective(cluster: ClusterSpec, case: Case, network: Network, value_bytes: Any = 2.0) -> Any:
    """Return the seconds of one all-gather or reduce-scatter of a micro-batch's hidden states over the tensor group."""
    activation_bytes = value_bytes * case.tokens * case.hidden
    gap = np.where(case.tensor > 1, case.region_gap_us * 1e-6, 0.0)
    return network.collective(activation_bytes, case.tensor, np.minimum(case.tensor, cluster.gpus_per_host)) + gap


def slow_host_seconds(cluster: ClusterSpec, case: Case, constants: Constants, times: StageTimes) -> Any:
    """Return the expected seconds per micro-batch that slow hosts cost.

    Replicas wait for each other, so that one slow host slows all replicas. A slow host takes longer by the fraction
    `slow_by` for the same forward code (paper section 6.3). Stages but the last wait for the last stage's logits, and
    this slack hides a part of the delay. At 12,288 GPUs the cost is about 0.7 MFU points, which the paper gained by
    removing such hosts.
    """
    rate = cluster.stragglers.slow_hosts
    if constants.slow_by is None:
        slowdown = cluster.stragglers.slow_by
    else:
        slowdown = constants.slow_by
    hosts = np.maximum(1.0, case.gpus / cluster.gpus_per_host)
    last_stage_hosts = hosts / case.pipeline
    # Probabilities of at least one slow host on the last stage, and on the other stages.
    last_probability = 1.0 - (1.0 - rate) ** last_stage_hosts
    other_probability = 1.0 - (1.0 - rate) ** (hosts - last_stage_hosts)
    delay = slowdown * times.forward_kernels
    slack = np.maximum(0.0, times.last_forward + times.last_backward)
    only_other_delay = (1.0 - last_probability) * other_probability * np.maximum(0.0, delay - slack)
    return last_probability * delay + only_other_delay


def last_host_delay_seconds(cluster: ClusterSpec, case: Case, constants: Constants) -> Any:
    """Return the mean seconds that a step waits at its end for the last host: the largest of n exponential delays.

    Garbage collection, data loading and logging delay hosts independently, and the gradient reduction waits for the
    last host (paper section 6.3). Asynchronous batch preparation and planned garbage collection (section 3.4) remove
    the share `data_share` of the delay.
    """
    hosts = np.maximum(1.0, case.gpus / cluster.gpus_per_host)
    exposed_share = np.where(np.asarray(case.async_data, dtype=bool), 1.0 - constants.data_share, 1.0)
    return constants.fixed * exposed_share * (np.log(hosts) + EULER)


def compute_step_parts(
    cluster: ClusterSpec, case: Case, constants: Constants = Constants(), network: Network | None = None
) -> StepParts:
    """Return the seconds of a step by part. Arrays in `case` broadcast. Sizes are not checked (see `Case.fits`)."""
    times = compute_stage_times(cluster, case, constants, network)
    m = case.microbatches
    p = case.pipeline
    v = case.virtual
    has_exchanges = times.blocking_exchange_count > 0
    jitter_wait = COUPLING * cluster.stragglers.jitter * np.where(has_exchanges, times.forward + times.backward, 0.0)
    exposed_transfers = times.blocking_exchange * times.blocking_exchange_count + times.residual + jitter_wait
    slow_hosts = slow_host_seconds(cluster, case, constants, times)
    # The first and the last micro-batch pass all p v chunks in turn, with a transfer between each two of them.
    stall = np.where(has_exchanges, cluster.overlap.blocking_us * 1e-6, 0.0)
    # The slowest hop determines the pace of blocking exchanges.
    hop = np.where(has_exchanges, times.transfer, times.mean_transfer)
    hops = 2 * (v * (p - 1) * hop + (v - 1) * times.transfer) + 2 * (p - 1) * stall
    # With one chunk per stage, the transfers of a micro-batch's round trip are exposed, unless the wait for the logits
    # is longer.
    round_trip = np.where((v == 1) & (times.blocking_exchange_count == 0), 2 * (p - 1) / p * times.transfer, 0.0)
    ramp = (p - 1) / v * (times.forward + times.backward) + hops
    logits = np.maximum(times.last_forward + times.last_backward, np.where(p > 1, round_trip, -np.inf))
    data = exposed_data_seconds(cluster, case, constants, times)
    fixed = last_host_delay_seconds(cluster, case, constants)
    return StepParts(
        gemm=m * times.parts["gemm"],
        attention=m * times.parts["attention"],
        elementwise=m * times.parts["elementwise"],
        recompute=m * times.parts["recompute"],
        host=m * times.parts["host"],
        tensor=m * times.parts["tensor"],
        exchange=m * times.parts["exchange"],
        pipeline=m * exposed_transfers,
        data=data,
        logits=m * logits,
        bubble=ramp,
        stragglers=m * slow_hosts,
        optimizer=times.optimizer,
        fixed=fixed,
    )


def exposed_data_seconds(cluster: ClusterSpec, case: Case, constants: Constants, times: StageTimes) -> Any:
    """Return the seconds of data-parallel communication that the step waits for.

    With overlap, the gradients of one chunk are scattered during the last backwards of other chunks, and its parameters
    are gathered during the first forwards of other chunks. The last scatter and the first gather are exposed. Training
    prefetches the first gather (paper section 3.2), but neither level assumes work before it.
    """
    without_overlap = times.scatter + times.gather
    buckets = count_buckets(case)
    # Between the last backwards of two chunks lie the backwards of one micro-batch group. The buckets of a single chunk
    # overlap with the last backward.
    group_size = np.maximum(case.pipeline, case.micro_batch_group_size)
    forwards = np.where(case.virtual > 1, np.minimum(group_size, case.microbatches), 1)
    # Gradients that are reduced after every micro-batch overlap with all backwards.
    is_per_microbatch = np.asarray(case.reduces_each_microbatch, dtype=bool)
    backwards = np.where(is_per_microbatch, case.microbatches, forwards)
    # A group's passes of one chunk end when the last micro-batch has passed all stages.
    hops = np.where((case.virtual > 1) & (forwards <= case.pipeline), case.pipeline * times.mean_transfer, 0.0)
    slowdown = np.where(case.virtual > 1, cluster.overlap.slowdown, 0.0)
    scatter = times.scatter / buckets
    gather = times.gather / buckets
    last_scatter = scatter / np.where(is_per_microbatch, case.microbatches, 1)
    backward_seconds = backwards * times.backward / buckets + hops
    forward_seconds = forwards * times.forward / buckets + hops
    other_scatters = (buckets - 1) * _delay_by_collective(
        scatter, backward_seconds, slowdown, transfers=hops, stages=case.pipeline
    )
    other_gathers = (buckets - 1) * _delay_by_collective(
        gather, forward_seconds, slowdown, transfers=hops, stages=case.pipeline
    )
    exposed = np.where(case.dp_overlap, last_scatter + other_scatters + gather + other_gathers, without_overlap)
    return exposed + times.tied + case.microbatches * times.sharded + times.sharded_ends


def count_buckets(case: Case) -> Any:
    """Return into how many collectives a stage's gradients are divided: one per chunk, or BUCKETS for one chunk."""
    buckets = np.minimum(BUCKETS, np.maximum(1, case.layers // case.pipeline))
    return np.where(case.virtual > 1, case.virtual, buckets)


def _delay_by_collective(collective: Any, compute: Any, slowdown: Any, transfers: Any, stages: Any) -> Any:
    """Return the seconds by which a collective delays `compute` seconds of passes with which it overlaps.

    If the collective takes longer, its end is awaited. Otherwise the passes are slowed as long as the collective runs
    on any of the stages that they pass, and the transfers between stages share the NIC with it.

    Args:
        slowdown: fraction by which a running collective slows compute.
        transfers: seconds of the passes' transfers between stages.
        stages: number of stages that a pass goes through. Each runs the collective, at slightly different times.
    """
    # Compute that is done, without its slow-down, while the collective runs.
    unslowed = collective / (1.0 + slowdown)
    slowed = slowdown * np.minimum(compute, unslowed + np.minimum(compute / stages, unslowed) * (stages - 1))
    return np.maximum(slowed + np.where(collective > 0, transfers, 0.0), collective - compute)


def head_exchange_seconds(cluster: ClusterSpec, case: Case, network: Network) -> Any:
    """Return the seconds of context parallelism in a layer's forward, and also in its backward; all exposed.

    An all-to-all exchanges slices of the sequence with all heads for whole sequences with some of the heads, and
    another one returns the results. Each key/value head is sent to several ranks if there are fewer heads than ranks.
    """
    head_width = case.query / case.heads
    key_width = np.maximum(case.kv / case.tensor, case.context * head_width)
    sent_width = 2.0 * case.query / case.tensor + 2.0 * key_width
    # A rank sends and receives over all its links at once, as in a gather of as many bytes.
    ranks_per_host = np.maximum(1, np.minimum(case.context, cluster.gpus_per_host // case.tensor))
    seconds = 2.0 * network.collective(case.tokens * sent_width, case.context, ranks_per_host)
    return np.where(case.context > 1, seconds, 0.0)


def expert_exchange_seconds(cluster: ClusterSpec, case: Case, network: Network) -> Any:
    """Return the seconds of token exchange with experts on other ranks in a layer's forward, and also in its backward.

    Each pass has an all-to-all to the experts and one back, all exposed. Tokens are assumed to be spread evenly over
    experts; each token goes to `top_k` of them.
    """
    sent_share = (case.expert_parallel - 1) / case.expert_parallel
    width = case.hidden / np.where(case.sequence_parallel, case.tensor, 1)
    sent_bytes = 2.0 * case.tokens * width * case.top_k * sent_share
    is_within_host = case.tensor * case.context * case.expert_parallel <= cluster.gpus_per_host
    return np.where(case.expert_parallel > 1, 2.0 * network.p2p(sent_bytes, is_within_host), 0.0)
