"""Handlers of a packet's arrival at a switch, at its receiver or (an acknowledgement) at its sender; ports of switches.

The compiler inlines these functions into the loop of the packet kernel (packet_kernel.py). Their arguments are the
tuples of packet_tables.py: `t` is the changing state (Tables), the others are constant. Frequent names: `i` is the row
of a packet, `f` a flow, `e` a link, `time` is in ticks.
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
    t.pk[i, col.AFTER] = t.totals[col.FREE]
    t.totals[col.FREE] = i


@inlined
def is_down(outages, link, time):
    """Return whether a link drops packets at `time`."""
    return outages.down[link] <= time < outages.up[link]


@inlined
def at_sender(t, rules, paths, i, time):
    """Handle an acknowledgement: update the flow, its window and its rate. Return the NIC that may now send, or -1."""
    pk = t.pk
    fl = t.fl
    cc = t.cc
    f = pk[i, col.FLOW]
    flags = pk[i, col.FLAGS]
    acked = pk[i, col.NUMBER] - fl[f, col.DONE_TO]
    if acked > 0:
        fl[f, col.DONE_TO] += acked
        fl[f, col.FOLLOWING] = max(fl[f, col.FOLLOWING], fl[f, col.DONE_TO])
        fl[f, col.PROGRESS] = fl[f, col.ANSWERED] = time
        fl[f, col.TRIES] = 0
        fl[f, col.RTO] = rules.rto_first
    rtt = (time - np.int64(pk[i, col.SENT_AT])) & col.CLOCK
    if acked >= 0:
        cc[f, RTT] = rtt
        t.rtt[0] += rtt
        t.rtt[1] += 1.0
    if rules.windowed:
        if flags & col.IS_GO_BACK:
            swift_loss(cc, f, time, rules.s)
        elif acked > 0:
            swift_delay(cc, f, time, np.float64(rtt), np.float64(acked), rules.s)
    if flags & col.IS_CNP:
        if rules.control == USE_CUT:
            window_cut(cc, f, time, rules.d, rules.s)
        elif rules.paced:
            dcqcn_cut(cc, f, time, rules.d)
    if flags & col.IS_GO_BACK:
        fl[f, col.FOLLOWING] = fl[f, col.DONE_TO]
    release(t, i)
    nic = NOT_SENT
    if fl[f, col.DONE_TO] < paths.packets[f]:
        nic = paths.path[f, 0]
    return nic


@inlined
def at_receiver(t, far, rules, paths, outages, flapping, i, time):
    """Handle a packet at its receiver.

    The next packet in order is accepted, and every `ack_every`-th one is acknowledged. A gap is reported once, so that
    the sender goes back. If the packet is marked, the answer carries a congestion notification (CNP), at most one per
    `cnp_gap`.
    """
    pk = t.pk
    fl = t.fl
    totals = t.totals
    f = pk[i, col.FLOW]
    n = pk[i, col.NUMBER]
    flags = col.IS_ANSWER
    has_answer = False
    if n == fl[f, col.EXPECTED]:
        fl[f, col.EXPECTED] += 1
        totals[col.DELIVERED] += 1
        fl[f, col.NACKED] = 0
        if fl[f, col.EXPECTED] == paths.packets[f]:
            fl[f, col.DONE] = time
            totals[col.UNFINISHED] -= 1
            has_answer = True
        elif fl[f, col.EXPECTED] % rules.ack_every == 0:
            has_answer = True
    elif n > fl[f, col.EXPECTED]:
        totals[col.OUT_OF_ORDER] += 1
        if not fl[f, col.NACKED]:
            fl[f, col.NACKED] = 1
            flags |= col.IS_GO_BACK
            has_answer = True
    else:
        totals[col.DUPLICATE] += 1
        has_answer = True
    if pk[i, col.FLAGS] & col.IS_MARKED and time - fl[f, col.LAST_CNP] >= rules.cnp_gap:
        fl[f, col.LAST_CNP] = time
        totals[col.NOTIFIED] += 1
        flags |= col.IS_CNP
        has_answer = True
    if has_answer and flapping and outages.flow[f] >= 0 and is_down(outages, outages.flow[f], time):
        has_answer = False  # the answer is lost on the link that is down
    if has_answer:
        pk[i, col.FLAGS] = flags
        pk[i, col.NUMBER] = fl[f, col.EXPECTED]
        if paths.back[f] < SLOTS:
            insert(t.head, pk, t.count, time + paths.back[f], i)
        else:
            heapq.heappush(far, (time + paths.back[f], np.int64(i)))
    else:
        release(t, i)


@inlined
def maximum_queue(t, links, rules, node):
    """Return PFC's dynamic threshold: the bytes that a switch may hold from one link before it pauses this link."""
    return max(np.float64(2 * rules.mtu), links.pfc_alpha * (links.shared[node] - t.used[node]))


@inlined
def mark(t, links, i, e):
    """Mark packet i by RED, from the length of the queue of link e at its arrival."""
    queued = t.lk[e, col.QUEUED]
    if queued > links.kmin[e]:
        if queued >= links.kmax[e]:
            t.pk[i, col.FLAGS] |= col.IS_MARKED
            t.totals[col.MARKED] += 1
        else:
            t.random[0] = t.random[0] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            draw = np.float64(t.random[0] >> np.uint64(11)) * 1.1102230246251565e-16
            if draw < links.pmax * (queued - links.kmin[e]) / (links.kmax[e] - links.kmin[e]):
                t.pk[i, col.FLAGS] |= col.IS_MARKED
                t.totals[col.MARKED] += 1


@inlined
def wait_in_queue(t, i, e, time):
    """Append packet i to the queue of link e, and wake the link if it has no wake-up."""
    pk, lk = t.pk, t.lk
    pk[i, col.AFTER] = -1
    if lk[e, col.FIRST] < 0:
        lk[e, col.FIRST] = i
    else:
        pk[lk[e, col.LAST], col.AFTER] = i
    lk[e, col.LAST] = i
    lk[e, col.QUEUED] += pk[i, col.SIZE]
    lk[e, col.QUEUED_MOST] = max(lk[e, col.QUEUED_MOST], lk[e, col.QUEUED])
    if lk[e, col.WAKE_AT] == UNLIMITED and not lk[e, col.PAUSED]:
        lk[e, col.WAKE_AT] = max(lk[e, col.FREE_AT], time + 1)
        insert(t.head, pk, t.count, lk[e, col.WAKE_AT], t.wakes + e)


@inlined
def at_switch(t, links, rules, paths, i, time):
    """Handle a packet at a switch: drop it, queue it, or pass it on.

    Returns the link that can send the packet at once, or -1. Asks the previous link to pause if its bytes exceed the
    threshold.
    """
    pk, lk = t.pk, t.lk
    f, hop = pk[i, col.FLOW], pk[i, col.HOP]
    incoming, e = paths.path[f, hop], paths.path[f, hop + 1]
    size, node = pk[i, col.SIZE], links.node[e]
    out = NOT_SENT
    if t.used[node] + size > links.capacity[node]:
        t.totals[col.DROPPED] += 1
        release(t, i)
    else:
        t.used[node] += size
        lk[incoming, col.ARRIVED] += size
        may_pause = links.pfc_alpha > 0.0 and not lk[incoming, col.PAUSE_REQUESTED] and not lk[incoming, col.PAUSE_SENT]
        if may_pause and lk[incoming, col.ARRIVED] > maximum_queue(t, links, rules, node):
            lk[incoming, col.PAUSE_REQUESTED] = 1
            lk[incoming, col.PAUSE_SENT] = 1
            t.totals[col.PAUSES] += 1
            lk[incoming, col.PAUSE_COUNT] += 1
            insert(t.head, pk, t.count, time + links.delay[incoming] + 1, t.pauses + incoming)
        mark(t, links, i, e)
        pk[i, col.HOP] += 1
        if lk[e, col.FIRST] < 0 and lk[e, col.FREE_AT] <= time and not lk[e, col.PAUSED]:
            out = e
        else:
            wait_in_queue(t, i, e, time)
    return out


@inlined
def send_from_switch(t, links, rules, paths, e, packet, time):
    """Send a packet over link e of a switch: `packet`, or the first one of the link's queue if it is -1.

    Asks the previous link to resume if its bytes have fallen below the threshold.
    """
    pk, lk = t.pk, t.lk
    i = packet
    if i < 0:
        i = lk[e, col.FIRST]
        lk[e, col.FIRST] = pk[i, col.AFTER]
        lk[e, col.QUEUED] -= pk[i, col.SIZE]
    size = pk[i, col.SIZE]
    node = links.node[e]
    incoming = paths.path[pk[i, col.FLOW], pk[i, col.HOP] - 1]
    t.used[node] -= size
    lk[incoming, col.ARRIVED] -= size
    may_resume = lk[incoming, col.PAUSE_REQUESTED] and not lk[incoming, col.RESUME_SENT]
    if may_resume and lk[incoming, col.ARRIVED] <= maximum_queue(t, links, rules, node) - rules.mtu:
        lk[incoming, col.PAUSE_REQUESTED] = 0
        lk[incoming, col.RESUME_SENT] = 1
        insert(t.head, pk, t.count, time + links.delay[incoming] + 2, t.resumes + incoming)
    duration = np.int64(size / links.speed[e] + 0.5)
    lk[e, col.FREE_AT] = time + duration
    lk[e, col.CARRIED] += size
    insert(t.head, pk, t.count, time + duration + links.delay[e], i)
    if lk[e, col.FIRST] >= 0:
        lk[e, col.WAKE_AT] = lk[e, col.FREE_AT]
        insert(t.head, pk, t.count, lk[e, col.WAKE_AT], t.wakes + e)
