"""Report of `benchmarks convergence`: the losses, their differences seed by seed, and the plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class ConvergenceOutcome:
    """Outcome of a run: held-out losses by tokens trained, in nats per token.

    The last is of all held-out samples, those before of `train.eval_samples` of them. `unquantised`: that of the same
    weights multiplied without float8, None where none is used.
    """

    variant: str
    seed: int
    folder: str
    tokens: list[int]
    held_out: list[float]
    tokens_per_second: float
    key: str = ""  # of all that decides its losses but the device
    unquantised: float | None = None
    device: str = ""

    @property
    def last(self) -> float:
        """The held-out loss at the end."""
        return self.held_out[-1]


def tokens_to(outcome: ConvergenceOutcome, loss: float) -> float | None:
    """Tokens after which the held-out loss is first at most `loss`, between evaluations by a straight line."""
    before: tuple[int, float] | None = None
    for location, value in zip(outcome.tokens, outcome.held_out, strict=True):
        if value <= loss:
            if before is None or before[1] <= loss:
                return float(location)
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (location - before[0])
        before = (location, value)
    return None


def paired(
    outcomes: Sequence[ConvergenceOutcome], variant: str, against: str, unquantised: bool = False
) -> tuple[float, float | None, int] | None:
    """Held-out loss at the end, variant - against, over the seeds that both have: mean, its standard error (None for
    one pair), pairs. None without a pair. `unquantised`: the variant's loss is that of its weights without float8."""
    of = {o.seed: o.unquantised if unquantised else o.last for o in outcomes if o.variant == variant}
    second = {o.seed: o.last for o in outcomes if o.variant == against}
    result = [loss - second[seed] for seed, loss in of.items() if loss is not None and seed in second]
    if not result:
        return None
    if len(result) > 1:
        error = statistics.stdev(result) / len(result) ** 0.5
    else:
        error = None
    return statistics.mean(result), error, len(result)


def _in_words(pair: tuple[float, float | None, int] | None) -> str:
    if pair is None:
        return "no pair"
    mean, error, count = pair
    return f"{mean:+.4f}" + (f" ± {error:.4f} ({count} pairs)" if error is not None else " (one pair)")


def show(outcomes: list[ConvergenceOutcome], console: Any) -> None:
    """The table: losses at the end, their spread over seeds, and how far from the first variant, seed by seed."""
    from rich.table import Table

    names = list(dict.fromkeys(o.variant for o in outcomes))
    meanings = {n: statistics.mean(o.last for o in outcomes if o.variant == n) for n in names}
    plain = any(o.unquantised is not None for o in outcomes)
    columns = ["variant", "held-out loss", "seeds apart", f"against {names[0]}"]
    table = Table(*columns, *["its weights without float8"] * plain, "tokens to its loss", "tokens/s")
    for name in names:
        local = [o for o in outcomes if o.variant == name]
        needed = [tokens_to(o, meanings[names[0]]) for o in local]
        reached = [n for n in needed if n is not None]
        expected = any(o.unquantised is not None for o in local)
        also = [_in_words(paired(outcomes, name, names[0], unquantised=True)) if expected else ""]
        table.add_row(
            name,
            f"{meanings[name]:.4f}",
            f"{max(o.last for o in local) - min(o.last for o in local):.4f}",
            "" if name == names[0] else _in_words(paired(outcomes, name, names[0])),
            *also * plain,
            f"{statistics.mean(reached) / 1e6:,.1f} M" if len(reached) == len(local) else "not reached",
            f"{statistics.mean(o.tokens_per_second for o in local):,.0f}",
        )
    console.print(table)


STYLES = ("-", "--", ":", "-.")


def seeds_in_words(seeds: list[int]) -> str:
    """Return the legend of line styles by seed."""
    shapes = ("solid", "dashed", "dotted", "dash-dotted")
    return ", ".join(f"seed {seed} {shapes[i % len(shapes)]}" for i, seed in enumerate(seeds))


def _above(single: ConvergenceOutcome, base: ConvergenceOutcome) -> dict[int, float]:
    """By how much the losses of `one` are above those of `base`, by tokens, where both were evaluated."""
    of = dict(zip(base.tokens, base.held_out, strict=True))
    return {t: loss - of[t] for t, loss in zip(single.tokens, single.held_out, strict=True) if t in of}


def draw(outcomes: list[ConvergenceOutcome], out: Path, title: str) -> None:
    """Held-out loss over tokens, a colour a variant, a style of line a seed; below it how far each is from the first
    variant with its seed. Dots are of all held-out samples, lines of those that evaluations on the way take."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names, seeds = (list(dict.fromkeys(getattr(o, subject) for o in outcomes)) for subject in ("variant", "seed"))
    bases = {o.seed: o for o in outcomes if o.variant == names[0]}
    separate = [(o, _above(o, bases[o.seed])) for o in outcomes if o.variant != names[0] and o.seed in bases]
    separate = [(o, locations) for o, locations in separate if locations]
    figure, panels = plt.subplots(
        1 + bool(separate),
        figsize=(9, 7.5 if separate else 5.5),
        layout="constrained",
        sharex=True,
        squeeze=False,
        height_ratios=[2, 1][: 1 + bool(separate)],
    )
    axes = panels[0, 0]

    def line(where: Any, o: ConvergenceOutcome, at: dict[int, float], label: str | None = None) -> None:
        positions = [t / 1e6 for t in at]
        values = list(at.values())
        colour = f"C{names.index(o.variant)}"
        style = STYLES[seeds.index(o.seed) % len(STYLES)]
        where.plot(positions[:-1], values[:-1], style, color=colour, linewidth=1.2, label=label)
        where.plot(positions[-1:], values[-1:], "o", color=colour, markersize=3.5)

    for o in outcomes:
        first = o is next(p for p in outcomes if p.variant == o.variant)
        mean = statistics.mean(p.last for p in outcomes if p.variant == o.variant)
        line(axes, o, dict(zip(o.tokens, o.held_out, strict=True)), f"{o.variant}: {mean:.4f}" if first else None)
    low = min(o.last for o in outcomes)
    tops = [o.held_out[min(2, len(o.held_out) - 1)] for o in outcomes]
    axes.set_ylim(low * 0.98, max(*tops, low * 1.05) * 1.02)
    axes.set_ylabel("Held-out loss (nats per token)")
    axes.set_title(title, fontsize=10)
    axes.legend(title=f"Held-out loss at the end (dots: of all samples)\n{seeds_in_words(seeds)}", frameon=False)
    if separate:
        below = panels[1, 0]
        for o, at in separate:
            line(below, o, at)
        # The first steps, where runs leave their plateau at different times, would hide all that follows.
        late = [value for _, at in separate for value in list(at.values())[len(at) // 4 :]]
        margin = 0.2 * (max(*late, 0.0) - min(*late, 0.0)) or 1e-3
        below.set_ylim(min(*late, 0.0) - margin, max(*late, 0.0) + margin)
        below.axhline(0.0, color="C0", linewidth=0.8)
        below.set_ylabel(f"Above {names[0]}, same seed")
    panels[-1, 0].set_xlabel("Tokens (millions)")
    for panel in panels[:, 0]:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)
