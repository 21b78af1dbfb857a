"""From "nothing moves" to a rank and a collective: joins the rules' verdict with what agents know of their ranks."""

from __future__ import annotations

from dataclasses import replace

from megascale.core.events import Event
from megascale.core.layout import Layout
from megascale.observe.hang import verdict as hang_report
from megascale.observe.hang.scene import Scene
from megascale.observe.hang.verdict import explain_hang
from megascale.resilience.rules.offenders import repeated
from megascale.resilience.rules.verdicts import Action, Verdict
from megascale.resilience.rules.view import View

# Wrong calls come from code: once they may come from a corrupted state, twice they will come again.
_CODE = frozenset({"mismatched collective", "missing send", "missing call"})


def refine(verdict: Verdict, view: View, scene: Scene, layout: Layout | None) -> Verdict:
    """`verdict` (of kind HANG) with the ranks that began it, their nodes, and how that is known.

    scene: what agents know of their ranks; layout: how these are laid out, None if that is not known.
    """
    if not scene.ranks:
        return replace(verdict, evidence=(*verdict.evidence, "no closer look: no agent said what its ranks do"))
    hang = explain_hang(scene, layout)
    nodes = tuple(dict.fromkeys(m.node for rank in hang.ranks for m in view.members if rank in m.ranks))
    evidence = (hang_report.format_headline(hang), *hang.evidence[:10], *verdict.evidence)
    action: Action = "diagnose" if hang.kind == "network" else "recover"
    person = False
    if hang.kind in _CODE and any(p.kind == Event.HANG and hang.kind in p.evidence[0] for _, p in view.past):
        action, person = "stop", True
        evidence = (*evidence, "an earlier start hung the same way: it is in the code")
    found = replace(verdict, nodes=nodes, ranks=hang.ranks, action=action, evidence=evidence, person=person)
    return repeated(view, [found])[0]
