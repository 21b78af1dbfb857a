"""Plots of runs: loss, learning rate and gradient norm over tokens, steps or hours, for one run or several."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
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
_DRAWN_KEYS = ("step", "tokens", "loss", "valid_loss", "learning_rate", "grad_norm", "seconds")
# matplotlib cannot lay out axes for extreme values. A larger value is a gap, a value below the inverse counts as 0.
_LARGEST = 1e30


def read_metrics(run: Path, warn: Callable[[str], None] = lambda text: None) -> list[dict[str, float]]:
    """Return the values of a run's records that are drawn, by key; NaN for values that are not numbers.

    Raises DataError if the run has no metrics or no losses.

    Args:
        warn: called with a sentence about skipped lines.
    """
    file = run / "metrics.jsonl"
    reader = RecordReader(file)
    try:
        numbers = ({key: _parse_number(record[key]) for key in _DRAWN_KEYS if key in record} for record in reader)
        records = [record for record in numbers if not math.isnan(record.get("step", math.nan))]
    except FileNotFoundError:
        raise DataError(
            f"{run} has no metrics.jsonl; name the folder of a run that has begun, such as runs/stdlib"
        ) from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    damage = reader.describe_damage()
    if damage:
        warn(damage)
    if not any("loss" in record for record in records):
        raise DataError(f"{file} has no losses; the run has not finished a step yet")
    return records


@dataclass(frozen=True)
class Curves:
    """The drawn curves of a run.

    Attributes:
        x: position of each step on the axis: tokens, steps, or the sum of the steps' hours.
        loss, rate, norm: loss, learning rate and gradient norm of each step; NaN is a gap.
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
        """Return the curves of a run's records. Raises DataError if no record has a position on the axis."""
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
            preceding_count = bisect_right(numbers, record["step"])
            if not math.isnan(valid_loss) and preceding_count:
                held_out.append((x[preceding_count - 1], valid_loss))
        loss, rate, norm = (
            [_parse_number(r.get(key)) for r in steps] for key in ("loss", "learning_rate", "grad_norm")
        )
        return cls(name, x, loss, rate, norm, held_out)

    def format_label(self, weight: float) -> str:
        """Return the text of the legend: name, last loss (averaged with `weight`) and last held-out loss."""
        last_loss = smooth(self.loss, weight)[-1]
        if math.isnan(last_loss):
            label = f"{self.name}: no finite loss"
        else:
            label = f"{self.name}: {last_loss:.3f}"
        if self.held_out:
            _, held_out_loss = self.held_out[-1]
            label += f", held out {held_out_loss:.3f}"
        return label


def _parse_number(value: Any) -> float:
    """Return a value that can be drawn, or NaN."""
    parsed = to_float(value)
    if not abs(parsed) <= _LARGEST:
        return math.nan
    if abs(parsed) * _LARGEST >= 1:
        return parsed
    return 0.0


def _escape_name(name: str) -> str:
    """Return a name for a legend: undecodable bytes become "?", and "$" does not begin a formula."""
    text = name.encode(errors="replace").decode().replace("$", r"\$")
    if text.startswith("_"):  # matplotlib omits such a label
        return f" {text}"
    return text


def smooth(values: list[float], weight: float) -> list[float]:
    """Return the exponential moving average after each value, with the bias correction of Adam; NaN is ignored.

    Args:
        weight: weight of the past.
    """
    averages = []
    mean = 0.0
    weight_sum = 0.0
    for value in values:
        if not math.isnan(value):
            mean = weight * mean + (1 - weight) * value
            weight_sum = weight * weight_sum + (1 - weight)
        averages.append(mean / weight_sum if weight_sum else math.nan)
    return averages


def choose_unit(largest: float) -> tuple[float, str]:
    """Return the largest power of 1,000 up to `largest` that has a name, and the name, such as 1e6 and "millions"."""
    for divisor, name in ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if largest >= divisor:
            return divisor, name
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

    Raises DataError if a run has no steps, and OSError if the file cannot be written.

    Args:
        out: the file; its suffix is the format, such as .png.
        smoothing: weight of the past in the average over each noisy curve, from 0 to below 1; 0 draws no average.
        warn: called with a sentence about skipped lines.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    # Runs with equal names are shown with their paths.
    name_counts = Counter(run.name for run in runs)
    names = [run.name if name_counts[run.name] == 1 else str(run) for run in runs]
    curves = [
        Curves.from_records(_escape_name(name), read_metrics(run, warn), x)
        for name, run in zip(names, runs, strict=True)
    ]
    farthest = max((position for c in curves for position in c.x if not math.isnan(position)), default=0.0)
    if x == "tokens":
        scale, scale_name = choose_unit(farthest)
    else:
        scale, scale_name = 1.0, ""
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
    x_label: str = x
    if x == "hours":
        x_label = "hours in steps"
    elif scale_name:
        x_label = f"{x} ({scale_name})"
    norm.set_xlabel(x_label)
    for axes in (top, rate, norm):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)
    return out


def _choose_limits(curves: list[Curves], smoothing: float) -> tuple[float, float]:
    """Return limits of the loss axis that include all averages, all evaluations and 99% of the steps' losses."""
    shown = [loss for c in curves for _, loss in c.held_out]
    for c in curves:
        values = sorted(v for v in c.loss if not math.isnan(v))
        if values:
            excluded_count = len(values) // 200  # at each end
            shown += [values[excluded_count], values[-1 - excluded_count]] + smooth(c.loss, smoothing)
    positive = [v for v in shown if v > 0]
    if positive:
        return (min(positive) / 1.03, max(positive) * 1.03)
    return (0.1, 10.0)


def _draw_noisy(axes: Any, x: list[float], y: list[float], weight: float, color: str, label: str | None) -> None:
    """Draw a curve. With a positive `weight`, draw it pale, and its average over it."""
    if not weight:
        axes.plot(x, y, color=color, linewidth=1.0, label=label)
        return
    axes.plot(x, y, color=color, alpha=0.22, linewidth=0.7)
    axes.plot(x, smooth(y, weight), color=color, linewidth=1.6, label=label)
