"""The packet kernel: one compiled loop over events. What it models, and what not, is said in packets.py.

Numbers are int64, times in ticks (event_wheel), rates in bytes a tick. Events: a packet (its arrival at the end of a
link, or its acknowledgement at the sender), waking a port, pausing and resuming one, a flow's retransmission timer.
"""
# The compiler gives types here: numbers are machine words, whichever name they have.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import heapq

import numpy as np

from megascale.simulate.fabric import dcqcn, hybrid, swift
from megascale.simulate.fabric.control_settings import BOTH as USE_BOTH
from megascale.simulate.fabric.control_settings import CUT as USE_CUT
from megascale.simulate.fabric.control_settings import DCQCN as USE_DCQCN
from megascale.simulate.fabric.control_settings import SWIFT as USE_SWIFT
from megascale.simulate.fabric.event_wheel import SLOTS, insert, next_time, remove
from megascale.simulate.fabric.jit import compiled

# What a run was, in `totals`.
(SENT, RESENT, DELIVERED, DROPPED, MARKED, NOTIFIED, PAUSES, OUT_OF_ORDER, DUPLICATE, TIMEOUTS, EVENTS, END, FULL,
 IN_FLIGHT, LOST, WIRE) = range(16)  # fmt: skip
# Columns of a packet's or event's row; 32 bytes, so that handling one touches one cache line.
FLOW, NUMBER, HOP, SIZE, FLAGS, SENT_AT, AFTER, BEFORE = range(8)
# Flags of a packet.
IS_MARKED, IS_ANSWER, IS_CNP, IS_GO_BACK = 1, 2, 4, 8
# Columns of a link: its sender's queue, and what the receiver says to it.
(FIRST, LAST, QUEUED, QUEUED_MOST, FREE_AT, WAKE_AT, PAUSED, ASKED, PAUSE_SENT, RESUME_SENT, SINCE, PAUSED_FOR,
 PAUSE_COUNT, ARRIVED, CARRIED) = range(15)  # fmt: skip
# Columns of a flow.
(DONE_TO, FOLLOWING, HIGHEST, EXPECTED, ASKED_AGAIN, READY, PROGRESS, ARMED, RTO, TRIES, LAST_CNP, DONE,
 FAILED, ANSWERED) = range(14)  # fmt: skip
CLOCK = (1 << 32) - 1  # a packet keeps the low half of its sending time: round trips are shorter than 0.4 s
MANY = 1 << 62
IN_HEAP = -1

dcqcn_advance, dcqcn_sent, dcqcn_cut = dcqcn.advance, dcqcn.on_sent, dcqcn.on_notification
swift_delay, swift_loss, window_cut = swift.on_delay, swift.on_loss, hybrid.cut_window
RATE, CWND, RTT = dcqcn.RATE, dcqcn.CWND, dcqcn.RTT


@compiled
def run(  # type: ignore[no-untyped-def]
    nics, speed, delay, node, capacity, shared, pfc_alpha, kmin, kmax, pmax,
    path, hops, packets, last, start, back, flap_down, flap_up, flap_flow,
    by_nic, nic_first, control, cc, d, s, cnp_gap, ack_every, window, mtu, header,
    rto_first, rto_most, retries, adaptive, pool, seed, stop, sample_every, watch,
):  # fmt: skip
    """See packets.simulate_packets for the meaning of each argument."""
    links, flows = len(speed), len(packets)
    wakes, pauses, resumes, timers = pool, pool + links, pool + 2 * links, pool + 3 * links
    pk = np.zeros((timers + flows, 8), np.int32)
    pk[:, BEFORE] = IN_HEAP
    for i in range(pool):
        pk[i, AFTER] = i + 1 if i + 1 < pool else -1
    free = 0
    head = np.full(SLOTS, -1, np.int32)
    count = np.zeros(SLOTS // 64 + 1, np.int64)
    far = [(np.int64(MANY), np.int64(0))]

    lk = np.zeros((links, 16), np.int64)
    lk[:, FIRST] = lk[:, LAST] = -1
    lk[:, WAKE_AT] = MANY  # none pending
    used = np.zeros(len(capacity), np.int64)
    fl = np.zeros((flows, 16), np.int64)
    fl[:, READY] = start
    fl[:, PROGRESS] = start
    fl[:, RTO] = rto_first
    fl[:, LAST_CNP] = -MANY // 2
    fl[:, DONE] = fl[:, FAILED] = -1
    turn = nic_first[:-1].copy()
    totals = np.zeros(16, np.int64)
    samples = np.zeros((4096 if sample_every > 0 else 0, 3), np.float64)
    taken, next_sample = 0, np.int64(0)
    rtt_sum, rtt_count = 0.0, 0
    flapping = flap_down.min() < MANY
    windowed = control in (USE_SWIFT, USE_BOTH, USE_CUT)
    paced = control in (USE_DCQCN, USE_BOTH)
    random = np.uint64(seed * 2 + 1)
    left = flows
    for e in range(nics):
        if nic_first[e] < nic_first[e + 1]:
            first = np.int64(MANY)
            for j in range(nic_first[e], nic_first[e + 1]):
                first = min(first, start[by_nic[j]])
            lk[e, WAKE_AT] = first
            heapq.heappush(far, (first, np.int64(wakes + e)))

    now = np.int64(0)
    while left > 0:
        limit = min(far[0][0], now + SLOTS)
        if count[-1] == 0:
            now = far[0][0]
        else:
            now = next_time(head, count, now, limit)
        if now >= stop or now >= MANY:
            break
        if sample_every > 0 and now >= next_sample and taken < len(samples):
            samples[taken, 0] = now
            samples[taken, 1] = lk[watch, QUEUED]
            samples[taken, 2] = lk[watch, CARRIED]
            taken += 1
            next_sample = now - now % sample_every + sample_every
        while True:
            # One event of this tick: from the heap first, then from the slot.
            from_far = far[0][0] == now
            if from_far:
                event = np.int64(heapq.heappop(far)[1])
                if wakes <= event < pauses and (lk[event - wakes, WAKE_AT] != now or pk[event, BEFORE] != IN_HEAP):
                    continue  # woken earlier in the meantime
            else:
                event = np.int64(head[now & (SLOTS - 1)])
                if event < 0:
                    break
                remove(head, pk, count, now, event)
            totals[EVENTS] += 1
            kick, out, packet = -1, -1, -1

            if event < pool:
                i = event
                f = pk[i, FLOW]
                if pk[i, FLAGS] & IS_ANSWER:  # at the sender: acknowledgement
                    got = pk[i, NUMBER] - fl[f, DONE_TO]
                    if got > 0:
                        fl[f, DONE_TO] += got
                        fl[f, FOLLOWING] = max(fl[f, FOLLOWING], fl[f, DONE_TO])
                        fl[f, PROGRESS] = fl[f, ANSWERED] = now
                        fl[f, TRIES] = 0
                        fl[f, RTO] = rto_first
                    rtt = (now - np.int64(pk[i, SENT_AT])) & CLOCK
                    if got >= 0:
                        cc[f, RTT] = rtt
                        rtt_sum += rtt
                        rtt_count += 1
                    if windowed:
                        if pk[i, FLAGS] & IS_GO_BACK:
                            swift_loss(cc, f, now, s)
                        elif got > 0:
                            swift_delay(cc, f, now, np.float64(rtt), np.float64(got), s)
                    if pk[i, FLAGS] & IS_CNP:
                        if control == USE_CUT:
                            window_cut(cc, f, now, d, s)
                        elif paced:
                            dcqcn_cut(cc, f, now, d)
                    if pk[i, FLAGS] & IS_GO_BACK:
                        fl[f, FOLLOWING] = fl[f, DONE_TO]
                    pk[i, AFTER] = free
                    free = i
                    if fl[f, DONE_TO] < packets[f]:
                        kick = path[f, 0]
                elif flapping and flap_down[path[f, pk[i, HOP]]] <= now < flap_up[path[f, pk[i, HOP]]]:
                    totals[LOST] += 1  # the link is down
                    pk[i, AFTER] = free
                    free = i
                elif pk[i, HOP] + 1 == hops[f]:  # at the receiver
                    n = pk[i, NUMBER]
                    flags = IS_ANSWER
                    answer = False
                    if n == fl[f, EXPECTED]:
                        fl[f, EXPECTED] += 1
                        totals[DELIVERED] += 1
                        fl[f, ASKED_AGAIN] = 0
                        if fl[f, EXPECTED] == packets[f]:
                            fl[f, DONE] = now
                            left -= 1
                            answer = True
                        elif fl[f, EXPECTED] % ack_every == 0:
                            answer = True
                    elif n > fl[f, EXPECTED]:
                        totals[OUT_OF_ORDER] += 1
                        if not fl[f, ASKED_AGAIN]:
                            fl[f, ASKED_AGAIN] = 1
                            flags |= IS_GO_BACK
                            answer = True
                    else:
                        totals[DUPLICATE] += 1
                        answer = True
                    if pk[i, FLAGS] & IS_MARKED and now - fl[f, LAST_CNP] >= cnp_gap:
                        fl[f, LAST_CNP] = now
                        totals[NOTIFIED] += 1
                        flags |= IS_CNP
                        answer = True
                    if (
                        answer
                        and flapping
                        and flap_flow[f] >= 0
                        and flap_down[flap_flow[f]] <= now < flap_up[flap_flow[f]]
                    ):
                        answer = False  # the acknowledgement is lost on its way back
                    if answer:
                        pk[i, FLAGS] = flags
                        pk[i, NUMBER] = fl[f, EXPECTED]
                        if back[f] < SLOTS:
                            insert(head, pk, count, now + back[f], i)
                        else:
                            heapq.heappush(far, (now + back[f], np.int64(i)))
                    else:
                        pk[i, AFTER] = free
                        free = i
                else:  # at a switch
                    came, e = path[f, pk[i, HOP]], path[f, pk[i, HOP] + 1]
                    size, at = pk[i, SIZE], node[e]
                    if used[at] + size > capacity[at]:
                        totals[DROPPED] += 1
                        pk[i, AFTER] = free
                        free = i
                    else:
                        used[at] += size
                        lk[came, ARRIVED] += size
                        if pfc_alpha > 0.0 and not lk[came, ASKED]:
                            most = max(np.float64(2 * mtu), pfc_alpha * (shared[at] - used[at]))
                            if lk[came, ARRIVED] > most and not lk[came, PAUSE_SENT]:
                                lk[came, ASKED] = 1
                                lk[came, PAUSE_SENT] = 1
                                totals[PAUSES] += 1
                                lk[came, PAUSE_COUNT] += 1
                                insert(head, pk, count, now + delay[came] + 1, pauses + came)
                        if lk[e, QUEUED] > kmin[e]:
                            if lk[e, QUEUED] >= kmax[e]:
                                pk[i, FLAGS] |= IS_MARKED
                                totals[MARKED] += 1
                            else:
                                random = random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
                                draw = np.float64(random >> np.uint64(11)) * 1.1102230246251565e-16
                                if draw < pmax * (lk[e, QUEUED] - kmin[e]) / (kmax[e] - kmin[e]):
                                    pk[i, FLAGS] |= IS_MARKED
                                    totals[MARKED] += 1
                        pk[i, HOP] += 1
                        if lk[e, FIRST] < 0 and lk[e, FREE_AT] <= now and not lk[e, PAUSED]:
                            out, packet = e, i
                        else:
                            pk[i, AFTER] = -1
                            if lk[e, FIRST] < 0:
                                lk[e, FIRST] = i
                            else:
                                pk[lk[e, LAST], AFTER] = i
                            lk[e, LAST] = i
                            lk[e, QUEUED] += size
                            lk[e, QUEUED_MOST] = max(lk[e, QUEUED_MOST], lk[e, QUEUED])
                            if lk[e, WAKE_AT] == MANY and not lk[e, PAUSED]:
                                lk[e, WAKE_AT] = max(lk[e, FREE_AT], now + 1)
                                insert(head, pk, count, lk[e, WAKE_AT], wakes + e)
            elif event < pauses:  # a port wakes
                e = event - wakes
                lk[e, WAKE_AT] = MANY
                if e < nics:
                    kick = e
                elif not lk[e, PAUSED] and lk[e, FIRST] >= 0:
                    out = e
            elif event < resumes:
                e = event - pauses
                lk[e, PAUSE_SENT] = 0
                if not lk[e, PAUSED]:
                    lk[e, PAUSED] = 1
                    lk[e, SINCE] = now
            elif event < timers:
                e = event - resumes
                lk[e, RESUME_SENT] = 0
                if lk[e, PAUSED]:
                    lk[e, PAUSED] = 0
                    lk[e, PAUSED_FOR] += now - lk[e, SINCE]
                if e < nics:
                    kick = e
                elif lk[e, FIRST] >= 0 and lk[e, WAKE_AT] == MANY:
                    lk[e, WAKE_AT] = max(lk[e, FREE_AT], now + 1)
                    insert(head, pk, count, lk[e, WAKE_AT], wakes + e)
                if (
                    lk[e, ASKED] and lk[e, ARRIVED] < mtu
                ):  # what asked again has drained while this frame was on its way
                    lk[e, ASKED] = 0
                    lk[e, RESUME_SENT] = 1
                    insert(head, pk, count, now + delay[e] + 2, event)
            else:  # a retransmission timer
                f = event - timers
                fl[f, ARMED] = 0
                if fl[f, DONE_TO] < packets[f] and fl[f, DONE_TO] < fl[f, HIGHEST] and fl[f, FAILED] < 0:
                    due = fl[f, PROGRESS] + fl[f, RTO]
                    if now < due:
                        fl[f, ARMED] = 1
                        heapq.heappush(far, (due, np.int64(timers + f)))
                    elif (not adaptive and fl[f, TRIES] >= retries) or (
                        adaptive and now - fl[f, ANSWERED] >= retries * rto_most
                    ):
                        fl[f, FAILED] = now
                        left -= 1
                    else:
                        fl[f, TRIES] += 1
                        totals[TIMEOUTS] += 1
                        if adaptive:
                            fl[f, RTO] = min(2 * fl[f, RTO], rto_most)
                        fl[f, PROGRESS] = now
                        fl[f, FOLLOWING] = fl[f, DONE_TO]
                        if windowed:
                            swift_loss(cc, f, now, s)
                        fl[f, ARMED] = 1
                        heapq.heappush(far, (now + fl[f, RTO], np.int64(timers + f)))
                        kick = path[f, 0]

            if out >= 0:  # a switch port sends: a packet that found it free, or the head of its queue
                e = out
                if packet >= 0:
                    i = packet
                else:
                    i = lk[e, FIRST]
                    lk[e, FIRST] = pk[i, AFTER]
                    lk[e, QUEUED] -= pk[i, SIZE]
                f = pk[i, FLOW]
                size, at, came = pk[i, SIZE], node[e], path[f, pk[i, HOP] - 1]
                used[at] -= size
                lk[came, ARRIVED] -= size
                if lk[came, ASKED] and not lk[came, RESUME_SENT]:
                    most = max(np.float64(2 * mtu), pfc_alpha * (shared[at] - used[at]))
                    if lk[came, ARRIVED] <= most - mtu:
                        lk[came, ASKED] = 0
                        lk[came, RESUME_SENT] = 1
                        insert(head, pk, count, now + delay[came] + 2, resumes + came)
                took = np.int64(size / speed[e] + 0.5)
                lk[e, FREE_AT] = now + took
                lk[e, CARRIED] += size
                insert(head, pk, count, now + took + delay[e], i)
                if lk[e, FIRST] >= 0:
                    lk[e, WAKE_AT] = lk[e, FREE_AT]
                    insert(head, pk, count, lk[e, WAKE_AT], wakes + e)

            if kick >= 0 and lk[kick, FREE_AT] > now:
                if lk[kick, WAKE_AT] == MANY:
                    lk[kick, WAKE_AT] = lk[kick, FREE_AT]
                    insert(head, pk, count, lk[kick, WAKE_AT], wakes + kick)
            elif kick >= 0 and not lk[kick, PAUSED]:  # a NIC may send
                e = kick
                low, high = nic_first[e], nic_first[e + 1]
                chosen, soonest = -1, np.int64(MANY)
                j = turn[e]
                for _ in range(high - low):
                    f = by_nic[j]
                    j = j + 1 if j + 1 < high else low
                    if fl[f, FOLLOWING] >= packets[f] or fl[f, FAILED] >= 0:
                        continue
                    allowed = window
                    if windowed:
                        allowed = min(window, max(1, np.int64(cc[f, CWND])))
                    if fl[f, FOLLOWING] - fl[f, DONE_TO] >= allowed:
                        continue
                    if fl[f, READY] <= now:
                        chosen = f
                        break
                    soonest = min(soonest, fl[f, READY])
                if chosen >= 0:
                    turn[e] = j
                    f = chosen
                    if free < 0:
                        totals[FULL] = 1
                        left = 0
                        break
                    i = free
                    free = pk[i, AFTER]
                    n = fl[f, FOLLOWING]
                    size = header + (last[f] if n + 1 == packets[f] else mtu)
                    pk[i, FLOW] = f
                    pk[i, NUMBER] = n
                    pk[i, HOP] = 0
                    pk[i, SIZE] = size
                    pk[i, SENT_AT] = np.int32(now & CLOCK)
                    pk[i, FLAGS] = 0
                    fl[f, FOLLOWING] = n + 1
                    totals[SENT] += 1
                    totals[WIRE] += size
                    if n < fl[f, HIGHEST]:
                        totals[RESENT] += 1
                    else:
                        fl[f, HIGHEST] = n + 1
                    took = np.int64(size / speed[e] + 0.5)
                    lk[e, FREE_AT] = now + took
                    lk[e, CARRIED] += size
                    gap = 0.0
                    if paced:
                        dcqcn_advance(cc, f, np.float64(now), d)
                        dcqcn_sent(cc, f, np.float64(size), d)
                        gap = size / cc[f, RATE]
                    if windowed and cc[f, CWND] < 1.0:
                        gap = max(gap, cc[f, RTT] / cc[f, CWND])
                    fl[f, READY] = now + np.int64(gap)
                    insert(head, pk, count, now + took + delay[e], i)
                    if not fl[f, ARMED]:
                        fl[f, ARMED] = 1
                        fl[f, PROGRESS] = max(fl[f, PROGRESS], now)
                        fl[f, ANSWERED] = max(fl[f, ANSWERED], now)
                        heapq.heappush(far, (now + fl[f, RTO], np.int64(timers + f)))
                    soonest = lk[e, FREE_AT]
                    if high - low == 1:
                        soonest = max(soonest, fl[f, READY])
                        if fl[f, FOLLOWING] >= packets[f]:
                            soonest = np.int64(MANY)
                if soonest < lk[e, WAKE_AT]:
                    if lk[e, WAKE_AT] != MANY and pk[wakes + e, BEFORE] != IN_HEAP:
                        remove(head, pk, count, lk[e, WAKE_AT], wakes + e)
                    lk[e, WAKE_AT] = soonest
                    if soonest - now < SLOTS:
                        insert(head, pk, count, soonest, wakes + e)
                    else:
                        pk[wakes + e, BEFORE] = IN_HEAP
                        heapq.heappush(far, (soonest, np.int64(wakes + e)))
        # The slot is done; go on with the next tick.
        now += 1
    totals[END] = now
    for e in range(links):
        if lk[e, PAUSED]:
            lk[e, PAUSED_FOR] += now - lk[e, SINCE]
    in_pool = np.ones(pool, np.bool_)
    i = free
    while i >= 0:
        in_pool[i] = False
        i = pk[i, AFTER]
    for i in range(pool):
        if in_pool[i] and not pk[i, FLAGS] & IS_ANSWER:
            totals[IN_FLIGHT] += 1
    mean_rtt = rtt_sum / max(rtt_count, 1)
    return fl, lk, totals, samples[:taken], mean_rtt
