"""Tables that the functions of the packet kernel share: their columns, and named tuples of tables and constants.

Values are int64, times are in ticks (event_wheel.py), rates in bytes per tick. The compiler unpacks named tuples, so
that they cost nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megascale.simulate.fabric.jit import inlined, memory_view

# Indices into `totals`, the counters of a run. The last two are internal: the first free row of the pool, and the
# number of unfinished flows. WIRE counts bytes, headers included, and FULL is 1 if the pool had no free row.
(SENT, RESENT, DELIVERED, DROPPED, MARKED, NOTIFIED, PAUSES, OUT_OF_ORDER, DUPLICATE, TIMEOUTS, EVENTS, END, FULL,
 IN_FLIGHT, LOST, WIRE, FREE, UNFINISHED) = range(18)  # fmt: skip
# Columns of a row of `rows`: a packet or another event. A row has 32 bytes, which lie in one cache line. AFTER and
# BEFORE are the neighbours in a list: of a wheel's slot, of a queue, or of the free rows.
FLOW, NUMBER, HOP, SIZE, FLAGS, SENT_AT, AFTER, BEFORE = range(8)
# Flags of a packet.
IS_MARKED = 1
IS_ANSWER = 2
IS_CNP = 4
IS_GO_BACK = 8
# Columns of a row of `ports`: the queue of a link's sender, and the pause state. FIRST and LAST are the packets at the
# queue's ends, QUEUED its bytes. The sender is busy until FREE_AT and acts again at WAKE_AT. PAUSED tells whether the
# sender is paused, since PAUSED_FROM and for PAUSED_FOR ticks before that. PAUSE_REQUESTED tells whether the receiver
# wants a pause; PAUSE_SENT and RESUME_SENT tell whether such a frame is on its way. ARRIVED counts bytes that came over
# the link and are still in the switch, CARRIED all bytes sent.
(FIRST, LAST, QUEUED, MAX_QUEUED, FREE_AT, WAKE_AT, PAUSED, PAUSE_REQUESTED, PAUSE_SENT, RESUME_SENT,
 PAUSED_FROM, PAUSED_FOR, ARRIVED, CARRIED) = range(14)  # fmt: skip
# Columns of a row of `flows`: a flow. Packets below DONE_TO are acknowledged, FOLLOWING is the next to send, HIGHEST
# the first that was never sent, EXPECTED the next that the receiver accepts. NACKED is 1 if the receiver has reported
# the present gap. READY is the earliest time of the next send. ARMED is 1 if the flow's timer is set, RTO is its
# period, and TRIES counts retries. The timer runs from PROGRESS, the last acknowledgement or retry; ANSWERED is the
# last acknowledgement. LAST_CNP, DONE and FAILED are the times of these events.
(DONE_TO, FOLLOWING, HIGHEST, EXPECTED, NACKED, READY, PROGRESS, ARMED, RTO, TRIES, LAST_CNP, DONE,
 FAILED, ANSWERED) = range(14)  # fmt: skip
SLOTS = 1 << 17  # slots of the wheel, one per tick: 13.1 us, longer than a hop or an acknowledgement
CLOCK = (1 << 32) - 1  # a packet stores the low 32 bits of its sending time, since round trips are shorter than 0.4 s
UNLIMITED = 1 << 62  # ticks
IN_HEAP = -1  # value of BEFORE of an event that is not in the wheel


class Links(NamedTuple):
    """Constant properties of links and switches.

    Attributes:
        nics: number of NICs; link e with e < nics starts at NIC e.
        speed: [E] bytes per tick.
        delay: [E] ticks.
        node: [E] the sender's switch (0 for NICs).
        capacity: [S] bytes of a switch's packet memory.
        shared: [S] the same without PFC's headroom.
        pfc_alpha: share of the free shared memory that a link's packets may occupy; 0: no PFC.
        kmin, kmax: [E] bytes of a queue from which on packets are marked sometimes, and always.
        pmax: probability of a mark just below kmax.
    """

    nics: Any
    speed: Any
    delay: Any
    node: Any
    capacity: Any
    shared: Any
    pfc_alpha: Any
    kmin: Any
    kmax: Any
    pmax: Any


class Paths(NamedTuple):
    """Constant properties of flows.

    Attributes:
        path: [F, hops] links.
        hops, packets: [F] number of hops and of packets.
        last: [F] payload bytes of the last packet.
        start: [F] ticks.
        back: [F] ticks that an acknowledgement takes.
        by_nic, nic_first: the flows of NIC e are by_nic[nic_first[e] : nic_first[e + 1]].
    """

    path: Any
    hops: Any
    packets: Any
    last: Any
    start: Any
    back: Any
    by_nic: Any
    nic_first: Any


class Outages(NamedTuple):
    """Outages of links.

    Attributes:
        down, up: [E] ticks at which a link goes down and comes up again.
        flow: [F] link of the flow's path that goes down, where acknowledgements are lost too; -1: none.
    """

    down: Any
    up: Any
    flow: Any


class Rules(NamedTuple):
    """Values of `packets.PacketSettings` in ticks and packets.

    Attributes:
        control: number of the congestion control (control_settings.py).
        has_window, has_rate: whether the control has a window (Swift), and a rate (DCQCN).
        dcqcn, swift: parameter vectors of the two controls (control_vectors.py).
        cnp_gap: minimum ticks between two notifications of a flow.
        rto_first, rto_max: first and longest retransmission timer.
    """

    control: Any
    has_window: Any
    has_rate: Any
    dcqcn: Any
    swift: Any
    cnp_gap: Any
    ack_every: Any
    window: Any
    mtu: Any
    header: Any
    rto_first: Any
    rto_max: Any
    retries: Any
    adaptive: Any


class Tables(NamedTuple):
    """State that changes during a simulation.

    Attributes:
        head, rows, count: the wheel (event_wheel.py). Packets come first in
            `rows`, then one row for each other event.
        ports: [E, 16] links.
        used: [S] bytes in a switch.
        flows: [F, 16] flows.
        cc: [F, COLUMNS] state of congestion control.
        turn: [nics] index in `by_nic` of the flow with which a NIC goes on.
        totals: [18] counters.
        random: [1] uint64, state of the random numbers.
        rtt: [2] sum of round trips in ticks, and their number.
        pool: number of rows for packets.
        wakes, pauses, resumes: first row of each kind of link event; link e has row wakes + e, and so on.
        timers: first row of the flows' timers; flow f has row timers + f.
    """

    head: Any
    rows: Any
    count: Any
    ports: Any
    used: Any
    flows: Any
    cc: Any
    turn: Any
    totals: Any
    random: Any
    rtt: Any
    pool: Any
    wakes: Any
    pauses: Any
    resumes: Any
    timers: Any


def new_tables(links: Links, paths: Paths, rules: Rules, cc: Any, pool: int, seed: int) -> Tables:
    """Return tables in which all flows wait for their start and all rows of the pool are free."""
    link_count = len(links.speed)
    flow_count = len(paths.packets)
    timers = pool + 3 * link_count
    rows = np.zeros((timers + flow_count, 8), np.int32)
    rows[:, BEFORE] = IN_HEAP
    rows[:pool, AFTER] = np.arange(1, pool + 1)
    rows[pool - 1, AFTER] = -1
    ports = np.zeros((link_count, 16), np.int64)
    ports[:, FIRST] = ports[:, LAST] = -1
    ports[:, WAKE_AT] = UNLIMITED  # none pending
    flows = np.zeros((flow_count, 16), np.int64)
    flows[:, READY] = flows[:, PROGRESS] = paths.start
    flows[:, RTO] = rules.rto_first
    flows[:, LAST_CNP] = -UNLIMITED // 2
    flows[:, DONE] = flows[:, FAILED] = -1
    totals = np.zeros(18, np.int64)
    totals[UNFINISHED] = flow_count
    return Tables(
        np.full(SLOTS, -1, np.int32), rows, np.zeros(SLOTS // 64 + 1, np.int64), ports,
        np.zeros(len(links.capacity), np.int64), flows, cc, paths.nic_first[:-1].copy(), totals,
        np.array([seed * 2 + 1], np.uint64), np.zeros(2), pool, pool, pool + link_count, pool + 2 * link_count, timers,
    )  # fmt: skip


view = memory_view()


@inlined
def unowned(table):
    """Return a view of a table without reference counting, which would cost time in each call."""
    return view(table.ctypes.data, table.shape, table.dtype)


@inlined
def unowned_tables(t):
    """Return the tables as views without reference counting."""
    return Tables(
        unowned(t.head), unowned(t.rows), unowned(t.count), unowned(t.ports), unowned(t.used), unowned(t.flows),
        unowned(t.cc), unowned(t.turn), unowned(t.totals), unowned(t.random), unowned(t.rtt), t.pool, t.wakes, t.pauses,
        t.resumes, t.timers,
    )  # fmt: skip


@inlined
def unowned_links(links):
    """Return the links' tables as views without reference counting."""
    return Links(
        links.nics, unowned(links.speed), unowned(links.delay), unowned(links.node), unowned(links.capacity),
        unowned(links.shared), links.pfc_alpha, unowned(links.kmin), unowned(links.kmax), links.pmax,
    )  # fmt: skip


@inlined
def unowned_paths(paths):
    """Return the flows' tables as views without reference counting."""
    return Paths(
        unowned(paths.path), unowned(paths.hops), unowned(paths.packets), unowned(paths.last), unowned(paths.start),
        unowned(paths.back), unowned(paths.by_nic), unowned(paths.nic_first),
    )  # fmt: skip


@inlined
def unowned_outages(outages):
    """Return the outages' tables as views without reference counting."""
    return Outages(unowned(outages.down), unowned(outages.up), unowned(outages.flow))
