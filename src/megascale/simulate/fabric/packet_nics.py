"""Sending by a NIC: choice of the next flow, its packet, and retransmission timers.

The compiler inlines these functions into the loop of the packet kernel. packet_hops.py explains the arguments.
"""
# mypy: disable-error-code="no-untyped-def,assignment"

from __future__ import annotations

import heapq

import numpy as np

from megascale.simulate.fabric import dcqcn, swift
from megascale.simulate.fabric import packet_tables as col
from megascale.simulate.fabric.event_wheel import insert, remove
from megascale.simulate.fabric.jit import inlined
from megascale.simulate.fabric.packet_tables import IN_HEAP, SLOTS, UNLIMITED

dcqcn_advance = dcqcn.advance
dcqcn_sent = dcqcn.on_sent
swift_loss = swift.on_loss
RATE = dcqcn.RATE
CWND = dcqcn.CWND
RTT = dcqcn.RTT
NONE = -1


@inlined
def choose_flow(t, rules, paths, e, time):
    """Choose a flow of NIC e, round-robin.

    Returns:
        (a flow that may send now or -1, index in `by_nic` of the flow after it, earliest tick at which another may).
    """
    flows, cc = t.flows, t.cc
    low, high = paths.nic_first[e], paths.nic_first[e + 1]
    sender, soonest = NONE, np.int64(UNLIMITED)
    j = t.turn[e]
    for _ in range(high - low):
        f = paths.by_nic[j]
        j = j + 1 if j + 1 < high else low
        if flows[f, col.FOLLOWING] >= paths.packets[f] or flows[f, col.FAILED] >= 0:
            continue
        allowed = rules.window
        if rules.has_window:
            allowed = min(rules.window, max(1, np.int64(cc[f, CWND])))
        if flows[f, col.FOLLOWING] - flows[f, col.DONE_TO] >= allowed:
            continue
        if flows[f, col.READY] <= time:
            sender = f
            break
        soonest = min(soonest, flows[f, col.READY])
    return sender, j, soonest


@inlined
def send_packet(t, far, links, rules, paths, e, f, i, time):
    """Send the next packet of flow f from NIC e. Row i of the pool holds the packet."""
    rows = t.rows
    ports = t.ports
    flows = t.flows
    cc = t.cc
    n = flows[f, col.FOLLOWING]
    size = rules.header + (paths.last[f] if n + 1 == paths.packets[f] else rules.mtu)
    rows[i, col.FLOW] = f
    rows[i, col.NUMBER] = n
    rows[i, col.HOP] = 0
    rows[i, col.SIZE] = size
    rows[i, col.SENT_AT] = np.int32(time & col.CLOCK)
    rows[i, col.FLAGS] = 0
    flows[f, col.FOLLOWING] = n + 1
    t.totals[col.SENT] += 1
    t.totals[col.WIRE] += size
    if n < flows[f, col.HIGHEST]:
        t.totals[col.RESENT] += 1
    else:
        flows[f, col.HIGHEST] = n + 1
    duration = np.int64(size / links.speed[e] + 0.5)
    ports[e, col.FREE_AT] = time + duration
    ports[e, col.CARRIED] += size
    gap = 0.0
    if rules.has_rate:
        dcqcn_advance(cc, f, np.float64(time), rules.dcqcn)
        dcqcn_sent(cc, f, np.float64(size), rules.dcqcn)
        gap = size / cc[f, RATE]
    if rules.has_window and cc[f, CWND] < 1.0:
        gap = max(gap, cc[f, RTT] / cc[f, CWND])
    flows[f, col.READY] = time + np.int64(gap)
    insert(t.head, rows, t.count, time + duration + links.delay[e], i)
    if not flows[f, col.ARMED]:
        flows[f, col.ARMED] = 1
        flows[f, col.PROGRESS] = max(flows[f, col.PROGRESS], time)
        flows[f, col.ANSWERED] = max(flows[f, col.ANSWERED], time)
        heapq.heappush(far, (time + flows[f, col.RTO], np.int64(t.timers + f)))


@inlined
def wake_nic(t, far, e, when, time):
    """Schedule a wake-up of NIC e at `when`, unless an earlier one is scheduled."""
    ports = t.ports
    if when < ports[e, col.WAKE_AT]:
        if ports[e, col.WAKE_AT] != UNLIMITED and t.rows[t.wakes + e, col.BEFORE] != IN_HEAP:
            remove(t.head, t.rows, t.count, ports[e, col.WAKE_AT], t.wakes + e)
        ports[e, col.WAKE_AT] = when
        if when - time < SLOTS:
            insert(t.head, t.rows, t.count, when, t.wakes + e)
        else:
            t.rows[t.wakes + e, col.BEFORE] = IN_HEAP
            heapq.heappush(far, (when, np.int64(t.wakes + e)))


@inlined
def send_from_nic(t, far, links, rules, paths, e, time):
    """Send a packet from NIC e if a flow may send, and schedule the NIC's next wake-up.

    If the pool has no free row, FULL is set and the simulation ends.
    """
    ports, flows = t.ports, t.flows
    if ports[e, col.FREE_AT] > time:
        if ports[e, col.WAKE_AT] == UNLIMITED:
            ports[e, col.WAKE_AT] = ports[e, col.FREE_AT]
            insert(t.head, t.rows, t.count, ports[e, col.WAKE_AT], t.wakes + e)
    elif not ports[e, col.PAUSED]:
        f, following, soonest = choose_flow(t, rules, paths, e, time)
        i = t.totals[col.FREE]
        if f >= 0 and i < 0:
            t.totals[col.FULL] = 1
            t.totals[col.UNFINISHED] = 0
        else:
            if f >= 0:
                t.turn[e] = following
                t.totals[col.FREE] = t.rows[i, col.AFTER]
                send_packet(t, far, links, rules, paths, e, f, i, time)
                soonest = ports[e, col.FREE_AT]
                if paths.nic_first[e + 1] - paths.nic_first[e] == 1:
                    soonest = max(soonest, flows[f, col.READY])
                    if flows[f, col.FOLLOWING] >= paths.packets[f]:
                        soonest = np.int64(UNLIMITED)
            wake_nic(t, far, e, soonest, time)


@inlined
def on_timer(t, far, rules, paths, f, time):
    """Handle the retransmission timer of flow f. Return the NIC that may now send, or -1.

    If the flow had progress in the meantime, the timer is set again. After the last retry the flow fails. Otherwise all
    packets since the last acknowledgement are sent again.
    """
    flows = t.flows
    nic = NONE
    flows[f, col.ARMED] = 0
    is_waiting = flows[f, col.DONE_TO] < paths.packets[f] and flows[f, col.DONE_TO] < flows[f, col.HIGHEST]
    if is_waiting and flows[f, col.FAILED] < 0:
        due = flows[f, col.PROGRESS] + flows[f, col.RTO]
        if time < due:
            flows[f, col.ARMED] = 1
            heapq.heappush(far, (due, np.int64(t.timers + f)))
        elif (not rules.adaptive and flows[f, col.TRIES] >= rules.retries) or (
            rules.adaptive and time - flows[f, col.ANSWERED] >= rules.retries * rules.rto_max
        ):
            flows[f, col.FAILED] = time
            t.totals[col.UNFINISHED] -= 1
        else:
            flows[f, col.TRIES] += 1
            t.totals[col.TIMEOUTS] += 1
            if rules.adaptive:
                flows[f, col.RTO] = min(2 * flows[f, col.RTO], rules.rto_max)
            flows[f, col.PROGRESS] = time
            flows[f, col.FOLLOWING] = flows[f, col.DONE_TO]
            if rules.has_window:
                swift_loss(t.cc, f, time, rules.swift)
            flows[f, col.ARMED] = 1
            heapq.heappush(far, (time + flows[f, col.RTO], np.int64(t.timers + f)))
            nic = paths.path[f, 0]
    return nic
