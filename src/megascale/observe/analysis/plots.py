"""Plots of analyses: the step times and causes of a decline, slow ranks, and what-if scores of workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megascale.core import palette
from megascale.observe.analysis.slow_ranks import nan_median

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megascale.observe.analysis.decline import Decline
    from megascale.observe.analysis.stragglers import Stragglers
    from megascale.observe.analysis.whatif import WhatIf

Array = np.ndarray[Any, Any]

_BEFORE, _AFTER, _CAUSE = palette.RUNS[0], palette.RUNS[1], palette.EXPOSED
_MAX_POINTS = 400  # points of a curve
_RANK_COLOURS = palette.RUNS[1:6]
_MAX_SLOW_CURVES = 5  # slow ranks with a curve
_MAX_HEALTHY_CURVES = 9  # fewer healthy ranks have a curve each, more are drawn as a range
_MAX_CELLS = 1024  # up to this number of ranks, each has a cell; more are drawn as a histogram
_MAX_LABELLED_CELLS = 128  # up to this number of cells, each shows its rank and value
_MAX_NUMBERED_CELLS = 400  # up to this number of cells, each shows its score


def draw_decline(decline: Decline, path: Path) -> None:
    """Draw the time of each step with the two windows, and the causes of the growth, as PNG, SVG or PDF."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    time_axes, cause_axes = figure.subplots(1, 2, width_ratios=[1.4, 1])
    steps, seconds = decline.step_seconds
    time_axes.plot(steps, 1e3 * seconds, ".", markersize=2, color="#00000040")
    width = max(1, len(steps) // _MAX_POINTS, min(9, len(steps) // 10))
    smoothed = nan_median(_split_into_rows(seconds, width))
    time_axes.plot(_split_into_rows(steps, width).mean(1), 1e3 * smoothed, color="#333333", linewidth=1.2)
    windows = zip((decline.before, decline.after), decline.seconds, (_BEFORE, _AFTER), strict=True)
    for (first, last), mean, colour in windows:
        time_axes.axvspan(first, last, color=colour, alpha=0.12, linewidth=0)
        time_axes.plot([first, last], [1e3 * mean] * 2, color=colour, linewidth=2, label=f"{1e3 * mean:.1f} ms")
    low = 1e3 * float(np.nanpercentile(seconds, 1))
    high = 1e3 * float(np.nanpercentile(seconds, 99))
    time_axes.set(xlabel="step", ylabel="ms per step (median rank)", ylim=(0.9 * low, 1.1 * high))
    time_axes.legend(fontsize=8, frameon=False, loc="lower right")
    time_axes.grid(color="#00000018")
    causes = [cause for cause in decline.causes if cause.share >= 0.02][:8][::-1]
    cause_axes.barh(
        [cause.name for cause in causes],
        [1e3 * cause.seconds for cause in causes],
        color=[_AFTER if cause in decline.main_causes else _CAUSE for cause in causes],
    )
    cause_axes.set(xlabel="ms of the growth")
    cause_axes.grid(axis="x", color="#00000018")
    cause_axes.set_axisbelow(True)
    listed = ", ".join(f"{cause.name} ({cause.share:.0%})" for cause in decline.main_causes)
    if not listed:
        texts = {"declined": "no main cause", "uncertain": "chance may explain it", "unchanged": "no decline"}
        listed = texts[decline.verdict]
    _save(figure, path, f"{decline.growth:+.1%} per step: {listed}")


def draw_stragglers(stragglers: Stragglers, path: Path) -> None:
    """Draw the excess of all ranks, and the slow ranks step by step, as PNG, SVG or PDF."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    rank_axes, step_axes = figure.subplots(1, 2, width_ratios=[1, 1.4])
    if len(stragglers.times.ranks) <= _MAX_CELLS:
        _draw_rank_cells(figure, rank_axes, stragglers)
    else:
        _draw_histogram(rank_axes, stragglers)
    _draw_steps(step_axes, stragglers)
    listed = ", ".join(
        f"rank {straggler.slow_rank.rank}: {straggler.slow_rank.excess:.1%} slower, {straggler.slow_rank.state}, "
        f"{straggler.cause}"
        for straggler in stragglers.ranks[:3]
    )
    steps = stragglers.times.steps
    _save(figure, path, f"steps {steps[0]} to {steps[-1]}. {listed or 'No rank is slow'}")


def _save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _split_into_rows(values: Array, width: int) -> Array:
    """Return consecutive values as rows of `width`, without an incomplete last row."""
    row_count = len(values) // width
    return values[: row_count * width].reshape(row_count, width)


def _draw_rank_cells(figure: Figure, axes: Any, stragglers: Stragglers) -> None:
    """Draw a cell per rank and a row per host, as in figure 7 of the MegaScale paper."""
    times = stragglers.times
    hosts = sorted(set(times.host.tolist()))
    columns = max(int((times.host == host).sum()) for host in hosts)
    if len(hosts) == 1:  # a single row would be very flat
        columns = min(columns, max(4, int(np.ceil(np.sqrt(columns)))))
    rows: list[list[int]] = []
    labels = []
    for host in hosts:
        members = np.flatnonzero(times.host == host).tolist()
        for begin in range(0, len(members), columns):
            rows.append(members[begin : begin + columns])
            labels.append(f"host {host}" if begin == 0 else "")
    cells = np.full((len(rows), columns), np.nan)
    for y, members in enumerate(rows):
        cells[y, : len(members)] = 100 * stragglers.judgement.excess[members]
    limit = 100 * stragglers.judgement.limit
    largest = max(limit if np.isfinite(limit) else 5.0, float(np.nanmax(np.abs(cells), initial=1)))
    image = axes.imshow(cells, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto")
    if cells.size <= _MAX_LABELLED_CELLS:
        for y, members in enumerate(rows):
            for x, r in enumerate(members):
                if np.isfinite(cells[y, x]):
                    text = f"{times.ranks[r]}\n{cells[y, x]:+.1f}%"
                else:
                    text = ""
                if abs(cells[y, x]) > 0.6 * largest:
                    colour = "white"
                else:
                    colour = "black"
                axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set(xticks=[], yticks=range(len(labels)))
    axes.set_yticklabels(labels, fontsize=8)
    axes.set_title("busy time compared with similar ranks", fontsize=9)
    figure.colorbar(image, ax=axes, label="% slower")


def _draw_histogram(axes: Any, stragglers: Stragglers) -> None:
    judgement = stragglers.judgement
    excess = 100 * judgement.excess[np.isfinite(judgement.excess)]
    axes.hist(excess, bins=120, color="#5b9bd5", log=True)
    axes.axvline(100 * judgement.limit, color="#333333", linestyle="--", linewidth=1)
    axes.text(100 * judgement.limit, 0.98, " limit", transform=axes.get_xaxis_transform(), va="top", fontsize=8)
    for straggler, colour in zip(stragglers.persistent, _RANK_COLOURS, strict=False):
        (r,) = np.flatnonzero(stragglers.times.ranks == straggler.slow_rank.rank)
        axes.plot([100 * judgement.excess[r]], [1], "v", color=colour, markersize=8)
    axes.set(xlabel="% slower than comparable ranks", ylabel="ranks")
    axes.set_title(f"{len(excess):,} ranks", fontsize=9)


def _draw_steps(axes: Any, stragglers: Stragglers) -> None:
    """Draw the slow ranks step by step, over the healthy ranks without the slowest and the fastest 5%."""
    times, limit = stragglers.times, stragglers.judgement.limit
    slow = [straggler.slow_rank.rank for straggler in stragglers.ranks]
    width = max(1, len(times.steps) // 150)
    centres = _split_into_rows(times.steps, width).mean(1)
    percent = 100 * np.expm1(stragglers.judgement.log_ratio)
    healthy = percent[np.isfinite(percent).any(1) & ~np.isin(times.ranks, slow)]
    if len(healthy) < _MAX_HEALTHY_CURVES:
        for values in healthy:
            axes.plot(centres, nan_median(_split_into_rows(values, width)), color="#00000040", linewidth=0.8)
    else:
        low, high = (nan_median(_split_into_rows(np.nanpercentile(healthy, p, axis=0), width)) for p in (5, 95))
        axes.fill_between(centres, low, high, color="#00000018", label="5% to 95% of the healthy ranks", linewidth=0)
    for straggler, colour in zip(stragglers.ranks[:_MAX_SLOW_CURVES], _RANK_COLOURS, strict=False):
        rank = straggler.slow_rank.rank
        (r,) = np.flatnonzero(times.ranks == rank)
        values = nan_median(_split_into_rows(percent[r], width))
        axes.plot(centres, values, color=colour, linewidth=1.4, label=f"rank {rank}: {straggler.cause}")
    if np.isfinite(limit):
        axes.axhline(100 * limit, color="#333333", linestyle="--", linewidth=1, label="limit")
    axes.set(xlabel="step", ylabel="% slower than comparable ranks")
    axes.grid(color="#00000018")
    axes.legend(fontsize=8, frameon=False, loc="best")


def draw_worker_scores(result: WhatIf, path: Path) -> None:
    """Draw the workers' scores, stages down and replicas across, as PNG, SVG or PDF."""
    from matplotlib.figure import Figure

    stages, replicas = result.scores.shape
    figure = Figure(figsize=(min(24.0, 3.4 + 0.55 * replicas), min(18.0, 1.6 + 0.5 * stages)), layout="constrained")
    axes = figure.subplots()
    # The scale begins at no slow-down and ends at 1.5 like the published maps, or at the highest score.
    highest = max(1.5, float(result.scores.max()))
    image = axes.imshow(result.scores, cmap="Reds", vmin=1.0, vmax=highest, aspect="auto")
    if result.scores.size <= _MAX_NUMBERED_CELLS:
        for (stage, replica), score in np.ndenumerate(result.scores):
            if score > (1.0 + highest) / 2:
                colour = "white"
            else:
                colour = "black"
            axes.text(replica, stage, f"{score:.2f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set(xlabel="data-parallel replica", ylabel="pipeline stage", yticks=range(stages))
    if replicas <= 32:
        axes.set_xticks(range(replicas))
    figure.colorbar(image, ax=axes)
    _save(figure, path, f"slow-down with one worker as recorded (whole job: {result.slow_down:.3f})")
