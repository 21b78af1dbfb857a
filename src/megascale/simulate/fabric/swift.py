"""Swift: a window for each flow, held where the round-trip time is at a target (Kumar et al., SIGCOMM 2020, section 3).

Below the target the window grows by `ai` packets per round trip. Above the target it shrinks in proportion to the
excess, at most once per round trip and by at most `max_cut`. Packets of windows below one packet are paced. The target
grows with the number of hops (topology scaling) and, for small windows, with 1/sqrt(window) (flow scaling). NICs take
the time stamps, so round trips do not contain the host's delay.

In all functions `cc` is the table of states, `f` the flow, and `p` the parameter vector.
"""

from __future__ import annotations

from megascale.simulate.fabric.dcqcn import CWND, LAST_DECREASE, RTT, SWIFT_TARGET
from megascale.simulate.fabric.jit import compiled

# Columns of the parameter vector; SWIFT_TARGET of a flow's state holds base + hops x per_hop.
AI, BETA, MAX_CUT, FS_ALPHA, FS_SHIFT, FS_RANGE, LOWEST, HIGHEST = range(8)


@compiled
def target_delay(cc, f, p):  # type: ignore[no-untyped-def]
    """Return the target round trip of flow f in ticks."""
    extra = p[FS_ALPHA] / cc[f, CWND] ** 0.5 + p[FS_SHIFT]
    return cc[f, SWIFT_TARGET] + min(p[FS_RANGE], max(0.0, extra))


@compiled
def on_delay(cc, f, time, rtt, acked, p):  # type: ignore[no-untyped-def]
    """Handle an acknowledgement of `acked` packets with a round trip of `rtt` ticks."""
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
    """Handle a loss (go-back or time-out): cut the window by MAX_CUT, at most once per round trip."""
    if time - cc[f, LAST_DECREASE] >= cc[f, RTT]:
        cc[f, CWND] = max(cc[f, CWND] * (1.0 - p[MAX_CUT]), p[LOWEST])
        cc[f, LAST_DECREASE] = time
