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
# matplotlib cannot lay out axes for extreme values. A value with a larger magnitude is a gap, and a value with a
# smaller magnitude than the inverse counts as 0.
_LARGEST = 1e30
_LIMIT_MARGIN = 1.03  # factor by which the limits of the loss axis are beyond the drawn values


def read_metrics(run: Path, warn: Callable[[str], None] = lambda text: None) -> list[dict[str, float]]:
    """Return the values of a run's records that are drawn, by key; NaN for values that are not numbers.

    Raises DataError if the run has no metrics or no losses.

    Args:
        warn: called with a sentence about skipped lines.
    """
    file = run / "metrics.jsonl"
    reader = RecordReader(file)
    try:
        drawn_values = ({key: _parse_number(record[key]) for key in _DRAWN_KEYS if key in record} for record in reader)
        records = [values for values in drawn_values if not math.isnan(values.get("step", math.nan))]
    except FileNotFoundError:
        raise DataError(
            f"{run} has no metrics.jsonl; name the folder of a run that has begun, such as runs/stdlib"
        ) from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    damage = reader.describe_damage()
    if damage:
        warn(damage)
    losses = [record["loss"] for record in records if "loss" in record]
    if not losses:
        raise DataError(f"{file} has no losses; the run has not finished a step yet")
    gap_count = sum(map(math.isnan, losses))
    if gap_count:
        warn(f"{file}: the loss of {gap_count} of {len(losses)} steps is not a finite number; the curve has gaps there")
    return records


@dataclass(frozen=True)
class Curves:
    """The drawn curves of a run.

    Attributes:
        x: position of each step on the axis: tokens, steps, or the sum of the steps' hours.
        loss, rate, norm: loss, learning rate and gradient norm of each step; NaN is a gap.
        valid_points: position and loss of each evaluation.
    """

    name: str
    x: list[float]
    loss: list[float]
    rate: list[float]
    norm: list[float]
    valid_points: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def from_records(cls, name: str, records: list[dict[str, Any]], axis: Axis) -> Curves:
        """Return the curves of a run's records. Raises DataError if no record has a position on the axis."""
        training_records = [record for record in records if "loss" in record]
        if axis == "hours":
            seconds = [_parse_number(record.get("seconds")) for record in training_records]
            seconds = [step_seconds if step_seconds > 0 else 0.0 for step_seconds in seconds]  # NaN counts as 0
            x = [total / 3600 for total in accumulate(seconds)]
        else:
            key = {"tokens": "tokens", "steps": "step"}[axis]
            x = [_parse_number(record.get(key)) for record in training_records]
        if all(math.isnan(position) for position in x):
            raise DataError(f"the metrics of {name} have no {axis}; draw them along another axis, such as --x steps")
        steps = [record["step"] for record in training_records]
        valid_points = []
        for record in records:
            # An evaluation has the position of the last step before it, on every axis.
            valid_loss = _parse_number(record.get("valid_loss"))
            preceding_count = bisect_right(steps, record["step"])
            if not math.isnan(valid_loss) and preceding_count:
                valid_points.append((x[preceding_count - 1], valid_loss))
        loss, rate, norm = (
            [_parse_number(record.get(key)) for record in training_records]
            for key in ("loss", "learning_rate", "grad_norm")
        )
        return cls(name, x, loss=loss, rate=rate, norm=norm, valid_points=valid_points)

    def format_label(self, weight: float) -> str:
        """Return the text of the legend: name, last loss (averaged with `weight`, see `smooth`), last held-out loss."""
        last_loss = smooth(self.loss, weight)[-1]
        if math.isnan(last_loss):
            label = f"{self.name}: no finite loss"
        else:
            label = f"{self.name}: {last_loss:.3f}"
            gap_count = sum(map(math.isnan, self.loss))
            if gap_count:
                label += f", {gap_count} step{'' if gap_count == 1 else 's'} not finite"
        if self.valid_points:
            _, valid_loss = self.valid_points[-1]
            label += f", held out {valid_loss:.3f}"
        return label


def _parse_number(value: Any) -> float:
    """Return a value as a number that can be drawn, or NaN."""
    parsed = to_float(value)
    if not abs(parsed) <= _LARGEST:  # true for NaN
        return math.nan
    if abs(parsed) < 1 / _LARGEST:
        return 0.0
    return parsed


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
    weight_sum = 0.0  # of all values so far; dividing by it corrects the bias towards the initial 0
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

    # Runs with equal names are shown with their paths.
    name_counts = Counter(run.name for run in runs)
    names = [run.name if name_counts[run.name] == 1 else str(run) for run in runs]
    curves = [
        Curves.from_records(_escape_name(name), read_metrics(run, warn), x)
        for name, run in zip(names, runs, strict=True)
    ]
    unit = 1.0
    unit_name = ""
    if x == "tokens":
        positions = [position for run in curves for position in run.x if not math.isnan(position)]
        unit, unit_name = choose_unit(max(positions, default=0.0))
    figure, (loss_axes, rate_axes, norm_axes) = plt.subplots(
        3, 1, figsize=(9, 9), sharex=True, height_ratios=[3, 1, 1], layout="constrained"
    )
    for index, run in enumerate(curves):
        color = palette.RUNS[index % len(palette.RUNS)]
        positions = [position / unit for position in run.x]
        label = run.format_label(smoothing)
        _draw_noisy(loss_axes, positions, run.loss, weight=smoothing, color=color, label=label)
        if run.valid_points:
            valid_positions = [position / unit for position, _ in run.valid_points]
            valid_losses = [loss for _, loss in run.valid_points]
            loss_axes.plot(valid_positions, valid_losses, "o:", color=color, markersize=5, linewidth=1.0)
        rate_axes.plot(positions, run.rate, color=color, linewidth=1.4)
        _draw_noisy(norm_axes, positions, run.norm, weight=smoothing, color=color, label=None)
    _lay_out_loss(loss_axes, curves, smoothing)
    rate_axes.set_ylabel("Learning rate")
    rate_axes.set_ylim(bottom=0)
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    if any(value > 0 for run in curves for value in run.norm):
        _use_logarithms(norm_axes, (1, 2, 5))  # without a positive value, such an axis cannot be laid out
    norm_axes.set_ylabel("Gradient norm")
    norm_axes.set_xlabel(_label_x(x, unit_name))
    for axes in (loss_axes, rate_axes, norm_axes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)
    return out


def _lay_out_loss(axes: Any, curves: list[Curves], smoothing: float) -> None:
    """Set the scale, the limits, the label and the legend of the loss axes."""
    _use_logarithms(axes, (1, 1.5, 2, 3, 4, 5, 6, 8))
    axes.set_ylim(*_choose_limits(curves, smoothing))
    label = "Loss (nats per token)"
    if any(run.valid_points for run in curves):
        label += "; dots: held out"
    axes.set_ylabel(label)
    title = "last loss"
    if smoothing:
        title += ", averaged"
    axes.legend(title=title, frameon=False)


def _use_logarithms(axes: Any, labelled_multiples: tuple[float, ...]) -> None:
    """Make the y axis logarithmic, with labels at these multiples of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=labelled_multiples))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label_x(axis: Axis, unit_name: str) -> str:
    """Return the label of the x axis."""
    if axis == "hours":
        return "hours in steps"
    if unit_name:
        return f"{axis} ({unit_name})"
    return axis


def _choose_limits(curves: list[Curves], smoothing: float) -> tuple[float, float]:
    """Return limits of the loss axis that include all averages, all evaluations and 99% of the steps' losses."""
    shown_losses = [loss for run in curves for _, loss in run.valid_points]
    for run in curves:
        losses = sorted(loss for loss in run.loss if not math.isnan(loss))
        if losses:
            excluded_count = len(losses) // 200  # at each end
            shown_losses += [losses[excluded_count], losses[-1 - excluded_count]]
            shown_losses += smooth(run.loss, smoothing)
    positive = [loss for loss in shown_losses if loss > 0]
    if positive:
        return (min(positive) / _LIMIT_MARGIN, max(positive) * _LIMIT_MARGIN)
    return (0.1, 10.0)


def _draw_noisy(axes: Any, x: list[float], y: list[float], *, weight: float, color: str, label: str | None) -> None:
    """Draw a curve. If `weight` (see `smooth`) is positive, draw the curve pale and its average over it."""
    if not weight:
        axes.plot(x, y, color=color, linewidth=1.0, label=label)
        return
    axes.plot(x, y, color=color, alpha=0.22, linewidth=0.7)
    axes.plot(x, smooth(y, weight), color=color, linewidth=1.6, label=label)
