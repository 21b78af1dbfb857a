"""Congestion control of the MegaScale paper: a hybrid of Swift's round-trip time and DCQCN's fast reaction to ECN.

Section 3.6 names the two components and the reason (PFC and head-of-line blocking under default DCQCN with all-to-all
traffic), but neither equations nor parameters. There are therefore two rules, which are both interpretations:

both:  DCQCN controls the rate and Swift the window. A packet is sent when both allow it.
cut:   Only Swift's window paces the flow. A CNP cuts the window by DCQCN's alpha/2, at most once per round trip. Alpha
       decays as in DCQCN.

A result for the hybrid must name the rule and the parameters of both controls.
"""

from __future__ import annotations

from megascale.simulate.fabric.dcqcn import ALPHA, ALPHA_TIMER, CWND, LAST_CUT, LAST_DECREASE, NEXT_ALPHA, ON, RTT, G
from megascale.simulate.fabric.jit import compiled
from megascale.simulate.fabric.swift import LOWEST


@compiled
def cut_window(cc, f, time, d, s):  # type: ignore[no-untyped-def]
    """Handle a CNP by rule `cut`. `d` and `s` are the parameter vectors of DCQCN and Swift."""
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
