"""DCQCN: a rate for each flow, cut when the receiver reports ECN marks (Zhu et al., SIGCOMM 2015).

On a notification (CNP), the present rate becomes the target, the rate falls by the fraction alpha/2, and alpha rises.
Without notifications alpha decays. A timer and a byte counter raise the rate again: in the first `fast` rounds half-way
to the target, then by additive steps of the target, then by hyper steps. A flow's timers are evaluated when the flow
sends or is notified, which gives the same rates at these moments as timer events would.

In all functions `cc` is the table of states, `f` the flow, and `p` the parameter vector.
"""

from __future__ import annotations

from megascale.simulate.fabric.jit import compiled

# Columns of a flow's state (cc[f, :]), shared with Swift and the hybrid. Times in ticks, rates in bytes per tick.
RATE, TARGET, ALPHA, NEXT_ALPHA, NEXT_RISE, BY_TIMER, BY_BYTES, BYTES, LAST_CUT, ON, LINE = range(11)
CWND, LAST_DECREASE, RTT, SWIFT_TARGET = range(11, 15)
COLUMNS = 15
# Columns of the parameter vector.
G, ALPHA_TIMER, RISE_TIMER, FAST, BYTE_COUNTER, ADDITIVE, HYPER, CUT_INTERVAL, FLOOR = range(9)


@compiled
def advance_alpha(cc, f, time, p):  # type: ignore[no-untyped-def]
    """Advance alpha and the timers to `time` for a flow at line rate, where only alpha changes."""
    if time >= cc[f, NEXT_ALPHA]:
        steps = 1.0 + (time - cc[f, NEXT_ALPHA]) // p[ALPHA_TIMER]
        cc[f, ALPHA] *= (1.0 - p[G]) ** steps
        cc[f, NEXT_ALPHA] += steps * p[ALPHA_TIMER]
    if time >= cc[f, NEXT_RISE]:
        cc[f, NEXT_RISE] += (1.0 + (time - cc[f, NEXT_RISE]) // p[RISE_TIMER]) * p[RISE_TIMER]


@compiled
def rise(cc, f, p):  # type: ignore[no-untyped-def]
    """Apply one increase event of the timer or of the byte counter."""
    higher, lower = max(cc[f, BY_TIMER], cc[f, BY_BYTES]), min(cc[f, BY_TIMER], cc[f, BY_BYTES])
    if p[BYTE_COUNTER] == 0.0:
        lower = higher  # timer only
    if higher > p[FAST]:
        cc[f, TARGET] += p[HYPER] if lower > p[FAST] and p[HYPER] > 0.0 else p[ADDITIVE]
        cc[f, TARGET] = min(cc[f, TARGET], cc[f, LINE])
    cc[f, RATE] = min((cc[f, RATE] + cc[f, TARGET]) / 2.0, cc[f, LINE])
    if cc[f, RATE] > 0.999 * cc[f, LINE]:
        cc[f, RATE] = cc[f, LINE]


@compiled
def advance(cc, f, time, p):  # type: ignore[no-untyped-def]
    """Advance the timers of flow f up to `time`."""
    if cc[f, ON] == 0.0:
        return
    if cc[f, RATE] >= cc[f, LINE]:
        advance_alpha(cc, f, time, p)
        return
    while True:
        a, r = cc[f, NEXT_ALPHA], cc[f, NEXT_RISE]
        if a > time and r > time:
            return
        if a <= r:
            cc[f, ALPHA] *= 1.0 - p[G]
            cc[f, NEXT_ALPHA] = a + p[ALPHA_TIMER]
        else:
            cc[f, NEXT_RISE] = r + p[RISE_TIMER]
            cc[f, BY_TIMER] += 1.0
            rise(cc, f, p)
            if cc[f, RATE] >= cc[f, LINE]:
                advance_alpha(cc, f, time, p)
                return


@compiled
def on_sent(cc, f, size, p):  # type: ignore[no-untyped-def]
    """Add `size` sent bytes to the byte counter, and raise the rate if the counter is full."""
    if cc[f, ON] > 0.0 and p[BYTE_COUNTER] > 0.0 and cc[f, RATE] < cc[f, LINE]:
        cc[f, BYTES] += size
        if cc[f, BYTES] >= p[BYTE_COUNTER]:
            cc[f, BYTES] -= p[BYTE_COUNTER]
            cc[f, BY_BYTES] += 1.0
            rise(cc, f, p)


@compiled
def on_notification(cc, f, time, p):  # type: ignore[no-untyped-def]
    """Handle a CNP: cut the rate, unless the last cut was less than CUT_INTERVAL ago."""
    advance(cc, f, time, p)
    if cc[f, ON] > 0.0 and time - cc[f, LAST_CUT] < p[CUT_INTERVAL]:
        return
    cc[f, ON] = 1.0
    cc[f, TARGET] = cc[f, RATE]
    cc[f, RATE] = max(cc[f, RATE] * (1.0 - cc[f, ALPHA] / 2.0), p[FLOOR])
    cc[f, ALPHA] = (1.0 - p[G]) * cc[f, ALPHA] + p[G]
    cc[f, BY_TIMER] = 0.0
    cc[f, BY_BYTES] = 0.0
    cc[f, BYTES] = 0.0
    cc[f, NEXT_RISE] = time + p[RISE_TIMER]
    cc[f, NEXT_ALPHA] = time + p[ALPHA_TIMER]
    cc[f, LAST_CUT] = time
