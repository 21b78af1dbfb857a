"""The MegaScale paper's congestion control: Swift's round-trip time joined with DCQCN's fast answer to ECN.

Section 3.6 names the two parts and the reason (PFC and head-of-line blocking under default DCQCN with all-to-all
traffic), and gives neither equations nor parameters. So the rule is an option, and every rule is an interpretation:

both:  DCQCN runs the rate, Swift the window; a packet goes when both let it.
cut:   Swift's window alone paces the flow, and a CNP cuts it at once by DCQCN's alpha/2, at most once a round trip;
       alpha decays as in DCQCN.

A statement on "the" hybrid must name the rule and both parents' parameters.
"""

from __future__ import annotations

from megascale.simulate.fabric.dcqcn import ALPHA, ALPHA_TIMER, CWND, LAST_CUT, LAST_DECREASE, NEXT_ALPHA, ON, RTT, G
from megascale.simulate.fabric.jit import compiled
from megascale.simulate.fabric.swift import LOWEST


@compiled
def cut_window(cc, f, time, d, s):  # type: ignore[no-untyped-def]
    """Rule `cut`: a CNP (d: DCQCN's parameters, s: Swift's)."""
    if cc[f, ON] > 0.0:
        if cc[f, NEXT_ALPHA] <= time:
            steps = 1.0 + (time - cc[f, NEXT_ALPHA]) // d[ALPHA_TIMER]
            cc[f, ALPHA] *= (1.0 - d[G]) ** steps
            cc[f, NEXT_ALPHA] += steps * d[ALPHA_TIMER]
        if time - cc[f, LAST_CUT] < cc[f, RTT]:
            return
    cc[f, ON] = 1.0
    cc[f, CWND] = max(cc[f, CWND] * (1.0 - cc[f, ALPHA] / 2.0), s[LOWEST])
    cc[f, ALPHA] = (1.0 - d[G]) * cc[f, ALPHA] + d[G]
    cc[f, NEXT_ALPHA] = time + d[ALPHA_TIMER]
    cc[f, LAST_CUT] = time
    cc[f, LAST_DECREASE] = time
