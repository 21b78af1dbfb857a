"""The packet kernel: one compiled loop over events. What it models, and what not, is said in packets.py.

Events are rows of one table: a packet (its arrival at the end of a link, or its acknowledgement at the sender), waking
a port, pausing and resuming one, a flow's retransmission timer. The loop takes them in the order of their ticks; what
each does stands in packet_hops.py and packet_nics.py, which are put into the loop by the compiler.
"""
# The compiler gives types here: numbers are machine words, whichever name they have.
# mypy: disable-error-code="no-untyped-def,assignment"

from __future__ import annotations

import heapq

import numpy as np

from megascale.simulate.fabric import packet_tables as col
from megascale.simulate.fabric.event_wheel import insert, next_time, remove
from megascale.simulate.fabric.jit import compiled, inlined
from megascale.simulate.fabric.packet_hops import (
    at_receiver,
    at_sender,
    at_switch,
    is_down,
    release,
    send_from_switch,
)
from megascale.simulate.fabric.packet_nics import on_timer, send_from_nic
from megascale.simulate.fabric.packet_tables import IN_HEAP, IS_ANSWER, MANY, SLOTS
from megascale.simulate.fabric.packet_views import unowned_links, unowned_outages, unowned_paths, unowned_tables

NONE = -1


@inlined
def first_wakes(t, links, paths):
    """The heap of what is far: every NIC at the start of its first flow."""
    far = [(np.int64(MANY), np.int64(0))]
    for e in range(links.nics):
        if paths.nic_first[e] < paths.nic_first[e + 1]:
            first = np.int64(MANY)
            for j in range(paths.nic_first[e], paths.nic_first[e + 1]):
                first = min(first, paths.start[paths.by_nic[j]])
            t.lk[e, col.WAKE_AT] = first
            heapq.heappush(far, (first, np.int64(t.wakes + e)))
    return far


@inlined
def on_resume(t, links, rules, e, now):
    """Link e's sender may go on: the NIC that may send, or -1."""
    lk = t.lk
    kick = NONE
    lk[e, col.RESUME_SENT] = 0
    if lk[e, col.PAUSED]:
        lk[e, col.PAUSED] = 0
        lk[e, col.PAUSED_FOR] += now - lk[e, col.SINCE]
    if e < links.nics:
        kick = e
    elif lk[e, col.FIRST] >= 0 and lk[e, col.WAKE_AT] == MANY:
        lk[e, col.WAKE_AT] = max(lk[e, col.FREE_AT], now + 1)
        insert(t.head, t.pk, t.count, lk[e, col.WAKE_AT], t.wakes + e)
    if lk[e, col.ASKED] and lk[e, col.ARRIVED] < rules.mtu:
        # What asked again has drained while this frame was on its way.
        lk[e, col.ASKED] = 0
        lk[e, col.RESUME_SENT] = 1
        insert(t.head, t.pk, t.count, now + links.delay[e] + 2, t.resumes + e)
    return kick


@inlined
def close_books(t, now):
    """At the end: how long what is paused was, and how many packets are under way."""
    pk, lk, totals = t.pk, t.lk, t.totals
    totals[col.END] = now
    for e in range(len(lk)):
        if lk[e, col.PAUSED]:
            lk[e, col.PAUSED_FOR] += now - lk[e, col.SINCE]
    in_pool = np.ones(t.pool, np.bool_)
    i = totals[col.FREE]
    while i >= 0:
        in_pool[i] = False
        i = pk[i, col.AFTER]
    for i in range(t.pool):
        if in_pool[i] and not pk[i, col.FLAGS] & IS_ANSWER:
            totals[col.IN_FLIGHT] += 1


@inlined
def on_event(t, far, links, paths, outages, rules, flapping, event, now):
    """One event, and what may be sent because of it."""
    kick, out, packet = NONE, NONE, NONE
    if event < t.pool:
        f, hop = t.pk[event, col.FLOW], t.pk[event, col.HOP]
        if t.pk[event, col.FLAGS] & IS_ANSWER:
            kick = at_sender(t, rules, paths, event, now)
        elif flapping and is_down(outages, paths.path[f, hop], now):
            t.totals[col.LOST] += 1
            release(t, event)
        elif hop + 1 == paths.hops[f]:
            at_receiver(t, far, rules, paths, outages, flapping, event, now)
        else:
            out = at_switch(t, links, rules, paths, event, now)
            packet = event
    elif event < t.pauses:  # a port wakes
        e = event - t.wakes
        t.lk[e, col.WAKE_AT] = MANY
        if e < links.nics:
            kick = e
        elif not t.lk[e, col.PAUSED] and t.lk[e, col.FIRST] >= 0:
            out = e
    elif event < t.resumes:
        e = event - t.pauses
        t.lk[e, col.PAUSE_SENT] = 0
        if not t.lk[e, col.PAUSED]:
            t.lk[e, col.PAUSED] = 1
            t.lk[e, col.SINCE] = now
    elif event < t.timers:
        kick = on_resume(t, links, rules, event - t.resumes, now)
    else:
        kick = on_timer(t, far, rules, paths, event - t.timers, now)
    if out >= 0:
        send_from_switch(t, links, rules, paths, out, packet, now)
    if kick >= 0:
        send_from_nic(t, far, links, rules, paths, kick, now)


@compiled
def run(own_tables, own_links, own_paths, own_outages, rules, stop, sample_every, watch):
    """See packets.simulate_packets for the meaning of each argument, packet_tables for the tuples.

    Returns samples of the watched link and the mean round trip in ticks; the rest is in the tables.
    """
    t, links, paths, outages = (
        unowned_tables(own_tables), unowned_links(own_links), unowned_paths(own_paths), unowned_outages(own_outages)
    )  # fmt: skip
    far = first_wakes(t, links, paths)
    head, pk, count, lk, totals = t.head, t.pk, t.count, t.lk, t.totals
    samples = np.zeros((4096 if sample_every > 0 else 0, 3), np.float64)
    taken, next_sample = 0, np.int64(0)
    flapping = outages.down.min() < MANY
    now = np.int64(0)
    while totals[col.LEFT] > 0:
        now = far[0][0] if count[-1] == 0 else next_time(head, count, now, min(far[0][0], now + SLOTS))
        if now >= stop or now >= MANY:
            break
        if sample_every > 0 and now >= next_sample and taken < len(samples):
            samples[taken, 0] = now
            samples[taken, 1] = lk[watch, col.QUEUED]
            samples[taken, 2] = lk[watch, col.CARRIED]
            taken += 1
            next_sample = now - now % sample_every + sample_every
        while not totals[col.FULL]:
            # One event of this tick: from the heap first, then from the slot.
            if far[0][0] == now:
                event = np.int64(heapq.heappop(far)[1])
                if t.wakes <= event < t.pauses and (
                    lk[event - t.wakes, col.WAKE_AT] != now or pk[event, col.BEFORE] != IN_HEAP
                ):
                    continue  # woken earlier in the meantime
            else:
                event = np.int64(head[now & (SLOTS - 1)])
                if event < 0:
                    break
                remove(head, pk, count, now, event)
            totals[col.EVENTS] += 1
            on_event(t, far, links, paths, outages, rules, flapping, event, now)
        # The slot is done; go on with the next tick.
        now += 1
    close_books(t, now)
    return samples[:taken], t.rtt[0] / max(t.rtt[1], 1.0)
