"""A decline as a picture: seconds of each step with the two windows, and what of the growth has which cause."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megascale.observe.analysis.slow_ranks import nan_median

if TYPE_CHECKING:
    from megascale.observe.analysis.decline import Decline

_BEFORE, _AFTER, _CAUSE = "#2f6db3", "#d9534f", "#f0ad4e"
_POINTS = 400


def draw_decline(found: Decline, path: Path) -> None:
    """Draw a PNG, SVG or PDF."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.4, 1])
    steps, seconds = found.step_seconds
    left.plot(steps, 1e3 * seconds, ".", markersize=2, color="#00000040")
    width = max(1, len(steps) // _POINTS, min(9, len(steps) // 10))
    count = len(steps) // width
    middle = nan_median(seconds[: count * width].reshape(count, width))
    left.plot(steps[: count * width].reshape(count, width).mean(1), 1e3 * middle, color="#333333", linewidth=1.2)
    for (first, last), mean, colour in zip((found.before, found.after), found.seconds, (_BEFORE, _AFTER), strict=True):
        left.axvspan(first, last, color=colour, alpha=0.12, linewidth=0)
        left.plot([first, last], [1e3 * mean] * 2, color=colour, linewidth=2, label=f"{1e3 * mean:.1f} ms")
    low = 1e3 * float(np.nanpercentile(seconds, 1))
    high = 1e3 * float(np.nanpercentile(seconds, 99))
    left.set(xlabel="step", ylabel="ms a step (median rank)", ylim=(0.9 * low, 1.1 * high))
    left.legend(fontsize=8, frameon=False, loc="lower right")
    left.grid(color="#00000018")
    shown = [one for one in found.causes if one.share >= 0.02][:8][::-1]
    names = [one.name for one in shown]
    right.barh(
        names,
        [1e3 * one.seconds for one in shown],
        color=[_AFTER if one in found.main_causes else _CAUSE for one in shown],
    )
    right.set(xlabel="ms of the growth")
    right.grid(axis="x", color="#00000018")
    right.set_axisbelow(True)
    words = {"declined": "no cause stands out", "uncertain": "chance may explain it", "unchanged": "no decline"}
    named = ", ".join(f"{one.name} ({one.share:.0%})" for one in found.main_causes) or words[found.verdict]
    figure.suptitle(f"{found.growth:+.1%} a step: {named}", fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
