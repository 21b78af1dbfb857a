"""What the driver concludes from a view: pure functions to Verdicts, each with the sentences that led to it.

No rule looks at a node's clock: ages are measured on the agent's and on the driver's monotonic clocks, so that clocks
that are minutes apart change nothing. No rule acts on what a calm run shows: the first step, an evaluation and a
checkpoint are no hangs, and a value must leave what was seen before by a margin.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module

from megascale.resilience.rules import offenders
from megascale.resilience.rules.table import QUICK, SLOW, Rule, register_rule
from megascale.resilience.rules.verdicts import Verdict
from megascale.resilience.rules.view import View

__all__ = ["QUICK", "SLOW", "Rule", "judge", "register_rule"]

# Of verdicts that are equally hard the first is acted upon: what ended tells more than what is silent.
_FIRST = ("exits", "silence", "node_signals")
for _name in dict.fromkeys([*_FIRST, *(module.name for module in pkgutil.iter_modules(__path__))]):
    import_module(f"{__name__}.{_name}")


def judge(view: View, which: Sequence[Rule] | None = None) -> list[Verdict]:
    """The verdicts of some rules (None: all) on `view`, in no order. Nodes that offended before are judged harder."""
    which = [*QUICK, *SLOW] if which is None else [*which]
    return offenders.repeated(view, [verdict for rule in which for verdict in rule(view)])
