"""Slow ranks as a picture: all ranks by how much slower they are, and those that stand out step by step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megascale.observe.analysis.slow_ranks import nan_median

if TYPE_CHECKING:
    from megascale.observe.analysis.stragglers import Stragglers

_COLOURS = ("#d9534f", "#f0ad4e", "#7a5ea8", "#2f7d4a", "#2f6db3")
_SHOWN = 5  # ranks that are drawn step by step
_FEW = 9  # healthy ranks that are drawn each
_CELLS = 1024  # ranks up to which each has a cell


def draw_stragglers(found: Stragglers, path: Path) -> None:
    """Draw a PNG, SVG or PDF."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.4])
    if len(found.parts.ranks) <= _CELLS:
        _cells(figure, left, found)
    else:
        _histogram(left, found)
    _by_step(right, found)
    named = ", ".join(
        f"rank {one.slow_rank.rank}: {one.slow_rank.excess:.1%} slower, {one.slow_rank.state}, {one.cause}"
        for one in found.ranks[:3]
    )
    steps = found.parts.steps
    figure.suptitle(f"steps {steps[0]} to {steps[-1]}. {named or 'No rank is slow'}", fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _cells(figure: Any, axes: Any, found: Stragglers) -> None:
    """A row a host, as hosts were looked at in MegaScale's figure 7."""
    hosts = sorted(set(found.parts.host.tolist()))
    across = max(int((found.parts.host == host).sum()) for host in hosts)
    if len(hosts) == 1:  # a row of all of them would be thin
        across = min(across, max(4, int(np.ceil(np.sqrt(across)))))
    rows: list[list[int]] = []
    labels = []
    for host in hosts:
        mine = np.flatnonzero(found.parts.host == host).tolist()
        for begin in range(0, len(mine), across):
            rows.append(mine[begin : begin + across])
            labels.append(f"host {host}" if begin == 0 else "")
    cells = np.full((len(rows), across), np.nan)
    for y, row in enumerate(rows):
        for x, r in enumerate(row):
            cells[y, x] = 100 * found.judgement.excess[r]
    most = max(
        100 * found.judgement.limit if np.isfinite(found.judgement.limit) else 5.0,
        float(np.nanmax(np.abs(cells), initial=1)),
    )
    image = axes.imshow(cells, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    if cells.size <= 128:
        for y, row in enumerate(rows):
            for x, r in enumerate(row):
                text = f"{found.parts.ranks[r]}\n{cells[y, x]:+.1f}%" if np.isfinite(cells[y, x]) else ""
                colour = "white" if abs(cells[y, x]) > 0.6 * most else "black"
                axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set(xticks=[], yticks=range(len(labels)), title="own time against comparable ranks")
    axes.set_yticklabels(labels, fontsize=8)
    axes.title.set_fontsize(9)
    figure.colorbar(image, ax=axes, label="% slower")


def _histogram(axes: Any, found: Stragglers) -> None:
    excess = 100 * found.judgement.excess[np.isfinite(found.judgement.excess)]
    axes.hist(excess, bins=120, color="#5b9bd5", log=True)
    axes.axvline(100 * found.judgement.limit, color="#333333", linestyle="--", linewidth=1)
    axes.text(100 * found.judgement.limit, 0.98, " limit", transform=axes.get_xaxis_transform(), va="top", fontsize=8)
    for number, one in enumerate(found.persistent[:_SHOWN]):
        (r,) = np.flatnonzero(found.parts.ranks == one.slow_rank.rank)
        axes.plot([100 * found.judgement.excess[r]], [1], "v", color=_COLOURS[number], markersize=8)
    axes.set(xlabel="% slower than comparable ranks", ylabel="ranks", title=f"{len(excess):,} ranks")
    axes.title.set_fontsize(9)


def _by_step(axes: Any, found: Stragglers) -> None:
    """Named ranks over the middle nine tenths of the others."""
    steps, ratio = found.parts.steps, 100 * np.expm1(found.judgement.ratio)
    named = {one.slow_rank.rank for one in found.ranks}
    healthy = np.array([rank not in named for rank in found.parts.ranks.tolist()])
    known = ratio[np.isfinite(ratio).any(1) & healthy]
    width = max(1, len(steps) // 150)
    count = len(steps) // width
    at = steps[: count * width].reshape(count, width).mean(1)

    def thin(values: Any) -> Any:
        return nan_median(values[: count * width].reshape(count, width))

    if len(known) < _FEW:
        for values in known:
            axes.plot(at, thin(values), color="#00000040", linewidth=0.8)
    else:
        low, high = (np.nanpercentile(known, p, axis=0) for p in (5, 95))
        axes.fill_between(
            at, thin(low), thin(high), color="#00000018", label="5% to 95% of those not named", linewidth=0
        )
    for number, one in enumerate(found.ranks[:_SHOWN]):
        (r,) = np.flatnonzero(found.parts.ranks == one.slow_rank.rank)
        axes.plot(
            at, thin(ratio[r]), color=_COLOURS[number], linewidth=1.4, label=f"rank {one.slow_rank.rank}: {one.cause}"
        )
    if np.isfinite(found.judgement.limit):
        axes.axhline(100 * found.judgement.limit, color="#333333", linestyle="--", linewidth=1, label="limit")
    axes.set(xlabel="step", ylabel="% slower than comparable ranks")
    axes.grid(color="#00000018")
    axes.legend(fontsize=8, frameon=False, loc="best")
