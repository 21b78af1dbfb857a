"""Tables that the packet kernel's functions share: their columns, and the tuples that carry them.

Numbers are int64, times in ticks (event_wheel), rates in bytes per tick. Named tuples keep argument lists short; the
compiler unpacks them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megascale.simulate.fabric.jit import inlined, memory_view

# Totals of a run, in `totals`; the last two are the kernel's own: the first free row of the pool, flows not finished.
(SENT, RESENT, DELIVERED, DROPPED, MARKED, NOTIFIED, PAUSES, OUT_OF_ORDER, DUPLICATE, TIMEOUTS, EVENTS, END, FULL,
 IN_FLIGHT, LOST, WIRE, FREE, UNFINISHED) = range(18)  # fmt: skip
# Columns of a packet's or event's row; 32 bytes, so that handling one touches one cache line.
FLOW, NUMBER, HOP, SIZE, FLAGS, SENT_AT, AFTER, BEFORE = range(8)
# Flags of a packet.
IS_MARKED = 1
IS_ANSWER = 2
IS_CNP = 4
IS_GO_BACK = 8
# Columns of a link: its sender's queue, and what the receiver says to it.
(FIRST, LAST, QUEUED, QUEUED_MOST, FREE_AT, WAKE_AT, PAUSED, PAUSE_REQUESTED, PAUSE_SENT, RESUME_SENT,
 PAUSED_FROM, PAUSED_FOR,
 PAUSE_COUNT, ARRIVED, CARRIED) = range(15)  # fmt: skip
# Columns of a flow.
(DONE_TO, FOLLOWING, HIGHEST, EXPECTED, NACKED, READY, PROGRESS, ARMED, RTO, TRIES, LAST_CNP, DONE,
 FAILED, ANSWERED) = range(14)  # fmt: skip
SLOTS = 1 << 17  # of the wheel, a tick each: 13.1 us, longer than a hop or an acknowledgement takes
CLOCK = (1 << 32) - 1  # a packet keeps the low half of its sending time: round trips are shorter than 0.4 s
UNLIMITED = 1 << 62
IN_HEAP = -1


class Links(NamedTuple):
    """Constant properties of links and switches.

    Attributes:
        nics: links below this number leave NICs.
        speed: [E] bytes per tick. delay: [E] ticks. node: [E] the sender's switch (0 for NICs, which have none).
        capacity, shared: [S] bytes of packet memory, and of it without PFC's headroom.
        pfc_alpha: share of the free shared memory that a link may hold; 0: no PFC.
        kmin, kmax: [E] bytes of a queue at which marking begins and is certain. pmax: probability just below kmax.
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
        path: [F, hops] links. hops: [F]. packets: [F]. last: [F] payload bytes of the last packet.
        start: [F] ticks. back: [F] ticks that an acknowledgement takes.
        by_nic, nic_first: flows of NIC e are by_nic[nic_first[e] : nic_first[e + 1]].
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
    """[E] ticks from and to which a link is down; [F] link at which a flow loses acknowledgements, -1: none."""

    down: Any
    up: Any
    flow: Any


class Rules(NamedTuple):
    """Settings of packets.PacketSettings in ticks and packets; `d`, `s`: vectors of DCQCN and Swift."""

    control: Any
    windowed: Any
    paced: Any
    d: Any
    s: Any
    cnp_gap: Any
    ack_every: Any
    window: Any
    mtu: Any
    header: Any
    rto_first: Any
    rto_most: Any
    retries: Any
    adaptive: Any


class Tables(NamedTuple):
    """State that changes during a simulation.

    Attributes:
        head, pk, count: the wheel (event_wheel), whose rows are packets and then a row for each other event.
        lk: [E, 16]. used: [S] bytes in a switch. fl: [F, 16]. cc: [F, COLUMNS] state of congestion control.
        turn: [nics] the next of a NIC's flows. totals: see above. random: [1] uint64.
        rtt: [2] sum of round trips in ticks, and how many.
        pool, wakes, pauses, resumes, timers: rows of pk: packets lie below pool, the events of link e at wakes + e and
            so on, the timer of flow f at timers + f.
    """

    head: Any
    pk: Any
    count: Any
    lk: Any
    used: Any
    fl: Any
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
    edges, flows = len(links.speed), len(paths.packets)
    timers = pool + 3 * edges
    pk = np.zeros((timers + flows, 8), np.int32)
    pk[:, BEFORE] = IN_HEAP
    pk[:pool, AFTER] = np.arange(1, pool + 1)
    pk[pool - 1, AFTER] = -1
    lk = np.zeros((edges, 16), np.int64)
    lk[:, FIRST] = lk[:, LAST] = -1
    lk[:, WAKE_AT] = UNLIMITED  # none pending
    fl = np.zeros((flows, 16), np.int64)
    fl[:, READY] = fl[:, PROGRESS] = paths.start
    fl[:, RTO] = rules.rto_first
    fl[:, LAST_CNP] = -UNLIMITED // 2
    fl[:, DONE] = fl[:, FAILED] = -1
    totals = np.zeros(18, np.int64)
    totals[UNFINISHED] = flows
    return Tables(
        np.full(SLOTS, -1, np.int32), pk, np.zeros(SLOTS // 64 + 1, np.int64), lk,
        np.zeros(len(links.capacity), np.int64), fl, cc, paths.nic_first[:-1].copy(), totals,
        np.array([seed * 2 + 1], np.uint64), np.zeros(2), pool, pool, pool + edges, pool + 2 * edges, timers,
    )  # fmt: skip


view = memory_view()


@inlined
def unowned(table):
    """The same memory, not counted."""
    return view(table.ctypes.data, table.shape, table.dtype)


@inlined
def unowned_tables(t):
    """See packet_tables.Tables."""
    return Tables(
        unowned(t.head), unowned(t.pk), unowned(t.count), unowned(t.lk), unowned(t.used), unowned(t.fl), unowned(t.cc),
        unowned(t.turn), unowned(t.totals), unowned(t.random), unowned(t.rtt), t.pool, t.wakes, t.pauses, t.resumes,
        t.timers,
    )  # fmt: skip


@inlined
def unowned_links(links):
    """See packet_tables.Links."""
    return Links(
        links.nics, unowned(links.speed), unowned(links.delay), unowned(links.node), unowned(links.capacity),
        unowned(links.shared), links.pfc_alpha, unowned(links.kmin), unowned(links.kmax), links.pmax,
    )  # fmt: skip


@inlined
def unowned_paths(paths):
    """See packet_tables.Paths."""
    return Paths(
        unowned(paths.path), unowned(paths.hops), unowned(paths.packets), unowned(paths.last), unowned(paths.start),
        unowned(paths.back), unowned(paths.by_nic), unowned(paths.nic_first),
    )  # fmt: skip


@inlined
def unowned_outages(outages):
    """See packet_tables.Outages."""
    return Outages(unowned(outages.down), unowned(outages.up), unowned(outages.flow))
