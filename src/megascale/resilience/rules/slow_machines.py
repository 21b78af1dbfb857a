"""Machines that recorded spans show to be slow: what follows is resilience.slow_action, by how slow they are.

The heartbeats' rule (metrics_rules.py::slow_nodes) evicts what is 1.25 times slower without anybody's reading of spans;
this one has the evidence for less: the paper's slow hosts took 10% longer (MegaScale section 6.3).
"""

from __future__ import annotations

from megascale.core.events import Event
from megascale.resilience.rules.table import slow
from megascale.resilience.rules.verdicts import Action, Verdict
from megascale.resilience.rules.view import SlowFinding, View

# Confidence from which a finding counts: a driver looks thousands of times a day.
SURE = 0.9999
_OTHERS = "host: processes"  # what other processes do on a shared machine is nobody's defect: the command tells of it


@slow
def slow_machines(view: View) -> list[Verdict]:
    """A verdict for each node with slow ranks or a slow link."""
    if view.phase != "running" or not view.slow:
        return []
    nodes = {rank: member.node for member in view.members for rank in member.ranks}
    by_node: dict[str, list[SlowFinding]] = {}
    for one in view.slow:
        if one.confidence >= SURE and one.rank in nodes and one.cause != _OTHERS:
            by_node.setdefault(nodes[one.rank], []).append(one)
    return [_verdict(view, node, found) for node, found in by_node.items()]


def _verdict(view: View, node: str, found: list[SlowFinding]) -> Verdict:
    worst = max(found, key=lambda one: one.slower)
    sentences = [
        f"rank {one.rank} on {node} is {one.slower:.1%} slower than comparable ranks by its spans: {one.cause} "
        f"(healthy "
        f"ranks that would be expected to show as much: {1 - one.confidence:.0e})"
        for one in found[:4]
    ]
    sentences += worst.evidence[:3]
    action: Action = "alert"
    if worst.slower >= view.slow_least:
        action = view.slow_action
    if action == "diagnose" and any(
        who == node and kind == Event.SLOW_NODE for when, who, kind in view.incidents if when < view.started
    ):
        action = "alert"
        sentences.append(f"{node} was tested for this in an earlier attempt and passed; megascale evict takes it out")
    ranks = tuple(sorted({one.rank for one in found}))
    return Verdict(Event.SLOW_NODE, (node,), ranks, action, tuple(sentences))
