"""The packet level: simulates every packet on every link, with finite buffers and congestion control.

The model has

- store-and-forward output queues, first come first served, in one lossless class,
- packet memory that the ports of a switch share,
- RED marking (ECN) by the present length of the queue,
- PFC by the bytes that came over a link, with a dynamic threshold and headroom; pause frames take the link's delay,
- NICs that serve their flows round-robin,
- go-back-N with one request per gap, and retransmission timers with retries, fixed or adaptive,
- flapping links that lose the packets on them.

The model leaves out queues of acknowledgements and notifications, which have a class with strict priority and return
after the path's delay. It also leaves out cut-through switching, PCIe and host delay, and several lossless classes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from megascale.errors import ConfigError, FitError
from megascale.simulate.fabric import packet_tables as tables
from megascale.simulate.fabric.control_settings import SETS, DcqcnSettings, SwiftSettings, control_number
from megascale.simulate.fabric.ecmp import Flows
from megascale.simulate.fabric.topology import Floats, Ints, Topology

TICK = 1e-10  # seconds; times of the kernel are counted in ticks
NEVER = 1 << 62  # ticks
MAX_PACKETS = 500_000_000  # of one run
PACKETS_PER_SECOND = 1e6  # that a core simulates, roughly (docs/network.md)
PROGRESS_SECONDS = 0.1  # between two reports of progress
# Names of the kernel's counters, in order; packet_tables.py explains them.
COUNTERS = (
    "sent", "resent", "delivered", "dropped", "marked", "notified", "pauses", "out_of_order", "duplicate", "timeouts",
    "events", "end", "full", "in_flight", "lost", "wire",
)  # fmt: skip


@dataclass(frozen=True)
class Flap:
    """A temporary outage of a link, in both directions.

    Attributes:
        link: index of the link in one direction.
        start: beginning of the outage, in seconds.
        duration: length of the outage, in seconds.
    """

    link: int
    start: float
    duration: float

    def __post_init__(self) -> None:
        if self.start < 0 or self.duration < 0:
            raise ConfigError(f"flap at {self.start:g} s for {self.duration:g} s: times must be 0 or more")


@dataclass(frozen=True)
class PacketSettings:
    """Settings of a simulation at the packet level.

    Attributes:
        control: congestion control: none, dcqcn, swift, hybrid-both or hybrid-cut.
        dcqcn, swift: settings of the two controls.
        mtu: payload bytes of a packet; the default is RoCE's maximum.
        header: bytes besides the payload: preamble, gap, Ethernet, IP, UDP, BTH, ICRC.
        pfc: whether switches pause their neighbours.
        pfc_alpha: share of the free shared memory that a link's packets may occupy (HPCC's setting, 1/8).
        window_mb: maximum MB in flight per flow; NCCL's buffer of a channel is 4 MiB.
        ack_every: packets per acknowledgement. Swift and the hybrids use 1, because they measure each round trip.
        timeout: exponent of the queue pair's retransmission timer, 4.096 us x 2^timeout (NCCL_IB_TIMEOUT).
        retries: number of retries (NCCL_IB_RETRY_CNT).
        adaptive_us: first adaptive retransmission timer, which doubles up to the queue pair's timer; 0: fixed timer.
        seed: seed of the random marking.
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
                f"packets: mtu={self.mtu} must be at least 64, header={self.header} at least 0, ack_every="
                f"{self.ack_every} at least 1, window_mb={self.window_mb:g} and pfc_alpha={self.pfc_alpha:g} positive"
            )
        if not 1 <= self.timeout <= 31 or not 0 <= self.retries <= 7 or self.adaptive_us < 0:
            raise ConfigError(
                f"packets: timeout={self.timeout} must be in 1..31, retries={self.retries} in 0..7, adaptive_us="
                f"{self.adaptive_us:g} 0 or more"
            )

    @property
    def payload_share(self) -> float:
        """Share of a link's bandwidth that carries payload."""
        return self.mtu / (self.mtu + self.header)


@dataclass(frozen=True)
class PacketResult:
    """Result of a simulation at the packet level, with F flows and E links.

    Attributes:
        finish: [F] seconds at which the last byte of a flow arrived, NaN if it never arrived.
        aborted: [F] seconds at which a flow was aborted, NaN if it was not.
        counts: counters by name (see COUNTERS).
        max_queue_bytes: [E] maximum bytes in the queue of each link's sender.
        pause_seconds, pause_count: [E] total time and number of pauses of each link's sender.
        carried: [E] bytes sent over each link.
        samples: [n, 3] of the watched link: time in seconds, bytes in the queue, bytes sent so far.
        mean_rtt: mean round trip in seconds.
        wall, cpu: wall-clock and processor seconds of the simulation.
        settings: settings of the simulation.
    """

    finish: Floats
    aborted: Floats
    counts: dict[str, int]
    max_queue_bytes: Ints
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
        """Packets sent per CPU second."""
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
    """Simulate flows on their paths until all have ended, at most for `horizon` simulated seconds.

    Ctrl-C ends the simulation and is raised to the caller.

    Args:
        paths: [F, hops] links from NIC to NIC, as `ecmp.route` returns them.
        starts: [F] start of each flow in seconds; default: 0.
        sample_every: seconds between samples of the link `watch`; 0: no samples.
        progress: called several times per second with the share of packets that have arrived, 0 to 1.

    Raises:
        ConfigError: a flow has no path, a time is negative, there are more packets than MAX_PACKETS, or numba is not
            installed.
        FitError: a path has a failed link, or more packets are in flight than the pool holds.
    """
    if len(flows) == 0:
        raise ConfigError("no flows to simulate: all traffic stays inside hosts")
    if (paths[:, 0] < 0).any() or (paths >= topology.links).any():
        raise ConfigError("a flow has no path; route flows between NICs of the fabric first")
    if starts is not None and (starts < 0).any():
        raise ConfigError(f"a flow starts at {starts.min():g} s: delays must be 0 or more")
    if flows.size.min() <= 0:
        raise ConfigError("a flow of 0 bytes has no packets; leave it out")
    packets = float(np.ceil(flows.size / settings.mtu).sum())
    if packets > MAX_PACKETS:
        raise ConfigError(
            f"{packets:.3g} packets would take about {packets / PACKETS_PER_SECOND / 60:,.0f} minutes, and at most "
            f"{MAX_PACKETS:.0e} are simulated; send fewer or smaller flows (--mb, --senders, --hosts), or use the "
            "flow level (megascale network flows)"
        )
    from megascale.simulate.fabric import packet_kernel

    run: Any = packet_kernel.run

    used_links = _find_used_links(paths)
    links = used_links.links
    if (topology.bandwidth[links] <= 0).any():
        raise FitError("a path crosses a failed link; route flows around it first")

    def make_arguments() -> tuple[Any, ...]:
        return _make_kernel_arguments(topology, flows, settings, used_links=used_links, starts=starts, flaps=flaps)

    stop_tick = min(NEVER, int(horizon / TICK))
    watched_link = 0 if watch is None else int(np.searchsorted(links, watch))
    if not run.signatures:
        # The first call compiles the kernel, or loads it from the cache, and simulates nothing.
        run(*make_arguments(), 0, 0, 0)
    arguments = make_arguments()
    result_tables: tables.Tables = arguments[0]
    wall_start = time.perf_counter()
    (samples, mean_rtt), cpu = _run_interruptibly(
        lambda: run(*arguments, stop_tick, int(sample_every / TICK), watched_link), result_tables, packets, progress
    )
    wall = time.perf_counter() - wall_start
    ports = result_tables.ports
    totals = result_tables.totals
    done = result_tables.flows[:, tables.DONE]
    failed = result_tables.flows[:, tables.FAILED]
    if totals[COUNTERS.index("full")]:
        raise FitError("more packets are in flight than the pool holds; use a smaller window_mb or fewer flows")

    def spread(values: Any, dtype: type) -> Any:
        """Return values of the used links as an array over all links, 0 for unused links."""
        values_by_link: Any = np.zeros(topology.links, dtype)
        values_by_link[links] = values
        return values_by_link

    samples = samples.copy()
    samples[:, 0] *= TICK
    return PacketResult(
        finish=np.where(done >= 0, done * TICK, np.nan),
        aborted=np.where(failed >= 0, failed * TICK, np.nan),
        counts={name: int(totals[index]) for index, name in enumerate(COUNTERS)},
        max_queue_bytes=spread(ports[:, tables.MAX_QUEUED], np.int64),
        pause_seconds=spread(ports[:, tables.PAUSED_FOR] * TICK, np.float64),
        pause_count=spread(ports[:, tables.PAUSE_COUNT], np.int64),
        carried=spread(ports[:, tables.CARRIED], np.int64),
        samples=samples,
        mean_rtt=mean_rtt * TICK,
        wall=wall,
        cpu=cpu,
        settings=settings,
    )


def _run_interruptibly(
    kernel: Callable[[], Any], result_tables: tables.Tables, packets: float, progress: Callable[[float], None] | None
) -> tuple[Any, float]:
    """Run the kernel in a thread and return (its result, CPU seconds).

    Compiled code handles no signals, so the main thread waits and handles them. On an interruption it sets the count of
    unfinished flows to a negative number, which ends the kernel's loop.
    """
    results: list[Any] = []
    errors: list[BaseException] = []
    cpu_seconds: list[float] = []

    def work() -> None:
        start = time.thread_time()
        try:
            results.append(kernel())
        except BaseException as error:
            errors.append(error)
        cpu_seconds.append(time.thread_time() - start)

    worker = threading.Thread(target=work, name="packet-kernel", daemon=True)
    worker.start()
    try:
        is_running = True
        while is_running:
            worker.join(PROGRESS_SECONDS)
            is_running = worker.is_alive()
            if progress is not None:
                progress(min(1.0, float(result_tables.totals[tables.DELIVERED]) / packets))
    except BaseException:
        result_tables.totals[tables.UNFINISHED] = -NEVER
        worker.join()
        raise
    if errors:
        raise errors[0]
    return results[0], cpu_seconds[0]


class _UsedLinks(NamedTuple):
    """Links that paths use.

    Attributes:
        links: the links, ascending.
        paths: [F, hops] index into `links` of each hop of a flow; a shorter path fills up with zeros.
        hops: [F] number of hops.
    """

    links: Ints
    paths: Ints
    hops: Ints


def _find_used_links(paths: Ints) -> _UsedLinks:
    is_hop = paths >= 0
    links, indices = np.unique(paths[is_hop], return_inverse=True)
    hops_first = np.argsort(~is_hop, axis=1, kind="stable")
    index_paths = np.zeros(paths.shape, np.int64)
    index_paths[is_hop] = indices
    return _UsedLinks(links, np.take_along_axis(index_paths, hops_first, axis=1), is_hop.sum(axis=1))


def _make_kernel_arguments(
    topology: Topology,
    flows: Flows,
    settings: PacketSettings,
    used_links: _UsedLinks,
    starts: Floats | None,
    flaps: tuple[Flap, ...],
) -> tuple[Any, ...]:
    """Return the first arguments of the kernel (packet_kernel.run), with times in ticks and sizes in bytes."""
    links, path, hops = used_links
    flow_count = len(flows)
    speed = topology.bandwidth[links] * TICK  # bytes per tick
    cable_ticks = round(topology.spec.cable_ns * 1e-9 / TICK)
    delay = np.full(len(links), cable_ticks, np.int64)
    nics = int(np.searchsorted(links, topology.nics))
    node = np.maximum(topology.tail[links] - topology.nics, 0)
    switches = topology.leaves + topology.aggregations + topology.cores
    capacity = np.full(switches, int(topology.spec.buffer_mb * 1e6), np.int64)
    # A link may still deliver the bytes of a round trip and the packets on the wire after a pause.
    link_headroom = 2 * cable_ticks * topology.bandwidth * TICK + 3 * (settings.mtu + settings.header)
    is_into_switch = topology.head >= topology.nics
    headroom = np.bincount(
        topology.head[is_into_switch] - topology.nics, weights=link_headroom[is_into_switch], minlength=switches
    )
    shared = capacity - headroom.astype(np.int64)
    if settings.pfc and (shared <= 0).any():
        raise FitError(
            f"buffer_mb={topology.spec.buffer_mb:g} does not hold the headroom that PFC needs "
            f"({headroom.max() / 1e6:.1f} MB); use a larger buffer_mb or a shorter cable_ns"
        )
    kmin = settings.dcqcn.kmin_kb * 1e3
    kmax = settings.dcqcn.kmax_kb * 1e3
    if settings.dcqcn.scale_ecn:
        scale = topology.bandwidth[links] / (25e9 / 8)  # the settings are given for ports of 25 Gb/s
    else:
        scale = np.ones(len(links))
    has_marks = settings.control not in ("none", "swift")
    packets = np.maximum(1, np.ceil(flows.size / settings.mtu)).astype(np.int64)
    last_bytes = np.maximum(1, np.ceil(flows.size - (packets - 1) * settings.mtu)).astype(np.int64)
    if starts is None:
        start = np.zeros(flow_count, np.int64)
    else:
        start = np.round(starts / TICK).astype(np.int64)
    line_speed = speed[path[:, 0]]
    ack_bytes = 64 + settings.header - 12
    # Ticks per byte over all hops of a flow. With many flows, all links are assumed to have the speed of the first one.
    if flow_count < 2000:
        ticks_per_byte = np.array([(1.0 / speed[path[f, : hops[f]]]).sum() for f in range(flow_count)])
    else:
        ticks_per_byte = hops / line_speed
    ack_delay = (hops * cable_ticks + ack_bytes * ticks_per_byte).astype(np.int64)
    base_rtt = ack_delay + hops * cable_ticks + (settings.mtu + settings.header) * ticks_per_byte
    down = np.full(len(links), NEVER, np.int64)
    up = np.zeros(len(links), np.int64)
    flap_link_of_flow = np.full(flow_count, -1, np.int64)
    for flap in flaps:
        link_pair = _link_pair(topology, flap.link)
        crossings = np.flatnonzero(np.isin(links, link_pair))
        down[crossings] = round(flap.start / TICK)
        up[crossings] = round((flap.start + flap.duration) / TICK)
        crosses = np.isin(path, crossings) & (np.arange(path.shape[1]) < hops[:, None])
        is_affected = crosses.any(axis=1)
        flap_link_of_flow[is_affected] = path[is_affected, crosses[is_affected].argmax(axis=1)]
    outages = tables.Outages(down, up, flap_link_of_flow)
    by_nic = np.argsort(path[:, 0], kind="stable")
    nic_first = np.searchsorted(path[by_nic, 0], np.arange(nics + 1))
    window = max(1, int(settings.window_mb * 1e6 / settings.mtu))
    from megascale.simulate.fabric.control_vectors import make_state_and_vectors

    control_state, dcqcn_vector, swift_vector, cnp_interval = make_state_and_vectors(
        settings.dcqcn,
        settings.swift,
        settings.mtu + settings.header,
        line_speed,
        hops,
        base_rtt.astype(float),
        window,
        TICK,
    )
    timer = round(4.096e-6 * 2**settings.timeout / TICK)
    first_timer = timer
    if settings.adaptive_us:
        first_timer = round(settings.adaptive_us * 1e-6 / TICK)
    # Room for the packets of all windows and their retransmissions, at most 8 million.
    pool = int(min(2 * np.minimum(packets, window).sum() + 1024, 1 << 23))
    has_window = settings.control not in ("none", "dcqcn")  # Swift and the hybrids adapt a window to each round trip
    link_constants = tables.Links(
        nics, speed, delay, node, capacity, shared, settings.pfc_alpha if settings.pfc else 0.0,
        kmin * scale if has_marks else np.full(len(links), np.inf), kmax * scale, settings.dcqcn.pmax,
    )  # fmt: skip
    flow_paths = tables.Paths(
        np.ascontiguousarray(path, np.int32), hops.astype(np.int64), packets, last_bytes, start, ack_delay, by_nic,
        nic_first,
    )  # fmt: skip
    rules = tables.Rules(
        control_number(settings.control), has_window, settings.control in ("dcqcn", "hybrid-both"), dcqcn_vector,
        swift_vector, cnp_interval, 1 if has_window else settings.ack_every, window, settings.mtu, settings.header,
        min(first_timer, timer), timer, settings.retries, bool(settings.adaptive_us),
    )  # fmt: skip
    kernel_tables = tables.new_tables(link_constants, flow_paths, rules, control_state, pool, settings.seed)
    return kernel_tables, link_constants, flow_paths, outages, rules


def _link_pair(topology: Topology, link: int) -> Ints:
    """Return a link and the link in the opposite direction: [2]."""
    # All links of a tier in one direction precede those in the opposite direction.
    links_by_tier = {0: topology.nics, 1: topology.uplinks.size, 2: topology.core_links.size}
    offset = links_by_tier[int(topology.tier[link])]
    is_upward = topology.tail[link] < topology.head[link]
    opposite = link + offset if is_upward else link - offset
    return np.array([link, opposite])


def compare_controls(
    topology: Topology,
    flows: Flows,
    paths: Ints,
    settings: PacketSettings,
    controls: tuple[str, ...],
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, PacketResult]:
    """Return the results of the same traffic by congestion control.

    Args:
        progress: called with the present control and the share of its packets that have arrived.
    """
    results = {}
    for control in controls:
        control_progress = None if progress is None else partial(progress, control)
        results[control] = simulate_packets(
            topology, flows, paths, settings=replace(settings, control=control), progress=control_progress
        )
    return results
