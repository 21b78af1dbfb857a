"""Level 2: the step event by event, on the schedule's own actions.

The schedule that training runs (core/schedule.py) is replayed (core/replay.py) with the durations of `stage_times`.
Each stage has a compute stream, its transfer streams and the data-parallel streams; work that overlaps other work on
the same NIC or the same SMs is stretched by the time they share, and the step replayed. Replicas have
durations of their own where hosts are slow or times jitter; gradient reductions wait for the last replica.
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
from megascale.simulate.closed import StageTimes, late_seconds, pieces_of, stage_times
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.network import Network, UnevenNetwork

# Passes of stretching: durations, what they overlap, longer durations; the second changes them by little.
PASSES = 2


@dataclass(frozen=True, eq=False)
class SimulatedEvent:
    """A simulated step.

    Attributes:
        seconds: the step, from the first action to the last update.
        timeline: the replayed pipeline of the replica that ended last.
        replicas: seconds of each replica's pipeline alone.
        reduced: [stages] when each stage's gradients were reduced.
        times: the durations that went in.
        slow: slowness factor of each (replica, stage).
    """

    seconds: float
    timeline: Timeline
    replicas: np.ndarray
    reduced: np.ndarray
    times: StageTimes
    slow: np.ndarray


def simulate(
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
) -> SimulatedEvent:
    """Simulate one step of a scalar case.

    Args:
        schedule: name of the pipeline schedule (core/schedule_registry.py).
        layers: [stages, chunks] layers of each chunk; default: the same in all.
        slow_hosts: host -> factor on its compute time; see `draw_hosts` for a random fleet.
        jitter: relative standard deviation of each action's compute time, drawn anew for each.
        seed: of the jitter.
    """
    p = int(case.pipeline)
    v = int(case.virtual)
    m = int(case.microbatches)
    times = stage_times(cluster, case, constants, network)
    group = int(case.micro_batch_group_size) or None
    graph = ActionGraph.compile(build_checked_schedule(schedule, p, v, m, bool(case.reduce_each), group))
    blocking = float(times.exchanges) > 0
    if blocking:
        graph = graph.with_extra_waits(blocking_waits(graph))
    if isinstance(network, UnevenNetwork):
        uneven = network
    else:
        uneven = None
    if uneven is None:
        stage_shares = np.ones(p)
    else:
        stage_shares = np.broadcast_to(uneven.stage_shares(), (p,))
    durations = _durations(cluster, case, times, graph, blocking, layers, stage_shares)
    if case.dp_overlap:
        durations = _stretched(cluster, graph, durations, times)

    slow = _slowness(cluster, case, slow_hosts or {})
    compute = graph.is_compute
    # Replicas whose hosts are alike run alike: replay one of each kind.
    if uneven is None:
        sends = np.ones(len(slow))
    else:
        sends = np.broadcast_to(uneven.replica_shares(), (len(slow),))
    kinds, which = np.unique(np.column_stack([slow, sends]), axis=0, return_inverse=True)
    which = np.asarray(which).reshape(-1)
    if jitter > 0:
        kinds, which = np.column_stack([slow, sends]), np.arange(len(slow))
    samples = np.repeat(durations[:, None], len(kinds), axis=1)
    samples[compute] *= kinds.T[graph.stage[compute]]
    if uneven is not None:
        far = _between_hosts(cluster, case, graph)
        samples[far] *= kinds[:, -1]
    if jitter > 0:
        noise = np.random.default_rng(seed).normal(0.0, jitter, size=(int(compute.sum()), len(kinds)))
        samples[compute] *= np.maximum(0.5, 1.0 + noise)
    timeline = replay_schedule(graph, samples)
    reduced = _reduced(graph, timeline, case, times, stage_shares)
    makespan = timeline.makespan
    last = int(makespan.argmax())
    first_timeline = Timeline(graph, timeline.start[:, last], timeline.end[:, last], timeline.transfer_start[:, last])
    tail = float(times.optimizer) + (0.0 if case.dp_overlap else float(times.gather))
    seconds = float(reduced.max()) + tail + float(times.tied) + float(late_seconds(cluster, case, constants))
    return SimulatedEvent(seconds, first_timeline, makespan[which], reduced, times, slow)


def _durations(
    cluster: ClusterSpec,
    case: Case,
    times: StageTimes,
    graph: ActionGraph,
    blocking: bool,
    layers: np.ndarray | None,
    shares: np.ndarray,
) -> np.ndarray:
    """Seconds of each action of a replica of healthy hosts; shares: [stages] of collectives' times."""
    p, v = graph.schedule.stages, graph.schedule.virtual_stages
    last_stage = graph.schedule.chunk_map.last_stage
    if layers is None:
        layers = np.full((p, v), float(case.middle) / v)
        layers[last_stage] = float(case.last) / v
    fewer = float(case.last) - float(case.middle)
    forward, backward = layers * float(times.layer_forward), layers * float(times.layer_backward)
    forward[last_stage, -1] += float(times.last_forward) - fewer * float(times.layer_forward)
    backward[last_stage, -1] += float(times.last_backward) - fewer * float(times.layer_backward)
    transfer = float(times.transfer)
    if blocking:
        # Chunks interleaved: one exchange for a forward and a backward; both sends share the NIC.
        stall = cluster.overlap.blocking_us * 1e-6
        transfer = float(times.exchange) - stall
        share = stall / 2 if v > 1 else stall
    else:
        share = float(times.residual) / (2 * v)
    if case.dp_overlap:
        gather = float(times.gather) / v
    else:
        gather = 0.0
    if case.dp_overlap:
        reduce = float(times.scatter) / v
    else:
        reduce = 0.0
    if case.reduce_each:
        reduce /= int(case.microbatches)
    gathers, reduces = gather * shares[:, None], reduce * shares[:, None]
    durations = graph.durations(forward + share, backward + share, transfer, transfer, gathers, reduces)
    if not blocking:
        durations[graph.is_send & ~_between_hosts(cluster, case, graph)] = float(times.near_transfer)
    if case.dp_overlap and v == 1:
        # A single chunk's parameters come in buckets, all but the first behind the first forward.
        only = graph.kind == ActionKind.GATHER_PARAMS
        gather_seconds = gather * shares[graph.stage[only]]
        durations[only] = gather_seconds - _tail_seconds(case) * np.minimum(gather_seconds, float(times.forward))
    return durations


def _between_hosts(cluster: ClusterSpec, case: Case, graph: ActionGraph) -> np.ndarray:
    """[actions] whether each is a transfer to a stage on another host."""
    stages = np.arange(graph.schedule.stages)
    host = stages * int(case.tensor) * int(case.replicas) // cluster.gpus_per_host
    # The partner of an action that is no transfer is the last one, whose stage does not count.
    return graph.is_send & (host[graph.stage] != host[graph.stage[graph.partner]])


def _tail_seconds(case: Case) -> float:
    """Share of a single chunk's gradients that are not in its last bucket."""
    buckets = int(pieces_of(case))
    return (buckets - 1) / buckets


def blocking_waits(graph: ActionGraph) -> np.ndarray:
    """Return the waits of computes for blocking exchanges, [actions, 2], in Megatron-LM's order of January 2023.

    Warm-up and cool-down: the transfer of the compute before. Steady state with interleaved chunks: one exchange
    after each forward and backward, in which both results leave and both next inputs arrive. With one chunk: an
    exchange after each.
    """
    extra = np.full((graph.action_count, 2), -1)
    sends = np.full(graph.action_count, -1)
    m, v = graph.schedule.microbatches, graph.schedule.virtual_stages
    key = (graph.stage * v + graph.chunk) * m + graph.microbatch
    for kind, send in (
        (ActionKind.FORWARD, ActionKind.SEND_FORWARD),
        (ActionKind.BACKWARD, ActionKind.SEND_BACKWARD),
        (ActionKind.BACKWARD_INPUT, ActionKind.SEND_BACKWARD),
    ):
        sent = np.flatnonzero(graph.kind == send)
        by_key = np.full(graph.schedule.stages * v * m, -1)
        by_key[key[sent]] = sent
        done = np.flatnonzero(graph.kind == kind)
        sends[done] = by_key[key[done]]
    # The compute actions of a stage one after another, with the one before and the one before that.
    compute = np.flatnonzero(graph.is_compute)
    current = compute[1:]
    last = compute[:-1]
    before = np.concatenate([compute[:1], compute[:-2]])
    stays_on_stage = graph.stage[current] == graph.stage[last]
    alike = graph.kind[current] == graph.kind[last]
    follows_pair = ~alike & (graph.kind[current] == ActionKind.FORWARD)
    extra[current, 0] = np.where(stays_on_stage & ((v == 1) | alike | follows_pair), sends[last], -1)
    pair = stays_on_stage & (v > 1) & follows_pair & (graph.stage[before] == graph.stage[current])
    extra[current, 1] = np.where(pair, sends[before], -1)
    return extra


def _stretched(cluster: ClusterSpec, graph: ActionGraph, durations: np.ndarray, times: StageTimes) -> np.ndarray:
    """Return durations with overlap: collectives slow compute, transfers share the NIC with collectives."""
    compute = graph.is_compute
    longer = durations
    for _ in range(PASSES):
        timeline = replay_schedule(graph, longer)
        hidden_by = sum(timeline.overlap("compute", stream) for stream in ("gather", "reduce"))
        moving = sum(timeline.overlap("send", stream) for stream in ("gather", "reduce"))
        longer = durations + np.where(compute, cluster.overlap.slowdown * hidden_by, moving)
    return longer


def _slowness(cluster: ClusterSpec, case: Case, slow_hosts: Mapping[int, float]) -> np.ndarray:
    """Factor on compute of each (replica, stage): that of the slowest host that its tensor group touches."""
    p = int(case.pipeline)
    d = int(case.replicas)
    t = int(case.tensor)
    slow = np.ones((d, p))
    for host, factor in slow_hosts.items():
        first, last = host * cluster.gpus_per_host, (host + 1) * cluster.gpus_per_host - 1
        for group in range(first // t, min(last // t, p * d - 1) + 1):
            stage, replica = divmod(group, d)
            slow[replica, stage] = max(slow[replica, stage], factor)
    return slow


def draw_hosts(cluster: ClusterSpec, case: Case, seed: int, slow_by: float | None = None) -> dict[int, float]:
    """A random fleet: each host is slow with the cluster's probability."""
    hosts = max(1, -(-int(case.gpus) // cluster.gpus_per_host))
    if slow_by is None:
        slowdown = cluster.stragglers.slow_by
    else:
        slowdown = slow_by
    # Slow in forward, which is a third of the compute.
    slowdown = slowdown / 3.0
    chosen = np.flatnonzero(np.random.default_rng(seed).random(hosts) < cluster.stragglers.slow_hosts)
    return {int(h): 1.0 + slowdown for h in chosen}


def _reduced(graph: ActionGraph, timeline: Timeline, case: Case, times: StageTimes, shares: np.ndarray) -> np.ndarray:
    """Return when each stage's gradients are reduced. A reduction starts when the last replica has launched it."""
    stages = graph.schedule.stages
    done = np.zeros(stages)
    if not case.dp_overlap:
        compute = np.flatnonzero(graph.is_compute)
        np.maximum.at(done, graph.stage[compute], timeline.end[compute].max(axis=1))
        return done + float(times.scatter) * shares
    reduces = np.flatnonzero(graph.kind == ActionKind.REDUCE_GRADS)
    launched = timeline.end[graph.predecessors[reduces, 0]].max(axis=1)
    lengths = (timeline.end - timeline.transfer_start)[reduces].max(axis=1)
    if case.virtual > 1:
        early = 0.0
    else:
        early = _tail_seconds(case)
    for n, ready, length in zip(reduces.tolist(), launched, lengths, strict=True):
        stage = graph.stage[n]
        # Buckets of a single chunk leave as soon as its last backward has filled them.
        first = ready - early * float(times.backward)
        done[stage] = max(max(done[stage], first) + length, ready + (1.0 - early) * length)
    return done
