"""The table of rules. Modules of this package register rules by a decorator, other packages by `register_rule`.

A node with repeated machine faults is evicted, even if each single fault would only lead to a recovery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from megascale.core.events import Event
from megascale.resilience.rules.view import SEVERITY, Verdict, View

Rule = Callable[[View], list[Verdict]]

QUICK_RULES: list[Rule] = []  # applied in each iteration of the driver's loop, to the newest heartbeats only
SLOW_RULES: list[Rule] = []  # applied about once per second, in a thread, to the history of all nodes

OFFENCE_LIMIT = 3  # machine faults of a node, the present one included, for which it is evicted
OFFENCE_MEMORY_SECONDS = 24 * 3600.0  # seconds after which a fault no longer counts
# Events that count against a node, in contrast to a user's mistake or a full disk.
_MACHINE_FAULTS = frozenset(
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


def register_rule(rule: Rule, quick: bool = False) -> None:
    """Add a rule for every driver of this process. A repeated registration has no effect.

    Args:
        rule: a pure function.
        quick: apply the rule in each iteration of the driver's loop, to the newest heartbeats only.
    """
    rules = QUICK_RULES if quick else SLOW_RULES
    if rule not in rules:
        rules.append(rule)


def quick_rule(rule: Rule) -> Rule:
    """Register a rule that is applied in each iteration of the driver's loop; a decorator."""
    register_rule(rule, quick=True)
    return rule


def slow_rule(rule: Rule) -> Rule:
    """Register a rule for the history of all nodes; a decorator."""
    register_rule(rule)
    return rule


def judge(view: View, rules: Sequence[Rule] | None = None) -> list[Verdict]:
    """Return the verdicts of `rules` (None: all) on `view`, with evictions for repeat offenders."""
    rules = QUICK_RULES + SLOW_RULES if rules is None else rules
    return evict_repeat_offenders(view, [verdict for rule in rules for verdict in rule(view)])


def evict_repeat_offenders(view: View, verdicts: list[Verdict]) -> list[Verdict]:
    """Return `verdicts`, with those against repeat offenders turned into evictions."""
    return [_evict_if_repeated(view, verdict) for verdict in verdicts]


def _evict_if_repeated(view: View, verdict: Verdict) -> Verdict:
    """Return an eviction if the verdict is a further machine fault of a repeat offender, otherwise the verdict."""
    is_recoverable = SEVERITY["recover"] <= SEVERITY[verdict.action] < SEVERITY["evict"]
    if verdict.kind not in _MACHINE_FAULTS or len(verdict.nodes) != 1 or not is_recoverable:
        return verdict
    node = verdict.nodes[0]
    machine_faults = [incident for incident in view.incidents if incident.kind in _MACHINE_FAULTS]
    recent = [incident for incident in machine_faults if view.time - incident.time < OFFENCE_MEMORY_SECONDS]
    times = [incident.time for incident in recent if incident.node == node]
    offences_elsewhere = Counter(incident.node for incident in recent if incident.node != node)
    most_elsewhere = max(offences_elsewhere.values(), default=0)
    # If another node fails more than half as often, the cause is not in this node.
    is_common = len(times) < 2 * most_elsewhere
    if len(times) + 1 < OFFENCE_LIMIT or is_common:
        return verdict
    minutes = (view.time - min(times)) / 60
    text = f"offence {len(times) + 1} of {node} in {minutes:.0f} minutes, at most {most_elsewhere} of any other"
    return replace(verdict, action="evict", evidence=verdict.evidence + (text,))
