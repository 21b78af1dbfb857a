"""The packet kernel: one compiled loop over events. packets.py lists its assumptions.

Events are rows of one table. An event is the arrival of a packet at the end of a link, the arrival of an
acknowledgement at the sender, a wake-up, pause or resume of a link's sender, or a flow's retransmission timer. The loop
handles events in the order of their ticks. The compiler inlines the handlers in packet_hops.py and packet_nics.py into
the loop.
"""
# numba infers the types.
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
    """Return the heap of distant events, with a wake-up of every NIC at the start of its first flow."""
    far = [(np.int64(UNLIMITED), np.int64(0))]
    for e in range(links.nics):
        if paths.nic_first[e] < paths.nic_first[e + 1]:
            first = np.int64(UNLIMITED)
            for j in range(paths.nic_first[e], paths.nic_first[e + 1]):
                first = min(first, paths.start[paths.by_nic[j]])
            t.ports[e, col.WAKE_AT] = first
            heapq.heappush(far, (first, np.int64(t.wakes + e)))
    return far


@inlined
def on_resume(t, links, rules, e, time):
    """Resume the sender of link e. Return the NIC that may now send, or -1."""
    ports = t.ports
    nic = NONE
    ports[e, col.RESUME_SENT] = 0
    if ports[e, col.PAUSED]:
        ports[e, col.PAUSED] = 0
        ports[e, col.PAUSED_FOR] += time - ports[e, col.PAUSED_FROM]
    if e < links.nics:
        nic = e
    elif ports[e, col.FIRST] >= 0 and ports[e, col.WAKE_AT] == UNLIMITED:
        ports[e, col.WAKE_AT] = max(ports[e, col.FREE_AT], time + 1)
        insert(t.head, t.rows, t.count, ports[e, col.WAKE_AT], t.wakes + e)
    if ports[e, col.PAUSE_REQUESTED] and ports[e, col.ARRIVED] < rules.mtu:
        # Another pause was requested while this resume frame was on its way, but the switch has drained since.
        ports[e, col.PAUSE_REQUESTED] = 0
        ports[e, col.RESUME_SENT] = 1
        insert(t.head, t.rows, t.count, time + links.delay[e] + 2, t.resumes + e)
    return nic


@inlined
def finish_accounts(t, time):
    """Add the time of links that are still paused, and count the packets in flight."""
    rows = t.rows
    ports = t.ports
    totals = t.totals
    totals[col.END] = time
    for e in range(len(ports)):
        if ports[e, col.PAUSED]:
            ports[e, col.PAUSED_FOR] += time - ports[e, col.PAUSED_FROM]
    in_pool = np.ones(t.pool, np.bool_)
    i = totals[col.FREE]
    while i >= 0:
        in_pool[i] = False
        i = rows[i, col.AFTER]
    for i in range(t.pool):
        if in_pool[i] and not rows[i, col.FLAGS] & IS_ANSWER:
            totals[col.IN_FLIGHT] += 1


@inlined
def on_event(t, far, links, paths, outages, rules, flapping, event, time):
    """Handle one event and send what it unblocks."""
    nic = NONE
    link = NONE
    packet = NONE
    if event < t.pool:
        f, hop = t.rows[event, col.FLOW], t.rows[event, col.HOP]
        if t.rows[event, col.FLAGS] & IS_ANSWER:
            nic = at_sender(t, rules, paths, event, time)
        elif flapping and is_down(outages, paths.path[f, hop], time):
            t.totals[col.LOST] += 1
            release(t, event)
        elif hop + 1 == paths.hops[f]:
            at_receiver(t, far, rules, paths, outages, flapping, event, time)
        else:
            link = at_switch(t, links, rules, paths, event, time)
            packet = event
    elif event < t.pauses:  # a port wakes
        e = event - t.wakes
        t.ports[e, col.WAKE_AT] = UNLIMITED
        if e < links.nics:
            nic = e
        elif not t.ports[e, col.PAUSED] and t.ports[e, col.FIRST] >= 0:
            link = e
    elif event < t.resumes:
        e = event - t.pauses
        t.ports[e, col.PAUSE_SENT] = 0
        if not t.ports[e, col.PAUSED]:
            t.ports[e, col.PAUSED] = 1
            t.ports[e, col.PAUSED_FROM] = time
    elif event < t.timers:
        nic = on_resume(t, links, rules, event - t.resumes, time)
    else:
        nic = on_timer(t, far, rules, paths, event - t.timers, time)
    if link >= 0:
        send_from_switch(t, links, rules, paths, link, packet, time)
    if nic >= 0:
        send_from_nic(t, far, links, rules, paths, nic, time)


@compiled
def run(owned_tables, owned_links, owned_paths, owned_outages, rules, stop, sample_every, watch):
    """Simulate until all flows have ended, or until tick `stop`.

    Args:
        owned_tables, owned_links, owned_paths, owned_outages, rules: tuples of packet_tables.py.
        sample_every: ticks between samples; 0: no samples.
        watch: link that is sampled.

    Returns:
        (samples of the watched link, mean round trip in ticks). All other results are in the tables.
    """
    t = unowned_tables(owned_tables)
    links = unowned_links(owned_links)
    paths = unowned_paths(owned_paths)
    outages = unowned_outages(owned_outages)
    far = first_wakes(t, links, paths)
    head = t.head
    rows = t.rows
    count = t.count
    ports = t.ports
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
            samples[sampled, 1] = ports[watch, col.QUEUED]
            samples[sampled, 2] = ports[watch, col.CARRIED]
            sampled += 1
            next_sample = time - time % sample_every + sample_every
        while not totals[col.FULL]:
            # Take one event of this tick, first from the heap, then from the wheel's slot.
            if far[0][0] == time:
                event = np.int64(heapq.heappop(far)[1])
                if t.wakes <= event < t.pauses and (
                    ports[event - t.wakes, col.WAKE_AT] != time or rows[event, col.BEFORE] != IN_HEAP
                ):
                    continue  # the link was woken earlier
            else:
                event = np.int64(head[time & (SLOTS - 1)])
                if event < 0:
                    break
                remove(head, rows, count, time, event)
            totals[col.EVENTS] += 1
            on_event(t, far, links, paths, outages, rules, flapping, event, time)
        time += 1
    finish_accounts(t, time)
    return samples[:sampled], t.rtt[0] / max(t.rtt[1], 1.0)
