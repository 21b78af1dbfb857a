"""Plots of runs: loss, learning rate and gradient norm over tokens, steps or hours, for one run or several."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from megascale.core import palette
from megascale.core.json_lines import RecordReader
from megascale.core.strict_json import to_float
from megascale.errors import DataError

Axis = Literal["tokens", "steps", "hours"]
_DRAWN = ("step", "tokens", "loss", "valid_loss", "learning_rate", "grad_norm", "seconds")
_LARGEST = 1e30  # a larger value is a gap, one below its inverse is 0: axes cannot be laid over it


def read_metrics(run: Path, warn: Callable[[str], None] = lambda text: None) -> list[dict[str, float]]:
    """Return the drawn values of the records of a run folder, NaN for values that are not numbers.

    Args:
        warn: called with a sentence about skipped lines.

    Raises:
        DataError: the run has no metrics, or no losses.
    """
    file = run / "metrics.jsonl"
    reader = RecordReader(file)
    try:
        numbers = ({key: _parse_number(record[key]) for key in _DRAWN if key in record} for record in reader)
        records = [record for record in numbers if not math.isnan(record.get("step", math.nan))]
    except FileNotFoundError:
        raise DataError(
            f"{run} has no metrics.jsonl; name the folder of a run that has begun, such as runs/stdlib"
        ) from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    if text := reader.describe_damage():
        warn(text)
    if not any("loss" in record for record in records):
        raise DataError(f"{file} has no losses; the run has not finished a step yet")
    return records


@dataclass(frozen=True)
class Curves:
    """The drawn curves of a run.

    Attributes:
        x: position of each step on the axis: tokens, steps, or hours spent in steps.
        loss, rate, norm: values of each step; NaN is a gap.
        held_out: position and loss of each evaluation.
    """

    name: str
    x: list[float]
    loss: list[float]
    rate: list[float]
    norm: list[float]
    held_out: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def from_records(cls, name: str, records: list[dict[str, Any]], axis: Axis) -> Curves:
        """Return the curves of a run's records. DataError if no record has a position on the axis."""
        steps = [record for record in records if "loss" in record]
        if axis == "hours":
            seconds = (_parse_number(record.get("seconds")) for record in steps)
            x = [total / 3600 for total in accumulate(s if s > 0 else 0.0 for s in seconds)]
        else:
            x = [_parse_number(record.get("tokens" if axis == "tokens" else "step")) for record in steps]
        if all(math.isnan(position) for position in x):
            raise DataError(f"the metrics of {name} have no {axis}; draw them along another axis, such as --x steps")
        numbers = [record["step"] for record in steps]
        held_out = []
        for record in records:
            # An evaluation has the position of the last step before it, on every axis.
            valid_loss = _parse_number(record.get("valid_loss"))
            preceding = bisect_right(numbers, record["step"])
            if not math.isnan(valid_loss) and preceding:
                held_out.append((x[preceding - 1], valid_loss))
        loss, rate, norm = (
            [_parse_number(r.get(key)) for r in steps] for key in ("loss", "learning_rate", "grad_norm")
        )
        return cls(name, x, loss, rate, norm, held_out)

    def format_label(self, weight: float) -> str:
        """Return the text of the legend: the name and the last losses."""
        last = smooth(self.loss, weight)[-1]
        parts = ["no finite loss" if math.isnan(last) else f"{last:.3f}"]
        if self.held_out:
            parts.append(f"held out {self.held_out[-1][1]:.3f}")
        return f"{self.name}: {', '.join(parts)}"


def _parse_number(value: Any) -> float:
    """Return a value that can be drawn, or NaN."""
    parsed = to_float(value)
    if not abs(parsed) <= _LARGEST:
        return math.nan
    if abs(parsed) * _LARGEST >= 1:
        return parsed
    return 0.0


def _plain_name(name: str) -> str:
    """Return a name as a legend shows it: bytes that are not text as "?", and no formulas."""
    text = name.encode(errors="replace").decode().replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # matplotlib leaves such a label out


def smooth(values: list[float], weight: float) -> list[float]:
    """Return the exponential average of the values so far, without bias to its start; gaps are ignored."""
    out = []
    mean = 0.0
    total = 0.0
    for value in values:
        if not math.isnan(value):
            mean = weight * mean + (1 - weight) * value
            total = weight * total + (1 - weight)
        out.append(mean / total if total else math.nan)
    return out


def choose_unit(largest: float) -> tuple[float, str]:
    """Return a divisor that makes numbers up to `largest` short, and its name."""
    for size, name in ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if largest >= size:
            return size, name
    return 1.0, ""


def plot_runs(
    runs: list[Path],
    out: Path,
    *,
    x: Axis = "tokens",
    smoothing: float = 0.95,
    warn: Callable[[str], None] = lambda text: None,
) -> Path:
    """Draw loss (with held-out points), learning rate and gradient norm of runs into a file; return its path.

    Args:
        out: its suffix is the format, such as .png.
        smoothing: weight of the past in the average that is drawn over each noisy curve, 0 to below 1; 0 draws the
            curve alone.
        warn: called with a sentence about skipped lines.

    Raises:
        DataError: a run has no steps.
        OSError: the picture cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    names = [run.name if sum(r.name == run.name for r in runs) == 1 else str(run) for run in runs]
    curves = [
        Curves.from_records(_plain_name(name), read_metrics(run, warn), x)
        for name, run in zip(names, runs, strict=True)
    ]
    farthest = max((position for c in curves for position in c.x if not math.isnan(position)), default=0.0)
    scale, scale_name = choose_unit(farthest) if x == "tokens" else (1.0, "")
    figure, (top, rate, norm) = plt.subplots(
        3, 1, figsize=(9, 9), sharex=True, height_ratios=[3, 1, 1], layout="constrained"
    )
    for index, c in enumerate(curves):
        color = palette.RUNS[index % len(palette.RUNS)]
        positions = [position / scale for position in c.x]
        _draw_noisy(top, positions, c.loss, smoothing, color, c.format_label(smoothing))
        if c.held_out:
            held_x, held_y = zip(*c.held_out, strict=True)
            top.plot([p / scale for p in held_x], held_y, "o:", color=color, markersize=5, linewidth=1.0)
        rate.plot(positions, c.rate, color=color, linewidth=1.4)
        _draw_noisy(norm, positions, c.norm, smoothing, color, None)
    for axes in (top, norm):
        if axes is norm and not any(value > 0 for c in curves for value in c.norm):
            continue  # a logarithmic axis without a positive value cannot be laid out
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8) if axes is top else (1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    top.set_ylim(*_choose_limits(curves, smoothing))
    top.set_ylabel("Loss (nats per token)" + ("; dots: held out" if any(c.held_out for c in curves) else ""))
    top.legend(title=f"last loss{', averaged' if smoothing else ''}", frameon=False)
    rate.set_ylabel("Learning rate")
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    norm.set_ylabel("Gradient norm")
    norm.set_xlabel(
        {"tokens": f"tokens ({scale_name})" if scale_name else "tokens", "hours": "hours in steps"}.get(x, x)
    )
    for axes in (top, rate, norm):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)
    return out


def _choose_limits(curves: list[Curves], smoothing: float) -> tuple[float, float]:
    """Return the limits of the loss axis: all averages and evaluations, and all but the most extreme steps."""
    shown = [loss for c in curves for _, loss in c.held_out]
    for c in curves:
        values = sorted(v for v in c.loss if not math.isnan(v))
        if values:
            cut = len(values) // 200
            shown += [values[cut], values[-1 - cut]] + smooth(c.loss, smoothing)
    positive = [v for v in shown if v > 0]
    if positive:
        return (min(positive) / 1.03, max(positive) * 1.03)
    return (0.1, 10.0)


def _draw_noisy(axes: Any, x: list[float], y: list[float], weight: float, color: str, label: str | None) -> None:
    """Draw a curve, pale under its average if it is smoothed."""
    if not weight:
        axes.plot(x, y, color=color, linewidth=1.0, label=label)
        return
    axes.plot(x, y, color=color, alpha=0.22, linewidth=0.7)
    axes.plot(x, smooth(y, weight), color=color, linewidth=1.6, label=label)
