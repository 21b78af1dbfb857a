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
    fl, cc = t.fl, t.cc
    low, high = paths.nic_first[e], paths.nic_first[e + 1]
    sender, soonest = NONE, np.int64(UNLIMITED)
    j = t.turn[e]
    for _ in range(high - low):
        f = paths.by_nic[j]
        j = j + 1 if j + 1 < high else low
        if fl[f, col.FOLLOWING] >= paths.packets[f] or fl[f, col.FAILED] >= 0:
            continue
        allowed = rules.window
        if rules.windowed:
            allowed = min(rules.window, max(1, np.int64(cc[f, CWND])))
        if fl[f, col.FOLLOWING] - fl[f, col.DONE_TO] >= allowed:
            continue
        if fl[f, col.READY] <= time:
            sender = f
            break
        soonest = min(soonest, fl[f, col.READY])
    return sender, j, soonest


@inlined
def send_packet(t, far, links, rules, paths, e, f, i, time):
    """Send the next packet of flow f from NIC e. Row i of the pool holds the packet."""
    pk = t.pk
    lk = t.lk
    fl = t.fl
    cc = t.cc
    n = fl[f, col.FOLLOWING]
    size = rules.header + (paths.last[f] if n + 1 == paths.packets[f] else rules.mtu)
    pk[i, col.FLOW] = f
    pk[i, col.NUMBER] = n
    pk[i, col.HOP] = 0
    pk[i, col.SIZE] = size
    pk[i, col.SENT_AT] = np.int32(time & col.CLOCK)
    pk[i, col.FLAGS] = 0
    fl[f, col.FOLLOWING] = n + 1
    t.totals[col.SENT] += 1
    t.totals[col.WIRE] += size
    if n < fl[f, col.HIGHEST]:
        t.totals[col.RESENT] += 1
    else:
        fl[f, col.HIGHEST] = n + 1
    duration = np.int64(size / links.speed[e] + 0.5)
    lk[e, col.FREE_AT] = time + duration
    lk[e, col.CARRIED] += size
    gap = 0.0
    if rules.paced:
        dcqcn_advance(cc, f, np.float64(time), rules.d)
        dcqcn_sent(cc, f, np.float64(size), rules.d)
        gap = size / cc[f, RATE]
    if rules.windowed and cc[f, CWND] < 1.0:
        gap = max(gap, cc[f, RTT] / cc[f, CWND])
    fl[f, col.READY] = time + np.int64(gap)
    insert(t.head, pk, t.count, time + duration + links.delay[e], i)
    if not fl[f, col.ARMED]:
        fl[f, col.ARMED] = 1
        fl[f, col.PROGRESS] = max(fl[f, col.PROGRESS], time)
        fl[f, col.ANSWERED] = max(fl[f, col.ANSWERED], time)
        heapq.heappush(far, (time + fl[f, col.RTO], np.int64(t.timers + f)))


@inlined
def wake_nic(t, far, e, when, time):
    """Schedule a wake-up of NIC e at `when`, unless an earlier one is scheduled."""
    lk = t.lk
    if when < lk[e, col.WAKE_AT]:
        if lk[e, col.WAKE_AT] != UNLIMITED and t.pk[t.wakes + e, col.BEFORE] != IN_HEAP:
            remove(t.head, t.pk, t.count, lk[e, col.WAKE_AT], t.wakes + e)
        lk[e, col.WAKE_AT] = when
        if when - time < SLOTS:
            insert(t.head, t.pk, t.count, when, t.wakes + e)
        else:
            t.pk[t.wakes + e, col.BEFORE] = IN_HEAP
            heapq.heappush(far, (when, np.int64(t.wakes + e)))


@inlined
def send_from_nic(t, far, links, rules, paths, e, time):
    """Send a packet from NIC e if a flow may send, and schedule the NIC's next wake-up.

    If the pool has no free row, FULL is set and the simulation ends.
    """
    lk, fl = t.lk, t.fl
    if lk[e, col.FREE_AT] > time:
        if lk[e, col.WAKE_AT] == UNLIMITED:
            lk[e, col.WAKE_AT] = lk[e, col.FREE_AT]
            insert(t.head, t.pk, t.count, lk[e, col.WAKE_AT], t.wakes + e)
    elif not lk[e, col.PAUSED]:
        f, following, soonest = choose_flow(t, rules, paths, e, time)
        i = t.totals[col.FREE]
        if f >= 0 and i < 0:
            t.totals[col.FULL] = 1
            t.totals[col.UNFINISHED] = 0
        else:
            if f >= 0:
                t.turn[e] = following
                t.totals[col.FREE] = t.pk[i, col.AFTER]
                send_packet(t, far, links, rules, paths, e, f, i, time)
                soonest = lk[e, col.FREE_AT]
                if paths.nic_first[e + 1] - paths.nic_first[e] == 1:
                    soonest = max(soonest, fl[f, col.READY])
                    if fl[f, col.FOLLOWING] >= paths.packets[f]:
                        soonest = np.int64(UNLIMITED)
            wake_nic(t, far, e, soonest, time)


@inlined
def on_timer(t, far, rules, paths, f, time):
    """Handle the retransmission timer of flow f. Return the NIC that may now send, or -1.

    If the flow had progress in the meantime, the timer is set again. After the last retry the flow fails. Otherwise all
    packets since the last acknowledgement are sent again.
    """
    fl = t.fl
    nic = NONE
    fl[f, col.ARMED] = 0
    is_waiting = fl[f, col.DONE_TO] < paths.packets[f] and fl[f, col.DONE_TO] < fl[f, col.HIGHEST]
    if is_waiting and fl[f, col.FAILED] < 0:
        due = fl[f, col.PROGRESS] + fl[f, col.RTO]
        if time < due:
            fl[f, col.ARMED] = 1
            heapq.heappush(far, (due, np.int64(t.timers + f)))
        elif (not rules.adaptive and fl[f, col.TRIES] >= rules.retries) or (
            rules.adaptive and time - fl[f, col.ANSWERED] >= rules.retries * rules.rto_most
        ):
            fl[f, col.FAILED] = time
            t.totals[col.UNFINISHED] -= 1
        else:
            fl[f, col.TRIES] += 1
            t.totals[col.TIMEOUTS] += 1
            if rules.adaptive:
                fl[f, col.RTO] = min(2 * fl[f, col.RTO], rules.rto_most)
            fl[f, col.PROGRESS] = time
            fl[f, col.FOLLOWING] = fl[f, col.DONE_TO]
            if rules.windowed:
                swift_loss(t.cc, f, time, rules.s)
            fl[f, col.ARMED] = 1
            heapq.heappush(far, (time + fl[f, col.RTO], np.int64(t.timers + f)))
            nic = paths.path[f, 0]
    return nic
