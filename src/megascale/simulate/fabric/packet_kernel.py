"""The packet kernel: one compiled loop over events. What it models, and what not, is said in packets.py.

Numbers are int64, times in ticks (event_wheel), rates in bytes a tick. Events: a packet (its arrival at the end of a
link, or its acknowledgement at the sender), waking a port, pausing and resuming one, a flow's retransmission timer.
"""

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
    after = np.full(timers + flows, -1, np.int32)
    before = np.full(timers + flows, IN_HEAP, np.int32)
    head = np.full(SLOTS, -1, np.int32)
    count = np.zeros(SLOTS // 64 + 1, np.int64)
    far = [(np.int64(MANY), np.int64(0))]

    p_flow = np.zeros(pool, np.int32)
    p_number = np.zeros(pool, np.int32)
    p_hop = np.zeros(pool, np.int8)
    p_size = np.zeros(pool, np.int32)
    p_sent = np.zeros(pool, np.int64)
    p_flags = np.zeros(pool, np.int8)  # 1 marked, 2 acknowledgement, 4 CNP, 8 go back
    free = 0
    for i in range(pool):
        after[i] = i + 1 if i + 1 < pool else -1

    q_head = np.full(links, -1, np.int32)
    q_tail = np.full(links, -1, np.int32)
    q_bytes = np.zeros(links, np.int64)
    q_most = np.zeros(links, np.int64)
    free_at = np.zeros(links, np.int64)
    wake_at = np.full(links, MANY, np.int64)  # MANY: none pending
    paused = np.zeros(links, np.bool_)
    asked = np.zeros(links, np.bool_)  # the receiver wants the link's sender to pause
    pause_sent = np.zeros(links, np.bool_)  # a pause frame is on its way
    resume_sent = np.zeros(links, np.bool_)
    paused_since = np.zeros(links, np.int64)
    paused_for = np.zeros(links, np.int64)
    pause_count = np.zeros(links, np.int64)
    arrived = np.zeros(links, np.int64)  # bytes in the switch that came over this link
    used = np.zeros(len(capacity), np.int64)
    carried = np.zeros(links, np.int64)

    una = np.zeros(flows, np.int64)
    following = np.zeros(flows, np.int64)
    highest = np.zeros(flows, np.int64)
    expected = np.zeros(flows, np.int64)
    asked_again = np.zeros(flows, np.bool_)
    ready = start.copy()
    progress = start.copy()
    armed = np.zeros(flows, np.bool_)
    rto = np.full(flows, rto_first, np.int64)
    tries = np.zeros(flows, np.int64)
    last_cnp = np.full(flows, -MANY // 2, np.int64)
    done = np.full(flows, -1, np.int64)
    failed = np.full(flows, -1, np.int64)
    turn = nic_first[:-1].copy()
    totals = np.zeros(16, np.int64)
    samples = np.zeros((4096 if sample_every > 0 else 0, 3), np.float64)
    taken, next_sample = 0, np.int64(0)
    rtt_sum, rtt_count = 0.0, 0
    flapping = flap_down.min() < MANY
    random = np.uint64(seed * 2 + 1)
    left = flows
    for e in range(nics):
        if nic_first[e] < nic_first[e + 1]:
            first = np.int64(MANY)
            for j in range(nic_first[e], nic_first[e + 1]):
                first = min(first, start[by_nic[j]])
            wake_at[e] = first
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
            samples[taken, 1] = q_bytes[watch]
            samples[taken, 2] = carried[watch]
            taken += 1
            next_sample = now - now % sample_every + sample_every
        while True:
            # One event of this tick: from the heap first, then from the slot.
            from_far = far[0][0] == now
            if from_far:
                event = np.int64(heapq.heappop(far)[1])
                if wakes <= event < pauses and (wake_at[event - wakes] != now or before[event] != IN_HEAP):
                    continue  # woken earlier in the meantime
            else:
                event = np.int64(head[now & (SLOTS - 1)])
                if event < 0:
                    break
                remove(head, after, before, count, now, event)
            totals[EVENTS] += 1
            kick, out, packet = -1, -1, -1

            if event < pool:
                i = event
                f = p_flow[i]
                if p_flags[i] & 2:  # at the sender: acknowledgement
                    got = p_number[i] - una[f]
                    if got > 0:
                        una[f] += got
                        following[f] = max(following[f], una[f])
                        progress[f] = now
                        tries[f] = 0
                        rto[f] = rto_first
                    rtt = now - p_sent[i]
                    if got >= 0:
                        cc[f, RTT] = rtt
                        rtt_sum += rtt
                        rtt_count += 1
                    if control == USE_SWIFT or control == USE_BOTH or control == USE_CUT:
                        if p_flags[i] & 8:
                            swift_loss(cc, f, now, s)
                        elif got > 0:
                            swift_delay(cc, f, now, np.float64(rtt), np.float64(got), s)
                    if p_flags[i] & 4:
                        if control == USE_CUT:
                            window_cut(cc, f, now, d, s)
                        elif control == USE_DCQCN or control == USE_BOTH:
                            dcqcn_cut(cc, f, now, d)
                    if p_flags[i] & 8:
                        following[f] = una[f]
                    after[i] = free
                    free = i
                    if una[f] < packets[f]:
                        kick = path[f, 0]
                elif flapping and flap_down[path[f, p_hop[i]]] <= now < flap_up[path[f, p_hop[i]]]:
                    totals[LOST] += 1  # the link is down
                    after[i] = free
                    free = i
                elif p_hop[i] + 1 == hops[f]:  # at the receiver
                    n = p_number[i]
                    flags = 2
                    answer = False
                    if n == expected[f]:
                        expected[f] += 1
                        totals[DELIVERED] += 1
                        asked_again[f] = False
                        if expected[f] == packets[f]:
                            done[f] = now
                            left -= 1
                            answer = True
                        elif expected[f] % ack_every == 0:
                            answer = True
                    elif n > expected[f]:
                        totals[OUT_OF_ORDER] += 1
                        if not asked_again[f]:
                            asked_again[f] = True
                            flags |= 8
                            answer = True
                    else:
                        totals[DUPLICATE] += 1
                        answer = True
                    if p_flags[i] & 1 and now - last_cnp[f] >= cnp_gap:
                        last_cnp[f] = now
                        totals[NOTIFIED] += 1
                        flags |= 4
                        answer = True
                    if answer and flapping and flap_flow[f] >= 0 and flap_down[flap_flow[f]] <= now < flap_up[flap_flow[f]]:
                        answer = False  # the acknowledgement is lost on its way back
                    if answer:
                        p_flags[i] = flags
                        p_number[i] = expected[f]
                        if back[f] < SLOTS:
                            insert(head, after, before, count, now + back[f], i)
                        else:
                            heapq.heappush(far, (now + back[f], np.int64(i)))
                    else:
                        after[i] = free
                        free = i
                else:  # at a switch
                    came, e = path[f, p_hop[i]], path[f, p_hop[i] + 1]
                    size, at = p_size[i], node[e]
                    if used[at] + size > capacity[at]:
                        totals[DROPPED] += 1
                        after[i] = free
                        free = i
                    else:
                        used[at] += size
                        arrived[came] += size
                        if pfc_alpha > 0.0 and not asked[came]:
                            most = max(np.float64(2 * mtu), pfc_alpha * (shared[at] - used[at]))
                            if arrived[came] > most and not pause_sent[came]:
                                asked[came] = True
                                pause_sent[came] = True
                                totals[PAUSES] += 1
                                pause_count[came] += 1
                                insert(head, after, before, count, now + delay[came] + 1, pauses + came)
                        if q_bytes[e] > kmin[e]:
                            if q_bytes[e] >= kmax[e]:
                                p_flags[i] |= 1
                                totals[MARKED] += 1
                            else:
                                random = random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
                                draw = np.float64(random >> np.uint64(11)) * 1.1102230246251565e-16
                                if draw < pmax * (q_bytes[e] - kmin[e]) / (kmax[e] - kmin[e]):
                                    p_flags[i] |= 1
                                    totals[MARKED] += 1
                        p_hop[i] += 1
                        if q_head[e] < 0 and free_at[e] <= now and not paused[e]:
                            out, packet = e, i
                        else:
                            after[i] = -1
                            if q_head[e] < 0:
                                q_head[e] = i
                            else:
                                after[q_tail[e]] = i
                            q_tail[e] = i
                            q_bytes[e] += size
                            q_most[e] = max(q_most[e], q_bytes[e])
                            if wake_at[e] == MANY and not paused[e]:
                                wake_at[e] = max(free_at[e], now + 1)
                                insert(head, after, before, count, wake_at[e], wakes + e)
            elif event < pauses:  # a port wakes
                e = event - wakes
                wake_at[e] = MANY
                if e < nics:
                    kick = e
                elif not paused[e] and q_head[e] >= 0:
                    out = e
            elif event < resumes:
                e = event - pauses
                pause_sent[e] = False
                if not paused[e]:
                    paused[e] = True
                    paused_since[e] = now
            elif event < timers:
                e = event - resumes
                resume_sent[e] = False
                if paused[e]:
                    paused[e] = False
                    paused_for[e] += now - paused_since[e]
                if e < nics:
                    kick = e
                elif q_head[e] >= 0 and wake_at[e] == MANY:
                    wake_at[e] = max(free_at[e], now + 1)
                    insert(head, after, before, count, wake_at[e], wakes + e)
                if asked[e] and arrived[e] < mtu:  # what asked again has drained while this frame was on its way
                    asked[e] = False
                    resume_sent[e] = True
                    insert(head, after, before, count, now + delay[e] + 2, event)
            else:  # a retransmission timer
                f = event - timers
                armed[f] = False
                if una[f] < packets[f] and una[f] < highest[f] and failed[f] < 0:
                    due = progress[f] + rto[f]
                    if now < due:
                        armed[f] = True
                        heapq.heappush(far, (due, np.int64(timers + f)))
                    elif tries[f] >= retries:
                        failed[f] = now
                        left -= 1
                    else:
                        tries[f] += 1
                        totals[TIMEOUTS] += 1
                        if adaptive:
                            rto[f] = min(2 * rto[f], rto_most)
                            if rto[f] < rto_most:
                                tries[f] = 0  # only full time-outs count against the retries
                        progress[f] = now
                        following[f] = una[f]
                        if control == USE_SWIFT or control == USE_BOTH or control == USE_CUT:
                            swift_loss(cc, f, now, s)
                        armed[f] = True
                        heapq.heappush(far, (now + rto[f], np.int64(timers + f)))
                        kick = path[f, 0]

            if out >= 0:  # a switch port sends: a packet that found it free, or the head of its queue
                e = out
                if packet >= 0:
                    i = packet
                else:
                    i = q_head[e]
                    q_head[e] = after[i]
                    q_bytes[e] -= p_size[i]
                f = p_flow[i]
                size, at, came = p_size[i], node[e], path[f, p_hop[i] - 1]
                used[at] -= size
                arrived[came] -= size
                if asked[came] and not resume_sent[came]:
                    most = max(np.float64(2 * mtu), pfc_alpha * (shared[at] - used[at]))
                    if arrived[came] <= most - mtu:
                        asked[came] = False
                        resume_sent[came] = True
                        insert(head, after, before, count, now + delay[came] + 2, resumes + came)
                took = np.int64(size / speed[e] + 0.5)
                free_at[e] = now + took
                carried[e] += size
                insert(head, after, before, count, now + took + delay[e], i)
                if q_head[e] >= 0:
                    wake_at[e] = free_at[e]
                    insert(head, after, before, count, wake_at[e], wakes + e)

            if kick >= 0 and free_at[kick] > now:
                if wake_at[kick] == MANY:
                    wake_at[kick] = free_at[kick]
                    insert(head, after, before, count, wake_at[kick], wakes + kick)
            elif kick >= 0 and not paused[kick]:  # a NIC may send
                e = kick
                low, high = nic_first[e], nic_first[e + 1]
                chosen, soonest = -1, np.int64(MANY)
                j = turn[e]
                for _ in range(high - low):
                    f = by_nic[j]
                    j = j + 1 if j + 1 < high else low
                    if following[f] >= packets[f] or failed[f] >= 0:
                        continue
                    allowed = window
                    if control == USE_SWIFT or control == USE_BOTH or control == USE_CUT:
                        allowed = min(window, max(1, np.int64(cc[f, CWND])))
                    if following[f] - una[f] >= allowed:
                        continue
                    if ready[f] <= now:
                        chosen = f
                        break
                    soonest = min(soonest, ready[f])
                if chosen >= 0:
                    turn[e] = j
                    f = chosen
                    if free < 0:
                        totals[FULL] = 1
                        left = 0
                        break
                    i = free
                    free = after[i]
                    n = following[f]
                    size = header + (last[f] if n + 1 == packets[f] else mtu)
                    p_flow[i] = f
                    p_number[i] = n
                    p_hop[i] = 0
                    p_size[i] = size
                    p_sent[i] = now
                    p_flags[i] = 0
                    following[f] = n + 1
                    totals[SENT] += 1
                    totals[WIRE] += size
                    if n < highest[f]:
                        totals[RESENT] += 1
                    else:
                        highest[f] = n + 1
                    took = np.int64(size / speed[e] + 0.5)
                    free_at[e] = now + took
                    carried[e] += size
                    gap = 0.0
                    if control == USE_DCQCN or control == USE_BOTH:
                        dcqcn_advance(cc, f, np.float64(now), d)
                        dcqcn_sent(cc, f, np.float64(size), d)
                        gap = size / cc[f, RATE]
                    if (control == USE_SWIFT or control == USE_BOTH or control == USE_CUT) and cc[f, CWND] < 1.0:
                        gap = max(gap, cc[f, RTT] / cc[f, CWND])
                    ready[f] = now + np.int64(gap)
                    insert(head, after, before, count, now + took + delay[e], i)
                    if not armed[f]:
                        armed[f] = True
                        progress[f] = max(progress[f], now)
                        heapq.heappush(far, (now + rto[f], np.int64(timers + f)))
                    soonest = free_at[e]
                    if high - low == 1:
                        soonest = max(soonest, ready[f])
                        if following[f] >= packets[f]:
                            soonest = np.int64(MANY)
                if soonest < wake_at[e]:
                    if wake_at[e] != MANY and before[wakes + e] != IN_HEAP:
                        remove(head, after, before, count, wake_at[e], wakes + e)
                    wake_at[e] = soonest
                    if soonest - now < SLOTS:
                        insert(head, after, before, count, soonest, wakes + e)
                    else:
                        before[wakes + e] = IN_HEAP
                        heapq.heappush(far, (soonest, np.int64(wakes + e)))
        # The slot is done; go on with the next tick.
        now += 1
    totals[END] = now
    for e in range(links):
        if paused[e]:
            paused_for[e] += now - paused_since[e]
    in_pool = np.ones(pool, np.bool_)
    i = free
    while i >= 0:
        in_pool[i] = False
        i = after[i]
    for i in range(pool):
        if in_pool[i] and not p_flags[i] & 2:
            totals[IN_FLIGHT] += 1
    mean_rtt = rtt_sum / max(rtt_count, 1)
    return (
        done, failed, expected, totals, q_most, paused_for, pause_count, carried, samples[:taken], mean_rtt,
    )  # fmt: skip
