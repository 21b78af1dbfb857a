"""What the numbers say: losses, gradient norms, seconds a step, compute time by rank, checksums of weights.

Every threshold compares with what the run itself showed before, by medians, so that single outliers of a calm run
change nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from megascale.core.events import Event
from megascale.resilience.rules.table import slow
from megascale.resilience.rules.verdicts import Verdict
from megascale.resilience.rules.view import RankView, View

# Losses: a spike stands over the recent median by this many median deviations and by this part of it.
SPIKE_DEVIATIONS = 12.0
SPIKE_PART = 0.5
BASE_STEPS = 30
# ByteRobust (arXiv 2509.16293) takes a jump of five times as a fault; norms of calm runs jump more than losses do.
NORM_JUMP = 10.0
SEEN_STEPS = 100  # steps in which a skipped one is looked for
SKIPPED_STEPS = 3  # steps in a row without a finite gradient before the machines are tested

SLOWER = 1.3  # seconds a step, against the usual
SLOW_STEPS = 20

# Slow nodes: compute time against ranks that do the same work (MegaScale section 5.1 found hosts 10% slower).
SLOW_NODE = 1.25
SLOW_NODE_LEAST = 1.15  # the lower quartile must be above this too
SLOW_BEATS = 20
MANY = 64  # ranks of a stage from which what is usual is worked out once for all
CHECKSUM_BEATS = 10  # heartbeats over which copies of one step are looked for
_LEAST_DIFFERENCE = 0.01  # seconds a step; below it two processes that share a core look like a slow node
SLOW_SECONDS = 15.0  # time that the heartbeats must span


@slow
def losses(view: View) -> list[Verdict]:
    """Gradients that are no numbers, losses and norms that jump."""
    metrics = view.metrics
    if not metrics:
        return []
    found = []
    last = metrics[-1]
    skipped = 0
    for metric in reversed(metrics):
        if math.isfinite(metric.grad_norm):
            break
        skipped += 1
    if skipped:
        text = f"the gradient of step {last.step} has norm {last.grad_norm}; {skipped} steps in a row were skipped"
        action = "diagnose" if skipped >= SKIPPED_STEPS else "alert"
        found.append(Verdict(Event.NONFINITE_GRADIENT, (), (), action, (text,)))  # type: ignore[arg-type]
    elif past := [m for m in metrics[-SEEN_STEPS:] if not math.isfinite(m.grad_norm)]:
        # Short steps: it has come and gone between two looks.
        text = f"the gradient of step {past[-1].step} had norm {past[-1].grad_norm}; the step was skipped"
        found.append(Verdict(Event.NONFINITE_GRADIENT, (), (), "alert", (text,)))
    base = [m for m in metrics[:-1] if math.isfinite(m.loss) and math.isfinite(m.grad_norm)][-100:]
    if len(base) < BASE_STEPS or not math.isfinite(last.loss) or not math.isfinite(last.grad_norm):
        return found
    usual = median(m.loss for m in base)
    spread = median(abs(m.loss - usual) for m in base)
    if last.loss - usual > max(SPIKE_DEVIATIONS * spread, SPIKE_PART * abs(usual)):
        text = f"the loss of step {last.step} is {last.loss:.4g}; the median of {len(base)} steps before is {usual:.4g}"
        found.append(Verdict(Event.LOSS_SPIKE, (), (), "alert", (text,)))
    norm = median(m.grad_norm for m in base)
    highest = max(m.grad_norm for m in base)
    if norm > 0 and last.grad_norm > max(NORM_JUMP * norm, 2 * highest):
        text = f"the gradient norm of step {last.step} is {last.grad_norm:.4g}; usual is {norm:.4g}"
        found.append(Verdict(Event.LOSS_SPIKE, (), (), "alert", (text,)))
    return found


@slow
def throughput(view: View) -> list[Verdict]:
    """Steps that take longer for good."""
    seconds = [m.seconds for m in view.metrics]
    if len(seconds) < 3 * SLOW_STEPS:
        return []
    recent, before = seconds[-SLOW_STEPS:], seconds[SLOW_STEPS // 4 : -SLOW_STEPS]
    usual = median(before)
    noisy = sorted(before)[int(0.9 * (len(before) - 1))]
    now = median(recent)
    if usual <= 0 or sorted(recent)[SLOW_STEPS // 4] < max(SLOWER * usual, noisy):
        return []
    text = f"the last {SLOW_STEPS} steps took {now:.3g} s each (median), {now / usual:.2f} x the {usual:.3g} s before"
    return [Verdict(Event.THROUGHPUT_DROP, (), (), "alert", (text,))]


@slow
def slow_nodes(view: View) -> list[Verdict]:
    """Ranks that compute longer than those of the same pipeline stage elsewhere, heartbeat after heartbeat."""
    if view.phase != "running":
        return []
    series = {rank: (member, values) for member in view.members for rank, values in _compute(member).items()}
    stages: dict[int, list[int]] = defaultdict(list)
    for rank in series:
        if rank < view.grid.world_size:
            stages[view.grid.coordinate(rank).pipeline].append(rank)
    found: dict[str, list[str]] = {}
    guilty: dict[str, list[int]] = {}
    for ranks in stages.values():
        for rank, values, usual in _against_peers(ranks, series):
            member = series[rank][0]
            sentence = _slower(rank, member, values, usual)
            if sentence:
                found.setdefault(member.node, []).append(sentence)
                guilty.setdefault(member.node, []).append(rank)
    return [
        Verdict(Event.SLOW_NODE, (node,), tuple(guilty[node]), "evict", tuple(sentences[:8]))
        for node, sentences in found.items()
    ]


def _compute(member: RankView) -> dict[int, list[float]]:
    """Compute seconds a step of each rank in the last heartbeats; the attempt's first ones are left out."""
    found: dict[int, list[float]] = defaultdict(list)
    recent = list(member.history)[3:][-SLOW_BEATS:]
    if recent and recent[-1][0] - recent[0][0] < SLOW_SECONDS:
        recent = [beat for beat in list(member.history)[3:] if beat[0] >= recent[-1][0] - SLOW_SECONDS]
    for _, heartbeat in recent:
        ages = {w.rank: w.status_age for w in heartbeat.workers}
        for rank, seconds in heartbeat.step_seconds.items():
            # A rank that stands still repeats its last step's time: that is no further evidence.
            if seconds > 0 and ages.get(rank, 0.0) <= max(1.0, 3 * seconds):
                found[rank].append(seconds)
    if not recent or recent[-1][0] - recent[0][0] < 0.9 * SLOW_SECONDS:
        return {}
    return {rank: values for rank, values in found.items() if len(values) >= SLOW_BEATS}


@dataclass(frozen=True)
class _Usual:
    """What peers of a rank show: their typical seconds a step, what one in ten exceeds, and how many there are."""

    typical: float
    noise: float
    peers: int


def _against_peers(
    ranks: list[int], series: dict[int, tuple[RankView, list[float]]]
) -> Iterator[tuple[int, list[float], _Usual]]:
    """Each rank of a stage with its values and what is usual on other nodes."""
    medians = {rank: median(series[rank][1]) for rank in ranks}
    if len(ranks) >= MANY:
        # So many that their own node's few change no median: worked out once, not anew for each of thousands.
        pooled = sorted(value for rank in ranks for value in series[rank][1])
        usual = _Usual(median(medians.values()), pooled[int(0.9 * len(pooled))], len(ranks) - 1)
        yield from ((rank, series[rank][1], usual) for rank in ranks)
        return
    for rank in ranks:
        member, values = series[rank]
        peers = [r for r in ranks if series[r][0] is not member]
        if not peers:
            continue
        # Against the slowest of the peers' medians: a stage whose ranks all differ has no single slow one.
        theirs = [medians[r] for r in peers]
        typical = max(theirs) if len(peers) < 3 else median(theirs)
        # Where peers themselves vary that much, as on machines that do other work too, nobody stands out.
        tails = [sorted(series[r][1]) for r in peers]
        pooled = sorted(value for tail in tails for value in tail)
        noise = max(p[int(0.9 * (len(p) - 1))] for p in tails) if len(peers) < 3 else pooled[int(0.9 * len(pooled))]
        yield rank, values, _Usual(typical, noise, len(peers))


def _slower(rank: int, member: RankView, values: list[float], usual: _Usual) -> str:
    """Why a rank counts as slow, "" if it does not."""
    typical, peers = usual.typical, usual.peers
    mine, low = median(values), sorted(values)[len(values) // 4]
    if mine < SLOW_NODE * typical or low < SLOW_NODE_LEAST * typical or low < usual.noise:
        return ""
    if mine - typical < _LEAST_DIFFERENCE:
        return ""
    return (
        f"rank {rank} on {member.node} computes {mine:.3g} s a step, {mine / typical:.2f} x the {typical:.3g} s of "
        f"{peers} rank{'s' * (peers > 1)} with the same work elsewhere, over {len(values)} heartbeats"
    )


@slow
def checksums(view: View) -> list[Verdict]:
    """Weights that must be equal on all data-parallel copies and are not: a bit has flipped, or a kernel is wrong."""
    sums: dict[tuple[int, int, int], dict[int, str]] = defaultdict(dict)
    where: dict[int, str] = {}
    for member in view.members:
        for _, heartbeat in list(member.history)[-CHECKSUM_BEATS:]:
            for key, value in heartbeat.checksums.items():
                step, _, rank_text = key.partition(":")
                if not (step.isdigit() and rank_text.isdigit()) or int(rank_text) >= view.grid.world_size:
                    continue
                rank = int(rank_text)
                at = view.grid.coordinate(rank)
                sums[int(step), at.pipeline, at.tensor][rank] = value
                where[rank] = member.node
    for (after, stage, _), by_rank in sorted(sums.items()):
        votes = Counter(by_rank.values())
        if len(votes) < 2:
            continue
        (usual, count), *rest = votes.most_common()
        clear = count > rest[0][1]
        odd = sorted(r for r, v in by_rank.items() if not clear or v != usual)
        nodes = tuple(dict.fromkeys(where[r] for r in odd))
        evidence = [
            f"after step {after} the weights of stage {stage} differ between data-parallel copies: "
            + ", ".join(f"rank {r} on {where[r]} {by_rank[r]}" for r in sorted(by_rank)[:8])
        ]
        if not clear:
            evidence.append("no majority shows which copy is right, so all are tested")
        action = "evict" if clear and len(nodes) == 1 else "diagnose"
        return [Verdict(Event.CHECKSUM_MISMATCH, nodes, tuple(odd), action, tuple(evidence))]  # type: ignore[arg-type]
    return []
