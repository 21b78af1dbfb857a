"""`megascale stragglers`: which ranks and links are slow, since when, how sure, and what of the machine it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import check_picture

if TYPE_CHECKING:
    from megascale.observe.analysis.slow_links import SlowLink
    from megascale.observe.analysis.stragglers import Straggler, Stragglers


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("stragglers")(stragglers)


def stragglers(
    run: Path = typer.Argument(..., help="Run folder, such as runs/stdlib, alive or not; or a copy of its spans/."),
    steps: str = typer.Option("", "--steps", help="Steps to judge: 100-150. By default the newest."),
    last: int | None = typer.Option(
        None, min=2, help="How many of the newest steps; by default those of the last minute, and 50 at least."
    ),
    plot: Path | None = typer.Option(
        None, help="Also draw all ranks, and those named step by step (.png, .svg, .pdf).", callback=check_picture
    ),
    as_json: bool = typer.Option(False, "--json", help="Print all of it as JSON."),
) -> None:
    """Slow machines: ranks that take longer than others with the same work, and links that do.

    Each rank's own time (what it waited for others is left out) is compared with the median of the ranks of its stage,
    step by step. Named is who is slower than healthy ranks differ; it is said how much that is, and how sure.

    persistent: slow in most of the steps and still. irregular: late in some steps. passing: slow for a while, then not.

    The cause is what of the rank's work takes longer. GPU: forward, backward and update (look for throttling, a
    neighbour's heat, ECC; test it with megascale diagnose). host: launch, loader, garbage (look for other processes,
    slow storage, a train.gc_interval of 0). link: others wait though nobody is late (look at the NIC's counters).

    Examples:

      megascale stragglers runs/stdlib

      megascale stragglers runs/stdlib --steps 1000-1050 --plot slow.png

      megascale evict runs/stdlib n2 --why "rank 5 is 12% slower"
    """
    from megascale.errors import ConfigError
    from megascale.observe.analysis.rank_parts import choose_window, rank_parts
    from megascale.observe.analysis.stragglers import find_stragglers as find
    from megascale.observe.store.tables import SpanTables

    if steps and last is not None:
        raise ConfigError(f"--steps={steps} and --last={last} both say which steps; give one of them")
    with SpanTables(run) as tables:
        found = find(rank_parts(tables, *choose_window(tables, steps, last)), tables)
    if plot is not None:
        from megascale.observe.analysis.straggler_plot import draw_stragglers

        draw_stragglers(found, plot)
        typer.echo(f"ranks: {plot}", err=as_json)
    if as_json:
        from megascale.core import strict_json

        typer.echo(strict_json.dumps(as_tree(found)))
    else:
        show(found)


def show(found: Stragglers) -> None:
    """The tables."""
    import math

    from rich import box
    from rich.console import Console
    from rich.table import Table

    console, judged, steps = Console(highlight=False), found.judgement, found.parts.steps
    compared = len(found.parts.ranks) - judged.lonely
    console.print(f"steps {steps[0]} to {steps[-1]} of attempt {found.parts.attempt}, {len(found.parts.ranks):,} ranks")
    for text in untold(found):
        console.print(text)
    if judged.lonely:
        console.print(
            f"{judged.lonely} of them do work that no other does (data parallelism of 1): they cannot be compared"
        )
    if not compared:
        return
    if math.isnan(judged.spread):
        console.print(
            f"named is who is {judged.limit:.1%} slower or more: so few ranks do not show by how much healthy ones "
            f"differ, "
            "which is taken to be 4%"
        )
    else:
        console.print(
            f"healthy ranks differ by {judged.spread:.2%} (standard deviation); named is who is {judged.limit:.1%} "
            f"slower "
            "or more: one false alarm in 100 looks"
        )
    if not found.ranks and not found.links:
        console.print("none is slow")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("rank", "host", "slower", "", "steps", "cause", "costs,\nms", "sure"):
        table.add_column(name, justify="left" if name in ("cause", "", "steps") else "right", overflow="fold")
    for one in found.ranks[:_SHOWN]:
        at = f"{one.slow_rank.first}-{one.slow_rank.last}"
        table.add_row(
            str(one.slow_rank.rank), str(one.host), f"{one.slow_rank.excess:.1%}", one.slow_rank.state, at, one.cause,
            f"{1e3 * one.delay_seconds:.1f}" if one.delay_seconds else "", _sure(one.slow_rank.confidence),
        )  # fmt: skip
    for link in found.links[:_SHOWN]:
        who = str(link.ranks[0]) if len(link.ranks) == 1 else f"{len(link.ranks)} ranks"
        table.add_row(
            who, "", f"{link.share:.1%}", "persistent", f"{steps[0]}-{steps[-1]}", f"link ({link.axis})",
            f"{1e3 * link.seconds:.1f}", _sure(link.confidence),
        )  # fmt: skip
    console.print(table)
    for one in found.ranks[:_SHOWN]:
        console.print(f"rank {one.slow_rank.rank} ({one.position}{_on(one)}): {'; '.join(one.evidence)}", markup=False)
    for link in found.links[:_SHOWN]:
        console.print(f"link of {_named(link)}: {'; '.join(link.evidence)}", markup=False)
    if (left := len(found.ranks) + len(found.links) - 2 * _SHOWN) > 0:
        console.print(f"and {left} more: --json names all")


_SHOWN = 12


def untold(found: Stragglers) -> list[str]:
    """Of which ranks nothing, or nothing more, is recorded: they are not judged."""
    told = []
    if missing := found.parts.missing_ranks:
        listed = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        count = f"{len(missing):,} ranks ({listed})" if len(missing) > 1 else f"rank {listed}"
        told.append(f"of {count} nothing is recorded in these steps: not judged")
    for rank, step in list(found.parts.silent_ranks.items())[:_SHOWN]:
        told.append(f"rank {rank} tells of no step after step {step}, though others do")
    return told


def _on(one: Straggler) -> str:
    return f" on {one.hostname}" if one.hostname else ""


def _named(link: SlowLink) -> str:
    if len(link.ranks) == 1:
        return f"rank {link.ranks[0]}"
    return "one of ranks " + ", ".join(map(str, link.ranks[:6])) + (", ..." if len(link.ranks) > 6 else "")


def _sure(confidence: float) -> str:
    return ">99.99%" if confidence > 0.9999 else f"{confidence:.2%}"


def as_tree(found: Stragglers) -> dict[str, Any]:
    """What --json prints. Shares are of comparable ranks' time; null where there is none."""
    import math

    parts, judged = found.parts, found.judgement

    def number(value: float) -> float | None:
        return None if math.isnan(value) else float(value)

    return {
        "attempt": parts.attempt,
        "first_step": int(parts.steps[0]),
        "last_step": int(parts.steps[-1]),
        "missing": parts.missing_ranks,
        "silent": {str(rank): step for rank, step in parts.silent_ranks.items()},
        "compared": len(parts.ranks) - judged.lonely,
        "spread": number(judged.spread),
        "limit": number(judged.limit),
        "slow_ranks": [
            {
                "rank": one.slow_rank.rank,
                "host": one.host,
                "hostname": one.hostname,
                "device": one.device,
                "place": one.position,
                "slower": one.slow_rank.excess,
                "error": one.slow_rank.error,
                "limit": one.slow_rank.limit,
                "confidence": one.slow_rank.confidence,
                "state": one.slow_rank.state,
                "first_step": one.slow_rank.first,
                "last_step": one.slow_rank.last,
                "cause": one.cause,
                "shares": one.shares,
                "costs_seconds": one.delay_seconds,
                "evidence": list(one.evidence),
            }
            for one in found.ranks
        ],
        "slow_links": [
            {
                "ranks": list(one.ranks),
                "axis": one.axis,
                "seconds": one.seconds,
                "share": one.share,
                "limit": one.limit,
                "confidence": one.confidence,
                "evidence": list(one.evidence),
            }
            for one in found.links
        ],
        "slower": {str(rank): number(by) for rank, by in zip(parts.ranks.tolist(), judged.excess, strict=True)},
    }
