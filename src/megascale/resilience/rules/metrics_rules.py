"""Rules on metrics: losses, gradient norms, step times, compute times by rank, checksums of weights, slow machines.

Every threshold compares a value with the median of earlier values of the run, so that single outliers of a healthy run
change nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from megascale.config.axes import AXES
from megascale.core.events import Event
from megascale.resilience.rules.table import slow_rule
from megascale.resilience.rules.view import Action, Metric, NodeView, SlowFinding, Verdict, View

# A loss is a spike if it exceeds the recent median by this many median deviations and by this fraction of the median.
SPIKE_DEVIATIONS = 12.0
SPIKE_SHARE = 0.5
BASE_STEPS = 30  # steps with finite loss and norm that are needed to judge the next one
_MAX_BASE_STEPS = 100  # last of these steps whose median counts
# ByteRobust (arXiv 2509.16293) treats a jump of five times as a fault. In healthy runs norms jump more than losses.
NORM_JUMP = 10.0
SKIP_WINDOW = 100  # last steps among which a skipped step is reported
SKIPPED_STEPS = 3  # consecutive steps without a finite gradient before the machines are tested

THROUGHPUT_DROP_RATIO = 1.3  # ratio of the recent to the usual step time from which throughput has dropped
RECENT_STEPS = 20  # last steps, which are compared with the steps before them

# A slow node is compared with ranks that do the same work (MegaScale section 5.1 found hosts 10% slower).
SLOW_NODE_RATIO = 1.25  # ratio of compute times
# Another trainer has no spans that would show a smaller slow-down, so its ranks are reported from this ratio on.
FOREIGN_SLOW_NODE_RATIO = 1.12
QUARTILE_SHARE = 0.6  # fraction of the slow-down that the lower quartile of a rank's times must exceed too
SLOW_BEATS = 20  # heartbeats with a compute time that a rank needs to be judged
_FIRST_BEATS = 3  # heartbeats at the begin of an attempt that are left out, since its first steps are slow
POOLED_RANKS = 64  # With this many ranks in a stage, one usual time serves all of them.
_MIN_PEERS = 3  # With fewer peers, a rank is compared with the slowest of them instead of their median.
CHECKSUM_BEATS = 10  # last heartbeats whose checksums are compared
_MIN_DIFFERENCE = 0.01  # seconds per step; healthy processes that share a core may differ by this much
_MIN_SPAN = 15.0  # seconds that the heartbeats must span
_MAX_LISTED_RANKS = 8  # ranks that the evidence of a verdict names
_MAX_LISTED_FINDINGS = 4  # findings about a node that the evidence of a verdict names
_MAX_EVIDENCE_SENTENCES = 3  # sentences of the worst finding's own evidence

# The confidence from which a finding counts. It is high, since a driver searches thousands of times per day.
CONFIDENCE = 0.9999
_OTHER_PROCESSES = "host: processes"  # a cause that is not a defect: other processes on a shared machine


@slow_rule
def judge_losses(view: View) -> list[Verdict]:
    """Return verdicts on gradients that are not finite, and on losses and norms that jump."""
    # Another trainer may print loss and norm only in some steps.
    metrics = [metric for metric in view.metrics if metric.loss or metric.grad_norm]
    if not metrics:
        return []
    last = metrics[-1]
    verdicts = _judge_gradients(metrics)
    finite = [metric for metric in metrics[:-1] if math.isfinite(metric.loss) and math.isfinite(metric.grad_norm)]
    base = finite[-_MAX_BASE_STEPS:]
    if len(base) < BASE_STEPS or not math.isfinite(last.loss) or not math.isfinite(last.grad_norm):
        return verdicts
    usual_loss = median(metric.loss for metric in base)
    deviation = median(abs(metric.loss - usual_loss) for metric in base)
    margin = max(SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * abs(usual_loss))
    if last.loss - usual_loss > margin:
        usual_text = f"the median of {len(base)} steps before is {usual_loss:.4g}"
        text = f"the loss of step {last.step} is {last.loss:.4g}; {usual_text}"
        verdicts.append(Verdict(Event.LOSS_SPIKE, action="alert", evidence=(text,)))
    usual_norm = median(metric.grad_norm for metric in base)
    # A run whose norms have jumped before must exceed the highest of them too.
    highest_norm = max(metric.grad_norm for metric in base)
    if usual_norm > 0 and last.grad_norm > max(NORM_JUMP * usual_norm, 2 * highest_norm):
        text = f"the gradient norm of step {last.step} is {last.grad_norm:.4g}; usual is {usual_norm:.4g}"
        verdicts.append(Verdict(Event.LOSS_SPIKE, action="alert", evidence=(text,)))
    return verdicts


def _judge_gradients(metrics: list[Metric]) -> list[Verdict]:
    """Return a verdict if steps were skipped because of gradients that are not finite."""
    last = metrics[-1]
    skipped = [metric for metric in metrics[-SKIP_WINDOW:] if not math.isfinite(metric.grad_norm)]
    if not skipped:
        return []
    if math.isfinite(last.grad_norm):
        # Steps may be short, so that a skipped step and later ones come between two calls of the rule.
        text = f"the gradient of step {skipped[-1].step} had norm {skipped[-1].grad_norm}; the step was skipped"
        return [Verdict(Event.NONFINITE_GRADIENT, action="alert", evidence=(text,))]
    skipped_in_a_row = 0
    for metric in reversed(metrics):
        if math.isfinite(metric.grad_norm):
            break
        skipped_in_a_row += 1
    text = f"the gradient of step {last.step} has norm {last.grad_norm}; {skipped_in_a_row} steps in a row were skipped"
    action: Action = "diagnose" if skipped_in_a_row >= SKIPPED_STEPS else "alert"
    return [Verdict(Event.NONFINITE_GRADIENT, action=action, evidence=(text,))]


@slow_rule
def judge_throughput(view: View) -> list[Verdict]:
    """Return a verdict if three quarters of the last steps are slower than usual."""
    seconds = [metric.seconds for metric in view.metrics]
    if len(seconds) < 3 * RECENT_STEPS:
        return []
    recent = seconds[-RECENT_STEPS:]
    before = seconds[RECENT_STEPS // 4 : -RECENT_STEPS]  # without the first, slow steps
    usual = median(before)
    noise = sorted(before)[int(0.9 * (len(before) - 1))]  # the ninth decile
    recent_quartile = sorted(recent)[RECENT_STEPS // 4]  # the lower quartile, which a few slow steps do not change
    if usual <= 0 or recent_quartile < max(THROUGHPUT_DROP_RATIO * usual, noise):
        return []
    seconds_now = median(recent)
    ratio = seconds_now / usual
    text = (
        f"the last {RECENT_STEPS} steps took {seconds_now:.3g} s each (median), {ratio:.2f} x the {usual:.3g} s before"
    )
    return [Verdict(Event.THROUGHPUT_DROP, action="alert", evidence=(text,))]


# slow nodes by heartbeats ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Series:
    """Compute seconds per step of one rank in the last heartbeats."""

    member: NodeView
    seconds: list[float]


@dataclass(frozen=True)
class _PeerTimes:
    """The usual compute time of a rank's peers.

    Attributes:
        typical: typical seconds per step.
        noise: seconds per step that one of ten values exceeds.
    """

    typical: float
    noise: float
    peer_count: int


@dataclass(frozen=True)
class _Slowness:
    """A slow rank: the ratio of its compute time to the usual time, and the evidence."""

    rank: int
    ratio: float
    sentence: str


@slow_rule
def judge_slow_nodes(view: View) -> list[Verdict]:
    """Return a verdict for each node whose ranks compute longer than those of the same pipeline stage elsewhere.

    Another trainer on a single node has no ranks elsewhere, and no spans either. Its ranks are compared with each
    other, and the verdict is an alert: no other node shows whether the GPU or the node is slow.
    """
    if view.phase != "running":
        return []
    series: dict[int, _Series] = {}
    for member in view.members:
        series |= _read_series(member)
    ranks_by_stage: dict[int, list[int]] = defaultdict(list)
    for rank in series:
        if rank < view.grid.world_size:
            ranks_by_stage[view.grid.coordinate(rank).pipeline].append(rank)
    min_ratio = FOREIGN_SLOW_NODE_RATIO if view.is_foreign else SLOW_NODE_RATIO
    slow_ranks_by_node: dict[str, list[_Slowness]] = defaultdict(list)
    for ranks in ranks_by_stage.values():
        for rank, usual in _compare_with_peers(ranks, series, compares_within_node=view.is_foreign):
            slowness = _judge_slowness(rank, series[rank], usual=usual, min_ratio=min_ratio)
            if slowness is not None:
                slow_ranks_by_node[series[rank].member.node].append(slowness)
    return [_judge_slow_node(view, node, slow_ranks) for node, slow_ranks in slow_ranks_by_node.items()]


def _judge_slow_node(view: View, node: str, slow_ranks: list[_Slowness]) -> Verdict:
    """Return the verdict on a node. It is evicted only if other nodes show that this node is at fault."""
    worst = max(slowness.ratio for slowness in slow_ranks)
    action: Action = "alert"
    if len(view.members) > 1 and worst >= SLOW_NODE_RATIO:
        action = "evict"
    elif len(view.members) > 1 and worst >= 1 + view.slow_least:
        action = view.slow_action
    ranks = tuple(slowness.rank for slowness in slow_ranks)
    evidence = tuple(slowness.sentence for slowness in slow_ranks[:_MAX_LISTED_RANKS])
    return Verdict(Event.SLOW_NODE, nodes=(node,), ranks=ranks, action=action, evidence=evidence)


def _read_series(member: NodeView) -> dict[int, _Series]:
    """Return the compute times of each rank with enough heartbeats, without the first heartbeats of the attempt."""
    history = list(member.history)[_FIRST_BEATS:]  # (time received, heartbeat)
    recent = history[-SLOW_BEATS:]
    if not recent:
        return {}
    newest_time, _ = recent[-1]
    if newest_time - recent[0][0] < _MIN_SPAN:  # Heartbeats are frequent, so more of them are needed.
        recent = [(time, heartbeat) for time, heartbeat in history if time >= newest_time - _MIN_SPAN]
    # The oldest heartbeat within the span is up to one interval younger than the span.
    if newest_time - recent[0][0] < 0.9 * _MIN_SPAN:
        return {}
    series: dict[int, list[float]] = defaultdict(list)
    for _, heartbeat in recent:
        ages = {worker.rank: worker.status_age for worker in heartbeat.workers}
        for rank, seconds in heartbeat.step_seconds.items():
            # A rank without progress repeats the time of its last step, which is no further evidence.
            if seconds > 0 and ages.get(rank, 0.0) <= max(1.0, 3 * seconds):
                series[rank].append(seconds)
    return {rank: _Series(member, seconds) for rank, seconds in series.items() if len(seconds) >= SLOW_BEATS}


def _compare_with_peers(
    ranks: list[int], series: dict[int, _Series], *, compares_within_node: bool
) -> Iterator[tuple[int, _PeerTimes]]:
    """Yield each rank of a stage with the usual time of its peers on other nodes.

    If all ranks are on one node, `compares_within_node` takes its other ranks as peers.
    """
    medians = {rank: median(series[rank].seconds) for rank in ranks}
    if len(ranks) >= POOLED_RANKS:
        # The few ranks of a node do not change the median of so many, so one usual time serves all ranks.
        pooled = sorted(seconds for rank in ranks for seconds in series[rank].seconds)
        usual = _PeerTimes(median(medians.values()), _compute_ninth_decile(pooled), len(ranks) - 1)
        yield from ((rank, usual) for rank in ranks)
        return
    for rank in ranks:
        peers = [peer for peer in ranks if series[peer].member is not series[rank].member]
        if not peers and compares_within_node:
            peers = [peer for peer in ranks if peer != rank]
        if not peers:
            continue
        sorted_seconds = [sorted(series[peer].seconds) for peer in peers]
        if len(peers) < _MIN_PEERS:
            # Compare with the slowest peer, so that a stage whose ranks all differ has at most one slow rank.
            typical = max(medians[peer] for peer in peers)
            noise = max(seconds[int(0.9 * (len(seconds) - 1))] for seconds in sorted_seconds)
        else:
            typical = median(medians[peer] for peer in peers)
            pooled = sorted(value for seconds in sorted_seconds for value in seconds)
            noise = _compute_ninth_decile(pooled)
        yield rank, _PeerTimes(typical, noise, len(peers))


def _compute_ninth_decile(ordered: list[float]) -> float:
    """Return the value that one of ten exceeds. If peers on busy machines vary that much, no rank counts as slow."""
    return ordered[int(0.9 * len(ordered))]


def _judge_slowness(rank: int, series: _Series, *, usual: _PeerTimes, min_ratio: float) -> _Slowness | None:
    """Return the slowness of a rank, None if its ratio to the usual time is below `min_ratio` or uncertain."""
    typical = usual.typical
    seconds = median(series.seconds)
    quartile = sorted(series.seconds)[len(series.seconds) // 4]
    quartile_ratio = 1 + QUARTILE_SHARE * (min_ratio - 1)
    if seconds < min_ratio * typical or quartile < max(quartile_ratio * typical, usual.noise):
        return None
    if seconds - typical < _MIN_DIFFERENCE:
        return None
    peers = "1 rank" if usual.peer_count == 1 else f"{usual.peer_count} ranks"
    sentence = (
        f"rank {rank} on {series.member.node} computes {seconds:.3g} s per step, {seconds / typical:.2f} x the "
        f"{typical:.3g} s of {peers} with the same work, over "
        f"{len(series.seconds)} heartbeats"
    )
    return _Slowness(rank, seconds / typical if typical else math.inf, sentence)


# weights --------------------------------------------------------------------------------------------------------------


@slow_rule
def judge_checksums(view: View) -> list[Verdict]:
    """Return a verdict if weights differ between data-parallel copies: a bit has flipped, or a kernel is wrong."""
    # (step, pipeline stage, position in the replica) -> rank -> checksum. Ranks with one key hold copies of the same
    # weights. Heartbeats have checksums by "STEP:RANK".
    sums: dict[tuple[int, int, int], dict[int, str]] = defaultdict(dict)
    nodes_by_rank: dict[int, str] = {}
    for member in view.members:
        for _, heartbeat in list(member.history)[-CHECKSUM_BEATS:]:
            for key, value in heartbeat.checksums.items():
                step, _, rank_text = key.partition(":")
                if not (step.isdigit() and rank_text.isdigit()) or int(rank_text) >= view.grid.world_size:
                    continue
                rank = int(rank_text)
                stage = view.grid.coordinate(rank).pipeline
                sums[int(step), stage, view.grid.index(AXES.replica, rank)][rank] = value
                nodes_by_rank[rank] = member.node
    for (step_number, stage, _), checksums in sorted(sums.items()):
        counts = Counter(checksums.values()).most_common()
        if len(counts) < 2:
            continue
        majority_checksum, count = counts[0]
        has_majority = count > counts[1][1]
        deviating = sorted(rank for rank, value in checksums.items() if not has_majority or value != majority_checksum)
        nodes = tuple(dict.fromkeys(nodes_by_rank[rank] for rank in deviating))
        listed_ranks = sorted(checksums)[:_MAX_LISTED_RANKS]
        values = ", ".join(f"rank {rank} on {nodes_by_rank[rank]} {checksums[rank]}" for rank in listed_ranks)
        evidence = [
            f"after step {step_number} the weights of stage {stage} differ between data-parallel copies: {values}"
        ]
        if not has_majority:
            evidence.append("no majority shows which copy is right, so all nodes are tested")
        action: Action
        if has_majority and len(nodes) == 1:
            action = "evict"
        else:
            action = "diagnose"
        verdict = Verdict(
            Event.CHECKSUM_MISMATCH, nodes=nodes, ranks=tuple(deviating), action=action, evidence=tuple(evidence)
        )
        return [verdict]  # Later steps differ in consequence.
    return []


# slow machines by spans -----------------------------------------------------------------------------------------------


@slow_rule
def judge_slow_machines(view: View) -> list[Verdict]:
    """Return a verdict for each node with slow ranks or a slow link according to recorded spans.

    The action is resilience.slow_action if the slow-down is large enough. `judge_slow_nodes` finds slow-downs of 1.25
    times by heartbeats alone. Spans show smaller ones: the paper's slow hosts took 10% longer (MegaScale section 6.3).
    """
    if view.phase != "running" or not view.slow_findings:
        return []
    nodes = {rank: member.node for member in view.members for rank in member.ranks}
    by_node: dict[str, list[SlowFinding]] = defaultdict(list)
    for finding in view.slow_findings:
        if finding.confidence >= CONFIDENCE and finding.rank in nodes and finding.cause != _OTHER_PROCESSES:
            by_node[nodes[finding.rank]].append(finding)
    return [_judge_machine(view, node, findings) for node, findings in by_node.items()]


def _judge_machine(view: View, node: str, findings: list[SlowFinding]) -> Verdict:
    """Return the verdict on a node, whose action follows from its slowest rank.

    A node whose self-checks have passed in an earlier attempt is not tested again.
    """
    worst = max(findings, key=lambda finding: finding.slower)
    sentences = [
        f"rank {finding.rank} on {node} is {finding.slower:.1%} slower than comparable ranks by its spans: "
        f"{finding.cause} (expected number of healthy ranks with such a value: {1 - finding.confidence:.0e})"
        for finding in findings[:_MAX_LISTED_FINDINGS]
    ]
    sentences += worst.evidence[:_MAX_EVIDENCE_SENTENCES]
    action: Action
    if worst.slower >= view.slow_least:
        action = view.slow_action
    else:
        action = "alert"
    was_tested = any(
        incident.node == node and incident.kind == Event.SLOW_NODE and incident.time < view.started
        for incident in view.incidents
    )
    if action == "diagnose" and was_tested:
        action = "alert"
        sentences.append(f"{node} was tested for this in an earlier attempt and passed; megascale evict takes it out")
    ranks = tuple(sorted({finding.rank for finding in findings}))
    return Verdict(Event.SLOW_NODE, nodes=(node,), ranks=ranks, action=action, evidence=tuple(sentences))
