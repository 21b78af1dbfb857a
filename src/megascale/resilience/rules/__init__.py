"""What the driver concludes from a view: pure functions to Verdicts, each with the sentences that led to it.

No rule looks at a node's clock: ages are measured on the agent's and on the driver's monotonic clocks, so that clocks
that are minutes apart change nothing. No rule acts on what a calm run shows: the first step, an evaluation and a
checkpoint are no hangs, and a value must leave what was seen before by a margin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megascale.resilience.rules import exits, metrics_rules, node_signals, offenders, silence
from megascale.resilience.rules.verdicts import Verdict
from megascale.resilience.rules.view import View

Rule = Callable[[View], list[Verdict]]

# What must be seen at once, from the newest heartbeats only.
QUICK: list[Rule] = [exits.processes, silence.heartbeats, silence.slow_start, silence.hang, node_signals.log_lines]
# What goes through the history of all nodes.
SLOW: list[Rule] = [
    node_signals.devices,
    node_signals.traffic,
    metrics_rules.losses,
    metrics_rules.throughput,
    metrics_rules.slow_nodes,
    metrics_rules.checksums,
]


def register_rule(rule: Rule, quick: bool = False) -> None:
    """Have every driver of this process apply `rule` as well, once however often it is registered.

    quick: at each look, from the newest heartbeats only; else about once a second, in a thread, through the history.
    """
    rules = QUICK if quick else SLOW
    if rule not in rules:
        rules.append(rule)


def judge(view: View, which: Sequence[Rule] | None = None) -> list[Verdict]:
    """The verdicts of some rules (None: all) on `view`, in no order. Nodes that offended before are judged harder."""
    which = [*QUICK, *SLOW] if which is None else [*which]
    return offenders.repeated(view, [verdict for rule in which for verdict in rule(view)])
