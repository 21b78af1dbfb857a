"""`megascale plan`: compute a layout's cost, and whether it fits, before a GPU is rented. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from megascale.cli.common import (
    DEFAULT_CLUSTER,
    DEFAULT_DEVICE,
    JSON,
    OVERRIDES,
    check_finite,
    check_picture,
    format_count,
    has_file_argument,
    load_for_gpus,
    make_console,
    make_scenario,
    print_choice,
    print_json,
    print_marked,
    show_progress,
    write_text,
)
from megascale.errors import FitError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megascale.config import Config
    from megascale.simulate.planner.layout_cost import LayoutCost
    from megascale.simulate.scenario import Scenario
    from megascale.simulate.step import StepEstimate

# Shipped cluster with a device, on which layouts are compared. For other devices it is DEFAULT_CLUSTER.
_CLUSTER_BY_DEVICE = {"H200": "h200-host", "B200": "b200-dgx", "H800": "h800", "A100": "a100-roce", "A800": "a800"}
_MAX_GPUS = 2**17  # largest number of GPUs that is tried to name one for a model that does not fit
_MAX_DEVICE_GIB = 4096.0  # more is a number of megabytes or bytes
_MIN_SHOWN_BYTES = 2**30 / 200  # 0.005 GiB; less would be printed as 0.00

_HELP = """Compute the cost of FILE's layout on N GPUs, and check that it divides and fits.

Prints the layout, memory of a rank by kind, the pipeline bubble and its picture, FLOPs, parameters, and bytes sent
per step, for any number of GPUs. It needs neither a GPU nor torch. Every setting may be overridden. Without FILE, a
batch or a layout that is left out is chosen, and printed as flags.

Exit codes: 0 fits, 2 wrong setting, 3 does not divide or does not fit.

Examples:

  megascale plan --gpus 8 --model.preset=llama-8b

  megascale plan examples/gpt-175b.toml --gpus 12288 --device A100

  megascale plan examples/gpt-175b.toml --gpus 256 --train.global_batch=768 --device H200 --plot plan.png

  megascale plan --gpus 8 --model.preset=gpt-13b --parallel.tensor=2 --parallel.pipeline=2 --json
"""


class _ChosenSettings(NamedTuple):
    """A complete configuration.

    Attributes:
        config: the configuration.
        is_chosen: whether this command chose the batch or the layout, because they were not set.
        cluster: cluster whose predicted step times chose the layout; None if no predictions were used.
        estimates: predicted steps of the compared layouts, the fastest first; empty if no predictions were used.
    """

    config: Config
    is_chosen: bool
    cluster: str | None
    estimates: Sequence[StepEstimate] = ()


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan", help=_HELP, context_settings=OVERRIDES)(plan)


def plan(
    context: typer.Context,
    file: Path | None = typer.Argument(None, metavar="FILE.toml", help="Configuration; default: all defaults."),
    gpus: int = typer.Option(..., "--gpus", min=1, metavar="N", help="Number of GPUs for the layout."),
    device: str = typer.Option(DEFAULT_DEVICE, "--device", help="Device name, for its memory: H200, H100, A100, ..."),
    device_gib: float | None = typer.Option(
        None,
        "--device-gib",
        min=0.1,
        max=_MAX_DEVICE_GIB,
        callback=check_finite,
        help="Memory of a device in GiB; replaces the memory of --device.",
    ),
    plot: Path | None = typer.Option(
        None, "--plot", help="Draw schedule and memory (.png, .svg, .pdf).", callback=check_picture
    ),
    toml: Path | None = typer.Option(
        None, "--toml", metavar="FILE", help="Write the configuration for `megascale train`."
    ),
    as_json: bool = JSON,
) -> None:
    from megascale.simulate.planner.layout_cost import make_plan
    from megascale.simulate.planner.layout_figures import find_device_gib

    memory_gib = device_gib or find_device_gib(device)
    config = load_for_gpus(file, context.args)
    chosen = _ChosenSettings(config, is_chosen=False, cluster=None)
    if not has_file_argument(file, context.args):
        chosen = _choose_missing_settings(config, gpus, device, memory_gib)
        config = chosen.config
    cost = make_plan(config, gpus, memory_gib)
    if as_json:
        print_json(cost.to_dict(), indent=2)
    else:
        _print_plan(cost, make_console())
        if chosen.is_chosen:
            if chosen.cluster is not None:
                _print_predictions(chosen.estimates, chosen.cluster)
            print_choice(config, "chosen, since not set:")
    if toml is not None:
        write_text(toml, config.to_toml(), "--toml")
    if plot is not None:
        from megascale.simulate.planner.schedule_picture import save_png

        save_png(cost, plot)
        if not as_json:
            typer.echo(f"drawn into {plot}")
    if not cost.fits:
        raise FitError(_explain_misfit(cost))


def _choose_missing_settings(config: Config, gpus: int, device: str, memory_gib: float) -> _ChosenSettings:
    """Return the configuration with a vocabulary, a batch and a layout, where they are not set.

    Raises FitError if no layout fits, naming a number of GPUs for which a layout fits.
    """
    from megascale.core.inventory import has_experts
    from megascale.simulate.cluster import set_value
    from megascale.simulate.defaults import (
        assume_vocabulary,
        can_choose_layout,
        choose_batch,
        choose_layout,
        has_layout,
        rank_layouts,
    )

    config_with_vocabulary = assume_vocabulary(config)
    if has_layout(config_with_vocabulary):
        config_with_batch = choose_batch(config_with_vocabulary, gpus)
        return _ChosenSettings(config_with_batch, is_chosen=config_with_batch is not config, cluster=None)
    clusters = [cluster for name, cluster in _CLUSTER_BY_DEVICE.items() if name.lower() in device.lower()]
    cluster = clusters[0] if clusters else DEFAULT_CLUSTER
    scenario = make_scenario(config_with_vocabulary, gpus, cluster)
    scenario = replace(scenario, cluster=set_value(scenario.cluster, "gpu", "memory_gib", memory_gib))
    try:
        with show_progress("choosing the layout") as report:
            if has_experts(config_with_vocabulary.model):
                # The simulator has no prices of experts.
                return _ChosenSettings(choose_layout(scenario, report), is_chosen=True, cluster=None)
            estimates = rank_layouts(scenario, report)
        config = estimates[0].scenario.config
        return _ChosenSettings(config, is_chosen=True, cluster=cluster, estimates=estimates)
    except FitError as error:
        reason = str(error)
    offload = _find_offload_flags(scenario)
    if offload:
        reason += f"; {offload} fits, with the optimizer's state in host memory"
    gpus_per_host = config_with_vocabulary.parallel.gpus_per_host
    more_gpus = double_gpus(gpus, gpus_per_host)
    while more_gpus <= _MAX_GPUS:
        with show_progress("choosing the layout") as report:
            fits = can_choose_layout(replace(scenario, gpus=more_gpus), report)
        if fits:
            raise FitError(f"{reason}; --gpus {more_gpus} has a layout that fits")
        more_gpus = double_gpus(more_gpus, gpus_per_host)
    raise FitError(reason)


def double_gpus(gpus: int, gpus_per_host: int) -> int:
    """Return twice as many GPUs; from a host on, those of whole hosts."""
    if 2 * gpus <= gpus_per_host:
        return 2 * gpus
    return max(gpus_per_host, 2 * (gpus // gpus_per_host) * gpus_per_host)


def _find_offload_flags(scenario: Scenario) -> str:
    """Return flags of the fastest layout that fits with optimizer.offload, or an empty string."""
    from megascale.core.inventory import has_experts
    from megascale.simulate.defaults import format_flags, rank_layouts

    config = scenario.config
    # With many GPUs the search takes a minute, and state in host memory saves little per GPU.
    is_single_host = scenario.gpus <= config.parallel.gpus_per_host
    if not is_single_host or has_experts(config.model) or config.optimizer.name != "adamw":
        return ""
    optimizer = config.optimizer.model_copy(update={"offload": True})
    try:
        estimates = rank_layouts(scenario.with_config(config.model_copy(update={"optimizer": optimizer})))
    except FitError:
        return ""
    return f"--optimizer.offload=true {format_flags(estimates[0].scenario.config)}"


def _print_predictions(estimates: Sequence[StepEstimate], cluster: str) -> None:
    """Print the compared layouts, and that predictions have chosen the first one."""
    from megascale.simulate.render import print_layouts

    console = make_console()
    console.print()
    print_layouts(estimates, console, "fastest layout that fits, for each value of parallel.zero")
    console.print(
        f"[yellow]caution[/yellow] the order is predicted on {cluster}; `megascale simulate step --cluster {cluster}` "
        "prints how certain a prediction is, and `megascale simulate search` lists more layouts",
        soft_wrap=True,
    )


def _explain_misfit(cost: LayoutCost) -> str:
    """Return the message for a layout that does not fit: the memory, and single changes that would make it fit."""
    remedies = cost.remedies()
    advice = "raise parallel.tensor or parallel.pipeline, or use more GPUs"
    if remedies:
        choices = remedies[0]
        if len(remedies) > 1:
            choices = f"any one of {', '.join(remedies)}"
        advice = f"{choices} makes it fit"
    return (
        f"the fullest rank needs {cost.needed_gib:.1f} GiB but the device has {cost.device_gib:g} GiB "
        f"(--device-gib); {advice}"
    )


def _print_plan(cost: LayoutCost, console: Console) -> None:
    """Print a plan as tables and a picture."""
    _print_layout(cost, console)
    _print_memory(cost, console)
    _print_host_memory(cost, console)
    _print_schedule(cost, console)
    _print_traffic(cost, console)
    for note in cost.notes():
        print_marked(console, "note:", "yellow", note)


def _print_layout(cost: LayoutCost, console: Console) -> None:
    """Print grid, pipeline, batch, sharding, parameters and FLOPs."""
    from rich.table import Table

    record = cost.to_dict()
    grid = cost.layout.grid
    parallel = cost.config.parallel
    train = cost.config.train
    flops = record["flops"]
    layer_counts = record["layout"]["layers_by_chunk"]
    # One number if all chunks have as many layers, else the range.
    layers = " to ".join(str(count) for count in sorted({min(layer_counts), max(layer_counts)}))
    chunks = format_count(cost.schedule.virtual_stages, "chunk")
    pipeline = f"{cost.schedule.name}, {chunks} per stage, {layers} layers per chunk"
    if parallel.micro_batch_group_size:
        pipeline += f", rounds of {parallel.micro_batch_group_size} micro-batches"
    hosts = f"{format_count(grid.host_count, 'host')} of {parallel.gpus_per_host}"
    console.print(f"[bold]{train.name}[/bold] on {format_count(grid.world_size, 'GPU')}")
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("layout", f"{grid.describe()}, {hosts}")
    table.add_row("pipeline", pipeline)
    table.add_row(
        "batch",
        f"{train.global_batch:,} sequences = {record['tokens_per_step']:,} tokens: {cost.layout.microbatches} "
        f"micro-batches of {train.micro_batch} on each of {grid.replicas} replicas",
    )
    table.add_row("sharding", f"ZeRO-{parallel.zero}, recompute {parallel.recompute}, {train.precision}")
    parameters = f"{record['parameters'] / 1e9:,.3f} billion"
    if record["trained_parameters"] != record["parameters"]:
        parameters += f"; adapters train {record['trained_parameters']:,}"
    table.add_row("parameters", parameters)
    table.add_row(
        "FLOPs",
        f"{flops['per_token'] / 1e9:,.1f} GFLOP per token, {flops['per_step'] / 1e15:,.2f} PFLOP per step, "
        f"{flops['per_step_and_gpu'] / 1e12:,.1f} TFLOP per GPU and step\n[dim]{flops['convention']}[/dim]",
    )
    console.print(table)


def _make_stage_table(title: str, first_header: str, stages: dict[int, str]) -> Table:
    """Return a table with a column of numbers per stage.

    Args:
        first_header: header of the first column.
        stages: header of each stage's column.
    """
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # rich wraps a title to the width of its table, so the first column is widened. 12 characters are for the others.
    table.add_column(first_header, style="bold", min_width=len(title) - 12)
    for name in stages.values():
        table.add_column(name, justify="right")
    return table


def _add_gib_row(table: Table, name: str, byte_counts: Sequence[float]) -> None:
    """Add a row with bytes printed in GiB."""
    cells = [f"{count / 2**30:.2f}" for count in byte_counts]
    table.add_row(name, *cells)


def _print_memory(cost: LayoutCost, console: Console) -> None:
    """Print the memory of a rank of each listed stage by kind, and whether the fullest rank fits."""
    from megascale.simulate.planner.layout_figures import RESERVE_GIB

    names = {0: "first stage", cost.layout.grid.pipeline - 1: "last stage"}
    if cost.layout.grid.pipeline == 1:
        names = {0: "each rank"}
    # cost.stages: the first, the middle and the last stage.
    columns = {stage: names.get(stage, f"stage {stage}") for stage in cost.stages}
    table = _make_stage_table("memory of a rank, GiB", "kind", columns)
    estimates = [cost.memory[stage] for stage in cost.stages]
    for kind in estimates[0].bytes_by_kind():
        byte_counts = [estimate.bytes_by_kind()[kind] for estimate in estimates]
        if any(count >= _MIN_SHOWN_BYTES for count in byte_counts):
            _add_gib_row(table, kind.replace("_", " "), byte_counts)
    table.add_section()
    _add_gib_row(table, "total", [estimate.total for estimate in estimates])
    console.print(table)
    verdict = "[green]fits[/green]" if cost.fits else "[red]does not fit[/red]"
    console.print(
        f"{verdict}: the fullest rank needs {cost.needed_gib:.1f} GiB of {cost.device_gib:g}, with {RESERVE_GIB:g} GiB "
        "reserved for CUDA, communicators and the allocator",
        soft_wrap=True,
    )


def _print_host_memory(cost: LayoutCost, console: Console) -> None:
    """Print the host memory that the rank with most of it needs besides its process, if it needs any."""
    largest = max(cost.host_memory, key=lambda memory: memory.total)
    if not largest.total:
        return
    purposes = []
    for byte_count, purpose in (
        (largest.snapshots, "snapshots (checkpoint.slots)"),
        (largest.replicas, "copies of another host's snapshots (checkpoint.replicas)"),
        (largest.optimizer_state, "optimizer state (optimizer.offload)"),
        (largest.inputs, "inputs of layers (parallel.offload_activations)"),
    ):
        if byte_count:
            purposes.append(f"{byte_count / 2**30:.2f} {purpose}")
    grid = cost.layout.grid
    ranks = min(grid.ranks_per_host, grid.world_size)
    console.print(
        f"host memory: {largest.total / 2**30:.2f} GiB per rank, {ranks * largest.total / 2**30:.1f} GiB per host of "
        f"{format_count(ranks, 'rank')}: {', '.join(purposes)}",
        soft_wrap=True,
    )


def _print_schedule(cost: LayoutCost, console: Console) -> None:
    """Print the pipeline bubble and, if the terminal is wide enough, a picture of the schedule."""
    from megascale.core.schedule import compute_ideal_bubble
    from megascale.simulate.planner.schedule_picture import make_terminal_rows

    schedule = cost.schedule
    if schedule.stages == 1:
        return
    ideal = compute_ideal_bubble(schedule.stages, schedule.virtual_stages, schedule.microbatches)
    console.print(
        f"\n[bold]bubble[/bold] {cost.bubble:.2%} replayed, {ideal:.2%} ideal (p-1)/(v m); mean idle share of a stage "
        f"{cost.idle:.2%}; in flight on the first stage {schedule.count_in_flight(0)} chunk-forwards",
        soft_wrap=True,
    )
    label_width = len(f"stage {schedule.stages - 1} ")
    rows = make_terminal_rows(schedule, console.width - label_width)
    if rows is None:
        console.print("[dim]the schedule is too wide for this terminal; --plot FILE.png draws it[/dim]")
        return
    for stage, row in enumerate(rows):
        console.print(f"stage {stage}".ljust(label_width), row, sep="", soft_wrap=True)
    legend = 'number: micro-batch; blue: forward; green and "<": backward; equal chunks'
    if schedule.virtual_stages > 1:
        legend += "; a darker shade is an earlier chunk"
    console.print(f"[dim]{legend}[/dim]")


def _print_traffic(cost: LayoutCost, console: Console) -> None:
    """Print the bytes that a rank of each listed stage sends per step, by axis."""
    columns = {stage: f"stage {stage}" for stage in cost.stages}
    table = _make_stage_table("sent per rank and step, GiB", "axis", columns)
    traffic = [asdict(cost.traffic(stage)) for stage in cost.stages]
    for axis in traffic[0]:
        if any(sent[axis] for sent in traffic):
            _add_gib_row(table, axis.replace("_", ": "), [sent[axis] for sent in traffic])
    if table.rows:
        console.print()
        console.print(table)
