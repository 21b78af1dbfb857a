"""Handlers of a packet's arrival at a switch, at its receiver or (an acknowledgement) at its sender; ports of switches.

The compiler inlines these functions into the loop of the packet kernel (packet_kernel.py). Their arguments are the
tuples of packet_tables.py: `t` is the changing state (Tables), the others are constant. `far` is the heap of events
that are too distant for the wheel. Frequent names: `i` is the row of a packet, `f` a flow, `e` a link, `cc` the state
of congestion control; `time` is in ticks.
"""
# numba infers the types.
# mypy: disable-error-code="no-untyped-def,assignment"

from __future__ import annotations

import heapq

import numpy as np

from megascale.simulate.fabric import dcqcn, hybrid, swift
from megascale.simulate.fabric import packet_tables as col
from megascale.simulate.fabric.control_settings import CUT as USE_CUT
from megascale.simulate.fabric.event_wheel import insert
from megascale.simulate.fabric.jit import inlined
from megascale.simulate.fabric.packet_tables import SLOTS, UNLIMITED

dcqcn_cut, RTT = dcqcn.on_notification, dcqcn.RTT
swift_delay = swift.on_delay
swift_loss = swift.on_loss
window_cut = hybrid.cut_window
NOT_SENT = -1


@inlined
def release(t, i):
    """Return the packet's row to the pool of free rows."""
    t.rows[i, col.AFTER] = t.totals[col.FREE]
    t.totals[col.FREE] = i


@inlined
def is_down(outages, link, time):
    """Return whether a link drops packets at `time`."""
    return outages.down[link] <= time < outages.up[link]


@inlined
def at_sender(t, rules, paths, i, time):
    """Handle an acknowledgement: update the flow, its window and its rate. Return the NIC that may now send, or -1."""
    rows = t.rows
    flows = t.flows
    cc = t.cc
    f = rows[i, col.FLOW]
    flags = rows[i, col.FLAGS]
    acked = rows[i, col.NUMBER] - flows[f, col.DONE_TO]
    if acked > 0:
        flows[f, col.DONE_TO] += acked
        flows[f, col.FOLLOWING] = max(flows[f, col.FOLLOWING], flows[f, col.DONE_TO])
        flows[f, col.PROGRESS] = flows[f, col.ANSWERED] = time
        flows[f, col.TRIES] = 0
        flows[f, col.RTO] = rules.rto_first
    rtt = (time - np.int64(rows[i, col.SENT_AT])) & col.CLOCK
    if acked >= 0:
        cc[f, RTT] = rtt
        t.rtt[0] += rtt
        t.rtt[1] += 1.0
    if rules.has_window:
        if flags & col.IS_GO_BACK:
            swift_loss(cc, f, time, rules.swift)
        elif acked > 0:
            swift_delay(cc, f, time, np.float64(rtt), np.float64(acked), rules.swift)
    if flags & col.IS_CNP:
        if rules.control == USE_CUT:
            window_cut(cc, f, time, rules.dcqcn, rules.swift)
        elif rules.has_rate:
            dcqcn_cut(cc, f, time, rules.dcqcn)
    if flags & col.IS_GO_BACK:
        flows[f, col.FOLLOWING] = flows[f, col.DONE_TO]
    release(t, i)
    nic = NOT_SENT
    if flows[f, col.DONE_TO] < paths.packets[f]:
        nic = paths.path[f, 0]
    return nic


@inlined
def at_receiver(t, far, rules, paths, outages, flapping, i, time):
    """Handle a packet at its receiver.

    The next packet in order is accepted, and every `ack_every`-th one is acknowledged. A gap is reported once, so that
    the sender goes back. If the packet is marked, the answer carries a congestion notification (CNP), at most one per
    `cnp_gap`.
    """
    rows = t.rows
    flows = t.flows
    totals = t.totals
    f = rows[i, col.FLOW]
    n = rows[i, col.NUMBER]
    flags = col.IS_ANSWER
    has_answer = False
    if n == flows[f, col.EXPECTED]:
        flows[f, col.EXPECTED] += 1
        totals[col.DELIVERED] += 1
        flows[f, col.NACKED] = 0
        if flows[f, col.EXPECTED] == paths.packets[f]:
            flows[f, col.DONE] = time
            totals[col.UNFINISHED] -= 1
            has_answer = True
        elif flows[f, col.EXPECTED] % rules.ack_every == 0:
            has_answer = True
    elif n > flows[f, col.EXPECTED]:
        totals[col.OUT_OF_ORDER] += 1
        if not flows[f, col.NACKED]:
            flows[f, col.NACKED] = 1
            flags |= col.IS_GO_BACK
            has_answer = True
    else:
        totals[col.DUPLICATE] += 1
        has_answer = True
    if rows[i, col.FLAGS] & col.IS_MARKED and time - flows[f, col.LAST_CNP] >= rules.cnp_gap:
        flows[f, col.LAST_CNP] = time
        totals[col.NOTIFIED] += 1
        flags |= col.IS_CNP
        has_answer = True
    if has_answer and flapping and outages.flow[f] >= 0 and is_down(outages, outages.flow[f], time):
        has_answer = False  # the answer is lost on the link that is down
    if has_answer:
        rows[i, col.FLAGS] = flags
        rows[i, col.NUMBER] = flows[f, col.EXPECTED]
        if paths.back[f] < SLOTS:
            insert(t.head, rows, t.count, time + paths.back[f], i)
        else:
            heapq.heappush(far, (time + paths.back[f], np.int64(i)))
    else:
        release(t, i)


@inlined
def get_pause_threshold(t, links, rules, node):
    """Return PFC's dynamic threshold: the bytes that a switch may hold from one link before it pauses that link."""
    return max(np.float64(2 * rules.mtu), links.pfc_alpha * (links.shared[node] - t.used[node]))


@inlined
def mark(t, links, i, e):
    """Mark packet i at random by RED: the longer the queue of link e, the more likely. The numbers are a 64-bit LCG."""
    queued = t.ports[e, col.QUEUED]
    if queued > links.kmin[e]:
        if queued >= links.kmax[e]:
            t.rows[i, col.FLAGS] |= col.IS_MARKED
            t.totals[col.MARKED] += 1
        else:
            t.random[0] = t.random[0] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            draw = np.float64(t.random[0] >> np.uint64(11)) * 1.1102230246251565e-16
            if draw < links.pmax * (queued - links.kmin[e]) / (links.kmax[e] - links.kmin[e]):
                t.rows[i, col.FLAGS] |= col.IS_MARKED
                t.totals[col.MARKED] += 1


@inlined
def wait_in_queue(t, i, e, time):
    """Append packet i to the queue of link e, and wake the link if it has no wake-up."""
    rows, ports = t.rows, t.ports
    rows[i, col.AFTER] = -1
    if ports[e, col.FIRST] < 0:
        ports[e, col.FIRST] = i
    else:
        rows[ports[e, col.LAST], col.AFTER] = i
    ports[e, col.LAST] = i
    ports[e, col.QUEUED] += rows[i, col.SIZE]
    ports[e, col.MAX_QUEUED] = max(ports[e, col.MAX_QUEUED], ports[e, col.QUEUED])
    if ports[e, col.WAKE_AT] == UNLIMITED and not ports[e, col.PAUSED]:
        ports[e, col.WAKE_AT] = max(ports[e, col.FREE_AT], time + 1)
        insert(t.head, rows, t.count, ports[e, col.WAKE_AT], t.wakes + e)


@inlined
def at_switch(t, links, rules, paths, i, time):
    """Handle a packet at a switch: drop it, queue it, or pass it on.

    Returns the link that can send the packet at once, or -1. Asks the previous link to pause if its bytes exceed the
    threshold.
    """
    rows, ports = t.rows, t.ports
    f, hop = rows[i, col.FLOW], rows[i, col.HOP]
    incoming, e = paths.path[f, hop], paths.path[f, hop + 1]
    size, node = rows[i, col.SIZE], links.node[e]
    out = NOT_SENT
    if t.used[node] + size > links.capacity[node]:
        t.totals[col.DROPPED] += 1
        release(t, i)
    else:
        t.used[node] += size
        ports[incoming, col.ARRIVED] += size
        may_pause = (
            links.pfc_alpha > 0.0 and not ports[incoming, col.PAUSE_REQUESTED] and not ports[incoming, col.PAUSE_SENT]
        )
        if may_pause and ports[incoming, col.ARRIVED] > get_pause_threshold(t, links, rules, node):
            ports[incoming, col.PAUSE_REQUESTED] = 1
            ports[incoming, col.PAUSE_SENT] = 1
            t.totals[col.PAUSES] += 1
            insert(t.head, rows, t.count, time + links.delay[incoming] + 1, t.pauses + incoming)
        mark(t, links, i, e)
        rows[i, col.HOP] += 1
        if ports[e, col.FIRST] < 0 and ports[e, col.FREE_AT] <= time and not ports[e, col.PAUSED]:
            out = e
        else:
            wait_in_queue(t, i, e, time)
    return out


@inlined
def send_from_switch(t, links, rules, paths, e, packet, time):
    """Send a packet over link e of a switch: `packet`, or the first one of the link's queue if it is -1.

    Asks the previous link to resume if its bytes have fallen below the threshold.
    """
    rows, ports = t.rows, t.ports
    i = packet
    if i < 0:
        i = ports[e, col.FIRST]
        ports[e, col.FIRST] = rows[i, col.AFTER]
        ports[e, col.QUEUED] -= rows[i, col.SIZE]
    size = rows[i, col.SIZE]
    node = links.node[e]
    incoming = paths.path[rows[i, col.FLOW], rows[i, col.HOP] - 1]
    t.used[node] -= size
    ports[incoming, col.ARRIVED] -= size
    may_resume = ports[incoming, col.PAUSE_REQUESTED] and not ports[incoming, col.RESUME_SENT]
    if may_resume and ports[incoming, col.ARRIVED] <= get_pause_threshold(t, links, rules, node) - rules.mtu:
        ports[incoming, col.PAUSE_REQUESTED] = 0
        ports[incoming, col.RESUME_SENT] = 1
        insert(t.head, rows, t.count, time + links.delay[incoming] + 2, t.resumes + incoming)
    duration = np.int64(size / links.speed[e] + 0.5)
    ports[e, col.FREE_AT] = time + duration
    ports[e, col.CARRIED] += size
    insert(t.head, rows, t.count, time + duration + links.delay[e], i)
    if ports[e, col.FIRST] >= 0:
        ports[e, col.WAKE_AT] = ports[e, col.FREE_AT]
        insert(t.head, rows, t.count, ports[e, col.WAKE_AT], t.wakes + e)
