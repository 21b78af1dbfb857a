"""`megascale train`: train a model, and print sizes before the training and results after it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megascale.cli.common import OVERRIDES, join_arguments, make_console
from megascale.errors import FitError, MegascaleError, missing_extra

if TYPE_CHECKING:
    from megascale.api import RunDescription
    from megascale.config import Config
    from megascale.train.loop import TrainResult

_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))  # (factor, prefix of the unit)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(context_settings=OVERRIDES)(train)


def train(
    context: typer.Context,
    file: str = typer.Argument(
        None, metavar="FILE", help="Configuration, such as examples/stdlib.toml.", show_default=False
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the resolved configuration and sizes, and stop."),
) -> None:
    """Train a model, or resume it from the newest checkpoint.

    Any setting can be given as --section.key=value, with or without a file; `megascale config` explains the settings.
    The run folder runs/NAME gets config.toml, metrics.jsonl, events.jsonl, checkpoints/ and plots/. Ctrl-C finishes
    the step, saves and stops; the same command resumes. Works under torchrun as well.

    Examples:

    - one process per GPU of this machine, or one on the CPU: `megascale train examples/stdlib.toml`

    - other settings and another name:
      `megascale train examples/stdlib.toml --train.steps=2000 --lr.peak=1e-3 --train.name=longer`

    - only print the resolved configuration and the sizes: `megascale train examples/stdlib.toml --dry-run`

    - without a file: `megascale train --model.preset=gpt2-124m --data.train=datasets/mine/train --train.precision=bf16`

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 does not fit or divide, 4 bad data or checkpoint, 130 interrupted.
    """
    from megascale.config import load_command_line, resolve_precision

    config = load_command_line(file, context.args)
    from megascale import api
    from megascale.core.layout import lay_out
    from megascale.data.dataset.data_checks import check_data
    from megascale.train import launcher

    if dry_run:
        world = launcher.count_processes(config, api.visible_gpus(config))
        _print_dry_run(config, world)
        return
    if not launcher.is_launched_rank():
        world = launcher.count_processes(config, api.visible_gpus(config))
        if world > 1:
            config = resolve_precision(api.resolve(config), api.visible_gpus(config) > 0)
            layout = lay_out(config, world)  # raises errors once, before each rank would raise them
            check_data(
                config.data, config.model.sequence_length, needs_tokenizer=config.train.sample_prompt is not None
            )
            # This process launches one process per rank, and each of them runs this command again.
            arguments = join_arguments(file, context.args)
            raise typer.Exit(launcher.launch(["train"] + arguments, layout, saves_checkpoints=True))
    is_leader = os.environ.get("RANK", "0") == "0"
    description = api.describe(config)
    if is_leader:
        _print_start(description)
    result = api.train(config)
    if is_leader:
        _print_end(config, result)


def _print_dry_run(config: Config, world: int) -> None:
    """Print the resolved configuration as TOML, differences from the defaults, sizes, and the error of a start here."""
    from megascale import api
    from megascale.config.reference import list_differences
    from megascale.core.layout import lay_out
    from megascale.data.dataset.data_checks import check_data
    from megascale.train import launcher

    console = make_console(soft_wrap=True)
    description = api.describe(config)
    console.print(description.config.to_toml(), markup=False, soft_wrap=False)
    for key, value, default in list_differences(description.config):
        console.print(f"# {key} = {value}  (default {default or 'unset'})", markup=False)
    for label, value in _describe_sizes(description) + _describe_layout(description.config, world):
        console.print(f"# {label}: {value}", markup=False)
    try:
        resolved = description.config
        check_data(
            resolved.data, resolved.model.sequence_length, needs_tokenizer=resolved.train.sample_prompt is not None
        )
        launcher.check_host_fits(lay_out(description.config, world), saves_checkpoints=True)
    except MegascaleError as error:
        typer.echo(f"# would be refused here: {error}")


def _print_start(description: RunDescription) -> None:
    """Print a table of the run's sizes and layout before the first step."""
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rows = [("run folder", str(description.config.run_folder))]
    rows += _describe_sizes(description) + _describe_layout(description.config, world)
    for label, value in rows:
        table.add_row(f"[dim]{label}[/dim]", escape(value))
    make_console().print(table)


def _describe_sizes(description: RunDescription) -> list[tuple[str, str]]:
    """Return (label, value) of each size of a run."""
    from megascale.core.adapters import AdapterSpec, count_adapter_elements
    from megascale.core.flops import CONVENTION
    from megascale.core.layers import ChunkLayers

    model = description.config.model
    train_section = description.config.train
    flops = _format_count(description.flops_per_token * description.tokens)  # of the whole run
    flops_and_unit = f"{flops}FLOPs" if flops[-1].isalpha() else f"{flops} FLOPs"
    parameters = _format_count(description.parameters)
    embeddings = _format_count(description.embedding_parameters)
    counts = f"{parameters} ({embeddings} in embeddings)"
    spec = AdapterSpec.from_config(train_section)
    if spec is not None:
        layers = ChunkLayers.from_range(range(model.layers))
        counts += f"; adapters train {_format_count(count_adapter_elements(model, spec, layers))}"
    return [
        ("parameters", counts),
        (
            "FLOPs per token",
            f"{_format_count(description.flops_per_token)}, forward and backward ({CONVENTION})",
        ),
        ("a step", f"{train_section.global_batch} sequences x {model.sequence_length} tokens"),
        ("the run", f"{train_section.steps} steps, {_format_count(description.tokens)} tokens, {flops_and_unit}"),
    ]


def _describe_layout(config: Config, world: int) -> list[tuple[str, str]]:
    """Return (label, value) of layout, pipeline bubble and memory, as `megascale plan` computes them."""
    from megascale.core.layout import lay_out
    from megascale.simulate.planner.layout_cost import make_plan
    from megascale.simulate.planner.layout_figures import GIB

    try:
        plan = make_plan(config, world, 0.0)  # 0 GiB of device memory, since whether the layout fits is not printed
    except FitError as error:  # `lay_out` accepts the axes of plugins, the planner does not
        layout = lay_out(config, world).grid.describe()
        return [("layout", f"{layout}; ZeRO-{config.parallel.zero}"), ("plan", f"unavailable: {error}")]
    grid = plan.layout.grid
    parallel = config.parallel
    rows = []
    if world > 1:
        layout = grid.describe()
        if parallel.virtual_stages > 1:
            layout += f", {parallel.virtual_stages} chunks per stage"
        if parallel.micro_batch_group_size:
            layout += f" in rounds of {parallel.micro_batch_group_size}"
        rows.append(("layout", f"{layout}; ZeRO-{parallel.zero}, recompute {parallel.recompute}"))
    if grid.pipeline > 1:
        rows.append(("bubble", f"{plan.bubble:.1%} of the busiest stage's work ({plan.schedule.name})"))
    fullest = max(plan.memory, key=lambda memory: memory.total)
    unit_bytes, unit = (GIB, "GiB") if fullest.total >= GIB else (2**20, "MiB")
    kinds = []
    for name, byte_count in fullest.bytes_by_kind().items():
        if byte_count >= unit_bytes / 20:  # less would be printed as 0.0
            kinds.append(f"{name.replace('_', ' ')} {byte_count / unit_bytes:.1f}")
    total = f"{fullest.total / unit_bytes:.1f} {unit} at the fullest stage"
    rows.append(("memory of a rank", f"{total}: {', '.join(kinds)}"))
    return rows


def _format_count(count: float) -> str:
    """Return a count with a prefix: 1.50 G for 1.5 billion."""
    for factor, prefix in _UNITS:
        if count >= factor:
            return f"{count / factor:.2f} {prefix}"
    return f"{count:.0f}"


def _print_end(config: Config, result: TrainResult) -> None:
    """Print the held-out loss, the path of the loss curve and a sample; or how to resume a stopped run."""
    from megascale.cli.trained_run import print_evaluation
    from megascale.config import TrainConfig

    console = make_console(soft_wrap=True)
    folder = config.run_folder
    if not result.finished:
        console.print(f"stopped after step {result.step}; the same command resumes", markup=False)
        return
    if result.loss is None:  # The run was complete before, so this command trained no step.
        steps = 2 * result.step or TrainConfig().steps
        console.print(
            f"run {config.train.name} is complete ({result.step} steps). To train further, set more steps, such as "
            f"--train.steps={steps}; to start a new run, set another --train.name",
            markup=False,
        )
    if result.evaluation is not None:
        print_evaluation(result.evaluation)
    # The run has finished, so later failures are printed and do not change the exit code.
    try:
        _print_plot(folder)
    except ModuleNotFoundError as error:
        console.print(f"no loss curve: {missing_extra(error) or error}", markup=False)
    except Exception as error:
        console.print(f"no loss curve was drawn ({error}); run megascale plot {folder}", markup=False)
    if config.train.sample_prompt is not None:
        try:
            _print_sample(folder, config.train.sample_prompt, config.train.sample_tokens)
        except (MegascaleError, OSError) as error:
            console.print(f"no sample was generated: {error}", markup=False)


def _print_plot(folder: Path) -> None:
    from megascale.observe.plots import plot_runs

    path = plot_runs([folder], folder / "plots" / "loss.png")
    make_console().print(f"loss curve: {path}", markup=False)


def _print_sample(folder: Path, prompt: str, tokens: int) -> None:
    from megascale.api import generate

    text = prompt + "".join(generate(folder, prompt, tokens=tokens))
    console = make_console()
    console.rule("sample", align="left")
    console.print(text, markup=False, soft_wrap=True)
    console.rule()
    console.print(f"more: megascale generate {folder} --prompt import", markup=False)
