"""Plots of runs: loss, learning rate and gradient norm over tokens, steps or hours, for one run or several."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from megascale.core.bounded_lines import RecordReader
from megascale.core.strict_json import to_float
from megascale.errors import DataError

Axis = Literal["tokens", "steps", "hours"]
_DRAWN = ("step", "tokens", "loss", "valid_loss", "learning_rate", "grad_norm", "seconds")
_LARGEST = 1e30  # a larger value is a gap, one below its inverse is 0: axes cannot be laid over it


def read_metrics(run: Path, warn: Callable[[str], None] = lambda text: None) -> list[dict[str, float]]:
    """Return what is drawn of the records of a run folder, NaN for what is not a number.

    Args:
        warn: called with a sentence on lines that were left out.

    Raises:
        DataError: the run has no metrics, or no losses.
    """
    file = run / "metrics.jsonl"
    reader = RecordReader(file)
    try:
        numbers = ({key: _number(record[key]) for key in _DRAWN if key in record} for record in reader)
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
    """A run as it is drawn.

    Attributes:
        x: place of each step on the axis: tokens, steps, or hours spent in steps.
        loss, rate, norm: of each step; NaN is a gap.
        held_out: place and loss of each evaluation.
    """

    name: str
    x: list[float]
    loss: list[float]
    rate: list[float]
    norm: list[float]
    held_out: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def from_records(cls, name: str, records: list[dict[str, Any]], axis: Axis) -> Curves:
        """Return the curves of a run's records. DataError if no record has a place on the axis."""
        steps = [record for record in records if "loss" in record]
        if axis == "hours":
            seconds = (_number(record.get("seconds")) for record in steps)
            x = [total / 3600 for total in accumulate(s if s > 0 else 0.0 for s in seconds)]
        else:
            x = [_number(record.get("tokens" if axis == "tokens" else "step")) for record in steps]
        if all(math.isnan(place) for place in x):
            raise DataError(f"the metrics of {name} have no {axis}; draw them along another axis, such as --x steps")
        numbers = [record["step"] for record in steps]
        held_out = []
        for record in records:
            # An evaluation stands where the last step before it stands, whatever the axis.
            valid_loss = _number(record.get("valid_loss"))
            if not math.isnan(valid_loss) and (at := bisect_right(numbers, record["step"])):
                held_out.append((x[at - 1], valid_loss))
        loss, rate, norm = ([_number(r.get(key)) for r in steps] for key in ("loss", "learning_rate", "grad_norm"))
        return cls(name, x, loss, rate, norm, held_out)

    def format_label(self, weight: float) -> str:
        """Return the text of the legend: the name and the last losses."""
        last = smooth(self.loss, weight)[-1]
        parts = ["no finite loss" if math.isnan(last) else f"{last:.3f}"]
        if self.held_out:
            parts.append(f"held out {self.held_out[-1][1]:.3f}")
        return f"{self.name}: {', '.join(parts)}"


def _number(value: Any) -> float:
    """Return a value that can be drawn, or NaN."""
    found = to_float(value)
    if not abs(found) <= _LARGEST:
        return math.nan
    return found if abs(found) * _LARGEST >= 1 else 0.0


def _plain_name(name: str) -> str:
    """Return a name as a legend shows it: bytes that are not text as "?", and no formulas."""
    text = name.encode(errors="replace").decode().replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # matplotlib leaves such a label out


def smooth(values: list[float], weight: float) -> list[float]:
    """Exponential average of the values so far, free of the bias to its start; gaps stay out of it."""
    out, mean, total = [], 0.0, 0.0
    for value in values:
        if not math.isnan(value):
            mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        out.append(mean / total if total else math.nan)
    return out


def unit(largest: float) -> tuple[float, str]:
    """A divisor that makes numbers up to `largest` short, and its name."""
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
        warn: called with a sentence on lines that were left out.

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
    farthest = max((place for c in curves for place in c.x if not math.isnan(place)), default=0.0)
    scale, scale_name = unit(farthest) if x == "tokens" else (1.0, "")
    figure, (top, rate, norm) = plt.subplots(
        3, 1, figsize=(9, 9), sharex=True, height_ratios=[3, 1, 1], layout="constrained"
    )
    for index, c in enumerate(curves):
        color, places = f"C{index % 10}", [place / scale for place in c.x]
        _noisy(top, places, c.loss, smoothing, color, c.format_label(smoothing))
        if c.held_out:
            held_x, held_y = zip(*c.held_out, strict=True)
            top.plot([p / scale for p in held_x], held_y, "o:", color=color, markersize=5, linewidth=1.0)
        rate.plot(places, c.rate, color=color, linewidth=1.4)
        _noisy(norm, places, c.norm, smoothing, color, None)
    for axes in (top, norm):
        if axes is norm and not any(value > 0 for c in curves for value in c.norm):
            continue  # a logarithmic axis without a positive value cannot be laid out
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8) if axes is top else (1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    top.set_ylim(*_limits(curves, smoothing))
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


def _limits(curves: list[Curves], smoothing: float) -> tuple[float, float]:
    """Of the loss axis: all averages and evaluations, and all but the wildest steps."""
    shown = [loss for c in curves for _, loss in c.held_out]
    for c in curves:
        values = sorted(v for v in c.loss if not math.isnan(v))
        if values:
            cut = len(values) // 200
            shown += [values[cut], values[-1 - cut], *smooth(c.loss, smoothing)]
    known = [v for v in shown if v > 0]
    return (min(known) / 1.03, max(known) * 1.03) if known else (0.1, 10.0)


def _noisy(axes: Any, x: list[float], y: list[float], weight: float, color: str, label: str | None) -> None:
    """A curve, pale under its average if there is one."""
    if not weight:
        axes.plot(x, y, color=color, linewidth=1.0, label=label)
        return
    axes.plot(x, y, color=color, alpha=0.22, linewidth=0.7)
    axes.plot(x, smooth(y, weight), color=color, linewidth=1.6, label=label)
