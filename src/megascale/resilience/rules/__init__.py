"""Rules: pure functions from the driver's view to verdicts, each with the sentences that led to it.

No rule looks at a node's clock: ages are measured on the agent's and on the driver's monotonic clocks, so that clocks
that are minutes apart change nothing. No rule acts on what a calm run shows: the first step, an evaluation and a
checkpoint are not hangs, and a value must leave what was seen before by a margin.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from megascale.resilience.rules.table import QUICK_RULES, SLOW_RULES, Rule, judge, register_rule
from megascale.resilience.rules.view import Verdict, View

__all__ = ["QUICK_RULES", "SLOW_RULES", "Rule", "Verdict", "View", "judge", "register_rule"]

# Of equally severe verdicts the first is acted upon: the end of a process tells more than silence.
_FIRST = ("exits", "silence", "node_signals")
for _name in dict.fromkeys(list(_FIRST) + [module.name for module in pkgutil.iter_modules(__path__)]):
    import_module(f"{__name__}.{_name}")
