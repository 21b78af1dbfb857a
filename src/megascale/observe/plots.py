"""Plots of runs: loss, learning rate and gradient norm over tokens, for one run or several beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megascale.errors import DataError


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run folder; DataError if it has none."""
    file = run / "metrics.jsonl"
    if not file.exists():
        raise DataError(f"{run} has no metrics.jsonl; name a run folder such as runs/stdlib")
    records = []
    for line in file.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # a last line cut by a crash
    if not records:
        raise DataError(f"{file} is empty; the run has not finished a step yet")
    return records


def _smooth(values: list[float], weight: float = 0.95) -> list[float]:
    out, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        out.append(mean / total)
    return out


def plot_runs(runs: list[Path], out: Path) -> Path:
    """Draw loss (with held-out points), learning rate and gradient norm against tokens; writes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, rate, norm) = plt.subplots(
        3, 1, figsize=(9, 9), sharex=True, height_ratios=[3, 1, 1], layout="constrained"
    )
    for number, run in enumerate(runs):
        color = f"C{number}"
        records = read_metrics(run)
        steps = [r for r in records if "loss" in r]
        tokens = [r["tokens"] / 1e6 for r in steps]
        if steps:
            top.plot(tokens, [r["loss"] for r in steps], color=color, alpha=0.25, linewidth=0.8)
            label = f"{run.name}: training"
            top.plot(tokens, _smooth([r["loss"] for r in steps]), color=color, linewidth=1.6, label=label)
            rate.plot(tokens, [r["learning_rate"] for r in steps], color=color)
            norm.plot(tokens, [r["grad_norm"] for r in steps], color=color, linewidth=0.8)
        held_out = [r for r in records if "valid_loss" in r]
        if held_out:
            x, y = [r["tokens"] / 1e6 for r in held_out], [r["valid_loss"] for r in held_out]
            top.plot(x, y, "o--", color=color, markersize=5, label=f"{run.name}: held out")
    top.set_ylabel("loss (nats a token)")
    top.set_yscale("log")
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

    top.yaxis.set_major_locator(MaxNLocator(8))
    top.yaxis.set_major_formatter(ScalarFormatter())
    top.yaxis.set_minor_formatter(NullFormatter())
    top.legend()
    rate.set_ylabel("learning rate")
    norm.set_ylabel("gradient norm")
    norm.set_yscale("log")
    norm.set_xlabel("tokens (millions)")
    for axes in (top, rate, norm):
        axes.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)
    return out
