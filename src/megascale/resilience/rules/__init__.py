"""Rules: pure functions from the driver's view of a job to verdicts, each with its evidence as sentences.

No rule compares the clocks of two machines: ages are measured on the agent's and on the driver's monotonic clocks. No
rule acts on the events of a healthy run: the first step, an evaluation and a checkpoint are not hangs, and a value must
differ from earlier values of the run by a margin.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from megascale.resilience.rules.table import QUICK_RULES, SLOW_RULES, Rule, judge, register_rule
from megascale.resilience.rules.view import Verdict, View

__all__ = ["QUICK_RULES", "SLOW_RULES", "Rule", "Verdict", "View", "judge", "register_rule"]

# The driver acts on the first of equally severe verdicts, so the modules are imported in a fixed order, these first.
# The rules of silence are registered before those of exits, which imports silence.
_FIRST = ("exits", "silence", "node_signals")
_others = [module.name for module in pkgutil.iter_modules(__path__) if module.name not in _FIRST]
for _name in list(_FIRST) + _others:
    import_module(f"{__name__}.{_name}")
