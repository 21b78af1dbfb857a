"""Plots of fabrics and of results on them: PNG files by matplotlib, without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megascale.simulate.fabric.flaps import Advice, compute_stalls, compute_timer
from megascale.simulate.fabric.topology import Topology
from megascale.simulate.figures import label_log_axis, make_figure, save

BLUE = "#2b5c8a"
ORANGE = "#e07b39"
GREEN = "#3a9b6d"
RED = "#c0392b"
GREY = "#999999"
SHADES = (BLUE, ORANGE, GREEN, RED, "#7d5ba6", "#8a6d3b")


def draw_topology(topology: Topology, path: Path) -> None:
    """Plot the switches by tier and the cables of one leaf switch of each pod, with failed links black and dashed."""
    from matplotlib.patches import Rectangle

    figure, axes = make_figure(11, 4.6)
    switch_counts = (topology.leaves, topology.aggregations, topology.cores)
    positions = [(np.arange(count) + 0.5) / max(count, 1) for count in switch_counts]
    shown_leaves = [int(np.flatnonzero(topology.pod_of == pod)[0]) for pod in range(topology.pods)]
    for pod, leaf in enumerate(shown_leaves):
        colour = SHADES[pod % len(SHADES)]
        for port in range(topology.uplinks.shape[1]):
            agg = topology.uplinks[leaf, port]
            axes.plot([positions[0][leaf], positions[1][agg]], [1, 2], color=colour, lw=0.4, alpha=0.8)
        agg = topology.uplinks[leaf, 0]
        for core in topology.core_links[agg]:
            axes.plot([positions[1][agg], positions[2][core]], [2, 3], color=colour, lw=0.6, alpha=0.8)
    failed_links = np.flatnonzero(topology.bandwidth == 0)
    node_positions = np.concatenate([np.zeros(topology.nics)] + positions)
    for link in failed_links[failed_links >= topology.first_leaf_uplink]:
        level = 1 if topology.tier[link] == 1 else 2
        ends = sorted((int(topology.tail[link]), int(topology.head[link])))  # the lower node first
        axes.plot(node_positions[ends], [level, level + 1], color="#000000", ls="--", lw=0.9)
    for level, (x, name) in enumerate(zip(positions, ("leaf", "aggregation", "core"), strict=True), 1):
        axes.scatter(x, np.full(len(x), level), s=9, color="#222222", zorder=3)
        if len(x):
            axes.text(-0.01, level, f"{len(x):,} {name}", ha="right", va="center", fontsize=9)
    spec = topology.spec
    sets = -(-spec.hosts // spec.hosts_per_set)
    for i in range(min(sets, 60)):
        left_edge = i / sets
        corner = (left_edge + 0.1 / sets, 0.35)
        axes.add_patch(Rectangle(corner, width=0.8 / sets, height=0.18, facecolor="#dddddd", edgecolor=GREY, lw=0.4))
    axes.text(-0.01, 0.44, f"{spec.hosts:,} hosts, {sets} sets", ha="right", va="center", fontsize=9)
    title = (
        f"{spec.name}: {spec.gpus:,} NICs of {spec.nic_gbps:g}G, {topology.pods} pods; cables of one leaf "
        "switch of each pod, and of one aggregation switch"
    )
    if len(failed_links):
        title += f"; dashed: {len(failed_links) // 2} down"
    axes.set_title(title, fontsize=10)
    axes.set_xlim(-0.16, 1.01)
    axes.axis("off")
    save(figure, path)


def plot_bars(
    labels: Sequence[str], series: Mapping[str, Sequence[float]], path: Path, ylabel: str, title: str = ""
) -> None:
    """Plot a group of bars for each label, with one bar per series."""
    figure, axes = make_figure(max(6.0, 1.3 * len(labels) + 1), 4.0)
    group_positions = np.arange(len(labels))
    bar_width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        bar_positions = group_positions + (index - (len(series) - 1) / 2) * bar_width
        axes.bar(bar_positions, values, bar_width * 0.95, color=SHADES[index % len(SHADES)], label=name)
        for x, value in zip(bar_positions, values, strict=True):
            axes.text(x, value, f"{value:.3g}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(group_positions, labels, fontsize=9)
    axes.set_ylabel(ylabel)
    axes.set_ylim(0, 1.2 * max(max(values) for values in series.values()))
    axes.set_title(title, fontsize=10)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=len(series))
    save(figure, path)


def plot_lines(x: Sequence[float], series: Mapping[str, Sequence[float]], path: Path, xlabel: str, ylabel: str) -> None:
    """Plot one line per series over a logarithmic x axis."""
    figure, axes = make_figure(7.2, 4.2)
    for index, (name, values) in enumerate(series.items()):
        axes.plot(x, values, marker="o", ms=4, color=SHADES[index % len(SHADES)], label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{v:g}" for v in x])
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    save(figure, path)


def plot_controls(rows: Mapping[str, Mapping[str, float]], path: Path, title: str) -> None:
    """Plot finish times, queues and pauses of each congestion control. `rows`: figures by control."""
    figure, panels = make_figure(12, 3.8, 3)
    names = list(rows)
    positions = np.arange(len(names))
    for index, key in enumerate(("mean_us", "p99_us", "max_us")):
        values = [rows[name][key] for name in names]
        panels[0].bar(positions + (index - 1) * 0.27, values, 0.25, color=SHADES[index], label=key)
    panels[0].legend(["mean", "P99", "slowest"], frameon=False, fontsize=8, loc="upper left", ncols=3)
    panels[0].set_ylim(0, 1.15 * max(r["max_us"] for r in rows.values()))
    panels[0].set_ylabel("finish of flows, us")
    panels[1].bar(positions, [rows[name]["queue_kb"] for name in names], 0.6, color=BLUE)
    panels[1].set_ylabel("largest queue, KB")
    panels[2].bar(positions, [rows[name]["pause_us"] for name in names], 0.6, color=RED)
    panels[2].set_ylabel("PFC: link time paused, us, summed")
    for panel in panels:
        panel.set_xticks(positions, names, rotation=20, ha="right", fontsize=8)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def plot_flap_timers(advice: Advice, path: Path, restart: float) -> None:
    """Plot the stall over the flap's duration for several timers, and the mean cost of a flap for each setting."""
    figure, (left_axes, right_axes) = make_figure(11.5, 4.2, 2)
    durations = np.geomspace(0.01, 60, 400)
    for number, timeout in enumerate((14, 18, 20, 22)):
        times = compute_stalls(durations, timeout, 7).seconds
        left_axes.plot(durations, times, color=SHADES[number], label=f"{timeout}: {compute_timer(timeout):.2g} s x 7")
    times = compute_stalls(durations, 20, 7, 16.0).seconds
    left_axes.plot(durations, times, color="#222222", ls="--", label="20, adaptive")
    left_axes.plot(durations, durations, color=GREY, lw=0.8, label="the flap itself")
    left_axes.set_xscale("log")
    left_axes.set_yscale("log")
    left_axes.set_xlabel("flap, s")
    left_axes.set_ylabel("until data moves again, s")
    left_axes.legend(frameon=False, fontsize=8)
    for adaptive, colour in ((False, BLUE), (True, ORANGE)):
        outcomes = [outcome for outcome in advice.table if outcome.adaptive is adaptive]
        if outcomes:
            timeouts = [outcome.timeout for outcome in outcomes]
            costs = [outcome.cost for outcome in outcomes]
            label = "adaptive" if adaptive else "fixed"
            right_axes.plot(timeouts, costs, marker="o", ms=4, color=colour, label=label)
    best = advice.best
    right_axes.axvline(best.timeout, color=GREY, ls=":", label=f"advice: {best.timeout}, {best.retries} retries")
    right_axes.set_yscale("log")
    right_axes.set_xlabel("NCCL_IB_TIMEOUT")
    right_axes.set_ylabel(f"job seconds lost per flap (a restart: {restart:g} s)")
    right_axes.legend(frameon=False, fontsize=8)
    for axis, steps in ((left_axes.xaxis, (1,)), (left_axes.yaxis, (1,)), (right_axes.yaxis, (1, 2, 5))):
        label_log_axis(axis, steps)
    save(figure, path)
