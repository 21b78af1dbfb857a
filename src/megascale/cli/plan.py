"""`megascale plan`: what a layout costs and whether it fits, before a GPU is rented. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megascale.cli.common import DEFAULT_DEVICE, OVERRIDES, check_picture, load_for_gpus
from megascale.core import strict_json

if TYPE_CHECKING:
    from rich.console import Console

    from megascale.simulate.planner.layout_cost import LayoutCost

_HELP = """Say what FILE's layout costs on N GPUs, and whether it divides and fits.

Prints the layout, memory of a rank by kind, the pipeline bubble and its picture, FLOPs, parameters, and bytes sent
in a step, for any number of GPUs, without one and without torch. Every setting may be overridden.

Exit codes: 0 fits, 2 wrong setting, 3 does not divide or does not fit.

Examples:

  megascale plan examples/gpt-175b.toml --gpus 12288

  megascale plan examples/gpt-175b.toml --gpus 256 --train.global_batch=768 --device H200 --plot plan.png

  megascale plan --gpus 8 --model.preset=gpt-13b --parallel.tensor=2 --parallel.pipeline=2 --json
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan", help=_HELP, context_settings=OVERRIDES)(plan)


def plan(
    context: typer.Context,
    file: Path | None = typer.Argument(None, metavar="[FILE.toml]", help="Configuration; default: all defaults."),
    gpus: int = typer.Option(..., "--gpus", min=1, metavar="N", help="Devices to lay the model over."),
    device: str = typer.Option(DEFAULT_DEVICE, "--device", help="Device name, for its memory: H200, H100, A100, ..."),
    device_gib: float | None = typer.Option(None, "--device-gib", min=0.1, help="Memory of a device, over --device."),
    plot: Path | None = typer.Option(
        None, "--plot", help="Draw schedule and memory (.png, .svg, .pdf).", callback=check_picture
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of tables."),
) -> None:
    from megascale.errors import ConfigError
    from megascale.simulate.planner.layout_cost import DEVICES, make_plan

    extra = list(context.args)
    if file is not None and str(file).startswith("--"):
        # Without FILE the first override lands in its place.
        extra.insert(0, str(file))
        file = None
    memory = device_gib or next((gib for name, gib in DEVICES.items() if name.lower() in device.lower()), None)
    if memory is None:
        raise ConfigError(f"--device={device!r} is not known ({', '.join(DEVICES)}); give its memory with --device-gib")
    made = make_plan(load_for_gpus(file, extra), gpus, memory)
    if as_json:
        typer.echo(strict_json.dumps(made.to_dict(), indent=2))
    else:
        from rich.console import Console

        show(made, Console(highlight=False))
    if plot is not None:
        from megascale.simulate.planner.schedule_picture import save_png

        save_png(made, plot)
        if not as_json:
            typer.echo(f"drawn into {plot}")
    _refuse_what_does_not_fit(made)


def show(plan: LayoutCost, console: Console) -> None:
    """Print a plan as tables and a picture."""
    _show_layout(plan, console)
    _show_memory(plan, console)
    _show_schedule(plan, console)
    _show_traffic(plan, console)
    for note in plan.notes():
        console.print(f"[yellow]note[/yellow]: {note}", soft_wrap=True)


def _show_layout(plan: LayoutCost, console: Console) -> None:
    from rich.table import Table

    facts, grid, parallel = plan.to_dict(), plan.layout.grid, plan.config.parallel
    counts = facts["layout"]["layers_by_chunk"]
    layers = f"{counts[0]}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    hosts = "host" if grid.host_count == 1 else "hosts"
    table = Table(
        title=f"{plan.config.train.name} on {grid.world_size:,} GPUs", title_justify="left", show_header=False
    )
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "layout",
        f"tensor {grid.tensor} x data {grid.data} x pipeline {grid.pipeline}, {grid.host_count:,} {hosts} of "
        f"{parallel.gpus_per_host}",
    )
    rounds = f", rounds of {parallel.micro_batch_group_size} micro-batches" if parallel.micro_batch_group_size else ""
    table.add_row(
        "pipeline",
        f"{plan.schedule.name}, {plan.schedule.virtual_stages} chunks a stage, {layers} layers a chunk{rounds}",
    )
    train, tokens = plan.config.train, facts["tokens_per_step"]
    table.add_row(
        "batch",
        f"{train.global_batch:,} sequences = {tokens:,} tokens: {plan.layout.microbatches} micro-batches of "
        f"{train.micro_batch} on each of {grid.data} replicas",
    )
    table.add_row("sharding", f"ZeRO-{parallel.zero}, recompute {parallel.recompute}, {train.precision}")
    table.add_row("parameters", f"{facts['parameters'] / 1e9:,.3f} billion")
    per_step, per_gpu = facts["flops"]["per_step"], facts["flops"]["per_step_and_gpu"]
    table.add_row(
        "FLOPs",
        f"{facts['flops']['per_token'] / 1e9:,.1f} GFLOP a token, {per_step / 1e15:,.2f} PFLOP a step, "
        f"{per_gpu / 1e12:,.1f} TFLOP a GPU and step\n[dim]{facts['flops']['convention']}[/dim]",
    )
    console.print(table)


def _show_memory(plan: LayoutCost, console: Console) -> None:
    from rich.table import Table

    from megascale.simulate.planner.layout_cost import GIB, RESERVE_GIB

    names = {0: "first stage", plan.layout.grid.pipeline - 1: "last stage"}
    table = Table(title="memory of a rank, GiB", title_justify="left")
    table.add_column("kind", style="bold")
    for stage in plan.stages:
        table.add_column(names.get(stage, f"stage {stage}"), justify="right")
    for kind in plan.memory[0].kinds():
        table.add_row(kind.replace("_", " "), *(f"{plan.memory[s].kinds()[kind] / GIB:.2f}" for s in plan.stages))
    table.add_section()
    table.add_row("total", *(f"{plan.memory[s].total / GIB:.2f}" for s in plan.stages))
    console.print(table)
    word = "[green]fits[/green]" if plan.fits else "[red]does not fit[/red]"
    console.print(
        f"{word}: the fullest rank needs {plan.needed_gib:.1f} GiB of {plan.device_gib:g}, with {RESERVE_GIB:g} kept "
        "for CUDA, communicators and the allocator",
        soft_wrap=True,
    )


def _show_schedule(plan: LayoutCost, console: Console) -> None:
    from megascale.core.schedule import ideal_bubble
    from megascale.simulate.planner.schedule_picture import terminal_rows

    s = plan.schedule
    ideal = ideal_bubble(s.stages, s.virtual_stages, s.microbatches)
    console.print(
        f"\n[bold]bubble[/bold] {plan.bubble:.2%} replayed, {ideal:.2%} ideal (p-1)/(v m); mean idle share of a stage "
        f"{plan.idle:.2%}; in flight on the first stage {s.in_flight(0)} chunk-forwards",
        soft_wrap=True,
    )
    if s.stages == 1:
        return
    label = len(f"stage {s.stages - 1} ")
    rows = terminal_rows(s, console.width - label)
    if rows is None:
        console.print("[dim]the schedule is too wide for this terminal; --plot FILE.png draws it[/dim]")
        return
    for stage, row in enumerate(rows):
        console.print(f"stage {stage}".ljust(label), row, sep="", soft_wrap=True)
    shades = ", a darker shade is an earlier chunk" if s.virtual_stages > 1 else ""
    console.print(f'[dim]number: micro-batch; blue: forward; green and "<": backward{shades}; equal chunks[/dim]')


def _show_traffic(plan: LayoutCost, console: Console) -> None:
    from dataclasses import asdict

    from rich.table import Table

    table = Table(title="sent by a rank in a step, GiB", title_justify="left")
    table.add_column("axis", style="bold")
    sent = {s: asdict(plan.traffic(s)) for s in plan.stages}
    for s in plan.stages:
        table.add_column(f"stage {s}", justify="right")
    for axis in next(iter(sent.values())):
        if any(sent[s][axis] for s in plan.stages):
            table.add_row(axis.replace("_", ": "), *(f"{sent[s][axis] / 2**30:.2f}" for s in plan.stages))
    if table.rows:
        console.print()
        console.print(table)


def _refuse_what_does_not_fit(plan: LayoutCost) -> None:
    """FitError naming what alone would make the plan fit."""
    from megascale.errors import FitError

    if plan.fits:
        return
    remedies = plan.remedies()
    if remedies:
        advice = f"any one of {', '.join(remedies)} makes it fit"
    else:
        advice = "raise parallel.tensor or parallel.pipeline, or use more GPUs"
    raise FitError(
        f"the fullest rank needs {plan.needed_gib:.1f} GiB but the device has {plan.device_gib:g} GiB "
        f"(--device-gib); {advice}"
    )
