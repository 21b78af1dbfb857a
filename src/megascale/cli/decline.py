"""`megascale decline`: explain why steps take longer, and MFU is lower, than earlier in a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import JSON, check_picture, make_console, make_number_table, number_or_none, print_json

if TYPE_CHECKING:
    from megascale.observe.analysis.decline import Decline
    from megascale.observe.analysis.rank_times import RankTimes


_MIN_SHOWN_SHARE = 0.02  # smallest share of the growth for which a cause is listed


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(decline)


def decline(
    run: Path = typer.Argument(
        ..., help="Run folder, such as runs/stdlib, training or ended; or a copy of its spans/."
    ),
    before: str = typer.Option("", "--before", help="Steps before the decline, such as 10-60; default: first fifth."),
    after: str = typer.Option("", "--after", help="Steps to explain, such as 900-1000; default: last fifth."),
    plot: Path | None = typer.Option(
        None, help="Also draw step time and causes (.png, .svg, .pdf).", callback=check_picture
    ),
    as_json: bool = JSON,
) -> None:
    """Explain a lower MFU: the shares of a step's growth by cause.

    Causes are garbage collection, allocator retries, throttling, samples, and ranks that launch their last
    reduce-scatter late.

    Compares two windows of the newest attempt. In each step the other ranks wait for the rank that works longest. The
    excess of its time over its usual time is attributed to causes. Causes of a fifth of the growth and more are named,
    with the evidence. A machine that was slow from the beginning is not a decline: megascale stragglers names it.

    Examples:

      megascale decline runs/stdlib

      megascale decline runs/stdlib --before 100-200 --after 5000-5100 --plot decline.png
    """
    from megascale.errors import ConfigError
    from megascale.observe.analysis.decline import choose_windows, explain_decline, read_step_seconds
    from megascale.observe.analysis.rank_times import choose_window, read_rank_times
    from megascale.observe.analysis.run_steps import parse_step_range
    from megascale.observe.store.tables import SpanTables

    if bool(before) != bool(after):
        raise ConfigError("--before and --after are given together, as --before 10-60 --after 900-1000, or not at all")
    with SpanTables(run) as tables:
        if before:
            first_window = parse_step_range(before)
            second_window = parse_step_range(after)
            attempt, _, _ = choose_window(tables, after)
            steps, seconds = read_step_seconds(tables, attempt)
            # The picture shows the steps from the begin of the first window to the end of the second.
            is_shown = (steps >= first_window[0]) & (steps <= second_window[1])
            series = steps[is_shown], seconds[is_shown]
        else:
            attempt, _, _ = choose_window(tables)
            first_window, second_window, series = choose_windows(tables, attempt)

        def read_window(first_step: int, last_step: int) -> RankTimes:
            return read_rank_times(tables, attempt, first_step, last_step)

        report = explain_decline(read_window, first_window, second_window, tables, series)
    if plot is not None:
        from megascale.observe.analysis.plots import draw_decline

        draw_decline(report, plot)
        typer.echo(f"step time and causes: {plot}", err=as_json)
    if as_json:
        print_json(to_dict(report))
    else:
        print_tables(report)


def print_tables(report: Decline) -> None:
    """Print the step times of both windows, then the causes of their growth."""
    console = make_console()
    seconds_before, seconds_after = report.seconds
    line = (
        f"steps {report.before[0]} to {report.before[1]}: {seconds_before:.4f} s; steps {report.after[0]} to "
        f"{report.after[1]}: {seconds_after:.4f} s ({report.growth:+.1%}, standard error "
        f"{report.error / seconds_before:.1%})"
    )
    if not any(map(math.isnan, report.mfu)):
        line += f"; MFU {report.mfu[0]:.1%}, then {report.mfu[1]:.1%}"
    elif report.growth > -1:
        line += f"; MFU is {1 / (1 + report.growth):.1%} of its earlier value"
    console.print(line)
    if report.verdict == "unchanged":
        console.print("no decline: steps are not longer by more than 1%")
        return
    if report.verdict == "uncertain":
        if math.isfinite(report.growth_by_chance):
            size = f"up to {report.growth_by_chance:.0%}"
        else:
            size = "any size"
        console.print(
            f"undecided: steps are {report.growth:.1%} longer, but their times vary so much in windows of this length "
            f"that chance explains a growth of {size}; compare longer windows with --before and --after"
        )
        return
    table = make_number_table(["cause", "ms per step", "of the growth"])
    for cause in report.causes:
        if cause.share >= _MIN_SHOWN_SHARE:
            table.add_row(cause.name, f"{1e3 * cause.seconds:+.2f}", f"{cause.share:.0%}")
    console.print(table)
    for cause in report.main_causes:
        console.print(f"{cause.name}: {'; '.join(cause.evidence)}", markup=False)


def to_dict(report: Decline) -> dict[str, Any]:
    """Return the record of --json; null stands for an unknown figure."""
    return {
        "before": list(report.before),
        "after": list(report.after),
        "seconds": list(report.seconds),
        "standard_error": number_or_none(report.error),
        "growth": report.growth,
        "mfu": [number_or_none(mfu) for mfu in report.mfu],
        "verdict": report.verdict,
        "declined": report.has_declined,
        "named": [cause.name for cause in report.main_causes],
        "causes": [
            {
                "name": cause.name,
                "seconds": cause.seconds,
                "share": cause.share,
                "ranks": list(cause.ranks),
                "evidence": list(cause.evidence),
            }
            for cause in report.causes
        ],
    }
