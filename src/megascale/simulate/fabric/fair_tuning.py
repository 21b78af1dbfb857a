"""Tuning of DCQCN and Swift by a grid search on given traffic, for a fair comparison with the hybrids.

The best setting is within 1% of the shortest makespan and has the least pause time; among equals, it has the shortest
queue. The hybrids use the tuned settings of both controls and are not tuned themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megascale.simulate.fabric.control_settings import SETS
from megascale.simulate.fabric.packet_settings import PacketSettings
from megascale.simulate.fabric.packets import simulate_packets
from megascale.simulate.fabric.patterns import Traffic, summarise_result


def list_dcqcn_settings(settings: PacketSettings) -> Iterator[tuple[str, PacketSettings]]:
    """Yield (name, settings) of DCQCN: all sets, and the set "fast" with other notification gaps and thresholds."""
    for name, dcqcn in SETS.items():
        yield name, replace(settings, control="dcqcn", dcqcn=dcqcn)
    for gap in (4.0, 25.0, 50.0):
        for share in (0.25, 1.0):
            fast = SETS["fast"]
            dcqcn = replace(
                fast,
                cnp_us=gap,
                cut_us=gap,
                rise_us=gap,
                kmin_kb=fast.kmin_kb * share,
                kmax_kb=fast.kmax_kb * share,
            )
            name = f"fast, gaps {gap:g} us, thresholds x {share:g}"
            yield name, replace(settings, control="dcqcn", dcqcn=dcqcn)


def list_swift_settings(settings: PacketSettings) -> Iterator[tuple[str, PacketSettings]]:
    """Yield (name, settings) of Swift with several base targets and additive steps."""
    for base in (5.0, 10.0, 20.0, 40.0):
        for step in (0.3, 1.0, 3.0):
            candidate = replace(settings.swift, base_us=base, ai=step)
            yield f"base {base:g} us, step {step:g}", replace(settings, control="swift", swift=candidate)


class BestSettings(NamedTuple):
    """The best settings of a grid, with their name and the number of settings with which all flows finished."""

    name: str
    settings: PacketSettings
    finished_count: int


def find_best(traffic: Traffic, grid: Iterator[tuple[str, PacketSettings]]) -> BestSettings:
    """Return the settings with the shortest pauses, then the shortest queues, within 1% of the fastest."""
    candidates = []  # (figures, name, settings) of settings with which all flows finished
    for name, settings in grid:
        figures = summarise_result(simulate_packets(traffic.topology, traffic.flows, traffic.paths, settings), traffic)
        if figures["finished"] == 1.0:
            candidates.append((figures, name, settings))
    shortest_us = min(figures["max_us"] for figures, _, _ in candidates)
    fastest = [row for row in candidates if row[0]["max_us"] <= 1.01 * shortest_us]
    _, name, settings = min(fastest, key=lambda row: (row[0]["pause_us"], row[0]["queue_kb"]))
    return BestSettings(name, settings, len(candidates))


def tune_controls(traffic: Traffic, settings: PacketSettings) -> tuple[PacketSettings, str]:
    """Return (settings with tuned DCQCN and Swift, description of the tuned values)."""
    dcqcn = find_best(traffic, list_dcqcn_settings(settings))
    swift = find_best(traffic, list_swift_settings(settings))
    description = f"DCQCN: {dcqcn.name} (of {dcqcn.finished_count}); Swift: {swift.name} (of {swift.finished_count})"
    return replace(settings, dcqcn=dcqcn.settings.dcqcn, swift=swift.settings.swift), description
