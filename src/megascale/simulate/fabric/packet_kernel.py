"""The packet kernel: one compiled loop over events. packets.py lists its assumptions.

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
from megascale.simulate.fabric.packet_tables import (
    IN_HEAP,
    IS_ANSWER,
    SLOTS,
    UNLIMITED,
    unowned_links,
    unowned_outages,
    unowned_paths,
    unowned_tables,
)

NONE = -1


@inlined
def first_wakes(t, links, paths):
    """The heap of what is far: every NIC at the start of its first flow."""
    far = [(np.int64(UNLIMITED), np.int64(0))]
    for e in range(links.nics):
        if paths.nic_first[e] < paths.nic_first[e + 1]:
            first = np.int64(UNLIMITED)
            for j in range(paths.nic_first[e], paths.nic_first[e + 1]):
                first = min(first, paths.start[paths.by_nic[j]])
            t.lk[e, col.WAKE_AT] = first
            heapq.heappush(far, (first, np.int64(t.wakes + e)))
    return far


@inlined
def on_resume(t, links, rules, e, time):
    """Link e's sender may go on: the NIC that may send, or -1."""
    lk = t.lk
    kick = NONE
    lk[e, col.RESUME_SENT] = 0
    if lk[e, col.PAUSED]:
        lk[e, col.PAUSED] = 0
        lk[e, col.PAUSED_FOR] += time - lk[e, col.PAUSED_FROM]
    if e < links.nics:
        kick = e
    elif lk[e, col.FIRST] >= 0 and lk[e, col.WAKE_AT] == UNLIMITED:
        lk[e, col.WAKE_AT] = max(lk[e, col.FREE_AT], time + 1)
        insert(t.head, t.pk, t.count, lk[e, col.WAKE_AT], t.wakes + e)
    if lk[e, col.PAUSE_REQUESTED] and lk[e, col.ARRIVED] < rules.mtu:
        # What asked again has drained while this frame was on its way.
        lk[e, col.PAUSE_REQUESTED] = 0
        lk[e, col.RESUME_SENT] = 1
        insert(t.head, t.pk, t.count, time + links.delay[e] + 2, t.resumes + e)
    return kick


@inlined
def finish_accounts(t, time):
    """Add the time of links that are still paused, and count the packets in flight."""
    pk = t.pk
    lk = t.lk
    totals = t.totals
    totals[col.END] = time
    for e in range(len(lk)):
        if lk[e, col.PAUSED]:
            lk[e, col.PAUSED_FOR] += time - lk[e, col.PAUSED_FROM]
    in_pool = np.ones(t.pool, np.bool_)
    i = totals[col.FREE]
    while i >= 0:
        in_pool[i] = False
        i = pk[i, col.AFTER]
    for i in range(t.pool):
        if in_pool[i] and not pk[i, col.FLAGS] & IS_ANSWER:
            totals[col.IN_FLIGHT] += 1


@inlined
def on_event(t, far, links, paths, outages, rules, flapping, event, time):
    """Handle one event and send what it unblocks."""
    kick = NONE
    out = NONE
    packet = NONE
    if event < t.pool:
        f, hop = t.pk[event, col.FLOW], t.pk[event, col.HOP]
        if t.pk[event, col.FLAGS] & IS_ANSWER:
            kick = at_sender(t, rules, paths, event, time)
        elif flapping and is_down(outages, paths.path[f, hop], time):
            t.totals[col.LOST] += 1
            release(t, event)
        elif hop + 1 == paths.hops[f]:
            at_receiver(t, far, rules, paths, outages, flapping, event, time)
        else:
            out = at_switch(t, links, rules, paths, event, time)
            packet = event
    elif event < t.pauses:  # a port wakes
        e = event - t.wakes
        t.lk[e, col.WAKE_AT] = UNLIMITED
        if e < links.nics:
            kick = e
        elif not t.lk[e, col.PAUSED] and t.lk[e, col.FIRST] >= 0:
            out = e
    elif event < t.resumes:
        e = event - t.pauses
        t.lk[e, col.PAUSE_SENT] = 0
        if not t.lk[e, col.PAUSED]:
            t.lk[e, col.PAUSED] = 1
            t.lk[e, col.PAUSED_FROM] = time
    elif event < t.timers:
        kick = on_resume(t, links, rules, event - t.resumes, time)
    else:
        kick = on_timer(t, far, rules, paths, event - t.timers, time)
    if out >= 0:
        send_from_switch(t, links, rules, paths, out, packet, time)
    if kick >= 0:
        send_from_nic(t, far, links, rules, paths, kick, time)


@compiled
def run(owned_tables, owned_links, owned_paths, owned_outages, rules, stop, sample_every, watch):
    """See packets.simulate_packets for the meaning of each argument, packet_tables for the tuples.

    Returns samples of the watched link and the mean round trip in ticks; the rest is in the tables.
    """
    t = unowned_tables(owned_tables)
    links = unowned_links(owned_links)
    paths = unowned_paths(owned_paths)
    outages = unowned_outages(owned_outages)
    far = first_wakes(t, links, paths)
    head = t.head
    pk = t.pk
    count = t.count
    lk = t.lk
    totals = t.totals
    samples = np.zeros((4096 if sample_every > 0 else 0, 3), np.float64)
    sampled, next_sample = 0, np.int64(0)
    flapping = outages.down.min() < UNLIMITED
    time = np.int64(0)
    while totals[col.UNFINISHED] > 0:
        if count[-1] == 0:
            time = far[0][0]
        else:
            time = next_time(head, count, time, min(far[0][0], time + SLOTS))
        if time >= stop or time >= UNLIMITED:
            break
        if sample_every > 0 and time >= next_sample and sampled < len(samples):
            samples[sampled, 0] = time
            samples[sampled, 1] = lk[watch, col.QUEUED]
            samples[sampled, 2] = lk[watch, col.CARRIED]
            sampled += 1
            next_sample = time - time % sample_every + sample_every
        while not totals[col.FULL]:
            # One event of this tick: from the heap first, then from the slot.
            if far[0][0] == time:
                event = np.int64(heapq.heappop(far)[1])
                if t.wakes <= event < t.pauses and (
                    lk[event - t.wakes, col.WAKE_AT] != time or pk[event, col.BEFORE] != IN_HEAP
                ):
                    continue  # woken earlier in the meantime
            else:
                event = np.int64(head[time & (SLOTS - 1)])
                if event < 0:
                    break
                remove(head, pk, count, time, event)
            totals[col.EVENTS] += 1
            on_event(t, far, links, paths, outages, rules, flapping, event, time)
        # The slot is done; go on with the next tick.
        time += 1
    finish_accounts(t, time)
    return samples[:sampled], t.rtt[0] / max(t.rtt[1], 1.0)
