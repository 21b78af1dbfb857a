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
from megascale.simulate.kernel_times import layer_times, logits_seconds, optimizer_seconds
from megascale.simulate.network import Network, RingNetwork
from megascale.simulate.software import RECOMPUTE, RECOMPUTED

# Stages that exchange in lock-step wait for the slowest: the pace rises by this share of the standard deviation of a
# slot. Measured on the event-driven level (tests/simulate/test_levels.py holds the two together).
COUPLING = 0.45
# Buckets into which gradients of a stage with one chunk are cut so that they can hide.
BUCKETS = 8


@dataclass(frozen=True)
class Parts:
    """Where a step's seconds go; they add up to `total`. Numbers or arrays.

    Attributes:
        gemm, attention, elementwise: kernels of a middle stage's layers over all micro-batches.
        recompute: forward passes done again.
        host: what launching kernels takes beyond what they run.
        tensor, pipeline, data: exposed communication on each axis (with the slow-down of what runs beside compute).
        logits: what the last stage's output GEMM and loss add, since everyone waits for it.
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
    """What one micro-batch costs a stage, and what moves between stages; shared by both levels. Seconds.

    Attributes:
        forward, backward: kernels and exposed tensor communication of all a middle stage's chunks.
        last_forward, last_backward: what the last stage adds (less than 0 where it has fewer layers).
        layer_forward, layer_backward: one layer.
        transfer: one activation between neighbours.
        exchange: a blocking exchange (0 where transfers overlap).
        exchanges: blocking exchanges a micro-batch.
        residual: exposed part of overlapped transfers a micro-batch.
        scatter, gather: whole gradient reduction and parameter gathering of a stage.
        parts: kernel and communication parts of forward + backward, for the waterfall.
    """

    forward: Any
    backward: Any
    last_forward: Any
    last_backward: Any
    layer_forward: Any
    layer_backward: Any
    transfer: Any
    exchange: Any
    exchanges: Any
    residual: Any
    scatter: Any
    gather: Any
    optimizer: Any
    parts: dict[str, Any]


def stage_times(
    cluster: ClusterSpec, case: Case, constants: Constants = Constants(), network: Network | None = None
) -> StageTimes:
    """Durations of everything in a step, before any schedule is laid over them."""
    network = network or RingNetwork(cluster, constants.dp_efficiency)
    scale, overlap = constants.compute, cluster.overlap
    layers = case.middle
    layer = layer_times(cluster, case, constants.overhead)
    share = np.asarray(RECOMPUTED)[np.asarray(case.recompute)]
    whole = np.asarray(case.recompute) == RECOMPUTE.index("full")
    again = np.where(whole, scale * layer.forward, share * scale * layer.elementwise_forward)

    tp_forward, tp_backward = _tensor_exposed(cluster, case, constants, network)
    tp_again = np.where(whole, tp_forward, 0.0)
    # A block enters and leaves a tensor-parallel region forward and backward, and once more forward if recomputed.
    regions = np.where(case.tensor > 1, 4.0, 0.0) * np.where(case.parallel_block, 1.0, 2.0)
    floor = (layer.kernels * cluster.kernels.host_us + regions * cluster.kernels.region_us) * 1e-6
    busy = scale * (layer.forward + layer.backward) + again + tp_forward + tp_backward + tp_again
    host = np.maximum(0.0, floor * np.where(whole, 1.5, 1.0) - busy)
    layer_forward = scale * layer.forward + tp_forward + host / 3
    layer_backward = scale * layer.backward + tp_backward + again + tp_again + host * 2 / 3

    last_forward, last_backward = (scale * x for x in logits_seconds(cluster, case))
    # With sequence parallelism the last hidden states are gathered once more; backward hides its two collectives.
    one = _tensor_collective(cluster, case, network)
    gathered = np.where(case.sequence_parallel, one, 0.0)
    last_forward = last_forward + gathered
    last_backward = last_backward + np.where(case.sequence_parallel, 2.0 * overlap.slowdown, 1.0) * one
    fewer = case.last - case.middle
    bytes_moved = 2.0 * case.micro * case.sequence * case.hidden / case.tensor
    same_host = case.tensor * case.data < cluster.gpus_per_host
    piped = case.pipeline > 1
    transfer = np.where(piped, network.p2p(bytes_moved, same_host), 0.0)
    double = np.where(piped, network.p2p(2 * bytes_moved, same_host), 0.0)
    blocking = piped & ~np.asarray(case.pp_overlap, dtype=bool)
    exchange = np.where(blocking, np.where(case.virtual > 1, double, transfer) + overlap.blocking_us * 1e-6, 0.0)
    exchanges = np.where(blocking, np.where(case.virtual > 1, case.virtual, 2), 0)
    left = overlap.pp_residual if constants.pp_residual is None else constants.pp_residual
    residual = np.where(piped & ~blocking, left * 2 * case.virtual * transfer, 0.0)

    embedding = case.vocab * case.hidden / case.tensor
    parameters = layers * case.layer_parameters / case.tensor + embedding
    local = np.maximum(
        1, np.minimum(case.data, cluster.gpus_per_host // np.minimum(case.tensor, cluster.gpus_per_host))
    )
    # The all-reduce of a replicated optimizer is a reduce-scatter and an all-gather of the gradients.
    scatter = network.collective(parameters * case.reduce_bytes, case.data, local)
    once = np.where(case.distributed_optimizer, network.collective(parameters * 2.0, case.data, local), scatter)
    scatter = scatter * np.where(case.reduce_each, case.microbatches, 1)
    return StageTimes(
        forward=layers * layer_forward,
        backward=layers * layer_backward,
        last_forward=last_forward + fewer * layer_forward,
        last_backward=last_backward + fewer * layer_backward,
        layer_forward=layer_forward,
        layer_backward=layer_backward,
        transfer=transfer,
        exchange=exchange,
        exchanges=exchanges,
        residual=residual,
        scatter=scatter,
        gather=once,
        optimizer=optimizer_seconds(cluster, case, parameters),
        parts={
            "gemm": layers * scale * (layer.gemm_forward + layer.gemm_backward),
            "attention": layers * scale * (layer.attention_forward + layer.attention_backward),
            "elementwise": layers * scale * (layer.elementwise_forward + layer.elementwise_backward),
            "recompute": layers * (again + tp_again),
            "host": layers * host,
            "tensor": layers * (tp_forward + tp_backward),
        },
    )


def _tensor_exposed(cluster: ClusterSpec, case: Case, constants: Constants, network: Network) -> tuple[Any, Any]:
    """Tensor-parallel communication that a layer's forward and backward wait for, one micro-batch.

    With sequence parallelism a block's forward is an all-gather and a reduce-scatter; its backward exposes the
    gather of the output gradient, while the scatter of the input gradient and the second gather of the input run
    under weight-gradient and data-gradient GEMMs and only slow them. Without, forward ends in an all-reduce, and
    the all-reduce of the input gradient runs under the weight-gradient GEMM.
    """
    overlap = cluster.overlap
    left = overlap.tp_residual if constants.tp_residual is None else constants.tp_residual
    one = _tensor_collective(cluster, case, network)
    blocks = np.where(case.parallel_block, 1.0, 2.0)
    share = np.where(case.tp_overlap, left, 1.0)
    forward = blocks * 2.0 * one * share
    backward = blocks * one * (share + 2.0 * overlap.slowdown)
    backward = np.where(case.sequence_parallel, backward, blocks * 2.0 * one * overlap.slowdown)
    return forward, backward


def _tensor_collective(cluster: ClusterSpec, case: Case, network: Network) -> Any:
    """Seconds of one all-gather or reduce-scatter of a micro-batch's hidden states over the tensor group."""
    whole = 2.0 * case.micro * case.sequence * case.hidden
    return network.collective(whole, case.tensor, np.minimum(case.tensor, cluster.gpus_per_host))


def straggler_factor(cluster: ClusterSpec, case: Case, constants: Constants) -> Any:
    """Expected step over a step without slow hosts: replicas wait for each other, so one slow host slows all.

    This is the upper bound, in which no slack hides a slow host; `event` shows how much of it the slack that the last
    stage's logits leave would hide. The paper's own table grows with the number of GPUs about as the bound does, so
    it is kept as the scale factor of everything that makes replicas wait for each other: slow hosts, late launches
    before the gradient reduction, contention.
    """
    rate = cluster.stragglers.slow_hosts
    by = cluster.stragglers.slow_by if constants.slow_by is None else constants.slow_by
    hosts = np.maximum(1.0, case.gpus / cluster.gpus_per_host)
    return 1.0 + by * (1.0 - (1.0 - rate) ** hosts)


def step_parts(
    cluster: ClusterSpec, case: Case, constants: Constants = Constants(), network: Network | None = None
) -> Parts:
    """Seconds of a step by part. Broadcasts over the case; does not check that sizes divide (see Case.fits)."""
    times = stage_times(cluster, case, constants, network)
    m, p, v = case.microbatches, case.pipeline, case.virtual
    waits = COUPLING * cluster.stragglers.jitter * np.where(times.exchanges > 0, times.forward + times.backward, 0.0)
    same_host = times.exchange * times.exchanges + times.residual + waits
    middle = times.forward + times.backward + same_host
    factor = straggler_factor(cluster, case, constants)
    # The first and the last micro-batch pass all p v chunks one after another, a transfer between each two.
    stall = np.where(times.exchanges > 0, cluster.overlap.blocking_us * 1e-6, 0.0)
    hops = 2 * (p * v - 1) * times.transfer + 2 * (p - 1) * stall
    # With one chunk a stage, a micro-batch's round trip cannot hide its transfers; slack before the logits can.
    trip = np.where((v == 1) & (times.exchanges == 0), 2 * (p - 1) / p * times.transfer, 0.0)
    ramp = (p - 1) / v * (times.forward + times.backward) + hops
    logits = np.maximum(times.last_forward + times.last_backward, np.where(p > 1, trip, -np.inf))
    piped = m * (middle + logits) + ramp
    data = data_exposed(cluster, case, constants, times)
    fixed = constants.fixed * (1.0 - constants.data_share * np.asarray(case.async_data, dtype=float))
    return Parts(
        gemm=m * times.parts["gemm"],
        attention=m * times.parts["attention"],
        elementwise=m * times.parts["elementwise"],
        recompute=m * times.parts["recompute"],
        host=m * times.parts["host"],
        tensor=m * times.parts["tensor"],
        pipeline=m * same_host,
        data=data,
        logits=m * logits,
        bubble=ramp,
        stragglers=(factor - 1.0) * piped,
        optimizer=times.optimizer,
        fixed=fixed,
    )


def data_exposed(cluster: ClusterSpec, case: Case, constants: Constants, times: StageTimes) -> Any:
    """Data-parallel communication that the step waits for.

    Overlapped, a chunk's gradients are scattered while earlier chunks finish their last backward passes and its
    parameters gathered while earlier chunks do their first forward passes: the last scatter stays exposed, the first
    gather is prefetched behind the batch preparation (paper section 3.2).
    """
    plain = times.scatter + times.gather
    pieces = np.where(case.virtual > 1, case.virtual, np.minimum(BUCKETS, np.maximum(1, case.layers // case.pipeline)))
    # Between a chunk's last backward and the next chunk's lie a round's worth of passes; buckets of a single chunk
    # have the last backward itself.
    size = np.maximum(case.pipeline, case.micro_batch_group_size)
    rounds = np.where(case.virtual > 1, np.minimum(size, case.microbatches), 1)
    rest = (pieces - 1) / pieces
    # Reduced after every micro-batch, gradients have all backward passes to hide behind.
    rounds_back = np.where(case.reduce_each, case.microbatches, rounds)
    tail = times.scatter / pieces / np.where(case.reduce_each, case.microbatches, 1)
    late = np.maximum(0.0, times.scatter - tail - rest * rounds_back * times.backward)
    early = np.maximum(0.0, rest * times.gather - rest * rounds * times.forward)
    first = np.maximum(0.0, times.gather / pieces - constants.fixed)
    exposed = tail + late + early + first
    hidden = np.maximum(0.0, plain - exposed)
    # The first and the last micro-batch pass the stages one after another while the same NICs carry collectives.
    chunks = case.pipeline * case.virtual
    hops = np.minimum(chunks, times.gather * case.virtual / times.forward)
    hops = hops + np.minimum(chunks, times.scatter * case.virtual / times.backward)
    return np.where(case.dp_overlap, exposed + cluster.overlap.slowdown * hidden + hops * times.transfer, plain)
