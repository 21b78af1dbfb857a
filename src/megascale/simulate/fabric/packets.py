"""The packet level: every packet over every link, with finite buffers, ECN, PFC, go-back-N and congestion control.

Modelled: store-and-forward output queues, first come first served; one lossless class; packet memory shared by a
switch's ports; RED marking on the instantaneous queue; PFC by the bytes that came over a link, with a dynamic
threshold and headroom, pause and resume frames that take the link's delay; NICs that serve their flows round-robin;
go-back-N with one request a gap; retransmission timers with retries, fixed or adaptive; flapping links that lose what
crosses them.

Not modelled: queues of acknowledgements and notifications, which have a class of their own with strict priority (they
return after the path's plain delay); cut-through switching; PCIe and host delay; several lossless classes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from megascale.errors import ConfigError, FitError
from megascale.simulate.fabric import packet_tables as tables
from megascale.simulate.fabric.control_settings import SETS, DcqcnSettings, SwiftSettings, control_number
from megascale.simulate.fabric.ecmp import Flows
from megascale.simulate.fabric.topology import Floats, Ints, Topology

TICK = 1e-10
NEVER = 1 << 62
# Most packets of one run, and how many a core simulates per second (docs/network.md).
MOST_PACKETS, PACKETS_PER_SECOND = 500_000_000, 1e6
# Seconds between two looks at a run's progress.
PROGRESS_SECONDS = 0.1
COUNTERS = (
    "sent", "resent", "delivered", "dropped", "marked", "notified", "pauses", "out_of_order", "duplicate", "timeouts",
    "events", "end", "full", "in_flight", "lost", "wire",
)  # fmt: skip


@dataclass(frozen=True)
class Flap:
    """A link that is down for a while: `link` (both directions) from `at` for `lasts` seconds."""

    link: int
    at: float
    lasts: float

    def __post_init__(self) -> None:
        if self.at < 0 or self.lasts < 0:
            raise ConfigError(f"flap at {self.at:g} s for {self.lasts:g} s: times are 0 or more")


@dataclass(frozen=True)
class PacketSettings:
    """Attributes:

    control: none, dcqcn, swift, hybrid-both or hybrid-cut.
    mtu: payload bytes of a packet (RoCE's largest). header: preamble, gap, Ethernet, IP, UDP, BTH, ICRC: 82 bytes.
    pfc: whether switches pause their neighbours. pfc_alpha: a link may hold this share of the free shared memory
        (HPCC's setting, 1/8).
    window_mb: most bytes under way a flow: NCCL's buffer of a channel is 4 MiB.
    ack_every: packets an acknowledgement; Swift and the hybrids need each round trip and take 1.
    timeout: the queue pair's, as an exponent: 4.096 us x 2^timeout. retries: as NCCL_IB_RETRY_CNT.
    adaptive_us: first adaptive retransmission timer, doubled up to the queue pair's; 0: not adaptive.
    """

    control: str = "dcqcn"
    dcqcn: DcqcnSettings = SETS["fast"]
    swift: SwiftSettings = field(default_factory=SwiftSettings)
    mtu: int = 4096
    header: int = 82
    pfc: bool = True
    pfc_alpha: float = 0.125
    window_mb: float = 4.194304
    ack_every: int = 4
    timeout: int = 14
    retries: int = 7
    adaptive_us: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        control_number(self.control)
        if self.mtu < 64 or self.header < 0 or self.ack_every < 1 or self.window_mb <= 0 or self.pfc_alpha <= 0:
            raise ConfigError(
                f"packets: mtu={self.mtu} is at least 64, header={self.header} at least 0, ack_every="
                f"{self.ack_every} at least 1, window_mb={self.window_mb:g} and pfc_alpha={self.pfc_alpha:g} positive"
            )
        if not 1 <= self.timeout <= 31 or not 0 <= self.retries <= 7 or self.adaptive_us < 0:
            raise ConfigError(
                f"packets: timeout={self.timeout} lies in 1..31, retries={self.retries} in 0..7, adaptive_us="
                f"{self.adaptive_us:g} is 0 or more"
            )

    @property
    def payload_share(self) -> float:
        """Part of a link's bandwidth that carries payload."""
        return self.mtu / (self.mtu + self.header)


@dataclass(frozen=True)
class PacketResult:
    """Attributes:

    finish: [F] seconds at which the last byte of a flow arrived, nan if it never did.
    aborted: [F] seconds at which a flow gave up, nan if it did not.
    counts: see COUNTERS.
    queue_most: [E] largest queue of each link's sender, bytes.
    pause_seconds: [E] how long each link's sender was paused. pause_count: [E].
    carried: [E] bytes sent over each link.
    samples: [n, 3] seconds, bytes in the watched queue, bytes that the watched link has sent.
    mean_rtt: seconds.
    wall, cpu: seconds this took.
    """

    finish: Floats
    aborted: Floats
    counts: dict[str, int]
    queue_most: Ints
    pause_seconds: Floats
    pause_count: Ints
    carried: Ints
    samples: Floats
    mean_rtt: float
    wall: float
    cpu: float
    settings: PacketSettings = field(repr=False, default=PacketSettings())

    @property
    def packets_per_second(self) -> float:
        """Packets sent a second of one core."""
        return self.counts["sent"] / max(self.cpu, 1e-9)


def simulate_packets(
    topology: Topology,
    flows: Flows,
    paths: Ints,
    settings: PacketSettings = PacketSettings(),
    *,
    starts: Floats | None = None,
    flaps: tuple[Flap, ...] = (),
    horizon: float = 3600.0,
    sample_every: float = 0.0,
    watch: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> PacketResult:
    """Run flows over their paths to the end, or to `until` seconds.

    An interruption (Ctrl-C) ends the run and goes on to the caller.

    Args:
        paths: [F, hops] links from NIC to NIC, as ecmp.route gives them.
        starts: [F] seconds; default all at 0.
        sample_every: seconds between samples of the link `watch`; 0: none.
        progress: called several times per second with the share of packets that have arrived, 0 to 1.

    Raises:
        ConfigError: a flow without a path, negative times, more packets than MOST_PACKETS; numba is not installed.
        FitError: a path over a failed link, or more packets under way than the pool holds.
    """
    if len(flows) == 0:
        raise ConfigError("no flows to simulate: all traffic stays inside hosts")
    if (paths[:, 0] < 0).any() or (paths >= topology.links).any():
        raise ConfigError("a flow has no path; route flows between NICs of the fabric first")
    if starts is not None and (starts < 0).any():
        raise ConfigError(f"a flow starts at {starts.min():g} s: delays are 0 or more")
    if flows.size.min() <= 0:
        raise ConfigError("a flow of 0 bytes has no packets; leave it out")
    packets = float(np.ceil(flows.size / settings.mtu).sum())
    if packets > MOST_PACKETS:
        raise ConfigError(
            f"{packets:.3g} packets would take about {packets / PACKETS_PER_SECOND / 60:,.0f} minutes, and at most "
            f"{MOST_PACKETS:.0e} are simulated; send fewer or smaller flows (--mb, --senders, --hosts), or use the "
            "flow level (megascale network flows)"
        )
    from megascale.simulate.fabric import packet_kernel

    run: Any = packet_kernel.run

    links, compact, hops = _compact(paths)
    if (topology.bandwidth[links] <= 0).any():
        raise FitError("a path crosses a failed link; route flows around it first")

    def fresh() -> tuple[Any, ...]:
        return _arguments(topology, flows, settings, links, compact, hops, starts, flaps)

    stop = min(NEVER, int(horizon / TICK))
    watched = int(np.searchsorted(links, watch)) if watch is not None else 0
    if not run.signatures:
        run(*fresh(), 0, 0, 0)  # compiled, or read from the cache, before the clock starts
    arguments = fresh()
    found: tables.Tables = arguments[0]
    wall = time.perf_counter()
    (samples, mean_rtt), cpu = _run_interruptibly(
        lambda: run(*arguments, stop, int(sample_every / TICK), watched), found, packets, progress
    )
    wall = time.perf_counter() - wall
    fl, lk, totals = found.fl, found.lk, found.totals
    done, failed = fl[:, tables.DONE], fl[:, tables.FAILED]
    if totals[COUNTERS.index("full")]:
        raise FitError("more packets are under way than the pool holds; use a smaller window_mb or fewer flows")

    def spread(values: Any, kind: type) -> Any:
        whole: Any = np.zeros(topology.links, kind)
        whole[links] = values
        return whole

    samples = samples.copy()
    samples[:, 0] *= TICK
    return PacketResult(
        finish=np.where(done >= 0, done * TICK, np.nan),
        aborted=np.where(failed >= 0, failed * TICK, np.nan),
        counts=dict(zip(COUNTERS, (int(x) for x in totals[: len(COUNTERS)]), strict=True)),
        queue_most=spread(lk[:, tables.QUEUED_MOST], np.int64),
        pause_seconds=spread(lk[:, tables.PAUSED_FOR] * TICK, np.float64),
        pause_count=spread(lk[:, tables.PAUSE_COUNT], np.int64),
        carried=spread(lk[:, tables.CARRIED], np.int64),
        samples=samples,
        mean_rtt=mean_rtt * TICK,
        wall=wall,
        cpu=cpu,
        settings=settings,
    )


def _run_interruptibly(
    kernel: Callable[[], Any], found: tables.Tables, packets: float, progress: Callable[[float], None] | None
) -> tuple[Any, float]:
    """Run the kernel in a thread and return (its result, CPU seconds).

    Compiled code looks at no signals, so this thread waits for it. On an interruption the count of unfinished flows
    becomes negative, which is where the kernel's loop ends.
    """
    result: list[Any] = []
    problem: list[BaseException] = []

    def work() -> None:
        began = time.thread_time()
        try:
            result.append(kernel())
        except BaseException as error:
            problem.append(error)
        result.append(time.thread_time() - began)

    worker = threading.Thread(target=work, name="packet-kernel", daemon=True)
    worker.start()
    try:
        running = True
        while running:
            worker.join(PROGRESS_SECONDS)
            running = worker.is_alive()
            if progress is not None:
                progress(min(1.0, float(found.totals[tables.DELIVERED]) / packets))
    except BaseException:
        found.totals[tables.LEFT] = -NEVER
        worker.join()
        raise
    if problem:
        raise problem[0]
    returned, seconds = result
    return returned, float(seconds)


def _compact(paths: Ints) -> tuple[Ints, Ints, Ints]:
    """(links used, [F, hops] their positions with gaps closed, [F] hops)."""
    used = paths >= 0
    links, numbers = np.unique(paths[used], return_inverse=True)
    order = np.argsort(~used, axis=1, kind="stable")
    filled = np.zeros(paths.shape, np.int64)
    filled[used] = numbers
    return links, np.take_along_axis(filled, order, axis=1), used.sum(axis=1)


def _arguments(
    topology: Topology, flows: Flows, settings: PacketSettings, links: Ints, path: Ints, hops: Ints,
    starts: Floats | None, flaps: tuple[Flap, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """What the kernel takes, in ticks and bytes."""
    count = len(flows)
    speed = topology.bandwidth[links] * TICK
    ticks = round(topology.spec.cable_ns * 1e-9 / TICK)
    delay = np.full(len(links), ticks, np.int64)
    nics = int(np.searchsorted(links, topology.nics))
    node = np.maximum(topology.tail[links] - topology.nics, 0)
    switches = topology.leaves + topology.aggregations + topology.cores
    capacity = np.full(switches, int(topology.spec.buffer_mb * 1e6), np.int64)
    room = 2 * ticks * topology.bandwidth * TICK + 3 * (settings.mtu + settings.header)
    into = topology.head >= topology.nics
    headroom = np.bincount(topology.head[into] - topology.nics, weights=room[into], minlength=switches)
    shared = capacity - headroom.astype(np.int64)
    if settings.pfc and (shared <= 0).any():
        raise FitError(
            f"buffer_mb={topology.spec.buffer_mb:g} does not hold the headroom that PFC needs "
            f"({headroom.max() / 1e6:.1f} MB); use a larger buffer_mb or a shorter cable_ns"
        )
    kmin, kmax = settings.dcqcn.kmin_kb * 1e3, settings.dcqcn.kmax_kb * 1e3
    scale = topology.bandwidth[links] / (25e9 / 8) if settings.dcqcn.scale_ecn else np.ones(len(links))
    marks = settings.control not in ("none", "swift")
    packets = np.maximum(1, np.ceil(flows.size / settings.mtu)).astype(np.int64)
    last = np.maximum(1, np.ceil(flows.size - (packets - 1) * settings.mtu)).astype(np.int64)
    start = np.zeros(count, np.int64) if starts is None else np.round(starts / TICK).astype(np.int64)
    line = speed[path[:, 0]]
    small = 64 + settings.header - 12
    slow = np.array([(1.0 / speed[path[f, : hops[f]]]).sum() for f in range(count)]) if count < 2000 else hops / line
    back = (hops * ticks + small * slow).astype(np.int64)
    base_rtt = back + hops * ticks + (settings.mtu + settings.header) * slow
    down, up = np.full(len(links), NEVER, np.int64), np.zeros(len(links), np.int64)
    flap_flow = np.full(count, -1, np.int64)
    for flap in flaps:
        both = _both_directions(topology, flap.link)
        at = np.flatnonzero(np.isin(links, both))
        down[at], up[at] = round(flap.at / TICK), round((flap.at + flap.lasts) / TICK)
        crosses = np.isin(path, at) & (np.arange(path.shape[1]) < hops[:, None])
        own = crosses.any(axis=1)
        flap_flow[own] = path[own, crosses[own].argmax(axis=1)]
    outages = tables.Outages(down, up, flap_flow)
    by_nic = np.argsort(path[:, 0], kind="stable")
    nic_first = np.searchsorted(path[by_nic, 0], np.arange(nics + 1))
    window = max(1, int(settings.window_mb * 1e6 / settings.mtu))
    from megascale.simulate.fabric.control_vectors import state_and_vectors

    cc, d, s, cnp = state_and_vectors(
        settings.dcqcn, settings.swift, settings.mtu + settings.header, line, hops, base_rtt.astype(float), window, TICK
    )
    rto = round(4.096e-6 * 2**settings.timeout / TICK)
    first = round(settings.adaptive_us * 1e-6 / TICK) if settings.adaptive_us else rto
    pool = int(min(2 * np.minimum(packets, window).sum() + 1024, 1 << 23))
    on = settings.control not in ("none", "dcqcn")  # Swift or a hybrid: a window that follows each round trip
    edges = tables.Links(
        nics, speed, delay, node, capacity, shared, settings.pfc_alpha if settings.pfc else 0.0,
        kmin * scale if marks else np.full(len(links), np.inf), kmax * scale, settings.dcqcn.pmax,
    )  # fmt: skip
    ways = tables.Paths(
        np.ascontiguousarray(path, np.int32), hops.astype(np.int64), packets, last, start, back, by_nic, nic_first
    )
    rules = tables.Rules(
        control_number(settings.control), on, settings.control in ("dcqcn", "hybrid-both"), d, s, cnp,
        1 if on else settings.ack_every, window, settings.mtu, settings.header, min(first, rto), rto,
        settings.retries, bool(settings.adaptive_us),
    )  # fmt: skip
    return tables.new_tables(edges, ways, rules, cc, pool, settings.seed), edges, ways, outages, rules


def _both_directions(topology: Topology, link: int) -> Ints:
    """A link and the one back."""
    a, b = topology.tail[link], topology.head[link]
    half = {0: topology.nics, 1: topology.uplinks.size, 2: topology.core_links.size}[int(topology.tier[link])]
    back = link + half if a < b else link - half
    return np.array([link, back])


def compare_controls(
    topology: Topology,
    flows: Flows,
    paths: Ints,
    settings: PacketSettings,
    controls: tuple[str, ...],
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, PacketResult]:
    """Simulate the same traffic under each control; `progress` is called with a control and its share of packets."""
    results = {}
    for name in controls:
        share = None if progress is None else partial(progress, name)
        results[name] = simulate_packets(topology, flows, paths, replace(settings, control=name), progress=share)
    return results
