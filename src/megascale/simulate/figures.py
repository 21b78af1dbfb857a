"""Figures of matplotlib that need no display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def make_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, Any]:
    """Return a figure and its axes, an array of them for several columns. Sizes are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes if columns > 1 else axes[0]


def label_log_axis(axis: Any, steps: tuple[int, ...] = (1, 2, 5)) -> None:
    """Label a logarithmic axis with plain numbers, at these multiples of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> None:
    """Write a figure into a file, and create the folder if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
