"""Event queue of the packet kernel: a timing wheel with one slot per tick. Distant events are in a separate heap.

A tick is 0.1 ns, so that rounding the time of a packet on a 400G link costs 0.06% at most. An event is the index of a
row of `rows`, so nothing is allocated. `head[slot]` is the first event of a slot, and the columns AFTER and BEFORE link
the events of a slot. `count` has the number of events of every 64 slots, and in its last entry that of all slots.
"""

from __future__ import annotations

from megascale.simulate.fabric.jit import compiled
from megascale.simulate.fabric.packet_tables import AFTER, BEFORE, SLOTS

MASK = SLOTS - 1


@compiled
def insert(head, rows, count, time, event):  # type: ignore[no-untyped-def]
    """Add an event at tick `time`, which must be less than SLOTS ticks ahead."""
    slot = time & MASK
    first = head[slot]
    rows[event, AFTER] = first
    rows[event, BEFORE] = -2 - slot  # the first event refers to its slot
    if first >= 0:
        rows[first, BEFORE] = event
    head[slot] = event
    count[slot >> 6] += 1
    count[-1] += 1


@compiled
def remove(head, rows, count, time, event):  # type: ignore[no-untyped-def]
    """Remove an event at tick `time`."""
    slot = time & MASK
    follower, leader = rows[event, AFTER], rows[event, BEFORE]
    if leader < -1:
        head[slot] = follower
    else:
        rows[leader, AFTER] = follower
    if follower >= 0:
        rows[follower, BEFORE] = leader
    count[slot >> 6] -= 1
    count[-1] -= 1


@compiled
def next_time(head, count, time, limit):  # type: ignore[no-untyped-def]
    """Return the first tick from `time` on with an event in the wheel, at most `limit`."""
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
