"""Options and scenarios that the commands of `megascale simulate` share. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import (
    DEFAULT_CLUSTER,
    check_finite,
    check_picture,
    has_file_argument,
    load_for_gpus,
    make_scenario,
    print_marked,
    show_progress,
)
from megascale.errors import ConfigError

if TYPE_CHECKING:
    from megascale.simulate.scenario import Scenario
    from megascale.simulate.step import Level

# Default values of parameters: typer reads option name, help text and limits from them.
FILE = typer.Argument(None, metavar="FILE.toml", help="Configuration; settings follow as --section.key=value.")
GPUS = typer.Option(..., "--gpus", min=1, metavar="N", help="Number of GPUs for the layout.")
CLUSTER = typer.Option(
    DEFAULT_CLUSTER,
    "--cluster",
    help="Shipped: a100-roce, a100-hdr, a800, h100-dgx, h100-host, h800, h200-host, b200-dgx; or a TOML file.",
)
LEVEL = typer.Option("closed", "--level", help="closed (formula) or event (schedule's actions, jitter, slow hosts).")
CSV = typer.Option(None, "--csv", metavar="FILE", help="Also write the rows as CSV.")
PLOT = typer.Option(None, "--plot", metavar="FILE.png", help="Draw a picture.", callback=check_picture)
PRICE = typer.Option(
    None,
    "--price",
    min=0,
    max=1e9,
    callback=check_finite,
    help="Price of one GPU for one hour; prints the cost of the run.",
)
WATTS = typer.Option(
    None,
    "--watts",
    min=0,
    max=1e7,
    callback=check_finite,
    help="Power in watts of one GPU with its share of host and cooling; prints the energy of the run.",
)
MEMORY = typer.Option(
    True,
    "--memory/--no-memory",
    help="Reject layouts that exceed GPU memory, as modelled for MegaScale; other stacks use different amounts.",
)
TOKENS = typer.Option(
    300e9,
    "--tokens",
    min=1,
    max=1e20,
    callback=check_finite,
    help="Total training tokens, for days of training.",
)

# `print_choice` prints this text before the flags of a batch or layout that the command has chosen.
CHOICE_REASON = "chosen, since not set:"


def load_scenario(
    file: Path | None,
    overrides: list[str],
    gpus: int,
    cluster: str,
    calibration: str | None,
    software: str | None,
    *,
    chooses_layout: bool = True,
) -> tuple[Scenario, bool]:
    """Return the scenario of a command line, and whether this function has added settings to it.

    The settings of a configuration file are used as they are. Without a file, this function adds the vocabulary, the
    batch and the layout, each only if it is not set.

    Args:
        chooses_layout: whether a layout is chosen if neither a file nor the settings have one.
    """
    from megascale.simulate.defaults import assume_vocabulary, choose_batch, choose_layout, has_layout

    config = load_for_gpus(file, overrides)
    if has_file_argument(file, overrides):
        return make_scenario(config, gpus, cluster=cluster, calibration=calibration, software=software), False
    config_with_vocabulary = assume_vocabulary(config)
    scenario = make_scenario(config_with_vocabulary, gpus, cluster=cluster, calibration=calibration, software=software)
    if chooses_layout and not has_layout(config):
        with show_progress("choosing the layout") as report:
            return scenario.with_config(choose_layout(scenario, report)), True
    complete_config = choose_batch(scenario.config, gpus)
    # Both functions return the same object if they add nothing.
    is_chosen = config_with_vocabulary is not config or complete_config is not scenario.config
    return scenario.with_config(complete_config), is_chosen


def make_baseline(scenario: Scenario, stack_name: str | None, calibration: str | None) -> Scenario:
    """Return the scenario under a software stack without MegaScale's techniques, with the constants of that stack.

    Args:
        stack_name: None: the paper's Megatron-LM if the cluster has kernels of FlashAttention 1, else Megatron-Core.
        calibration: name of a shipped calibration, or TOML file; None: that of the cluster and the stack's family.
    """
    from megascale.simulate.calibration import load_calibration
    from megascale.simulate.scenario import make_baseline_software
    from megascale.simulate.software import find_stack

    if stack_name is None:
        if "flash1" in scenario.cluster.kernels.attention:
            stack_name = "megatron-2023"
        else:
            stack_name = "megatron-core-h200"
    stack = find_stack(stack_name)
    return replace(
        scenario,
        software=make_baseline_software(scenario.config, stack),
        label=stack_name,
        base=stack,
        is_baseline=True,
        calibration=load_calibration(calibration, scenario.cluster.name, stack.family),
    )


def parse_level(name: str) -> Level:
    """Return the value of --level. Raises ConfigError for an unknown value."""
    if name == "closed":
        return "closed"
    if name == "event":
        return "event"
    raise ConfigError(f"--level={name!r} is unknown; choose closed or event")


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a line per row. The times in `row["parts"]` become columns; other nested values are left out."""
    import csv

    flat_rows = []
    for row in rows:
        flat_row = {key: value for key, value in row.items() if not isinstance(value, dict)}
        flat_row |= {f"part_{part}": seconds for part, seconds in row["parts"].items()}
        flat_rows.append(flat_row)
    # Rows may have different columns. A dict keeps the columns in the order of their first row.
    columns: dict[str, None] = {}
    for flat_row in flat_rows:
        columns |= dict.fromkeys(flat_row)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(flat_rows)


def print_skipped(skipped: list[str], console: Any) -> None:
    """Print a line per layout or variant that cannot run, with the reason."""
    for text in skipped:
        print_marked(console, "skipped", "yellow", text)
