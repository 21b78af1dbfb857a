"""Exposed communication of a layer, and the paths between stages, for both levels of the simulator.

Values are seconds, numbers or arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megascale.simulate.calibration import Constants
from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.kernel_times import gathers_float8_activations
from megascale.simulate.network import Network, flow_slowdown

# Bytes moved per parameter and micro-batch between shards and layers: gathered parameters are copied out for forward
# and for backward (read and written in 2 bytes), gradients are copied in (read in 2, written in 4).
SHARD_COPY_BYTES = 14.0
# Rate of a gather by copy engines, relative to the links of one direction: 157 MB from the other H200 in 424 us.
# Measured by tests/gpu/mapped_shards.py (dev/log.md, 2026-11-28).
COPY_RATE = 0.82
# (ranks, fraction by which copies from peers slow compute). Fitted to steps of ZeRO-3 next to ZeRO-1: the first row to
# GPT 13B and the sizes of Llama 3.2 3B on two H200, the second one to GPT 13B and Llama 8B on four (dev/log.md,
# 2026-11-28). Why four ranks lose more is unknown.
COPY_SLOWDOWN = ((2, 0.03), (4, 0.18))
# Exposed share of the time that kernels on shards need at the memory's bandwidth, next to GEMMs. Copies of own shards
# delayed GPT 13B on two H200 by 35 ms per step, and need 48 ms (dev/log.md, 2026-11-28).
SHARD_KERNEL_SHARE = 0.7


class ShardingSeconds(NamedTuple):
    """Exposed seconds of fully sharded data parallelism.

    Attributes:
        per_layer: per layer and micro-batch.
        per_step: once per step: the first and the last layer, and the embeddings.
    """

    per_layer: Any
    per_step: Any


class PassSeconds(NamedTuple):
    """Seconds of a forward and of a backward."""

    forward: Any
    backward: Any


def exposed_tensor_seconds(cluster: ClusterSpec, case: Case, constants: Constants, network: Network) -> PassSeconds:
    """Return the seconds of tensor-parallel communication that a layer's forward and backward wait for per micro-batch.

    With sequence parallelism, the forward of a block has an all-gather and a reduce-scatter. In its backward the gather
    of the output gradient is exposed. The scatter of the input gradient and the second gather of the input overlap with
    GEMMs and only slow them. A float8 gather has half the bytes. In a parallel block, attention and MLP count as one
    block.

    Without sequence parallelism, forward ends in an all-reduce. In backward the all-reduce of the input gradient
    overlaps with the GEMM of the weight gradient or, in older stacks, follows it.
    """
    overlap = cluster.overlap
    if constants.tp_residual is None:
        residual_share = overlap.tp_residual
    else:
        residual_share = constants.tp_residual
    collective = tensor_collective_seconds(cluster, case, network)
    gather = tensor_collective_seconds(cluster, case, network, np.where(gathers_float8_activations(case), 1.0, 2.0))
    blocks = np.where(case.parallel_block, 1.0, 2.0)
    exposed_share = np.where(case.tp_overlap, residual_share, 1.0)
    forward = blocks * (gather + collective) * exposed_share
    backward = blocks * (gather * exposed_share + (gather + collective) * overlap.slowdown)
    # Ranks agree on the float8 scales of four operands in forward and of four gradients in backward, or of half as many
    # in a parallel block.
    scale_count = np.where(gathers_float8_activations(case) & np.asarray(case.float8_agrees, dtype=bool), 4.0, 0.0)
    scale_count = scale_count * np.where(case.parallel_block, 0.5, 1.0)
    agreement = scale_count * _scale_agreement_seconds(cluster, case, network)
    backward_share = np.where(case.tp_backward_overlap, overlap.slowdown, 1.0)
    # An all-reduce takes twice the time of a gather or a scatter.
    backward = np.where(case.sequence_parallel, backward, blocks * 2.0 * collective * backward_share)
    return PassSeconds(forward + agreement, backward + agreement)


def _scale_agreement_seconds(cluster: ClusterSpec, case: Case, network: Network) -> Any:
    """Return the seconds of an all-reduce of one float32 over the tensor group."""
    return network.collective(4.0, case.tensor, np.minimum(case.tensor, cluster.gpus_per_host))


def tensor_collective_seconds(cluster: ClusterSpec, case: Case, network: Network, value_bytes: Any = 2.0) -> Any:
    """Return the seconds of one all-gather or reduce-scatter of a micro-batch's hidden states over the tensor group."""
    activation_bytes = value_bytes * case.tokens * case.hidden
    gap = np.where(case.tensor > 1, case.region_gap_us * 1e-6, 0.0)
    return network.collective(activation_bytes, case.tensor, np.minimum(case.tensor, cluster.gpus_per_host)) + gap


def exposed_sharding_seconds(
    cluster: ClusterSpec, case: Case, network: Network, replicas_per_host: Any, forward: Any, backward: Any
) -> ShardingSeconds:
    """Return the exposed seconds of fully sharded data parallelism.

    Each micro-batch gathers a layer's parameters for its forward and again for its backward, and reduces its
    gradients. These transfers overlap with the neighbouring layers. Always exposed are the first gather, the last
    reduction, and those of the embeddings. Layers that stay gathered have fewer gathers (Case.gather_share).

    Args:
        forward, backward: seconds of one layer.
    """
    weights = case.layer_parameters / case.tensor
    embeddings = np.where(case.tied, 1.0, 2.0) * case.vocab * case.hidden / case.tensor
    # One rank has no peers. With collectives the network prices its transfers at 0.
    is_local = (case.replicas > 1) & (case.replicas <= replicas_per_host) & np.asarray(case.unit_slots, dtype=bool)
    has_copied_gathers = is_local & np.asarray(case.copied_gathers, dtype=bool)
    has_copied_reductions = is_local & (case.tokens >= case.copied_reductions)

    def transfer_seconds(bytes_per_parameter: Any, is_copied: Any) -> Any:
        """Return the seconds of a gather or reduction of one layer."""
        by_collective = network.collective(weights * bytes_per_parameter, case.replicas, replicas_per_host)
        received_bytes = weights * bytes_per_parameter * (case.replicas - 1) / case.replicas
        by_copies = received_bytes / (COPY_RATE * cluster.inside.gbs * 1e9) + cluster.inside.latency_us * 1e-6
        return np.where(is_copied, by_copies, by_collective)

    gather = transfer_seconds(case.gather_bytes, has_copied_gathers)
    reduce = transfer_seconds(case.reduce_bytes, has_copied_reductions)
    mean_gather = case.gather_share * gather
    # A transfer that overlaps with compute slows it. If it takes longer, the difference is exposed.
    copy_ranks, copy_slowdowns = np.transpose(COPY_SLOWDOWN)
    copy_slowdown = np.interp(np.log(case.replicas), np.log(copy_ranks), copy_slowdowns)
    gather_delay = np.where(has_copied_gathers, copy_slowdown, cluster.overlap.slowdown) * mean_gather
    reduce_delay = np.where(has_copied_reductions, copy_slowdown, cluster.overlap.slowdown) * reduce
    in_forward = np.maximum(
        mean_gather - forward, gather_delay * np.minimum(1.0, forward / np.maximum(mean_gather, 1e-30))
    )
    transfers = mean_gather + reduce
    in_backward = np.maximum(
        transfers - backward, (gather_delay + reduce_delay) * np.minimum(1.0, backward / np.maximum(transfers, 1e-30))
    )
    bandwidth = cluster.gpu.memory_gbs * 1e9 * cluster.kernels.memory
    copies = np.where(case.shard_copies, SHARD_COPY_BYTES * weights / bandwidth, 0.0)
    slot_bytes = _count_slot_traffic(cluster, case, weights, has_copied_gathers, has_copied_reductions)
    slots = np.where(case.unit_slots & (case.replicas > 1), slot_bytes / bandwidth, 0.0)
    embedding_gather = network.collective(embeddings * 2.0, case.replicas, replicas_per_host)
    embedding_reduce = network.collective(embeddings * case.reduce_bytes, case.replicas, replicas_per_host)
    # Half of the embeddings' collectives is taken as overlapping with layers. A tied embedding of this engine is no
    # unit: it is gathered and reduced once per step.
    is_resident = np.asarray(case.unit_slots, dtype=bool) & np.asarray(case.tied, dtype=bool)
    embedding_count = np.where(is_resident, 1.0, case.microbatches / 2.0)
    per_step = gather + reduce + embedding_count * (embedding_gather + embedding_reduce)
    return ShardingSeconds(in_forward + in_backward + copies + slots, per_step)


def _count_slot_traffic(
    cluster: ClusterSpec, case: Case, weights: Any, has_copied_gathers: Any, has_copied_reductions: Any
) -> Any:
    """Return the bytes of a GPU's memory that kernels move next to a layer's GEMMs under ZeRO-3, as exposed bytes.

    A kernel copies the own shard into the slot in both gathers, unless the slot contains the shard. Another kernel adds
    received gradients to the shard's float32 sum. GEMMs write gradients instead of adding to a float32 sum, so their
    traffic falls. The exposed share of this traffic is that of the cluster.

    Args:
        weights: parameters of the layer on a rank.
    """
    copies_own = has_copied_gathers & ~np.asarray(case.mapped_shards, dtype=bool)
    # Two gathers, each of which reads and writes the own shard.
    own_copy_bytes = np.where(copies_own, 4.0 * case.gather_share * case.gather_bytes / case.replicas, 0.0)
    shard_sum_bytes = 8.0 / case.replicas  # the shard's sum is read and written
    # Copies bring the addends of all ranks. A collective brings their sum, which is added without GEMMs next to it.
    copied_sum_bytes = SHARD_KERNEL_SHARE * (case.reduce_bytes + shard_sum_bytes)
    reduced_sum_bytes = 4.0 / case.replicas + shard_sum_bytes
    sum_bytes = np.where(has_copied_reductions, copied_sum_bytes, reduced_sum_bytes)
    is_rounded = has_copied_reductions & np.asarray(case.rounded_gradients, dtype=bool)
    written_bytes = np.where(is_rounded, case.reduce_bytes, case.gradient_bytes)
    saved_bytes = cluster.kernels.accumulate_exposed * (2.0 * case.gradient_bytes - written_bytes)
    return weights * (SHARD_KERNEL_SHARE * own_copy_bytes + sum_bytes - saved_bytes)


def head_exchange_seconds(cluster: ClusterSpec, case: Case, network: Network) -> Any:
    """Return the seconds of context parallelism in a layer's forward. Its backward takes the same; all are exposed.

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
    """Return the seconds of token exchange with experts on other ranks in a layer's forward.

    Its backward takes the same. Each pass has an all-to-all to the experts and one back, all exposed. Tokens are
    assumed to be spread evenly over experts; each token goes to `top_k` of them.
    """
    sent_share = (case.expert_parallel - 1) / case.expert_parallel
    width = case.hidden / np.where(case.sequence_parallel, case.tensor, 1)
    sent_bytes = 2.0 * case.tokens * width * case.top_k * sent_share
    is_within_host = case.tensor * case.context * case.expert_parallel <= cluster.gpus_per_host
    return np.where(case.expert_parallel > 1, 2.0 * network.p2p(sent_bytes, is_within_host), 0.0)


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
