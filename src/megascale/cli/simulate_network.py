"""Options and output of `megascale simulate step --fabric`, which predicts a step on a simulated network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import check_finite
from megascale.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from megascale.simulate.fabric.transfer_times import Outage
    from megascale.simulate.fabric_study import StepOnNetwork, Variant

_PANEL = "The network between hosts (megascale network --help)"
FABRIC = typer.Option(
    None, "--fabric", rich_help_panel=_PANEL,
    help="Network of the step: megascale (the paper's), or a TOML file; default: as calibrated.",
)  # fmt: skip
FABRIC_CHANGES = typer.Option(
    [], "--set", metavar="KEY=VALUE", rich_help_panel=_PANEL, help="Change a key of the fabric; repeatable."
)
PLACEMENT = typer.Option(
    "data", "--placement", rich_help_panel=_PANEL, help="data, replicas, random, adversarial, or a placement file."
)
QUEUE_PAIRS = typer.Option(4, "--queue-pairs", min=1, rich_help_panel=_PANEL, help="Connections per pair of ranks.")
JOB_STARTS = typer.Option(
    2, "--starts", min=1, rich_help_panel=_PANEL,
    help="Starts of the job to draw, each with its own hash seeds; one takes 10 to 60 s of a core at 12,288 GPUs.",
)  # fmt: skip
OUTAGES = typer.Option(
    [], "--outage", metavar="PART@FROM:TO", rich_help_panel=_PANEL,
    help="A switch or link that is down for these seconds of the run; repeatable.",
)  # fmt: skip
OUTAGE_SECOND = typer.Option(
    0.0, "--at", min=0, max=1e12, callback=check_finite, rich_help_panel=_PANEL, help="Second of the run, for outages."
)


def choose_network(
    fabric: str | None,
    changes: list[str],
    *,
    placement: str,
    queue_pairs: int,
    job_starts: int,
    outages: list[str],
    outage_second: float,
    seed: int,
) -> Variant | None:
    """Return the network that the options describe, or None without --fabric.

    Raises ConfigError for options of a network without --fabric.
    """
    if fabric is None:
        if changes or outages or outage_second or placement != "data":
            raise ConfigError("--set, --placement, --outage and --at belong to --fabric; add --fabric megascale")
        return None
    from megascale.simulate.fabric.fabric_spec import parse_changes
    from megascale.simulate.fabric_study import Variant

    return Variant(
        fabric,
        parse_changes(changes),
        placement=placement,
        queue_pairs=queue_pairs,
        draws=job_starts,
        seed=seed,
        outages=tuple(map(_parse_outage, outages)),
        offset=outage_second,
    )


def _parse_outage(text: str) -> Outage:
    """Return the outage in the text PART@FROM:TO, with times in seconds of the run. Raises ConfigError."""
    from megascale.simulate.fabric.transfer_times import Outage

    part, _, times = text.rpartition("@")
    first, _, last = times.partition(":")
    try:
        return Outage(part, float(first), float(last))
    except ValueError:
        raise ConfigError(f"--outage={text!r} must be PART@FROM:TO, such as core0@0:60 or leaf3-agg5@10:13") from None


def show_progress(variant: Variant, gpus: int) -> Any:
    """Return a context that shows a line on standard error while the flow level runs."""
    from rich.console import Console

    return Console(stderr=True).status(
        f"all groups of {gpus:,} GPUs share network {variant.fabric}, {variant.draws} starts"
    )


def print_network(results: list[StepOnNetwork], variant: Variant, console: Console) -> None:
    """Print the network's effect on transfers, and the step time for each scenario over starts of the job."""
    import numpy as np

    from megascale.simulate.fabric_study import AxisTimes
    from megascale.simulate.render import show_rows

    line = f"\n[bold]network[/bold] {variant.fabric}"
    line += "".join(f", {key} {value}" for key, value in variant.changes.items())
    line += f", placement {variant.placement}, {variant.queue_pairs} queue pairs, {variant.draws} starts"
    failed_parts = [outage.part for outage in variant.outages if outage.start <= variant.offset < outage.end]
    if failed_parts:
        line += f", down: {', '.join(failed_parts)}"
    console.print(line, soft_wrap=True)
    names = {"data": "data-parallel alone", "data_beside_pipeline": "with pipeline traffic", "pipeline": "pipeline"}
    rows = []
    for kind, name in names.items():
        times = getattr(results[0].slowdowns, kind)
        slowest = AxisTimes.worst(times)
        calibrated = AxisTimes.worst(getattr(results[0].reference, kind)).mean()
        figures = [times.mean(), slowest.mean(), np.quantile(slowest, 0.9), calibrated]
        rows.append([name] + [f"{figure:.2f}" for figure in figures])
    headers = ["time relative to full NIC rate", "mean", "slowest", "P90", "calibrated"]
    show_rows(headers, rows, console)
    rows = []
    for result in results:
        low, median, high = np.quantile(result.seconds, (0.1, 0.5, 0.9))
        figures = [result.reference_step.seconds, median, low, high]
        change = median / result.reference_step.seconds - 1
        rows.append(
            [result.reference_step.scenario.label] + [f"{figure:.3f}" for figure in figures] + [f"{change:+.1%}"]
        )
    show_rows(["step, s", "calibrated", "here", "P10", "P90", "change"], rows, console)
    console.print(
        "[dim]slowest: slowest of all groups, mean over starts, which differ in hash seeds; calibrated: on the paper's "
        "fabric with placement data and four queue pairs (assumed), as in the step model's constants. The breakdown "
        "above is that of the median start[/dim]",
        soft_wrap=True,
    )
    cluster = results[0].reference_step.scenario.cluster.name
    if cluster != "a100-roce":
        console.print(
            f"[yellow]caution[/yellow] {cluster} was not calibrated on the paper's fabric, relative to which transfers "
            "are slowed here",
            soft_wrap=True,
        )
