"""`megascale stragglers`: name slow ranks and links, with the beginning, the confidence and the cause."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import (
    JSON,
    check_picture,
    format_optional,
    join_limited,
    make_console,
    make_number_table,
    number_or_none,
    print_json,
)

if TYPE_CHECKING:
    from rich.table import Table

    from megascale.observe.analysis.slow_links import SlowLink
    from megascale.observe.analysis.stragglers import Straggler, Stragglers

_MAX_LISTED = 12  # rows of ranks, and of links, in the table
_MAX_LINK_RANKS = 6  # ranks that may have a slow link
_MAX_SHOWN_CONFIDENCE = 0.9999  # a greater confidence is printed as ">99.99%"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(stragglers)


def stragglers(
    run: Path = typer.Argument(
        ..., help="Run folder, such as runs/stdlib, training or ended; or a copy of its spans/."
    ),
    steps: str = typer.Option("", "--steps", help="Steps to compare, such as 100-150; default: the newest."),
    last: int | None = typer.Option(
        None, min=2, help="Number of the newest steps; default: those of the last minute, and at least 50."
    ),
    plot: Path | None = typer.Option(
        None, help="Also draw all ranks, and the named ones step by step (.png, .svg, .pdf).", callback=check_picture
    ),
    as_json: bool = JSON,
) -> None:
    """Name slow machines: ranks that take longer than others with the same work, and slow links.

    Each rank's own time (without its waits for other ranks) is compared with the median of the ranks of its stage, step
    by step. A rank is named, with excess and confidence, if the excess is larger than differences of healthy ranks.

    persistent: slow in most of the steps, up to the last. irregular: late in some steps. passing: slow for a while.

    The cause is the part of the rank's work that takes longer. GPU: forward, backward and update (look for throttling,
    a neighbour's heat, ECC; test it with megascale diagnose). host: launches, loader, garbage collection (look for
    other processes, slow storage, a train.gc_interval of 0). link: others wait though no rank is late (look at the
    NIC's counters).

    Examples:

      megascale stragglers runs/stdlib

      megascale stragglers runs/stdlib --steps 1000-1050 --plot slow.png

      megascale evict runs/stdlib n2 --why "rank 5 is 12% slower"
    """
    from megascale.errors import ConfigError
    from megascale.observe.analysis.rank_times import choose_window, read_rank_times
    from megascale.observe.analysis.stragglers import find_stragglers
    from megascale.observe.store.tables import SpanTables

    if steps and last is not None:
        raise ConfigError(f"--steps={steps} and --last={last} both choose the steps; give only one of them")
    with SpanTables(run) as tables:
        report = find_stragglers(read_rank_times(tables, *choose_window(tables, steps, last)), tables)
    if plot is not None:
        from megascale.observe.analysis.plots import draw_stragglers

        draw_stragglers(report, plot)
        typer.echo(f"ranks: {plot}", err=as_json)
    if as_json:
        print_json(to_dict(report))
    else:
        print_tables(report)


def print_tables(report: Stragglers) -> None:
    """Print the slow ranks and links, and the evidence for each."""
    console = make_console()
    judgement = report.judgement
    times = report.times
    console.print(f"steps {times.steps[0]} to {times.steps[-1]} of attempt {times.attempt}, {len(times.ranks):,} ranks")
    for line in describe_missing(report):
        console.print(line)
    if judgement.uncompared:
        console.print(
            f"{judgement.uncompared} of them have no rank with the same work (data parallelism of 1) and are not "
            "compared"
        )
    if len(times.ranks) == judgement.uncompared:
        return
    threshold = f"a rank is named if it is {judgement.limit:.1%} slower or more"
    if math.isnan(judgement.spread):  # too few ranks to estimate it
        console.print(f"{threshold}: so few ranks do not show how much healthy ranks differ, so 4% is assumed")
    else:
        console.print(
            f"healthy ranks differ by {judgement.spread:.2%} (standard deviation); {threshold}: one false alarm per "
            "100 comparisons"
        )
    if not report.ranks and not report.links:
        console.print("no rank or link is slow")
        return
    console.print(_make_table(report))
    for straggler in report.ranks[:_MAX_LISTED]:
        machine = format_optional(straggler.hostname or None, " on {}")
        evidence = "; ".join(straggler.evidence)
        console.print(f"rank {straggler.slow_rank.rank} ({straggler.position}{machine}): {evidence}", markup=False)
    for link in report.links[:_MAX_LISTED]:
        console.print(f"link of {_describe_link_ranks(link)}: {'; '.join(link.evidence)}", markup=False)
    remaining = max(0, len(report.ranks) - _MAX_LISTED) + max(0, len(report.links) - _MAX_LISTED)
    if remaining:
        console.print(f"and {remaining} more: --json lists all")


def _make_table(report: Stragglers) -> Table:
    """Return the table of slow ranks, then slow links."""
    headers = ["rank", "host", "slower", "", "steps", "cause", "costs,\nms", "confidence"]
    table = make_number_table(headers, left_aligned=["", "steps", "cause"])
    for straggler in report.ranks[:_MAX_LISTED]:
        slow_rank = straggler.slow_rank
        if straggler.delay_seconds:
            costs = f"{1e3 * straggler.delay_seconds:.1f}"
        else:
            costs = ""
        table.add_row(
            str(slow_rank.rank), str(straggler.host), f"{slow_rank.excess:.1%}", slow_rank.state,
            f"{slow_rank.first}-{slow_rank.last}", straggler.cause, costs, _format_confidence(slow_rank.confidence),
        )  # fmt: skip
    steps = report.times.steps
    for link in report.links[:_MAX_LISTED]:
        if len(link.ranks) == 1:
            ranks = str(link.ranks[0])
        else:
            ranks = f"{len(link.ranks)} ranks"
        table.add_row(
            ranks, "", f"{link.share:.1%}", "persistent", f"{steps[0]}-{steps[-1]}", f"link ({link.axis})",
            f"{1e3 * link.seconds:.1f}", _format_confidence(link.confidence),
        )  # fmt: skip
    return table


def describe_missing(report: Stragglers) -> list[str]:
    """Return lines on ranks that are not compared because they have no records, or no records after some step."""
    lines = []
    missing_ranks = report.times.missing_ranks
    if missing_ranks:
        ranks = join_limited(missing_ranks, _MAX_LISTED)
        if len(missing_ranks) > 1:
            subject = f"{len(missing_ranks):,} ranks ({ranks}) have"
        else:
            subject = f"rank {ranks} has"
        lines.append(f"{subject} no records in these steps: not compared")
    for rank, step in list(report.times.silent_ranks.items())[:_MAX_LISTED]:
        lines.append(f"rank {rank} has no records after step {step}, though other ranks have")
    return lines


def _describe_link_ranks(link: SlowLink) -> str:
    """Return the rank whose link is slow, or the ranks among which it is."""
    if len(link.ranks) == 1:
        return f"rank {link.ranks[0]}"
    return f"one of ranks {join_limited(link.ranks, _MAX_LINK_RANKS)}"


def _format_confidence(confidence: float) -> str:
    if confidence > _MAX_SHOWN_CONFIDENCE:
        return ">99.99%"
    return f"{confidence:.2%}"


def to_dict(report: Stragglers) -> dict[str, Any]:
    """Return the record of --json. Shares are relative to comparable ranks' time; null stands for an unknown number."""
    times = report.times
    judgement = report.judgement
    excesses = zip(times.ranks.tolist(), judgement.excess, strict=True)
    return {
        "attempt": times.attempt,
        "first_step": int(times.steps[0]),
        "last_step": int(times.steps[-1]),
        "missing": times.missing_ranks,
        "silent": {str(rank): step for rank, step in times.silent_ranks.items()},
        "compared": len(times.ranks) - judgement.uncompared,
        "spread": number_or_none(judgement.spread),
        "limit": number_or_none(judgement.limit),
        "slow_ranks": [_rank_to_dict(straggler) for straggler in report.ranks],
        "slow_links": [
            {
                "ranks": list(link.ranks),
                "axis": link.axis,
                "seconds": link.seconds,
                "share": link.share,
                "limit": link.limit,
                "confidence": link.confidence,
                "evidence": list(link.evidence),
            }
            for link in report.links
        ],
        "slower": {str(rank): number_or_none(excess) for rank, excess in excesses},
    }


def _rank_to_dict(straggler: Straggler) -> dict[str, Any]:
    slow_rank = straggler.slow_rank
    return {
        "rank": slow_rank.rank,
        "host": straggler.host,
        "hostname": straggler.hostname,
        "device": straggler.device,
        "place": straggler.position,
        "slower": slow_rank.excess,
        "error": slow_rank.error,
        "limit": slow_rank.limit,
        "confidence": slow_rank.confidence,
        "state": slow_rank.state,
        "first_step": slow_rank.first,
        "last_step": slow_rank.last,
        "cause": straggler.cause,
        "shares": straggler.shares,
        "costs_seconds": straggler.delay_seconds,
        "evidence": list(straggler.evidence),
    }
