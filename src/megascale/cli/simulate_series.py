"""`megascale simulate ablate` and `sweep`: predicted steps without techniques, and over values of keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import (
    JSON,
    has_file_argument,
    join_limited,
    make_console,
    print_choice,
    print_json,
    print_marked,
    show_progress,
    split_option,
)
from megascale.cli.simulate_measured import CALIBRATION, SOFTWARE
from megascale.cli.simulate_options import (
    CHOICE_REASON,
    CLUSTER,
    CSV,
    FILE,
    GPUS,
    LEVEL,
    MEMORY,
    PLOT,
    load_scenario,
    make_baseline,
    parse_level,
    print_skipped,
    write_csv,
)
from megascale.errors import FitError

if TYPE_CHECKING:
    from megascale.simulate.scenario import Scenario

_MAX_PARTIAL_CAUTIONS = 8  # printed cautions that hold for some of the values of a sweep


def ablate(
    context: typer.Context,
    file: Path | None = FILE,
    gpus: int = GPUS,
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    level: str = LEVEL,
    off: str | None = typer.Option(None, "--off", help="Ablate only these techniques (comma-separated; default: all)."),
    as_json: bool = JSON,
    csv: Path | None = CSV,
    plot: Path | None = PLOT,
) -> None:
    """Predict the gain of each MegaScale technique: added one after another, and removed one at a time.

    Techniques: parallel-block, window, tp-overlap, pp-overlap, dp-overlap, operators, data.

    Example:

      megascale simulate ablate examples/gpt-175b.toml --gpus 256 --train.global_batch=256 --plot ablation.png
    """
    from megascale.simulate import render, simulation_plots
    from megascale.simulate.series import ablate_in_turn, add_techniques_in_turn
    from megascale.simulate.software import TECHNIQUES

    step_level = parse_level(level)
    scenario, is_chosen = load_scenario(
        file, context.args, gpus=gpus, cluster=cluster, calibration=calibration, software=None
    )
    techniques = split_option(off) or list(TECHNIQUES)
    # Both stacks use one set of constants, so that only the techniques differ.
    baseline = replace(make_baseline(scenario, None, calibration), calibration=scenario.calibration)
    # Rows are (technique, step estimate, change of the step time).
    cumulative_rows = add_techniques_in_turn(baseline, scenario, names=techniques, level=step_level)
    removal_rows = ablate_in_turn(scenario, techniques, level=step_level)
    if as_json:
        record = {}
        for key, rows in (("cumulative", cumulative_rows), ("leave_one_out", removal_rows)):
            record[key] = [{"technique": name, "change": change, **result.as_dict()} for name, result, change in rows]
        print_json(record)
    else:
        console = make_console()
        if is_chosen:
            print_choice(scenario.config, CHOICE_REASON)
        render.print_ablation(
            cumulative_rows, f"one after another, {gpus:,} GPUs", change="time saved", console=console
        )
        render.print_ablation(removal_rows, "each removed from the complete stack", change="slower by", console=console)
        _, complete_stack_result, _ = removal_rows[0]
        render.print_assumptions([complete_stack_result], console)
    if csv is not None:
        write_csv([{"technique": name, **result.as_dict()} for name, result, _ in cumulative_rows + removal_rows], csv)
    if plot is not None:
        names = [name for name, _, _ in cumulative_rows]
        mfu_percents = [100 * result.mfu for _, result, _ in cumulative_rows]
        simulation_plots.plot_ablation(names, mfu_percents, plot)


def sweep(
    context: typer.Context,
    file: Path | None = FILE,
    vary: list[str] = typer.Option(
        ...,
        "--vary",
        metavar="KEY=VALUES",
        help="gpus, section.key or cluster.part.key; a,b,c or a:b (doubling).",
    ),
    gpus: int = typer.Option(8, "--gpus", min=1, help="Number of GPUs if it is not varied."),
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    against: str = typer.Option(
        "none", "--against", help="Stack to compare with; 'auto': as in `simulate step`, 'none': no comparison."
    ),
    level: str = LEVEL,
    memory: bool = MEMORY,
    as_json: bool = JSON,
    csv: Path | None = CSV,
    plot: Path | None = PLOT,
) -> None:
    """Predict steps for several numbers of GPUs, or several values of a setting or of the cluster.

    Layouts that cannot run are skipped, with the reason.

    Examples:

      megascale simulate sweep examples/gpt-175b.toml --vary gpus=768:12288 --cluster a100-roce --against megatron-2023

      megascale simulate sweep examples/gpt-175b.toml --gpus 3072 --vary cluster.between.gbs=12.5,25,50 --plot nic.png
    """
    from megascale.simulate import simulation_plots
    from megascale.simulate.defaults import has_layout
    from megascale.simulate.series import parse_vary, sweep_rows

    axes = [parse_vary(text) for text in vary]  # (key, values) per --vary
    gpu_counts = _list_gpu_counts(axes) or [gpus]
    base, is_chosen = load_scenario(
        file,
        context.args,
        gpus=gpu_counts[-1],
        cluster=cluster,
        calibration=calibration,
        software=software,
        chooses_layout=False,
    )
    if not has_file_argument(file, context.args) and not has_layout(base.config):
        base = _choose_swept_layout(base, gpu_counts)
        is_chosen = True
    scenarios = [base]
    if against != "none":
        scenarios.insert(0, make_baseline(base, None if against == "auto" else against, calibration))
    rows, skipped = sweep_rows(axes, scenarios=scenarios, level=parse_level(level), check_memory=memory)
    keys = [key for key, _ in axes]
    if as_json:
        print_json({"rows": rows, "left_out": skipped}, indent=2)
    else:
        _print_sweep(rows, keys, skipped)
        if is_chosen:
            print_choice(base.config, CHOICE_REASON)
    if csv is not None and rows:
        write_csv(rows, csv)
    if plot is not None and rows:
        simulation_plots.plot_sweep(rows, keys, plot)
    if not rows:
        raise FitError("none of the values can run; change the layout, or leave it out to have it chosen")


def _list_gpu_counts(axes: list[tuple[str, list[Any]]]) -> list[int]:
    """Return the varied numbers of GPUs in rising order. Wrong values are left out, since `vary_scenario` reports them.

    Args:
        axes: results of `parse_vary`.
    """
    counts = [value for key, values in axes if key == "gpus" for value in values]
    return sorted(count for count in counts if isinstance(count, int) and count >= 1)


def _choose_swept_layout(scenario: Scenario, gpu_counts: list[int]) -> Scenario:
    """Return the scenario with the fastest layout on the smallest number of GPUs for which a layout fits.

    On more GPUs this layout has more data-parallel ranks. Raises FitError if no layout fits any number of GPUs.
    """
    from megascale.simulate.defaults import choose_layout

    errors = []
    for count in gpu_counts:
        try:
            with show_progress("choosing the layout") as report:
                return scenario.with_config(choose_layout(replace(scenario, gpus=count), report))
        except FitError as error:
            errors.append(error)
    raise errors[-1]


def _print_sweep(rows: list[dict[str, Any]], keys: list[str], skipped: list[str]) -> None:
    """Print a table with a row per point and software stack, then cautions, then points that were skipped.

    Args:
        rows: results of `sweep_rows`. A row holds its software stack as `label`, and the value of each key of `keys`.
        keys: varied keys.
        skipped: reasons of points that cannot run.
    """
    from megascale.simulate import render

    stack_names = {row["label"] for row in rows}
    has_stack_column = len(stack_names) > 1  # else the title names the stack
    headers = [".".join(key.split(".")[-2:]) for key in keys]  # without "cluster." of cluster.part.key
    if has_stack_column:
        headers.append("software")
    headers += ["step, s", "P10-P90", "MFU", "tokens/s", "GiB"]
    table_rows = []
    for row in rows:
        cells = [str(row[key]) for key in keys]
        if has_stack_column:
            cells.append(row["label"])
        cells += [
            f"{row['seconds']:.3f}",
            f"{row['p10']:.2f}-{row['p90']:.2f}",
            f"{100 * row['mfu']:.1f}%",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['memory_gib']:.1f}",
        ]
        table_rows.append(cells)
    console = make_console()
    title = "" if has_stack_column else f"software: {', '.join(stack_names)}"
    if rows:
        render.show_rows(headers, table_rows, console=console, title=title)
    for text in _list_cautions(rows, keys):
        print_marked(console, "caution", "yellow", text)
    print_skipped(skipped, console)


def _list_cautions(rows: list[dict[str, Any]], keys: list[str]) -> list[str]:
    """Return the cautions of a sweep. Those that do not hold for all rows of a software stack name the values.

    Args:
        keys: varied keys.
    """
    common_cautions = []
    partial_cautions: dict[str, list[str]] = {}  # points for which a caution holds
    for label in dict.fromkeys(row["label"] for row in rows):
        rows_of_stack = [row for row in rows if row["label"] == label]
        for row in rows_of_stack:
            point = ", ".join(f"{key}={row[key]}" for key in keys)
            for text in row["cautions"]:
                if all(text in other["cautions"] for other in rows_of_stack):
                    common_cautions.append(text)
                else:
                    partial_cautions.setdefault(text, []).append(point)
    cautions = list(dict.fromkeys(common_cautions))
    for text, points in list(partial_cautions.items())[:_MAX_PARTIAL_CAUTIONS]:
        cautions.append(f"({join_limited(list(dict.fromkeys(points)), 3)}) {text}")
    hidden_count = len(partial_cautions) - _MAX_PARTIAL_CAUTIONS
    if hidden_count > 0:
        cautions.append(f"{hidden_count} more hold for some of the values; --json lists them")
    return cautions
