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
from typing import Any

import numpy as np

from megascale.errors import ConfigError, FitError
from megascale.simulate.fabric import packet_tables as tables
from megascale.simulate.fabric.ecmp import Flows
from megascale.simulate.fabric.kernel_arguments import (
    NEVER,
    TICK,
    KernelArguments,
    find_used_links,
    make_kernel_arguments,
)
from megascale.simulate.fabric.packet_settings import Flap, PacketSettings
from megascale.simulate.fabric.topology import Floats, Ints, Topology

MAX_PACKETS = 500_000_000  # per simulation
PACKETS_PER_SECOND = 1e6  # that a core simulates, roughly (docs/network.md); only for the message about MAX_PACKETS
PROGRESS_SECONDS = 0.1  # between two reports of progress
# Names of the kernel's counters, in order; packet_tables.py explains them.
COUNTERS = (
    "sent", "resent", "delivered", "dropped", "marked", "notified", "pauses", "out_of_order", "duplicate", "timeouts",
    "events", "end", "full", "in_flight", "lost", "wire",
)  # fmt: skip


@dataclass(frozen=True)
class PacketResult:
    """Result of a simulation at the packet level, with F flows and E links.

    Attributes:
        finish: [F] seconds at which the last byte of a flow arrived, NaN if it never arrived.
        aborted: [F] seconds at which a flow was aborted, NaN if it was not.
        counts: counters by name (see COUNTERS).
        max_queue_bytes: [E] maximum bytes in the queue of each link's sender.
        pause_seconds: [E] total time of the pauses of each link's sender.
        samples: [n, 3] of the watched link: time in seconds, bytes in the queue, bytes sent so far.
        mean_rtt: mean round trip in seconds.
        wall, cpu: wall-clock and processor seconds of the simulation.
    """

    finish: Floats
    aborted: Floats
    counts: dict[str, int]
    max_queue_bytes: Ints
    pause_seconds: Floats
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
        paths: [F, hops] links from NIC to NIC, -1 for no hop, as `ecmp.route_flows` returns them.
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

    used_links = find_used_links(paths)
    links = used_links.links
    if (topology.bandwidth[links] <= 0).any():
        raise FitError("a path crosses a failed link; route flows around it first")

    def make_arguments() -> KernelArguments:
        return make_kernel_arguments(topology, flows, settings, used_links=used_links, starts=starts, flaps=flaps)

    stop_tick = min(NEVER, int(horizon / TICK))
    watched_link = 0 if watch is None else int(np.searchsorted(links, watch))
    if not run.signatures:
        # The first call compiles the kernel, or loads it from the cache. It simulates nothing, so that compilation does
        # not count in the times below.
        run(*make_arguments(), 0, 0, 0)
    arguments = make_arguments()
    result_tables = arguments.tables  # the kernel changes the tables in place
    wall_start = time.perf_counter()
    (samples, mean_rtt), cpu = _run_interruptibly(
        lambda: run(*arguments, stop_tick, int(sample_every / TICK), watched_link),
        result_tables,
        packets=packets,
        progress=progress,
    )
    wall = time.perf_counter() - wall_start
    ports = result_tables.ports
    totals = result_tables.totals
    done = result_tables.flows[:, tables.DONE]
    failed = result_tables.flows[:, tables.FAILED]
    if totals[COUNTERS.index("full")]:
        raise FitError("more packets are in flight than the pool holds; use a smaller window_mb or fewer flows")

    def expand_to_all_links(values: Any, dtype: type) -> Any:
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
        max_queue_bytes=expand_to_all_links(ports[:, tables.MAX_QUEUED], np.int64),
        pause_seconds=expand_to_all_links(ports[:, tables.PAUSED_FOR] * TICK, np.float64),
        samples=samples,
        mean_rtt=mean_rtt * TICK,
        wall=wall,
        cpu=cpu,
        settings=settings,
    )


def _run_interruptibly(
    kernel: Callable[[], Any], result_tables: tables.Tables, packets: float, progress: Callable[[float], None] | None
) -> tuple[Any, float]:
    """Run the kernel in a thread, and return the kernel's result and the thread's CPU seconds.

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
