"""Level 1: the step in closed form. One pass of array arithmetic prices one layout or a million.

Each term follows from the schedule: an interleaved 1F1B pipeline of m micro-batches costs (m + (p-1)/v) times its
slowest stage (Megatron-LM, Narayanan et al. 2021); what is added is what the critical path sees of communication,
of the logits that only the last stage computes, of slow hosts, and of the ends of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megascale.simulate.calibration import Constants
from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.kernel_times import gathers_bytes, layer_times, logits_seconds, optimizer_seconds
from megascale.simulate.network import Network, RingNetwork, flow_slowdown
from megascale.simulate.software import RECOMPUTE, RECOMPUTED, RECOMPUTED_ATTENTION

# Stages that exchange in lock-step wait for the slowest: the pace rises by this share of the standard deviation of a
# slot. Measured on the event-driven level (tests/simulate/test_levels.py holds the two together).
COUPLING = 0.45
# Mean of the largest of n exponential delays: ln n + EULER.
EULER = 0.5772
# How sharply a layer's time turns from what the GPU needs to what the host needs: 1 would be their sum, infinity the
# larger of them. Megatron-Core in TP2 at micro-batch 2 (dev/log.md, peers) lies between.
HOST_SHARPNESS = 12.0
# Bytes moved per parameter and micro-batch between shards and layers: gathered parameters are copied out for forward
# and for backward (read and written in 2 bytes), gradients are copied in (read in 2, written in 4).
SHARD_COPY_BYTES = 14.0
# Buckets into which gradients of a stage with one chunk are cut so that they can hide.
BUCKETS = 8


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of a step, numbers or arrays; their sum is `total`.

    Attributes:
        gemm, attention, elementwise: kernels of a middle stage's layers over all micro-batches.
        recompute: repeated forward passes.
        host: what launching kernels takes beyond what they run.
        exchange: exposed transfers of keys and values around a ring, and of tokens to experts.
        tensor, pipeline, data: exposed communication per axis, with the slow-down of compute that it overlaps.
        logits: time of the last stage's output GEMM and loss, for which all stages wait.
        bubble: idle while the pipeline fills and drains.
        stragglers: waiting for slow hosts.
        optimizer, fixed: the update; batch preparation and host work.
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
        """Part -> seconds."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one micro-batch costs a stage and its transfers, shared by both levels.

    Attributes:
        forward, backward: kernels and exposed tensor communication of all a middle stage's chunks.
        last_forward, last_backward: what the last stage adds (less than 0 where it has fewer layers).
        layer_forward, layer_backward: one layer.
        transfer, mean_transfer, near_transfer: one activation between neighbours: over the slowest hop, on average over
            a model's hops, within a host.
        exchange: a blocking exchange (0 where transfers overlap).
        exchanges: blocking exchanges a micro-batch.
        residual: exposed part of overlapped transfers a micro-batch.
        scatter, gather: whole gradient reduction and parameter gathering of a stage.
        tied: sum of the embedding's gradient over first and last stage.
        sharded: what a micro-batch waits for parameters and gradients of fully sharded layers; sharded_ends: what a
            step waits for those of its first and last layer, and of the embeddings.
        forward_kernels: what runs on the GPU in a stage's forward, without communication.
        parts: kernel and communication parts of forward + backward, for the waterfall.
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
    exchange: Any
    exchanges: Any
    residual: Any
    scatter: Any
    gather: Any
    tied: Any
    sharded: Any
    sharded_ends: Any
    optimizer: Any
    forward_kernels: Any
    parts: dict[str, Any]


def stage_times(
    cluster: ClusterSpec,
    case: Case,
    constants: Constants = Constants(),
    network: Network | None = None,
    cap: Any = None,
) -> StageTimes:
    """Durations of everything in a step, before any schedule is laid over them.

    `cap`: share of peak that the power limit leaves GEMMs; None: what the cluster's power and the step's own duty
    cycle give.
    """
    network = network or RingNetwork(cluster, constants.dp_efficiency)
    if cap is None:
        cap = gemm_cap(cluster, case, constants, network)
    scale = constants.compute * (1.0 + cluster.stragglers.spread * slowest_of(case.gpus))
    overlap = cluster.overlap
    layers = case.middle
    layer = layer_times(cluster, case, constants.overhead, cap)
    share = np.asarray(RECOMPUTED)[np.asarray(case.recompute)]
    is_full = np.asarray(case.recompute) == RECOMPUTE.index("full")
    core = np.asarray(RECOMPUTED_ATTENTION)[np.asarray(case.recompute)]
    recomputed_kernels = share * layer.elementwise_forward + core * layer.attention_forward
    mlp = case.expert_parameters / case.layer_parameters
    gemms = np.where(np.asarray(case.recompute) == RECOMPUTE.index("mlp"), mlp, 0.0)
    gemms = np.where(np.asarray(case.recompute) == RECOMPUTE.index("attention"), 1 - mlp, gemms)
    recompute = scale * np.where(is_full, layer.forward, recomputed_kernels + gemms * layer.gemm_forward)

    tp_forward, tp_backward = _tensor_exposed(cluster, case, constants, network)
    is_half = gemms > 0
    tp_recompute = np.where(is_full, tp_forward, np.where(is_half, tp_forward / 2, 0.0))
    heads = head_exchange(cluster, case, network)
    sent = expert_exchange(cluster, case, network)
    swap_forward, swap_backward = (h + s for h, s in zip(heads, sent, strict=True))
    tp_recompute = tp_recompute + np.where(core > 0, heads[0], 0.0)
    # A block enters and leaves a tensor-parallel region forward and backward, and once more forward if recomputed.
    regions = np.where(case.tensor > 1, 4.0, 0.0) * np.where(case.parallel_block, 1.0, 2.0)
    launches = (layer.kernels * case.launch_us + regions * case.region_host_us) * 1e-6 * cluster.host_slowness
    busy = scale * (layer.forward + layer.backward) + recompute + tp_forward + tp_backward + tp_recompute
    host = exposed_launches(launches * np.where(is_full, 1.5, 1.0), busy)
    layer_forward = scale * layer.forward + tp_forward + swap_forward + host / 3
    layer_backward = scale * layer.backward + tp_backward + swap_backward + recompute + tp_recompute + host * 2 / 3

    last_forward, last_backward = (scale * x for x in logits_seconds(cluster, case, cap))
    # With sequence parallelism the last hidden states are gathered once more; backward hides its two collectives.
    collective = _tensor_collective(cluster, case, network)
    gathered = np.where(case.sequence_parallel, collective, 0.0)
    last_forward = last_forward + gathered
    last_backward = last_backward + np.where(case.sequence_parallel, 2.0 * overlap.slowdown, 1.0) * collective
    extra_layers = case.last - case.middle
    bytes_moved = 2.0 * case.tokens * case.hidden / case.tensor
    piped = case.pipeline > 1
    # Of the p-1 hops between stages some cross hosts: all where a stage fills one, none where all stages share one.
    # In the steady state every stage waits for the slowest hop.
    near, hops = neighbours_on_host(cluster, case), np.maximum(case.pipeline - 1, 1)
    all_near = near >= hops
    far = contention(cluster, case)
    transfer = np.where(piped, network.p2p(bytes_moved, all_near) * np.where(all_near, 1.0, far), 0.0)
    transfer_pair = np.where(piped, network.p2p(2 * bytes_moved, all_near) * np.where(all_near, 1.0, far), 0.0)
    all_hops = near * network.p2p(bytes_moved, True) + (hops - near) * network.p2p(bytes_moved, False) * far
    mean_transfer = np.where(piped, all_hops / hops, 0.0)
    blocking = piped & ~np.asarray(case.pp_overlap, dtype=bool)
    exchange = np.where(blocking, np.where(case.virtual > 1, transfer_pair, transfer) + overlap.blocking_us * 1e-6, 0.0)
    exchanges = np.where(blocking, np.where(case.virtual > 1, case.virtual, 2), 0)
    if constants.pp_residual is None:
        residual_share = overlap.pp_residual
    else:
        residual_share = constants.pp_residual
    residual = np.where(piped & ~blocking, residual_share * 2 * case.virtual * transfer, 0.0)

    embedding = case.vocab * case.hidden / case.tensor
    parameters = layers * case.layer_parameters / case.tensor + embedding
    local = np.maximum(
        1, np.minimum(case.replicas, cluster.gpus_per_host // np.minimum(case.tensor, cluster.gpus_per_host))
    )
    # The all-reduce of a replicated optimizer is a reduce-scatter and an all-gather of the gradients.
    expert_weights = layers * case.expert_parameters / case.tensor

    def reduce_seconds(bytes_each: Any) -> Any:
        """Dense weights over all replicas; experts over those that hold the same ones."""
        dense = network.collective((parameters - expert_weights) * bytes_each, case.replicas, local)
        experts = network.collective(expert_weights * bytes_each, case.replicas / case.expert_parallel, 1)
        all_weights = network.collective(parameters * bytes_each, case.replicas, local)
        return np.where(case.expert_parallel > 1, dense + experts, all_weights)

    scatter = reduce_seconds(case.reduce_bytes)
    narrower = (2 - case.gather_bytes) * (parameters - embedding) / parameters
    gather = np.where(case.distributed_optimizer, reduce_seconds(2.0 - narrower), scatter)
    scatter = scatter * np.where(case.reduce_each, case.microbatches, 1)
    is_fully_sharded = np.asarray(case.full_sharding, dtype=bool)
    sharded, sharded_ends = full_sharding(cluster, case, network, local, layer_forward, layer_backward)
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
        near_transfer=np.where(piped, network.p2p(bytes_moved, True), 0.0),
        exchange=exchange,
        exchanges=exchanges,
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
            "exchange": layers * (swap_forward + swap_backward),
        },
    )


def full_sharding(
    cluster: ClusterSpec, case: Case, network: Network, local: Any, forward: Any, backward: Any
) -> tuple[Any, Any]:
    """Return the exposed seconds of fully sharded data parallelism: (per layer and micro-batch, once per step).

    Each micro-batch gathers a layer's parameters for its forward and again for its backward, and reduces its
    gradients, under the layer before and after. `forward` and `backward` are the layer's own seconds, `local` the
    replicas per host. What cannot hide is the first gather, the last reduction and, where the layers cannot hide
    more, the embeddings.
    """
    weights = case.layer_parameters / case.tensor
    tables = np.where(case.tied, 1.0, 2.0) * case.vocab * case.hidden / case.tensor
    gather = network.collective(weights * case.gather_bytes, case.replicas, local)
    reduce = network.collective(weights * case.reduce_bytes, case.replicas, local)
    slowdown = cluster.overlap.slowdown
    ahead = np.maximum(gather - forward, slowdown * np.minimum(gather, forward))
    behind = np.maximum(gather + reduce - backward, slowdown * np.minimum(gather + reduce, backward))
    bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory
    copies = np.where(case.shard_copies, SHARD_COPY_BYTES * weights / bandwidth, 0.0)
    ends = network.collective(tables * 2.0, case.replicas, local)
    ends = ends + network.collective(tables * case.reduce_bytes, case.replicas, local)
    return ahead + behind + copies, gather + reduce + case.microbatches * ends / 2.0


def exposed_launches(launches: Any, busy: Any) -> Any:
    """Return the seconds that a layer takes beyond its `busy` ones, since the host needs `launches` to start it.

    The longer of the two bounds the layer, but neither runs at an even pace: where they are alike, each waits for the
    other at times.
    """
    longer = np.maximum(np.maximum(launches, busy), 1e-30)
    shorter = np.minimum(launches, busy)
    return longer * (1.0 + (shorter / longer) ** HOST_SHARPNESS) ** (1.0 / HOST_SHARPNESS) - busy


def slowest_of(ranks: Any) -> Any:
    """Return the expected maximum of `ranks` normally distributed step times, in standard deviations above the mean.

    GPUs of one kind differ permanently in speed, and all GPUs of a step wait for each other. The maximum is Blom's
    approximation, its quantile that of Abramowitz and Stegun 26.2.22 (within 0.003).
    """
    n = np.maximum(np.asarray(ranks, dtype=float), 1.0)
    t = np.sqrt(-2.0 * np.log(0.625 / (n + 0.25)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    return np.where(n > 1, np.maximum(z, 0.0), 0.0)


def neighbours_on_host(cluster: ClusterSpec, case: Case) -> Any:
    """Return how many of the p-1 hops between stages stay on a host, averaged over models and tensor ranks.

    Ranks run over the tensor axis, then data, then pipeline (core/grid.py): a stage's neighbour is tensor x data
    ranks away. A stage that fills a host or more never has its neighbour there.
    """
    stride = case.tensor * case.replicas
    on_host = np.maximum(1, cluster.gpus_per_host // np.maximum(stride, 1))
    crossing = np.ceil(case.pipeline / on_host) - 1
    return np.where(stride < cluster.gpus_per_host, case.pipeline - 1 - crossing, 0)


def contention(cluster: ClusterSpec, case: Case) -> Any:
    """Return the slow-down of transfers between stages that leave their leaf switch at the same time.

    A stage that fills a leaf's hosts has all its neighbours under another leaf; data-parallel rings run along
    neighbouring hosts and leave a leaf once in as many hosts, too seldom to meet.
    """
    slower = flow_slowdown(cluster.between)
    if slower == 1.0:
        return 1.0
    away = case.tensor * case.replicas / cluster.gpus_per_host
    # A model whose ranks all stand under one leaf crosses none.
    leaf = np.where(case.gpus / cluster.gpus_per_host <= cluster.between.leaf_hosts, 0.0, 1.0)
    return 1.0 + (slower - 1.0) * leaf * np.minimum(1.0, away / cluster.between.leaf_hosts)


def gemm_cap(cluster: ClusterSpec, case: Case, constants: Constants, network: Network) -> Any:
    """Return the share of peak that a GEMM reaches under the power limit.

    It is the rate of GEMMs without a pause, and larger if they pause. The limit holds for the mean over tens of
    milliseconds. Only waits in every micro-batch count (exposed transfers, launches), not the ends of the step. Other
    kernels are assumed to draw as much power as GEMMs.
    """
    power = cluster.power
    if power is None:
        return 1.0
    times = stage_times(cluster, case, constants, network, power.gemm_sustained)
    busy = times.parts["gemm"]
    waits = times.parts["tensor"] + times.parts["host"] + times.exchange * times.exchanges + times.residual
    return power.gemm_sustained * (1.0 + (1.0 - power.idle) * waits / busy) ** (1.0 / power.exponent)


def _tensor_exposed(cluster: ClusterSpec, case: Case, constants: Constants, network: Network) -> tuple[Any, Any]:
    """Return the seconds of tensor-parallel communication that a layer's forward and backward wait for per micro-batch.

    With sequence parallelism a block's forward is an all-gather and a reduce-scatter; its backward exposes the
    gather of the output gradient, while the scatter of the input gradient and the second gather of the input run
    under weight-gradient and data-gradient GEMMs and only slow them. A float8 gather has half the bytes.

    Without sequence parallelism, forward ends in an all-reduce. The all-reduce of the input gradient runs under the
    weight-gradient GEMM or, in older stacks, after both.
    """
    overlap = cluster.overlap
    if constants.tp_residual is None:
        residual_share = overlap.tp_residual
    else:
        residual_share = constants.tp_residual
    collective = _tensor_collective(cluster, case, network)
    gather = _tensor_collective(cluster, case, network, np.where(gathers_bytes(case), 1.0, 2.0))
    blocks = np.where(case.parallel_block, 1.0, 2.0)
    share = np.where(case.tp_overlap, residual_share, 1.0)
    forward = blocks * (gather + collective) * share
    backward = blocks * (gather * share + (gather + collective) * overlap.slowdown)
    # Four operands forward and four gradients backward, each an all-reduce of one number.
    agreed = np.where(gathers_bytes(case) & np.asarray(case.float8_agrees, dtype=bool), 4.0, 0.0)
    agreed = agreed * np.where(case.parallel_block, 0.5, 1.0) * _scale_agreement(cluster, case, network)
    under = np.where(case.tp_backward_under, overlap.slowdown, 1.0)
    backward = np.where(case.sequence_parallel, backward, blocks * 2.0 * collective * under)
    return forward + agreed, backward + agreed


def _scale_agreement(cluster: ClusterSpec, case: Case, network: Network) -> Any:
    """Return the seconds in which a tensor group agrees on one number."""
    return network.collective(4.0, case.tensor, np.minimum(case.tensor, cluster.gpus_per_host))


def _tensor_collective(cluster: ClusterSpec, case: Case, network: Network, value_bytes: Any = 2.0) -> Any:
    """Return the seconds of one all-gather or reduce-scatter of a micro-batch's hidden states over the tensor group."""
    activation_bytes = value_bytes * case.tokens * case.hidden
    gap = np.where(case.tensor > 1, case.region_gap_us * 1e-6, 0.0)
    return network.collective(activation_bytes, case.tensor, np.minimum(case.tensor, cluster.gpus_per_host)) + gap


def slow_host_seconds(cluster: ClusterSpec, case: Case, constants: Constants, times: StageTimes) -> Any:
    """Return the expected seconds per micro-batch that slow hosts cost.

    Replicas wait for each other, so that one slow host slows all.

    A slow host takes `slow_by` longer for the same forward code (paper section 6.3). On any stage but the last the
    slack that the last stage's logits leave hides as much of it as it can. At 12,288 GPUs this comes to what the
    paper gained by removing such hosts, about 0.7 MFU points.
    """
    rate = cluster.stragglers.slow_hosts
    if constants.slow_by is None:
        slowdown = cluster.stragglers.slow_by
    else:
        slowdown = constants.slow_by
    hosts = np.maximum(1.0, case.gpus / cluster.gpus_per_host)
    last = 1.0 - (1.0 - rate) ** (hosts / case.pipeline)
    elsewhere = 1.0 - (1.0 - rate) ** (hosts - hosts / case.pipeline)
    longer = slowdown * times.forward_kernels
    slack = np.maximum(0.0, times.last_forward + times.last_backward)
    return last * longer + (1.0 - last) * elsewhere * np.maximum(0.0, longer - slack)


def late_seconds(cluster: ClusterSpec, case: Case, constants: Constants) -> Any:
    """Return the mean seconds that a step waits at its end for the last host: the largest of n exponential delays.

    Garbage collection, data loading and logging delay hosts independently, and the gradient reduction waits for the
    last (paper section 6.3). Asynchronous preparation and planned collection (section 3.4) leave `data_share` of it.
    """
    hosts = np.maximum(1.0, case.gpus / cluster.gpus_per_host)
    exposed_share = np.where(np.asarray(case.async_data, dtype=bool), 1.0 - constants.data_share, 1.0)
    return constants.fixed * exposed_share * (np.log(hosts) + EULER)


def step_parts(
    cluster: ClusterSpec, case: Case, constants: Constants = Constants(), network: Network | None = None
) -> Parts:
    """Seconds of a step by part. Broadcasts over the case; does not check that sizes divide (see Case.fits)."""
    times = stage_times(cluster, case, constants, network)
    m = case.microbatches
    p = case.pipeline
    v = case.virtual
    waits = COUPLING * cluster.stragglers.jitter * np.where(times.exchanges > 0, times.forward + times.backward, 0.0)
    unhidden = times.exchange * times.exchanges + times.residual + waits
    slow = slow_host_seconds(cluster, case, constants, times)
    # The first and the last micro-batch pass all p v chunks one after another, a transfer between each two.
    stall = np.where(times.exchanges > 0, cluster.overlap.blocking_us * 1e-6, 0.0)
    # Blocking exchanges go at the pace of the slowest hop.
    hop = np.where(times.exchanges > 0, times.transfer, times.mean_transfer)
    hops = 2 * (v * (p - 1) * hop + (v - 1) * times.transfer) + 2 * (p - 1) * stall
    # With one chunk a stage, a micro-batch's round trip cannot hide its transfers; slack before the logits can.
    trip = np.where((v == 1) & (times.exchanges == 0), 2 * (p - 1) / p * times.transfer, 0.0)
    ramp = (p - 1) / v * (times.forward + times.backward) + hops
    logits = np.maximum(times.last_forward + times.last_backward, np.where(p > 1, trip, -np.inf))
    data = data_exposed(cluster, case, constants, times)
    fixed = late_seconds(cluster, case, constants)
    return Parts(
        gemm=m * times.parts["gemm"],
        attention=m * times.parts["attention"],
        elementwise=m * times.parts["elementwise"],
        recompute=m * times.parts["recompute"],
        host=m * times.parts["host"],
        tensor=m * times.parts["tensor"],
        exchange=m * times.parts["exchange"],
        pipeline=m * unhidden,
        data=data,
        logits=m * logits,
        bubble=ramp,
        stragglers=m * slow,
        optimizer=times.optimizer,
        fixed=fixed,
    )


def data_exposed(cluster: ClusterSpec, case: Case, constants: Constants, times: StageTimes) -> Any:
    """Return the seconds of data-parallel communication that the step waits for.

    Overlapped, a chunk's gradients are scattered while earlier chunks finish their last backward passes and its
    parameters gathered while earlier chunks do their first forward passes. The last scatter and the first gather
    stay exposed: the gather is prefetched (paper section 3.2), but on both levels nothing is assumed to run before it.
    """
    plain = times.scatter + times.gather
    pieces = pieces_of(case)
    # Between a chunk's last backward and the next chunk's lie a round's worth of passes; buckets of a single chunk
    # have the last backward itself.
    size = np.maximum(case.pipeline, case.micro_batch_group_size)
    rounds = np.where(case.virtual > 1, np.minimum(size, case.microbatches), 1)
    # Reduced after every micro-batch, gradients have all backward passes to hide behind.
    is_per_microbatch = np.asarray(case.reduce_each, dtype=bool)
    rounds_back = np.where(is_per_microbatch, case.microbatches, rounds)
    # A round of one chunk ends when its last micro-batch has passed all stages.
    hops = np.where((case.virtual > 1) & (rounds <= case.pipeline), case.pipeline * times.mean_transfer, 0.0)
    slowed = np.where(case.virtual > 1, cluster.overlap.slowdown, 0.0)
    scatter, gather = times.scatter / pieces, times.gather / pieces
    tail = scatter / np.where(is_per_microbatch, case.microbatches, 1)
    behind = rounds_back * times.backward / pieces + hops
    late = (pieces - 1) * _overlapped(scatter, behind, slowed, hops, case.pipeline)
    early = (pieces - 1) * _overlapped(gather, rounds * times.forward / pieces + hops, slowed, hops, case.pipeline)
    exposed = np.where(case.dp_overlap, tail + late + gather + early, plain)
    return exposed + times.tied + case.microbatches * times.sharded + times.sharded_ends


def pieces_of(case: Case) -> Any:
    """Pieces in which a stage's gradients and parameters travel: its chunks, or buckets where it has one chunk."""
    buckets = np.minimum(BUCKETS, np.maximum(1, case.layers // case.pipeline))
    return np.where(case.virtual > 1, case.virtual, buckets)


def _overlapped(collective: Any, compute: Any, slowdown: Any, transfers: Any, stages: Any) -> Any:
    """Return the seconds that an overlapping collective delays a round of `compute`.

    Either the round waits for the collective's end, or its passes are slowed while the collective lasts on any of
    the stages that they go through, and the transfers between stages share its NIC.
    """
    alone = collective / (1.0 + slowdown)
    slow = slowdown * np.minimum(compute, alone + np.minimum(compute / stages, alone) * (stages - 1))
    return np.maximum(slow + np.where(collective > 0, transfers, 0.0), collective - compute)


def head_exchange(cluster: ClusterSpec, case: Case, network: Network) -> tuple[Any, Any]:
    """Return the seconds of context parallelism in a layer's forward and backward; all exposed.

    An all-to-all exchanges slices of the sequence with all heads for whole sequences with some of the heads, and
    another one returns the results. Each key/value head goes to several ranks if there are fewer heads than ranks.
    """
    head = case.query / case.heads
    keys = np.maximum(case.kv / case.tensor, case.context * head)
    values = 2.0 * case.query / case.tensor + 2.0 * keys
    # A rank sends and receives over all its links at once, as in a gather of as many bytes.
    near = np.maximum(1, np.minimum(case.context, cluster.gpus_per_host // case.tensor))
    seconds = 2.0 * network.collective(case.tokens * values, case.context, near)
    seconds = np.where(case.context > 1, seconds, 0.0)
    return seconds, seconds


def expert_exchange(cluster: ClusterSpec, case: Case, network: Network) -> tuple[Any, Any]:
    """Return the seconds that a layer with experts on several ranks exchanges tokens, in forward and in backward.

    Each direction has an all-to-all to the experts and one back, all exposed. Tokens are assumed to be spread evenly
    over experts; each goes to `top_k` of them.
    """
    away = (case.expert_parallel - 1) / case.expert_parallel
    width = case.hidden / np.where(case.sequence_parallel, case.tensor, 1)
    moved = 2.0 * case.tokens * width * case.top_k * away
    inside = case.tensor * case.context * case.expert_parallel <= cluster.gpus_per_host
    round_trip = np.where(case.expert_parallel > 1, 2.0 * network.p2p(moved, inside), 0.0)
    return round_trip, round_trip
