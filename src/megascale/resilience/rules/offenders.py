"""Nodes that offend again and again are taken out, even if each single offence would be met by starting again."""

from __future__ import annotations

from dataclasses import replace

from megascale.core.events import Event
from megascale.resilience.rules.verdicts import SEVERITY, Verdict
from megascale.resilience.rules.view import View

OFFENCES = 3  # with the present one
MEMORY = 24 * 3600.0  # seconds after which an offence is forgotten
# What a machine does; a user's mistake or a full disk says nothing against a node.
_MACHINE = frozenset(
    {
        Event.SEGMENTATION_FAULT,
        Event.CUDA_ERROR,
        Event.NETWORK_ERROR,
        Event.PROCESS_KILLED,
        Event.PROCESS_EXIT,
        Event.MISSED_HEARTBEAT,
        Event.NODE_LOST,
        Event.AGENT_RESTARTED,
        Event.HANG,
        Event.DEVICE_FAULT,
        Event.TRAFFIC_STOPPED,
    }
)


def repeated(view: View, verdicts: list[Verdict]) -> list[Verdict]:
    """`verdicts`, with those against repeat offenders turned into evictions."""
    return [_judged(view, verdict) for verdict in verdicts]


def _judged(view: View, verdict: Verdict) -> Verdict:
    if verdict.kind not in _MACHINE or len(verdict.nodes) != 1:
        return verdict
    if not SEVERITY["recover"] <= SEVERITY[verdict.action] < SEVERITY["evict"]:
        return verdict
    node = verdict.nodes[0]
    recent = [(when, who, kind) for when, who, kind in view.incidents if kind in _MACHINE and view.time - when < MEMORY]
    mine = [when for when, who, _ in recent if who == node]
    others = [sum(who == other for _, who, _ in recent) for other in {who for _, who, _ in recent} - {node}]
    # Where all nodes fail alike the cause is not in this one.
    if len(mine) + 1 < OFFENCES or (others and len(mine) < 2 * max(others)):
        return verdict
    minutes = (view.time - min(mine)) / 60
    text = f"offence {len(mine) + 1} of {node} in {minutes:.0f} minutes, at most {max(others, default=0)} of any other"
    return replace(verdict, action="evict", evidence=(*verdict.evidence, text))
