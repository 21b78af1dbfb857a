"""The event level: the time of a step from a replay of the schedule's actions.

The schedule that training runs (core/schedule.py) is replayed (core/replay.py) with the durations of stage_times.py.
Each stage has a compute stream, transfer streams and data-parallel streams. Work that overlaps with other work on the
same NIC or the same SMs is then made longer by the shared time, and the step is replayed again. Replicas have different
durations if hosts are slow or times jitter. Gradient reductions wait for the last replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megascale.core.replay import ActionGraph, Timeline, replay_schedule
from megascale.core.schedule import ActionKind
from megascale.core.schedule_registry import build_checked_schedule
from megascale.simulate.calibration import Constants
from megascale.simulate.case import Case
from megascale.simulate.closed import count_buckets, last_host_delay_seconds
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.network import Network, UnevenNetwork
from megascale.simulate.stage_times import StageTimes, compute_stage_times

# Number of replays that make overlapping durations longer. The second one changes little.
OVERLAP_PASSES = 2


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """A simulated step.

    Attributes:
        seconds: time of the step, from the first action to the last update.
        timeline: the replayed pipeline of the replica that ended last.
        replicas: [replicas] seconds of each replica's pipeline.
        reduced: [stages] time at which each stage's gradients were reduced.
        slow: [replicas, stages] factor by which compute takes longer on the slowest host of each stage.
    """

    seconds: float
    timeline: Timeline
    replicas: np.ndarray
    reduced: np.ndarray
    times: StageTimes
    slow: np.ndarray


def simulate_step(
    cluster: ClusterSpec,
    case: Case,
    constants: Constants = Constants(),
    network: Network | None = None,
    *,
    slow_hosts: Mapping[int, float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    layers: np.ndarray | None = None,
    schedule: str = "auto",
) -> SimulatedStep:
    """Simulate one step of a scalar case.

    Args:
        schedule: name of the pipeline schedule (core/schedule_registry.py).
        slow_hosts: factor on the compute time by host; `draw_hosts` draws them at random.
        layers: [stages, chunks] layers of each chunk; default: the same in all chunks of a stage.
        jitter: relative standard deviation of an action's compute time, drawn for each action.
        seed: seed of the jitter.
    """
    p = int(case.pipeline)
    v = int(case.virtual)
    m = int(case.microbatches)
    times = compute_stage_times(cluster, case, constants, network)
    group_size = int(case.micro_batch_group_size) or None
    reduces_each_microbatch = bool(case.reduces_each_microbatch)
    graph = ActionGraph.compile(build_checked_schedule(schedule, p, v, m, reduces_each_microbatch, group_size))
    blocking = float(times.blocking_exchange_count) > 0
    if blocking:
        graph = graph.with_extra_waits(find_blocking_waits(graph))
    # In an uneven network, the collectives of stages and the transfers of replicas take different times.
    uneven = network if isinstance(network, UnevenNetwork) else None
    stage_factors = np.ones(p)
    if uneven is not None:
        stage_factors = np.broadcast_to(uneven.stage_shares(), (p,))
    durations = _compute_durations(
        cluster, case, times, graph=graph, blocking=blocking, layers=layers, stage_factors=stage_factors
    )
    if case.dp_overlap:
        durations = _add_overlap(cluster, graph, durations)

    slow = _compute_slowness(cluster, case, slow_hosts or {})
    is_compute = graph.is_compute
    send_factors = np.ones(len(slow))
    if uneven is not None:
        send_factors = np.broadcast_to(uneven.replica_shares(), (len(slow),))
    # Replicas with equal factors take the same time, so only one of them is replayed. With jitter all differ.
    factors = np.column_stack([slow, send_factors])  # [replicas, stages + 1]
    replayed_index = np.arange(len(slow))  # of each replica
    if jitter <= 0:
        factors, inverse = np.unique(factors, axis=0, return_inverse=True)
        replayed_index = np.asarray(inverse).reshape(-1)
    replica_durations = np.repeat(durations[:, None], len(factors), axis=1)  # [actions, replayed replicas]
    replica_durations[is_compute] *= factors.T[graph.stage[is_compute]]
    if uneven is not None:
        replica_durations[_find_sends_between_hosts(cluster, case, graph)] *= factors[:, -1]
    if jitter > 0:
        noise = np.random.default_rng(seed).normal(0.0, jitter, size=(int(is_compute.sum()), len(factors)))
        replica_durations[is_compute] *= np.maximum(0.5, 1.0 + noise)  # no compute takes less than half of its time
    timeline = replay_schedule(graph, replica_durations)
    reduced = _compute_reduction_ends(graph, timeline, case, times, stage_factors)
    makespan = timeline.makespan
    last = int(makespan.argmax())
    last_timeline = Timeline(graph, timeline.start[:, last], timeline.end[:, last], timeline.transfer_start[:, last])
    # Without overlap, the parameters are gathered after the update.
    tail = float(times.optimizer) + (0.0 if case.dp_overlap else float(times.gather))
    seconds = float(reduced.max()) + tail + float(times.tied) + float(last_host_delay_seconds(cluster, case, constants))
    return SimulatedStep(
        seconds=seconds,
        timeline=last_timeline,
        replicas=makespan[replayed_index],
        reduced=reduced,
        times=times,
        slow=slow,
    )


def _compute_durations(
    cluster: ClusterSpec,
    case: Case,
    times: StageTimes,
    *,
    graph: ActionGraph,
    blocking: bool,
    layers: np.ndarray | None,
    stage_factors: np.ndarray,
) -> np.ndarray:
    """Return the seconds of each action on healthy hosts: [actions].

    Args:
        blocking: whether exchanges with neighbouring stages block compute.
        layers: [stages, chunks] layers of each chunk; None: the same in all chunks of a stage.
        stage_factors: [stages] factor on the time of data-parallel collectives.
    """
    p, v = graph.schedule.stages, graph.schedule.virtual_stages
    last_stage = graph.schedule.chunk_map.last_stage
    if layers is None:
        layers = np.full((p, v), float(case.middle_layers) / v)
        layers[last_stage] = float(case.last_layers) / v
    # Subtract the last stage's additional layers from `last_forward`, because `layers` contains them.
    extra_layers = float(case.last_layers) - float(case.middle_layers)
    forward = layers * float(times.layer_forward)
    backward = layers * float(times.layer_backward)
    forward[last_stage, -1] += float(times.last_forward) - extra_layers * float(times.layer_forward)
    backward[last_stage, -1] += float(times.last_backward) - extra_layers * float(times.layer_backward)
    transfer = float(times.transfer)
    if blocking:
        # With interleaved chunks, one exchange serves a forward and a backward, and both sends share the NIC.
        stall = cluster.overlap.blocking_us * 1e-6
        transfer = float(times.blocking_exchange) - stall
        exposed = stall / 2 if v > 1 else stall
    else:
        exposed = float(times.residual) / (2 * v)
    gather = 0.0
    reduce = 0.0
    if case.dp_overlap:
        gather = float(times.gather) / v
        reduce = float(times.scatter) / v
    if case.reduces_each_microbatch:
        reduce /= int(case.microbatches)
    durations = graph.durations(
        forward + exposed,
        backward + exposed,
        send_forward=transfer,
        send_backward=transfer,
        gather=gather * stage_factors[:, None],
        reduce=reduce * stage_factors[:, None],
    )
    if not blocking:
        is_within_host = graph.is_send & ~_find_sends_between_hosts(cluster, case, graph)
        durations[is_within_host] = float(times.near_transfer)
    if case.dp_overlap and v == 1:
        # A single chunk's parameters are gathered in buckets, all but the first one during the first forward.
        is_gather = graph.kind == ActionKind.GATHER_PARAMS
        gather_seconds = gather * stage_factors[graph.stage[is_gather]]
        hidden_seconds = _hidden_bucket_share(case) * np.minimum(gather_seconds, float(times.forward))
        durations[is_gather] = gather_seconds - hidden_seconds
    return durations


def _find_sends_between_hosts(cluster: ClusterSpec, case: Case, graph: ActionGraph) -> np.ndarray:
    """Return which actions are sends to a stage on another host: [actions] booleans."""
    stages = np.arange(graph.schedule.stages)
    host = stages * int(case.tensor) * int(case.replicas) // cluster.gpus_per_host
    # Actions without a partner have partner -1, and `is_send` excludes them.
    return graph.is_send & (host[graph.stage] != host[graph.stage[graph.partner]])


def _hidden_bucket_share(case: Case) -> float:
    """Return the share of a single chunk's buckets that overlap with its passes: all but one."""
    buckets = int(count_buckets(case))
    return (buckets - 1) / buckets


def find_blocking_waits(graph: ActionGraph) -> np.ndarray:
    """Return the sends that computes await in blocking exchanges: [actions, 2], -1 where none.

    The order is that of Megatron-LM in January 2023. In warm-up and cool-down, a compute awaits the send of the compute
    before it. In the steady state with interleaved chunks, one exchange follows each pair of forward and backward: both
    results are sent and both next inputs received. With one chunk, an exchange follows each compute.
    """
    awaited_sends = np.full((graph.action_count, 2), -1)
    send_of_compute = np.full(graph.action_count, -1)
    m = graph.schedule.microbatches
    v = graph.schedule.virtual_stages
    key = (graph.stage * v + graph.chunk) * m + graph.microbatch
    for kind, send in (
        (ActionKind.FORWARD, ActionKind.SEND_FORWARD),
        (ActionKind.BACKWARD, ActionKind.SEND_BACKWARD),
        (ActionKind.BACKWARD_INPUT, ActionKind.SEND_BACKWARD),
    ):
        sends = np.flatnonzero(graph.kind == send)
        send_by_key = np.full(graph.schedule.stages * v * m, -1)
        send_by_key[key[sends]] = sends
        computes = np.flatnonzero(graph.kind == kind)
        send_of_compute[computes] = send_by_key[key[computes]]
    # Each compute from the second on, the compute before it, and the compute before that. Computes of a stage are next
    # to each other.
    computes = np.flatnonzero(graph.is_compute)
    current = computes[1:]
    previous = computes[:-1]
    second_previous = np.concatenate([computes[:1], computes[:-2]])
    is_same_stage = graph.stage[current] == graph.stage[previous]
    is_same_kind = graph.kind[current] == graph.kind[previous]
    follows_pair = ~is_same_kind & (graph.kind[current] == ActionKind.FORWARD)
    awaits_previous = is_same_stage & ((v == 1) | is_same_kind | follows_pair)
    awaited_sends[current, 0] = np.where(awaits_previous, send_of_compute[previous], -1)
    awaits_both = is_same_stage & (v > 1) & follows_pair & (graph.stage[second_previous] == graph.stage[current])
    awaited_sends[current, 1] = np.where(awaits_both, send_of_compute[second_previous], -1)
    return awaited_sends


def _add_overlap(cluster: ClusterSpec, graph: ActionGraph, durations: np.ndarray) -> np.ndarray:
    """Return durations made longer by overlap: collectives slow compute, and transfers share the NIC with them."""
    longer_durations = durations
    for _ in range(OVERLAP_PASSES):
        timeline = replay_schedule(graph, longer_durations)
        compute_overlap = sum(timeline.overlap("compute", stream) for stream in ("gather", "reduce"))
        send_overlap = sum(timeline.overlap("send", stream) for stream in ("gather", "reduce"))
        additional = np.where(graph.is_compute, cluster.overlap.slowdown * compute_overlap, send_overlap)
        longer_durations = durations + additional
    return longer_durations


def _compute_slowness(cluster: ClusterSpec, case: Case, slow_hosts: Mapping[int, float]) -> np.ndarray:
    """Return the factor of the slowest host of each replica and stage, [replicas, stages]."""
    p = int(case.pipeline)
    d = int(case.replicas)
    t = int(case.tensor)
    slow = np.ones((d, p))
    for host, factor in slow_hosts.items():
        first_rank = host * cluster.gpus_per_host
        last_rank = first_rank + cluster.gpus_per_host - 1
        # Tensor groups have consecutive ranks, and are numbered by stage and then by replica.
        for group in range(first_rank // t, min(last_rank // t, p * d - 1) + 1):
            stage, replica = divmod(group, d)
            slow[replica, stage] = max(slow[replica, stage], factor)
    return slow


def draw_hosts(cluster: ClusterSpec, case: Case, seed: int, slow_by: float | None = None) -> dict[int, float]:
    """Return randomly drawn slow hosts with their factor on the compute time.

    Each host is slow with the cluster's probability.

    Args:
        slow_by: fraction by which a slow host's forward takes longer; default: that of the cluster.
    """
    host_count = max(1, -(-int(case.gpus) // cluster.gpus_per_host))
    if slow_by is None:
        slow_by = cluster.stragglers.slow_by
    # Only forward is slower, which is a third of the compute.
    factor = 1.0 + slow_by / 3.0
    is_slow = np.random.default_rng(seed).random(host_count) < cluster.stragglers.slow_hosts
    return {int(host): factor for host in np.flatnonzero(is_slow)}


def _compute_reduction_ends(
    graph: ActionGraph, timeline: Timeline, case: Case, times: StageTimes, stage_factors: np.ndarray
) -> np.ndarray:
    """Return the time at which each stage's gradients are reduced: [stages].

    A reduction starts when the last replica has launched it.
    """
    reduction_ends = np.zeros(graph.schedule.stages)
    if not case.dp_overlap:
        computes = np.flatnonzero(graph.is_compute)
        np.maximum.at(reduction_ends, graph.stage[computes], timeline.end[computes].max(axis=1))
        return reduction_ends + float(times.scatter) * stage_factors
    reductions = np.flatnonzero(graph.kind == ActionKind.REDUCE_GRADS)
    # The first predecessor of a reduction is the last backward of its chunk.
    backward_ends = timeline.end[graph.predecessors[reductions, 0]].max(axis=1)
    lengths = (timeline.end - timeline.transfer_start)[reductions].max(axis=1)
    early_share = 0.0 if case.virtual > 1 else _hidden_bucket_share(case)
    for reduction, backward_end, length in zip(reductions.tolist(), backward_ends, lengths, strict=True):
        stage = graph.stage[reduction]
        # Buckets of a single chunk are reduced as soon as its last backward has filled them.
        first_start = backward_end - early_share * float(times.backward)
        # A stage's reductions run one after another. The last bucket follows the end of the backward.
        end_in_turn = max(reduction_ends[stage], first_start) + length
        reduction_ends[stage] = max(end_in_turn, backward_end + (1.0 - early_share) * length)
    return reduction_ends
