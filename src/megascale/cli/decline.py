"""`megascale decline`: why steps take longer, and MFU is lower, than earlier in a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import check_picture

if TYPE_CHECKING:
    from megascale.observe.analysis.decline import Decline


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("decline")(decline)


def decline(
    run: Path = typer.Argument(..., help="Run folder, such as runs/stdlib, alive or not; or a copy of its spans/."),
    before: str = typer.Option("", "--before", help="Steps when all was well: 10-60. By default the first fifth."),
    after: str = typer.Option("", "--after", help="Steps to explain: 900-1000. By default the last fifth."),
    plot: Path | None = typer.Option(
        None, help="Also draw step time and causes (.png, .svg, .pdf).", callback=check_picture
    ),
    as_json: bool = typer.Option(False, "--json", help="Print all of it as JSON."),
) -> None:
    """Why MFU fell: what of a step's growth is garbage collection, allocator retries, throttling, samples, or ranks
    that launch their last reduce-scatter late.

    Compares two windows of the newest attempt. In each step the rank that did most itself is what the others wait for:
    what it did beyond its usual is told by cause. Causes of a fifth of the growth and more are named, with the
    evidence. A slow machine that was slow from the beginning is no decline: megascale stragglers names it.

    Examples:

      megascale decline runs/stdlib

      megascale decline runs/stdlib --before 100-200 --after 5000-5100 --plot decline.png
    """
    from megascale.errors import ConfigError
    from megascale.observe.analysis.decline import choose_windows, step_series
    from megascale.observe.analysis.decline import decline as find
    from megascale.observe.analysis.rank_parts import choose_window, rank_parts
    from megascale.observe.analysis.run_steps import step_range
    from megascale.observe.store.tables import SpanTables

    if bool(before) != bool(after):
        raise ConfigError(
            "--before and --after belong together; give both, as --before 10-60 --after 900-1000, or neither"
        )
    with SpanTables(run) as tables:
        if before:
            first, second = step_range(before), step_range(after)
            attempt = choose_window(tables, after)[0]
            steps, seconds = step_series(tables, attempt)
            shown = (steps >= first[0]) & (steps <= second[1])
            series = steps[shown], seconds[shown]
        else:
            attempt = choose_window(tables)[0]
            first, second, series = choose_windows(tables, attempt)
        found = find(lambda low, high: rank_parts(tables, attempt, low, high), first, second, tables, series)
    if plot is not None:
        from megascale.observe.analysis.decline_plot import draw_decline

        draw_decline(found, plot)
        typer.echo(f"step time and causes: {plot}", err=as_json)
    if as_json:
        from megascale.core import strict_json

        typer.echo(strict_json.dumps(as_tree(found)))
    else:
        print_tables(found)


def print_tables(found: Decline) -> None:
    """The table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    (then, now), words = found.seconds, ""
    if not math.isnan(found.mfu[0]) and not math.isnan(found.mfu[1]):
        words = f"; MFU {found.mfu[0]:.1%}, then {found.mfu[1]:.1%}"
    elif found.growth > -1:
        words = f"; MFU is {1 / (1 + found.growth):.1%} of what it was"
    console.print(
        f"steps {found.before[0]} to {found.before[1]}: {then:.4f} s; steps {found.after[0]} to {found.after[1]}: "
        f"{now:.4f} "
        f"s ({found.growth:+.1%}, standard error {found.error / then:.1%}){words}"
    )
    if found.verdict == "unchanged":
        console.print("no decline: steps are not longer by more than 1%")
        return
    if found.verdict == "uncertain":
        many = f"of up to {found.chance:.0%}" if math.isfinite(found.chance) else "of any size"
        console.print(
            f"undecided: steps are {found.growth:.1%} longer, but their times vary so much in windows of this length "
            f"that chance explains a growth {many}; compare longer windows with --before and --after"
        )
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("cause", "ms a step", "of the growth"):
        table.add_column(name, justify="left" if name == "cause" else "right")
    for one in found.causes:
        if one.share >= 0.02:
            table.add_row(one.name, f"{1e3 * one.seconds:+.2f}", f"{one.share:.0%}")
    console.print(table)
    for one in found.main_causes:
        console.print(f"{one.name}: {'; '.join(one.evidence)}", markup=False)


def as_tree(found: Decline) -> dict[str, Any]:
    """What --json prints; null where a figure is unknown."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "before": list(found.before),
        "after": list(found.after),
        "seconds": list(found.seconds),
        "standard_error": number(found.error),
        "growth": found.growth,
        "mfu": [number(one) for one in found.mfu],
        "verdict": found.verdict,
        "declined": found.declined,
        "named": [one.name for one in found.main_causes],
        "causes": [
            {
                "name": one.name,
                "seconds": one.seconds,
                "share": one.share,
                "ranks": list(one.ranks),
                "evidence": list(one.evidence),
            }
            for one in found.causes
        ],
    }
