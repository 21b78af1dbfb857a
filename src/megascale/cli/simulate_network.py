"""`megascale simulate step --fabric`: options and lines of a step on a simulated network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import finite
from megascale.errors import ConfigError

if TYPE_CHECKING:
    from megascale.simulate.fabric_study import StepOnNetwork, Variant

_PANEL = "The network between hosts (megascale network --help)"
FABRIC = typer.Option(
    None, "--fabric", rich_help_panel=_PANEL,
    help="Price the step on this network: megascale (the paper's), or a TOML file; default: as calibrated.",
)  # fmt: skip
SET = typer.Option(
    [], "--set", metavar="KEY=VALUE", rich_help_panel=_PANEL, help="Change a key of the fabric; repeatable."
)
PLACEMENT = typer.Option(
    "data", "--placement", rich_help_panel=_PANEL, help="data, replicas, random, adversarial, or a placement file."
)
QUEUE_PAIRS = typer.Option(
    4, "--queue-pairs", min=1, rich_help_panel=_PANEL, help="Connections a pair of ranks spreads over."
)
STARTS = typer.Option(
    2, "--starts", min=1, rich_help_panel=_PANEL,
    help="Starts of the job to draw, each with its own hash seeds; one takes 10 to 60 s of a core at 12,288 GPUs.",
)  # fmt: skip
OUTAGE = typer.Option(
    [], "--outage", metavar="PART@FROM:TO", rich_help_panel=_PANEL,
    help="A switch or link that is down for these seconds of the run; repeatable.",
)  # fmt: skip
AT = typer.Option(
    0.0, "--at", min=0, max=1e12, callback=finite, rich_help_panel=_PANEL, help="Second of the run, for outages."
)


def chosen(
    fabric: str | None, changes: list[str], placement: str, queue_pairs: int, starts: int, outages: list[str],
    at: float, seed: int,
) -> Variant | None:  # fmt: skip
    """The network that the options name; ConfigError for options of a network without --fabric."""
    if fabric is None:
        if changes or outages or at or placement != "data":
            raise ConfigError("--set, --placement, --outage and --at belong to --fabric; add --fabric megascale")
        return None
    from megascale.simulate.fabric.fabric_spec import parse_changes
    from megascale.simulate.fabric_study import Variant

    down = tuple(_outage(word) for word in outages)
    return Variant(
        fabric, parse_changes(changes), placement, queue_pairs, draws=starts, seed=seed, outages=down, offset=at
    )


def _outage(word: str) -> Any:
    from megascale.simulate.fabric.transfer_times import Outage

    part, _, times = word.rpartition("@")
    first, _, last = times.partition(":")
    try:
        return Outage(part, float(first), float(last))
    except ValueError:
        raise ConfigError(f"--outage={word!r} must be PART@FROM:TO, such as core0@0:60 or leaf3-agg5@10:13") from None


def working(variant: Variant, gpus: int) -> Any:
    """A line on a terminal's standard error for as long as the flow level takes."""
    from rich.console import Console

    return Console(stderr=True).status(
        f"all groups of {gpus:,} GPUs share network {variant.fabric}, {variant.draws} starts"
    )


def show(results: list[StepOnNetwork], variant: Variant, console: Any) -> None:
    """What the network does to the transfers, and the step over starts of the job."""
    import numpy as np

    from megascale.simulate.fabric_study import AxisTimes
    from megascale.simulate.render import show_rows

    found, reference = results[0].found, results[0].reference
    changes = "".join(f", {key} {value}" for key, value in variant.changes.items())
    down = [o.part for o in variant.outages if o.start <= variant.offset < o.end]
    console.print(
        f"\n[bold]network[/bold] {variant.fabric}{changes}, placement {variant.placement}, {variant.queue_pairs} queue "
        f"pairs, {variant.draws} starts" + (f", down: {', '.join(down)}" if down else ""),
        soft_wrap=True,
    )
    names = {"data": "data-parallel alone", "busy": "beside pipeline traffic", "pipeline": "pipeline"}
    rows = []
    for kind, name in names.items():
        values, paper = getattr(found, kind), getattr(reference, kind)
        worst = AxisTimes.worst(values)
        rows.append([
            name, f"{values.mean():.2f}", f"{worst.mean():.2f}", f"{np.quantile(worst, 0.9):.2f}",
            f"{AxisTimes.worst(paper).mean():.2f}",
        ])  # fmt: skip
    headers = ["time over that at full NIC rate", "mean", "slowest", "P90", "calibrated"]
    show_rows(headers, rows, console)
    rows = []
    for result in results:
        low, middle, high = np.quantile(result.seconds, (0.1, 0.5, 0.9))
        away = middle / result.plain.seconds - 1
        rows.append([
            result.plain.scenario.label, f"{result.plain.seconds:.3f}", f"{middle:.3f}", f"{low:.3f}", f"{high:.3f}",
            f"{away:+.1%}",
        ])  # fmt: skip
    show_rows(["step, s", "calibrated", "here", "P10", "P90", "change"], rows, console)
    console.print(
        "[dim]slowest: of all groups, mean over starts, which differ in hash seeds; calibrated: on the paper's fabric, "
        "data-near, four queue pairs (assumed), which the step model's constants have in them. Above: the start in the "
        "middle[/dim]",
        soft_wrap=True,
    )
    if results[0].plain.scenario.cluster.name != "a100-roce":
        console.print(
            f"[yellow]mind[/yellow] {results[0].plain.scenario.cluster.name} was not calibrated on the paper's fabric, "
            "relative to which transfers are slowed here",
            soft_wrap=True,
        )
