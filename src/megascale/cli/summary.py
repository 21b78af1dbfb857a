"""What `megascale train` prints before the first and after the last step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megascale.errors import MegascaleError, missing_extra

if TYPE_CHECKING:
    from megascale.api import RunDescription
    from megascale.config import Config
    from megascale.train.evaluation import Evaluation
    from megascale.train.loop import TrainResult

console = Console(highlight=False)


def _count(n: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f}"


def rows(about: RunDescription) -> list[tuple[str, str]]:
    """The sizes of a run as label and value."""
    from megascale.core.flops import CONVENTION

    train = about.config.train
    return [
        ("parameters", f"{_count(about.parameters)} ({_count(about.embedding_parameters)} in embeddings)"),
        ("FLOPs a token", f"{_count(about.flops_per_token)}, forward and backward ({CONVENTION})"),
        ("a step", f"{train.global_batch} sequences x {about.config.model.sequence_length} tokens"),
        (
            "the run",
            f"{train.steps} steps, {_count(about.tokens)} tokens, {_count(about.flops_per_token * about.tokens)}FLOPs",
        ),
    ]


def layout_rows(config: Config, world: int) -> list[tuple[str, str]]:
    """Layout, bubble and memory by kind as label and value, by simulate/planner/layout_cost.py."""
    from megascale.simulate.planner.layout_cost import GIB, make_plan

    plan = make_plan(config, world, 0.0)
    grid, parallel, fullest = plan.layout.grid, config.parallel, max(plan.memory, key=lambda m: m.total)
    found = []
    if world > 1:
        chunks = f", {parallel.virtual_stages} chunks a stage" if parallel.virtual_stages > 1 else ""
        chunks += f" in rounds of {parallel.micro_batch_group_size}" if parallel.micro_batch_group_size else ""
        sizes = f"tensor {grid.tensor} x data {grid.data} x pipeline {grid.pipeline}{chunks}"
        found.append(("layout", f"{sizes}; ZeRO-{parallel.zero}, recompute {parallel.recompute}"))
    if grid.pipeline > 1:
        found.append(("bubble", f"{plan.bubble:.1%} of the busiest stage's work ({plan.schedule.name})"))
    size, unit = (GIB, "GiB") if fullest.total >= GIB else (2**20, "MiB")
    kinds = ", ".join(f"{k.replace('_', ' ')} {n / size:.1f}" for k, n in fullest.kinds().items() if n >= size / 20)
    found.append(("memory of a rank", f"{fullest.total / size:.1f} {unit} at its fullest stage: {kinds}"))
    return found


def print_description(about: RunDescription, world: int) -> None:
    """`--dry-run`: the resolved configuration as TOML, what of it is not the default, and the sizes."""
    from megascale.config.reference import list_differences

    console.print(about.config.to_toml(), markup=False)
    for key, value, default in list_differences(about.config):
        console.print(f"# {key} = {value}  (default {default or 'unset'})", markup=False, soft_wrap=True)
    for label, value in [*rows(about), *layout_rows(about.config, world)]:
        console.print(f"# {label}: {value}", markup=False, soft_wrap=True)


def print_start(about: RunDescription) -> None:
    """A short table before the first step, from the first process only."""
    if os.environ.get("RANK", "0") != "0":
        return
    table = Table.grid(padding=(0, 2))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for label, value in [("run folder", str(about.config.run_folder)), *rows(about), *layout_rows(about.config, world)]:
        table.add_row(f"[dim]{label}[/dim]", value)
    console.print(table)


def print_end(config: Config, result: TrainResult) -> None:
    """Held-out figures, plot and sample, or how to go on."""
    if os.environ.get("RANK", "0") != "0":
        return
    folder = config.run_folder
    if not result.finished:
        console.print(f"stopped after step {result.step}; run the same command to go on", markup=False)
        return
    if result.loss is None:
        console.print(
            f"run {config.train.name} is complete ({result.step} steps). To train further give more steps, such as "
            f"--train.steps={2 * result.step}; to start anew give another --train.name",
            markup=False,
            soft_wrap=True,
        )
    if result.evaluation is not None:
        print_evaluation(result.evaluation)
    # A run that has finished stays so: what fails from here on is named and changes no exit code.
    try:
        _print_plot(folder)
    except ModuleNotFoundError as error:
        console.print(f"no loss curve: {missing_extra(error) or error}", markup=False, soft_wrap=True)
    except Exception as error:
        console.print(f"no loss curve was drawn ({error}); run megascale plot {folder}", markup=False, soft_wrap=True)
    if config.train.sample_prompt is not None:
        try:
            _print_sample(folder, config.train.sample_prompt, config.train.sample_tokens)
        except (MegascaleError, OSError) as error:
            console.print(f"no sample was generated: {error}", markup=False, soft_wrap=True)


def _print_plot(folder: Path) -> None:
    from megascale.observe.plots import plot_runs

    path = plot_runs([folder], folder / "plots" / "loss.png")
    console.print(f"loss curve: {path}", markup=False)


def _print_sample(folder: Path, prompt: str, tokens: int) -> None:
    from megascale.api import generate

    pieces = generate(folder, prompt, tokens=tokens)
    console.rule("sample", align="left")
    console.print(prompt + "".join(pieces), markup=False, soft_wrap=True)
    console.rule()
    console.print(f"more: megascale generate {folder} --prompt import", markup=False)


def print_evaluation(found: Evaluation) -> None:
    """Held-out loss, beside general compressors where the text's size is known."""
    console.print(f"held-out loss {found.loss:.4f} nats a token over {found.tokens:,} tokens", markup=False)
    if found.bits_per_byte is None:
        return
    table = Table("held-out text", "bits per byte", box=None, padding=(0, 2))
    table.add_row("this model", f"[bold]{found.bits_per_byte:.3f}[/bold]")
    if found.compressed is not None:
        table.add_row("zlib -9", f"{found.compressed.zlib_bits_per_byte:.3f}")
        table.add_row("xz -9e", f"{found.compressed.xz_bits_per_byte:.3f}")
    console.print(table)
