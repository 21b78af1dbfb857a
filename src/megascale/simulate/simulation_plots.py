"""Plots of the simulator's results: PNG files by matplotlib, without a display."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megascale.simulate.figures import label_log_axis, make_figure, save
from megascale.simulate.render import PART_NAMES, list_shown_parts
from megascale.simulate.step import StepEstimate

# Colour of each part of a step.
COLOURS = dict(
    zip(
        PART_NAMES,
        (
            "#2b5c8a", "#4f8fc0", "#8fbce0", "#b9d3ea", "#7f7f7f", "#c0392b", "#d98cb3", "#e07b39", "#f0b35a",
            "#7d5ba6", "#b39bd0", "#3a9b6d", "#8a6d3b", "#b8a77e", "#444444",
        ),
        strict=True,
    )
)  # fmt: skip


def plot_waterfall(results: Sequence[StepEstimate], path: Path) -> None:
    """Plot a panel per result on one scale, with a row per part. Each bar begins where the bar above it ends."""
    from matplotlib.figure import Figure

    parts = list_shown_parts(results)
    size = (5.2 * len(results) + 1.2, 0.36 * len(parts) + 1.8)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    panels = figure.subplots(1, len(results), sharex=True, sharey=True, squeeze=False)
    longest = max(r.seconds for r in results)
    for axes, result in zip(panels[0], results, strict=True):
        bottom = 0.0
        for row, part in enumerate(parts):
            value = result.parts.get(part, 0.0)
            axes.barh(row, value, left=bottom, color=COLOURS[part], height=0.72)
            end = max(bottom, bottom + value)  # `value` may be negative: the part interplay is a difference
            axes.text(end + 0.008 * longest, row, f"{value:.3f}", va="center", fontsize=8, color="#333333")
            if row + 1 < len(parts):
                axes.plot([bottom + value] * 2, [row - 0.36, row + 1.36], color="#999999", lw=0.6)
            bottom += value
        axes.barh(len(parts), bottom, color="#222222", height=0.72)
        axes.text(bottom + 0.008 * longest, len(parts), f"{bottom:.2f} s", va="center", fontsize=8, weight="bold")
        axes.set_title(f"{result.scenario.label}\n{result.seconds:.2f} s, MFU {100 * result.mfu:.1f}%", fontsize=10)
        axes.set_xlabel("Step time (s)")
        axes.set_xlim(0, longest * 1.14)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_yticks(range(len(parts) + 1), [PART_NAMES[p] for p in parts] + ["step"], fontsize=9)
    panels[0][0].invert_yaxis()
    scenario = results[0].scenario
    figure.suptitle(
        f"{scenario.config.train.name} on {scenario.gpus:,} GPUs ({scenario.cluster.name})", fontsize=11, weight="bold"
    )
    save(figure, path)


def plot_ablation(
    names: Sequence[str], values: Sequence[float], path: Path, printed: Sequence[float] | None = None
) -> None:
    """Plot the MFU in percent as techniques are switched on in turn, next to the published values `printed`."""
    figure, axes = make_figure(8.5, 4.2)
    group_positions = np.arange(len(names))
    bar_width = 0.7
    label_positions = group_positions.astype(float)
    all_values = list(values)
    series: list[tuple[np.ndarray, Sequence[float], str, str]] = [(group_positions, values, "#2b5c8a", "predicted")]
    if printed is not None:
        bar_width = 0.4
        label_positions = group_positions + bar_width / 2
        all_values += printed
        series.append((group_positions + bar_width, printed, "#e0a35a", "printed in the paper"))
    for positions, heights, colour, label in series:
        axes.bar(positions, heights, bar_width, color=colour, label=label)
        for x, value in zip(positions, heights, strict=True):
            axes.text(x, value + 0.3, f"{value:.1f}", ha="center", fontsize=8)
    if printed is not None:
        axes.legend(frameon=False, loc="upper left")
    axes.set_xticks(label_positions, names, rotation=25, ha="right", fontsize=9)
    axes.set_ylim(max(0.0, min(all_values) - 8), max(all_values) + 5)
    axes.set_ylabel("MFU (%), axis not from 0")
    save(figure, path)


def plot_sweep(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], path: Path) -> None:
    """Plot step time and MFU over the first key, with one line per scenario and combination of the other keys.

    The shaded bands are from P10 to P90 of the predicted step time.

    Args:
        rows: rows of simulate/series.py `sweep_rows`: the values of `keys`, label (of the scenario), seconds, p10 and
            p90 (of the step), and mfu as a fraction.
    """
    figure, (left_axes, right_axes) = make_figure(11, 4.2, columns=2)
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        group = (row["label"], *(row[key] for key in keys[1:]))
        groups.setdefault(group, []).append(row)
    for group, group_rows in groups.items():
        x = [row[keys[0]] for row in group_rows]
        label = ", ".join([str(group[0])] + [f"{key}={value}" for key, value in zip(keys[1:], group[1:], strict=True)])
        line = left_axes.plot(x, [row["seconds"] for row in group_rows], marker="o", ms=3.5, label=label)[0]
        low = [row["p10"] for row in group_rows]
        high = [row["p90"] for row in group_rows]
        left_axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, lw=0)
        mfu = [100 * row["mfu"] for row in group_rows]
        right_axes.plot(x, mfu, marker="o", ms=3.5, color=line.get_color(), label=label)
    is_numeric = all(isinstance(row[keys[0]], int | float) for row in rows)
    x_values = sorted({row[keys[0]] for row in rows}) if is_numeric else []
    for axes, title in ((left_axes, "Step time (s)"), (right_axes, "MFU, %")):
        if is_numeric and x_values[0] > 0 and x_values[-1] / x_values[0] > 8:
            axes.set_xscale("log", base=2)
            axes.set_xticks(x_values, [f"{value:g}" for value in x_values], rotation=30)
            axes.minorticks_off()
        axes.set_xlabel(keys[0])
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
    if min(row["seconds"] for row in rows) * 8 < max(row["seconds"] for row in rows):
        left_axes.set_yscale("log")
        label_log_axis(left_axes.yaxis)
    right_axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def plot_tornado(step_changes: Mapping[str, tuple[float, float]], input_change: float, path: Path, title: str) -> None:
    """Plot how the step time depends on each input of the estimate.

    Args:
        step_changes: by name of an input, the changes of the step time when the input falls and when it rises, as
            fractions.
        input_change: the fraction by which the input falls and rises.
    """
    figure, axes = make_figure(8, 0.45 * len(step_changes) + 1.4)
    for row, (lower, higher) in enumerate(step_changes.values()):
        axes.barh(row, 100 * lower, color="#c0392b", height=0.6, label=f"-{input_change:.0%}" if row == 0 else None)
        axes.barh(row, 100 * higher, color="#2b5c8a", height=0.6, label=f"+{input_change:.0%}" if row == 0 else None)
    axes.set_yticks(range(len(step_changes)), list(step_changes))
    axes.invert_yaxis()
    axes.axvline(0, color="#333333", lw=0.8)
    axes.set_xlabel("Change of step time (%)")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, loc="lower right", title="figure changed by")
    save(figure, path)


def plot_effective_share(
    curve: Sequence[tuple[float, float]], marks: Mapping[str, float], path: Path, title: str
) -> None:
    """Plot the effective share of time over the checkpoint interval.

    Args:
        curve: (interval in seconds, effective share).
        marks: named intervals in seconds, which are drawn as lines.
    """
    figure, axes = make_figure(7, 4)
    axes.plot([x / 60 for x, _ in curve], [100 * y for _, y in curve], marker="o", ms=4, color="#2b5c8a")
    styles = ("--", ":", "-.")
    for style, (name, seconds) in zip(styles, marks.items(), strict=False):
        axes.axvline(seconds / 60, ls=style, color="#888888", label=f"{name}: {seconds / 60:.1f} min")
    axes.set_xscale("log")
    ticks = [x / 60 for x, _ in curve][::2]
    axes.set_xticks(ticks, [f"{t:.3g}" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("Minutes between checkpoints")
    axes.set_ylabel("Effective training time (%)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)


def plot_predictions(pairs: Sequence[tuple[str, float, float, bool]], path: Path, title: str) -> None:
    """Plot predicted over measured step times, with a band of 5%.

    Args:
        pairs: (name, measured seconds, predicted seconds, whether the row was used for fitting).
    """
    figure, axes = make_figure(5.4, 5.2)
    measured = np.array([seconds for _, seconds, _, _ in pairs])
    predicted = np.array([seconds for _, _, seconds, _ in pairs])
    is_fitted = np.array([fitted for *_, fitted in pairs])
    ends = np.array([measured.min() * 0.85, measured.max() * 1.18])
    axes.plot(ends, ends, color="#333333", lw=0.8)
    axes.fill_between(ends, ends / 1.05, ends * 1.05, color="#999999", alpha=0.2, lw=0, label="within 5%")
    for mask, colour, label in ((is_fitted, "#b8a77e", "fitted"), (~is_fitted, "#2b5c8a", "held out")):
        if mask.any():
            axes.scatter(measured[mask], predicted[mask], s=22, color=colour, label=label, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    label_log_axis(axes.xaxis)
    label_log_axis(axes.yaxis)
    axes.set_xlabel("Measured step time (s)")
    axes.set_ylabel("Predicted step time (s)")
    axes.set_title("\n".join(textwrap.wrap(title, 58)), fontsize=9)
    axes.legend(frameon=False)
    save(figure, path)
