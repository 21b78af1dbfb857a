"""Conversion of congestion-control settings to the vectors of the kernel, in ticks and bytes per tick."""

from __future__ import annotations

import numpy as np

from megascale.simulate.fabric import dcqcn as d
from megascale.simulate.fabric import swift as w
from megascale.simulate.fabric.control_settings import DcqcnSettings, SwiftSettings
from megascale.simulate.fabric.topology import Floats, Ints


def make_state_and_vectors(
    dcqcn: DcqcnSettings,
    swift: SwiftSettings,
    packet: int,
    line: Floats,
    hops: Ints,
    base_rtt: Floats,
    window: int,
    tick: float,
) -> tuple[Floats, Floats, Floats, int]:
    """Return the state of flows at line rate, and the parameters of the controls.

    Args:
        packet: bytes of a full packet.
        line: [F] line rate of the NIC, bytes per tick.
        base_rtt: [F] round-trip time of an empty path, ticks.
        window: maximum packets in flight per flow.
        tick: seconds of a tick.

    Returns:
        (state [F, COLUMNS], DCQCN's vector, Swift's vector, minimum ticks between two notifications of a flow).
    """
    micro = 1e-6 / tick
    mbps = 1e6 / 8 * tick
    if dcqcn.scale_rates:
        # The steps are given for a NIC of 25 Gb/s.
        mbps *= float(line.max()) / (25e9 / 8 * tick)
    rates = np.zeros(9)
    rates[d.G] = dcqcn.g
    rates[d.ALPHA_TIMER] = max(1.0, dcqcn.alpha_us * micro)
    rates[d.RISE_TIMER] = dcqcn.rise_us * micro
    rates[d.FAST] = dcqcn.fast
    rates[d.BYTE_COUNTER] = dcqcn.byte_mb * 1e6
    rates[d.ADDITIVE] = dcqcn.additive_mbps * mbps
    rates[d.HYPER] = dcqcn.hyper_mbps * mbps
    rates[d.CUT_INTERVAL] = dcqcn.cut_us * micro
    rates[d.FLOOR] = 1e-4 * float(line.max())
    a, shift = swift.flow_scaling()
    delays = np.zeros(8)
    delays[w.AI], delays[w.BETA], delays[w.MAX_CUT] = swift.ai, swift.beta, swift.max_cut
    delays[w.FS_ALPHA], delays[w.FS_SHIFT] = a * micro, shift * micro
    delays[w.FS_RANGE] = swift.flow_range_us * micro
    delays[w.LOWEST], delays[w.HIGHEST] = swift.least, float(window)
    state = np.zeros((len(line), d.COLUMNS))
    state[:, d.RATE] = state[:, d.TARGET] = state[:, d.LINE] = line
    state[:, d.ALPHA] = 1.0
    state[:, d.LAST_CUT] = state[:, d.LAST_DECREASE] = -1e18
    state[:, d.RTT] = base_rtt
    state[:, d.SWIFT_TARGET] = (swift.base_us + swift.hop_us * hops) * micro
    if swift.first:
        state[:, d.CWND] = min(swift.first, float(window))
    else:
        state[:, d.CWND] = np.clip(line * base_rtt / packet, 1.0, window)  # fills the path
    return state, rates, delays, round(dcqcn.cnp_us * micro)
