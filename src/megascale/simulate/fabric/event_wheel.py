"""Time for the packet kernel: a wheel of one slot a tick for what comes soon, a heap for the rest.

A tick is 0.1 ns, so that rounding a packet's time on a 400G link costs 0.06% at most. Events are numbers; those of
packets are the packets' own, so nothing is allocated. A slot is a doubly linked list; a count for every 64 slots tells
whether any is filled.
"""

from __future__ import annotations

from megascale.simulate.fabric.jit import compiled
from megascale.simulate.fabric.packet_tables import AFTER, BEFORE, SLOTS

MASK = SLOTS - 1


@compiled
def insert(head, pk, count, time, event):  # type: ignore[no-untyped-def]
    """Add an event that comes within the wheel's reach."""
    slot = time & MASK
    first = head[slot]
    pk[event, AFTER] = first
    pk[event, BEFORE] = -2 - slot  # the slot itself
    if first >= 0:
        pk[first, BEFORE] = event
    head[slot] = event
    count[slot >> 6] += 1
    count[-1] += 1


@compiled
def remove(head, pk, count, time, event):  # type: ignore[no-untyped-def]
    """Take an event back."""
    slot = time & MASK
    follower, leader = pk[event, AFTER], pk[event, BEFORE]
    if leader < -1:
        head[slot] = follower
    else:
        pk[leader, AFTER] = follower
    if follower >= 0:
        pk[follower, BEFORE] = leader
    count[slot >> 6] -= 1
    count[-1] -= 1


@compiled
def next_time(head, count, time, limit):  # type: ignore[no-untyped-def]
    """The next tick from `now` on with an event in the wheel, at most `limit`."""
    t = time
    while t < limit:
        slot = t & MASK
        if count[slot >> 6] == 0:
            t = (t | 63) + 1
        elif head[slot] >= 0:
            return t
        else:
            t += 1
    return limit
