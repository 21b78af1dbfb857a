"""The closed level: the time of a step as a formula. One pass of array arithmetic prices one layout or a million.

An interleaved 1F1B pipeline of m micro-batches takes (m + (p-1)/v) times the time of its slowest stage (Megatron-LM,
Narayanan et al. 2021). The formula adds the exposed communication, the logits on the last stage, the delay by slow
hosts, and the work at the beginning and at the end of a step. `stage_times` has the times of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megascale.simulate.calibration import Constants
from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.network import Network
from megascale.simulate.stage_times import StageTimes, compute_stage_times

# With blocking exchanges, all stages wait for the slowest one. A slot (one forward and one backward) takes longer by
# this share of its standard deviation. The value is fitted to the event level, and tests/simulate/test_levels.py
# compares both levels.
COUPLING = 0.45
# Mean of the largest of n exponential delays: ln n + EULER.
EULER = 0.5772
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
        logits: additional time of the last stage (output GEMM, loss, more or fewer layers), for which all stages wait;
            at least the exposed transfers of a micro-batch's round trip.
        bubble: idle time while the pipeline fills and drains.
        stragglers: wait for slow hosts.
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
        return sum(getattr(self, f.name) for f in fields(self))

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def compute_step_parts(
    cluster: ClusterSpec, case: Case, constants: Constants = Constants(), network: Network | None = None
) -> StepParts:
    """Return the seconds of a step by part.

    Arrays in `case` broadcast. Whether sizes divide and memory suffices is not checked (see `Case.fits`).
    """
    times = compute_stage_times(cluster, case, constants, network)
    m = case.microbatches
    p = case.pipeline
    v = case.virtual
    has_exchanges = times.blocking_exchange_count > 0
    # Exchanges are blocking exchanges here.
    jitter_wait = COUPLING * cluster.stragglers.jitter * np.where(has_exchanges, times.forward + times.backward, 0.0)
    exposed_transfers = times.blocking_exchange * times.blocking_exchange_count + times.residual + jitter_wait
    slow_hosts = slow_host_seconds(cluster, case, constants, times)
    # The first micro-batch passes all p v chunks in turn in forward, and the last one in backward, with a transfer
    # between each two chunks: v (p-1) transfers to the next stage, and v-1 from the last stage to the first.
    stall = np.where(has_exchanges, cluster.overlap.blocking_us * 1e-6, 0.0)
    # The slowest hop determines the pace of blocking exchanges.
    hop = np.where(has_exchanges, times.transfer, times.mean_transfer)
    hops = 2 * (v * (p - 1) * hop + (v - 1) * times.transfer) + 2 * (p - 1) * stall
    # With one chunk per stage and overlapped transfers, each micro-batch costs the pipeline a p-th of its round trip of
    # 2 (p-1) transfers, unless the wait for the logits is longer.
    round_trip = np.where((v == 1) & ~has_exchanges, 2 * (p - 1) / p * times.transfer, 0.0)
    # Time to fill and to drain the pipeline.
    ramp = (p - 1) / v * (times.forward + times.backward) + hops
    logits = np.maximum(times.last_forward + times.last_backward, np.where(p > 1, round_trip, -np.inf))
    data = exposed_data_seconds(cluster, case, times)
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


def slow_host_seconds(cluster: ClusterSpec, case: Case, constants: Constants, times: StageTimes) -> Any:
    """Return the expected seconds per micro-batch that slow hosts cost.

    Replicas wait for each other, so one slow host slows all replicas. A slow host takes longer by the fraction
    `slow_by` for the same forward code (MegaScale section 6.3). All other stages wait for the last stage's logits, and
    this slack hides a part of their delay. At 12,288 GPUs the cost is about 0.7 MFU points. The paper gained them by
    removing slow hosts.
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
    delay_of_others_only = (1.0 - last_probability) * other_probability * np.maximum(0.0, delay - slack)
    return last_probability * delay + delay_of_others_only


def last_host_delay_seconds(cluster: ClusterSpec, case: Case, constants: Constants) -> Any:
    """Return the mean seconds that a step waits at its end for the last host: the largest of n exponential delays.

    Garbage collection, data loading and logging delay hosts independently, and the gradient reduction waits for the
    last host (MegaScale section 6.3). Asynchronous batch preparation and planned garbage collection (section 3.4)
    remove the share `data_share` of the delay.
    """
    hosts = np.maximum(1.0, case.gpus / cluster.gpus_per_host)
    exposed_share = np.where(np.asarray(case.async_data, dtype=bool), 1.0 - constants.data_share, 1.0)
    return constants.fixed * exposed_share * (np.log(hosts) + EULER)


def exposed_data_seconds(cluster: ClusterSpec, case: Case, times: StageTimes) -> Any:
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
    scatter_slowdown = np.where(is_per_microbatch, cluster.overlap.slowdown, slowdown)
    scatter = times.scatter / buckets
    gather = times.gather / buckets
    last_scatter = scatter / np.where(is_per_microbatch, case.microbatches, 1)
    backward_seconds = backwards * times.backward / buckets + hops
    forward_seconds = forwards * times.forward / buckets + hops
    other_scatters = (buckets - 1) * _delay_by_collective(
        scatter, backward_seconds, scatter_slowdown, transfers=hops, stages=case.pipeline
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
    # Work that is done while the collective runs, in seconds of undisturbed compute.
    unslowed = collective / (1.0 + slowdown)
    slowed = slowdown * np.minimum(compute, unslowed + np.minimum(compute / stages, unslowed) * (stages - 1))
    delay_if_shorter = slowed + np.where(collective > 0, transfers, 0.0)
    return np.maximum(delay_if_shorter, collective - compute)
