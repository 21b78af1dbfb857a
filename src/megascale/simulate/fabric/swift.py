"""Swift: a window for each flow, held where the round-trip time is at a target (Kumar et al., SIGCOMM 2020, section 3).

Below the target the window grows by `ai` packets a round trip; above it shrinks in proportion to the excess, at most
once a round trip and by at most `max_cut`. Windows below one packet are paced. The target grows with hops (topology
scaling) and, as 1/sqrt(window), for small windows (flow scaling). NICs stamp times, so host delay is not in it.
"""

from __future__ import annotations

from megascale.simulate.fabric.dcqcn import CWND, LAST_DECREASE, RTT, SWIFT_TARGET
from megascale.simulate.fabric.jit import compiled

# Columns of the parameter vector; SWIFT_TARGET of a flow's state holds base + hops x per_hop.
AI, BETA, MAX_CUT, FS_ALPHA, FS_SHIFT, FS_RANGE, LOWEST, HIGHEST = range(8)


@compiled
def target_delay(cc, f, p):  # type: ignore[no-untyped-def]
    """Ticks of round trip that flow f aims at."""
    extra = p[FS_ALPHA] / cc[f, CWND] ** 0.5 + p[FS_SHIFT]
    return cc[f, SWIFT_TARGET] + min(p[FS_RANGE], max(0.0, extra))


@compiled
def on_delay(cc, f, time, rtt, acked, p):  # type: ignore[no-untyped-def]
    """An acknowledgement of `acked` packets, `rtt` ticks after its packet was sent."""
    cc[f, RTT] = rtt
    target = target_delay(cc, f, p)
    w = cc[f, CWND]
    if rtt < target:
        w += p[AI] * acked / w if w >= 1.0 else p[AI] * acked
    elif time - cc[f, LAST_DECREASE] >= rtt:
        w *= max(1.0 - p[BETA] * (rtt - target) / rtt, 1.0 - p[MAX_CUT])
        cc[f, LAST_DECREASE] = time
    cc[f, CWND] = min(max(w, p[LOWEST]), p[HIGHEST])


@compiled
def on_loss(cc, f, time, p):  # type: ignore[no-untyped-def]
    """Go-back or time-out: the largest cut, at most once a round trip."""
    if time - cc[f, LAST_DECREASE] >= cc[f, RTT]:
        cc[f, CWND] = max(cc[f, CWND] * (1.0 - p[MAX_CUT]), p[LOWEST])
        cc[f, LAST_DECREASE] = time
