"""From "nothing moves" to a rank and a collective: joins the rules' verdict with the hang verdict of the run folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megascale.core.events import Event
from megascale.errors import MegascaleError
from megascale.observe.hang import hang_report
from megascale.resilience.rules.offenders import repeated
from megascale.resilience.rules.verdicts import Action, Verdict
from megascale.resilience.rules.view import View

# Wrong calls come from code: once they may come from a corrupted state, twice they will come again.
_CODE = frozenset({"mismatched collective", "missing send", "missing call"})


def refine(verdict: Verdict, view: View, run: Path) -> Verdict:
    """`verdict` (of kind HANG) with the ranks that began it, their nodes, and how that is known.

    Reads the run folder and asks the ranks on this host for their stacks: takes up to some seconds.
    """
    try:
        _, hang = hang_report.examine(run)
    except (MegascaleError, OSError) as error:
        return replace(verdict, evidence=(*verdict.evidence, f"no closer look: {error}"))
    nodes = tuple(dict.fromkeys(m.node for rank in hang.ranks for m in view.members if rank in m.ranks))
    evidence = (hang_report.headline(hang), *hang.evidence[:10], *verdict.evidence)
    action: Action = "diagnose" if hang.kind == "network" else "respawn"
    person = False
    if hang.kind in _CODE and any(p.kind == Event.HANG and hang.kind in p.evidence[0] for _, p in view.past):
        action, person = "stop", True
        evidence = (*evidence, "an earlier start hung the same way: it is in the code")
    found = replace(verdict, nodes=nodes, ranks=hang.ranks, action=action, evidence=evidence, person=person)
    return repeated(view, [found])[0]
