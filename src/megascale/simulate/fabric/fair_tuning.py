"""Tuning of both parents of the hybrid on the traffic of the comparison: a grid, scored by the slowest flow.

Among settings within 1% of the least makespan, the one with the least time paused and then the shortest largest queue.
The hybrids take both parents' tuned settings and are not tuned themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megascale.simulate.fabric.control_settings import SETS
from megascale.simulate.fabric.packets import PacketSettings, simulate_packets
from megascale.simulate.fabric.patterns import Traffic, summary


def dcqcn_grid(settings: PacketSettings) -> Iterator[tuple[str, PacketSettings]]:
    """Yield names and settings of DCQCN: all sets, and set "fast" with other notification gaps and thresholds."""
    for name, chosen in SETS.items():
        yield name, replace(settings, control="dcqcn", dcqcn=chosen)
    for gap in (4.0, 25.0, 50.0):
        for share in (0.25, 1.0):
            base_settings = SETS["fast"]
            base_settings = replace(
                base_settings,
                cnp_us=gap,
                cut_us=gap,
                rise_us=gap,
                kmin_kb=base_settings.kmin_kb * share,
                kmax_kb=base_settings.kmax_kb * share,
            )
            yield (
                f"fast, gaps {gap:g} us, thresholds x {share:g}",
                replace(settings, control="dcqcn", dcqcn=base_settings),
            )


def swift_grid(settings: PacketSettings) -> Iterator[tuple[str, PacketSettings]]:
    """Yield names and settings of Swift with several base targets and additive steps."""
    for base in (5.0, 10.0, 20.0, 40.0):
        for step in (0.3, 1.0, 3.0):
            candidate = replace(settings.swift, base_us=base, ai=step)
            yield f"base {base:g} us, step {step:g}", replace(settings, control="swift", swift=candidate)


class BestSettings(NamedTuple):
    """The best settings of a grid, with their name and the number of settings with which all flows finished."""

    name: str
    settings: PacketSettings
    finished: int


def find_best(traffic: Traffic, grid: Iterator[tuple[str, PacketSettings]]) -> BestSettings:
    """Return the settings with the shortest pauses, then the shortest queues, within 1% of the fastest."""
    tried = []
    for name, settings in grid:
        result = summary(simulate_packets(traffic.topology, traffic.flows, traffic.paths, settings), traffic)
        if result["finished"] == 1.0:
            tried.append((result["max_us"], result["pause_us"], result["queue_kb"], name, settings))
    least = min(row[0] for row in tried)
    near = [row for row in tried if row[0] <= 1.01 * least]
    chosen = min(near, key=lambda row: row[1:3])
    return BestSettings(chosen[3], chosen[4], len(tried))


def tuned_parents(traffic: Traffic, settings: PacketSettings) -> tuple[PacketSettings, str]:
    """Return settings with both parents tuned, and a description of the tuned values."""
    dcqcn = find_best(traffic, dcqcn_grid(settings))
    swift = find_best(traffic, swift_grid(settings))
    description = f"DCQCN: {dcqcn.name} (of {dcqcn.finished}); Swift: {swift.name} (of {swift.finished})"
    return replace(settings, dcqcn=dcqcn.settings.dcqcn, swift=swift.settings.swift), description
