"""`megascale simulate`: predict a step on hardware you do not have. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli import simulate_network
from megascale.cli.common import (
    DEFAULT_CLUSTER,
    JSON,
    OVERRIDES,
    check_finite,
    check_picture,
    has_file_argument,
    load_for_gpus,
    make_console,
    make_scenario,
    parse_numbers,
    print_choice,
    print_json,
    split_option,
    write_text,
)
from megascale.cli.simulate_measured import CALIBRATION, SOFTWARE, calibrate, compare, measure, predict
from megascale.errors import ConfigError, FitError

if TYPE_CHECKING:
    from megascale.config import Config
    from megascale.simulate.step import Scenario, StepEstimate

_HELP = """Predict step time, MFU, days and memory of any layout on thousands of GPUs, without needing a GPU.

Two levels behind one interface: a closed-form model, which runs in milliseconds, and the schedule's own actions event
by event (--level event). Constants come from measurements, each with its source. In a clone of the repository,
`python -m benchmarks simulator` prints the prediction errors.

  megascale simulate step examples/gpt-175b.toml --gpus 12288

  megascale simulate search examples/gpt-175b.toml --gpus 1024:16384 --days 2
"""

# Options that several commands share.
FILE = typer.Argument(None, metavar="[FILE.toml]", help="Configuration; settings follow as --section.key=value.")
GPUS = typer.Option(..., "--gpus", min=1, metavar="N", help="Number of GPUs for the layout.")
CLUSTER = typer.Option(
    DEFAULT_CLUSTER,
    "--cluster",
    help="Shipped: a100-roce, a100-hdr, a800, h100-dgx, h100-host, h800, h200-host, b200-dgx; or a TOML file.",
)
LEVEL = typer.Option("closed", "--level", help="closed (formula) or event (schedule's actions, jitter, slow hosts).")
CSV = typer.Option(None, "--csv", metavar="FILE", help="Also write the rows as CSV.")
TOML = typer.Option(
    None, "--toml", metavar="FILE", help="Write the first layout's configuration for `megascale train`."
)
_MAX_LISTED_LAYOUTS = 5
# Values of parallel.recompute that `search` tries.
_RECOMPUTE_MODES = ("none", "norms", "activation", "selective", "full")
_LAYOUTS_PER_VARIANT = 4  # fastest layouts that `search` keeps per batch, precision and value of parallel.zero
_MIN_SHOWN_CHANGE = 0.0005  # a smaller change of the step's time would be printed as 0.0%
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

CHOICE_REASON = "chosen, since not set:"

# Values of train.linear_precision by value of --precisions.
_LINEAR_PRECISIONS = {"bfloat16": "default", "float8": "float8"}


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="markdown")
    for layout_command in (step, ablate, sweep, search, effective):
        group.command(context_settings=OVERRIDES)(layout_command)
    for command in (calibrate, measure, predict, compare):
        group.command()(command)
    app.add_typer(group, name="simulate")


def _load_scenario(
    file: Path | None,
    overrides: list[str],
    gpus: int,
    cluster: str,
    calibration: str | None,
    software: str | None,
    *,
    chooses_layout: bool = True,
) -> tuple[Scenario, bool]:
    """Return the scenario of a command line, and whether this function has chosen its layout or batch.

    The settings of a configuration file are used as they are. Without a file, a batch and a layout that are not set are
    chosen.

    Args:
        chooses_layout: whether a layout is chosen if the settings have none.
    """
    from megascale.simulate.defaults import assume_vocabulary, choose_batch, choose_layout, has_layout

    config = load_for_gpus(file, overrides)
    if has_file_argument(file, overrides):
        return make_scenario(config, gpus, cluster, calibration, software), False
    scenario = make_scenario(assume_vocabulary(config), gpus, cluster, calibration, software)
    if chooses_layout and not has_layout(config):
        return scenario.with_config(choose_layout(scenario)), True
    config_with_batch = choose_batch(scenario.config, gpus)
    return scenario.with_config(config_with_batch), config_with_batch is not config


def _make_baseline(scenario: Scenario, name: str | None, calibration: str | None) -> Scenario:
    """Return the scenario under a stack without MegaScale's techniques, with the constants of that stack.

    Args:
        name: name of the stack; None: the stack of the time of the cluster's attention kernels.
    """
    from megascale.simulate.calibration import load_calibration
    from megascale.simulate.software import find_stack
    from megascale.simulate.step import make_baseline_software

    if name is None:
        if "flash1" in scenario.cluster.kernels.attention:
            name = "megatron-2023"
        else:
            name = "megatron-core-h200"
    base = find_stack(name)
    software = make_baseline_software(scenario.config, base)
    constants = load_calibration(calibration, scenario.cluster.name, base.family)
    return replace(scenario, software=software, label=name, base=base, is_baseline=True, calibration=constants)


def _check_level(name: str) -> Any:
    if name not in ("closed", "event"):
        raise ConfigError(f"--level={name!r} is unknown; choose closed or event")
    return name


def _write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a line per row. The times in `row["parts"]` become columns; other nested values are left out."""
    import csv

    flat_rows = []
    for row in rows:
        flat_row = {key: value for key, value in row.items() if not isinstance(value, dict)}
        flat_row |= {f"part_{key}": value for key, value in row["parts"].items()}
        flat_rows.append(flat_row)
    keys = list(dict.fromkeys(key for row in flat_rows for key in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(flat_rows)


def step(
    context: typer.Context,
    file: Path | None = FILE,
    gpus: int = GPUS,
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    against: str | None = typer.Option(
        None,
        "--against",
        help="Stack to compare with; default: Megatron-Core, on A100 the paper's baseline; 'none' disables it.",
    ),
    level: str = LEVEL,
    slow_hosts: float | None = typer.Option(
        None,
        "--slow-hosts",
        min=0,
        max=1,
        callback=check_finite,
        help="Share of hosts that are slow; default: the cluster's value.",
    ),
    seed: int = typer.Option(0, "--seed", help="Event level: seed of slow hosts and jitter."),
    tokens: float = TOKENS,
    price: float | None = PRICE,
    watts: float | None = WATTS,
    memory: bool = MEMORY,
    experts: int = typer.Option(1, "--experts", min=1, help="Experts of each layer, each as wide as the MLP."),
    top_k: int = typer.Option(1, "--top-k", min=1, help="Experts per token."),
    expert_parallel: int = typer.Option(1, "--expert-parallel", min=1, help="Ranks that share the experts."),
    as_json: bool = JSON,
    csv: Path | None = CSV,
    plot: Path | None = PLOT,
    trace: Path | None = typer.Option(
        None, "--trace", metavar="FILE.json", help="Event level: timeline for ui.perfetto.dev (.gz compresses)."
    ),
    fabric: str | None = simulate_network.FABRIC,
    fabric_changes: list[str] = simulate_network.SET,
    placement: str = simulate_network.PLACEMENT,
    queue_pairs: int = simulate_network.QUEUE_PAIRS,
    job_starts: int = simulate_network.STARTS,
    outages: list[str] = simulate_network.OUTAGE,
    outage_at: float = simulate_network.AT,
) -> None:
    """Predict step time (with a breakdown), training days and memory, and compare MegaScale with Megatron-LM.

    Exit 3, with the reason, for a layout that does not divide or does not fit the memory.

    Examples:

      megascale simulate step --model.preset=llama-8b --gpus 8

      megascale simulate step examples/gpt-175b.toml --gpus 12288 --cluster a100-roce

      megascale simulate step examples/gpt-175b.toml --gpus 1024 --train.global_batch=768 --level event --trace t.json

      megascale simulate step --model.preset=gpt-13b --gpus 8 --cluster h200-host --parallel.tensor=2 --json

      megascale simulate step examples/gpt-175b.toml --gpus 12288 --cluster a100-roce --fabric megascale
    """
    from megascale.simulate import perfetto, render, simulation_plots
    from megascale.simulate.cluster import set_value
    from megascale.simulate.run_cost import estimate_run_cost
    from megascale.simulate.step import estimate_step

    if trace is not None:
        level = "event"
    step_level = _check_level(level)
    scenario, is_chosen = _load_scenario(file, context.args, gpus, cluster, calibration, software)
    scenario = replace(scenario, experts=experts, top_k=top_k, expert_parallel=expert_parallel)
    if scenario.uses_closed_form_only_features and step_level == "event":
        raise ConfigError("experts are modelled in closed form only; omit --level event and --trace")
    if slow_hosts is not None:
        scenario = replace(scenario, cluster=set_value(scenario.cluster, "stragglers", "slow_hosts", slow_hosts))
    scenarios = [scenario]
    if against != "none":
        scenarios.insert(0, _make_baseline(scenario, against, calibration))
    network = simulate_network.choose_network(
        fabric, fabric_changes, placement, queue_pairs, job_starts, outages, outage_at, seed
    )
    network_results = []
    # `fleet` is the seed that chooses the slow hosts.
    if network is None:
        results = [estimate_step(stack, step_level, fleet=seed, seed=seed, check_memory=memory) for stack in scenarios]
    else:
        from megascale.simulate.fabric_study import estimate_steps_on_network

        with simulate_network.show_progress(network, gpus):
            network_results = estimate_steps_on_network(
                scenarios, network, step_level, fleet=seed, seed=seed, check_memory=memory
            )
        results = [result.median for result in network_results]
    costs = [estimate_run_cost(result, tokens, 1.0, price, watts) for result in results]
    if as_json:
        records = [result.as_dict() | {"cost": cost.as_dict()} for result, cost in zip(results, costs, strict=True)]
        for record, network_result in zip(records, network_results, strict=False):
            record["network"] = network_result.as_dict()
        print_json(records, indent=2)
    else:
        console = make_console()
        render.print_summary(results, tokens, console)
        if is_chosen:
            print_choice(scenario.config, CHOICE_REASON)
        render.print_cost(costs[-1], console)
        render.print_waterfall(results, console)
        _print_slow_hosts(results, console)
        if network is not None:
            simulate_network.print_network(network_results, network, console)
    if csv is not None:
        _write_csv([result.as_dict() for result in results], csv)
    if plot is not None:
        simulation_plots.plot_waterfall(results, plot)
    if trace is not None:
        if results[-1].event is None:
            raise ConfigError("--trace needs --level event")
        count = perfetto.write_step_trace(results[-1], trace)
        if not as_json:
            typer.echo(f"{count:,} events in {trace}; open it at https://ui.perfetto.dev")


def _print_slow_hosts(results: list[StepEstimate], console: Any) -> None:
    """Print the number and the cost of slow hosts, for results of the event level."""
    for result in results:
        if result.event is not None:
            slow = int((result.event.slow > 1).sum())
            console.print(
                f"[dim]{result.scenario.label}: {slow} of {result.event.slow.size:,} (replica, stage) pairs on a slow "
                f"host; they cost {result.parts['stragglers'] / result.seconds:.2%} of the step[/dim]"
            )


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

    scenario, is_chosen = _load_scenario(file, context.args, gpus, cluster, calibration, None)
    techniques = split_option(off) or list(TECHNIQUES)
    # Both stacks use one set of constants, so that only the techniques differ.
    baseline = replace(_make_baseline(scenario, None, calibration), calibration=scenario.calibration)
    cumulative_rows = add_techniques_in_turn(baseline, scenario, techniques, _check_level(level))
    removal_rows = ablate_in_turn(scenario, techniques, _check_level(level))
    if as_json:
        record = {}
        for key, rows in (("cumulative", cumulative_rows), ("leave_one_out", removal_rows)):
            record[key] = [{"technique": name, "change": change, **result.as_dict()} for name, result, change in rows]
        print_json(record)
    else:
        console = make_console()
        if is_chosen:
            print_choice(scenario.config, CHOICE_REASON)
        render.print_ablation(cumulative_rows, f"one after another, {gpus:,} GPUs", "time saved", console)
        render.print_ablation(removal_rows, "each removed from the complete stack", "slower by", console)
        _, first_result, _ = removal_rows[0]
        render.print_assumptions([first_result], console)
    if csv is not None:
        _write_csv([{"technique": name, **result.as_dict()} for name, result, _ in cumulative_rows + removal_rows], csv)
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
    against: str | None = typer.Option("none", "--against", help="Stack to compare with; 'none' disables it."),
    level: str = LEVEL,
    memory: bool = MEMORY,
    as_json: bool = JSON,
    csv: Path | None = CSV,
    plot: Path | None = PLOT,
) -> None:
    """Predict steps for several numbers of GPUs, or several values of a setting or of the cluster.

    Layouts that cannot run are skipped, with the reason.

    Examples:

      megascale simulate sweep examples/gpt-175b.toml --vary gpus=768:12288 --against megatron-2023 --plot scaling.png

      megascale simulate sweep examples/gpt-175b.toml --gpus 3072 --vary cluster.between.gbs=12.5,25,50 --csv nic.csv
    """
    from megascale.simulate import simulation_plots
    from megascale.simulate.series import parse_vary, sweep_rows

    axes = [parse_vary(text) for text in vary]
    # A layout for one number of GPUs may not divide for others.
    chooses_layout = all(key != "gpus" for key, _ in axes)
    base, is_chosen = _load_scenario(
        file, context.args, gpus, cluster, calibration, software, chooses_layout=chooses_layout
    )
    scenarios = [base]
    if against != "none":
        scenarios.insert(0, _make_baseline(base, against or "megatron-2023", calibration))
    rows, skipped = sweep_rows(base, axes, scenarios, _check_level(level), memory)
    keys = [key for key, _ in axes]
    if as_json:
        print_json({"rows": rows, "left_out": skipped}, indent=2)
    else:
        _print_sweep(rows, keys, skipped)
        if is_chosen:
            print_choice(base.config, CHOICE_REASON)
    if csv is not None and rows:
        _write_csv(rows, csv)
    if plot is not None and rows:
        simulation_plots.plot_sweep(rows, keys, plot)


def _print_sweep(rows: list[dict[str, Any]], keys: list[str], skipped: list[str]) -> None:
    from megascale.simulate import render

    names = {row["label"] for row in rows}
    short_keys = [".".join(key.split(".")[-2:]) for key in keys]
    software = ["software"] if len(names) > 1 else []
    headers = short_keys + software + ["step, s", "P10-P90", "MFU", "tokens/s", "GiB"]
    cells = []
    for row in rows:
        figures = [
            f"{row['seconds']:.3f}",
            f"{row['p10']:.2f}-{row['p90']:.2f}",
            f"{100 * row['mfu']:.1f}%",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['memory_gib']:.1f}",
        ]
        label = [row["label"]] if len(names) > 1 else []
        cells.append([str(row[key]) for key in keys] + label + figures)
    console = make_console()
    title = "" if len(names) > 1 else f"software: {', '.join(names)}"
    if rows:
        render.show_rows(headers, cells, console, title)
    for text in _list_common_cautions(rows):
        console.print(f"[yellow]caution[/yellow] {text}", soft_wrap=True)
    _print_skipped(skipped, console)


def _list_common_cautions(rows: list[dict[str, Any]]) -> list[str]:
    """Return the cautions that all rows of a software stack have in common, for each stack."""
    common = []
    for label in dict.fromkeys(row["label"] for row in rows):
        cautions_by_row = [row["cautions"] for row in rows if row["label"] == label]
        for text in cautions_by_row[0]:
            if all(text in row_cautions for row_cautions in cautions_by_row):
                common.append(text)
    return list(dict.fromkeys(common))


def _print_skipped(skipped: list[str], console: Any) -> None:
    for text in skipped:
        console.print(f"[yellow]skipped[/yellow] {text}", soft_wrap=True)


def search(
    context: typer.Context,
    file: Path | None = FILE,
    gpus: str = typer.Option(..., "--gpus", metavar="N|A:B", help="Number of GPUs, or the range to search."),
    days: float | None = typer.Option(
        None, "--days", min=0, max=1e9, callback=check_finite, help="Deadline: find the fewest GPUs that meet it."
    ),
    tokens: float = TOKENS,
    effective_share: float | None = typer.Option(
        None,
        "--effective",
        min=0.01,
        max=1,
        callback=check_finite,
        help="Effective training time, as a share; default 1 (see --faults).",
    ),
    faults: bool = typer.Option(
        False, "--faults", help="Estimate the effective training time from faults of hosts, per number of GPUs."
    ),
    batches: str | None = typer.Option(
        None, "--batches", metavar="A,B", help="Global batches to try; default: the file's."
    ),
    precisions: str | None = typer.Option(
        None, "--precisions", help="bfloat16, float8 or both, comma-separated; default: the file's."
    ),
    recompute: str | None = typer.Option(
        None,
        "--recompute",
        help="Values of parallel.recompute, comma-separated; default: all, or the value on the command line.",
    ),
    zero: str | None = typer.Option(
        None, "--zero", help="Values of parallel.zero, comma-separated; default: 1,2,3, or the value that is set."
    ),
    memory: bool = MEMORY,
    price: float | None = PRICE,
    watts: float | None = WATTS,
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    as_json: bool = JSON,
    csv: Path | None = CSV,
    toml: Path | None = TOML,
    plot: Path | None = typer.Option(
        None, "--plot", metavar="FILE.png", help="Draw the sensitivities of the answer.", callback=check_picture
    ),
) -> None:
    """Find the best layouts for N GPUs, or the fewest GPUs that meet a deadline. Checks memory; prints sensitivities.

    Settings of the layout on the command line are kept: --parallel.tensor, context, pipeline, virtual_stages, data,
    zero, recompute and --train.micro_batch. A file's layout is replaced. The simulator does not model convergence, so
    it varies the global batch only over the values in --batches.

    Examples:

      megascale simulate search examples/gpt-175b.toml --gpus 12288

      megascale simulate search examples/gpt-175b.toml --gpus 64:16384 --days 2 --faults --price 2.5

      megascale simulate search --model.preset=llama-8b --gpus 8 --precisions bfloat16,float8 --toml job.toml
    """
    from megascale.simulate import effective as monte_carlo
    from megascale.simulate import render, simulation_plots
    from megascale.simulate import search as layout_search
    from megascale.simulate.run_cost import estimate_run_cost
    from megascale.simulate.sensitivity import compute_sensitivities

    low, high = _parse_gpu_range(gpus)
    if effective_share is not None and faults:
        raise ConfigError("--effective gives the share that --faults would estimate; give only one of them")
    base, _ = _load_scenario(file, context.args, high, cluster, calibration, software, chooses_layout=False)
    gpus_per_host = base.cluster.gpus_per_host
    if recompute is None:
        if _is_on_command_line("parallel.recompute", context.args):
            recompute = base.config.parallel.recompute
        else:
            recompute = ",".join(_RECOMPUTE_MODES)
    recompute_modes = _parse_recompute(recompute)
    fixed_sizes = _list_fixed_columns(base.config, context.args)
    kept_text = "".join(f", {name} {value} as given" for name, value in fixed_sizes.items())

    def compute_effective_share(gpu_counts: Any) -> Any:
        """Return the share of effective training time for a number of GPUs, or for an array of numbers."""
        if faults:
            return monte_carlo.estimate_first_order_share(monte_carlo.FaultRates(), gpu_counts / gpus_per_host)
        return gpu_counts * 0.0 + (effective_share or 1.0)  # of the shape of gpu_counts

    results: list[StepEstimate] = []
    skipped: list[str] = []
    shardings = _parse_shardings(zero, base.config)
    for scenario in _list_variants(base, batches, precisions, shardings):
        config = scenario.config
        try:
            layouts = layout_search.search_layouts(
                config,
                scenario.cluster,
                scenario.calibration,
                scenario.software,
                low,
                high,
                recompute_modes,
                fixed_sizes,
            )
            gpu_count = int(layouts.gpus.max())
            if days is not None:
                fewest = layout_search.find_fewest_gpus(
                    layouts, config, scenario, tokens, days, compute_effective_share, memory
                )
                gpu_count = fewest.scenario.gpus
            results += layout_search.find_fastest(layouts, config, scenario, gpu_count, _LAYOUTS_PER_VARIANT, memory)
        except FitError as error:
            reason = str(error).splitlines()[0]
            variant = f"{scenario.label}, batch {config.train.global_batch:,}, ZeRO-{config.parallel.zero}"
            skipped.append(f"{variant}: {reason}")
    if not results:
        raise FitError("\n".join(skipped))
    if days is not None:
        results.sort(key=lambda result: (result.scenario.gpus, result.days(tokens)))
        title = f"fewest GPUs for {tokens:.3g} tokens in {days:g} days"
    else:
        results.sort(key=lambda result: result.days(tokens))
        title = f"fastest layouts on {results[0].scenario.gpus:,} GPUs"
    if not (batches or precisions):  # with these options each variant must be listed
        del results[_MAX_LISTED_LAYOUTS:]
    shares = [float(compute_effective_share(result.scenario.gpus)) for result in results]
    costs = [
        estimate_run_cost(result, tokens, share, price, watts) for result, share in zip(results, shares, strict=True)
    ]
    sensitivities = compute_sensitivities(results[0].scenario)
    if as_json:
        records = [result.as_dict() | {"cost": cost.as_dict()} for result, cost in zip(results, costs, strict=True)]
        print_json({"layouts": records, "sensitivities": sensitivities, "left_out": skipped}, indent=2)
    else:
        console = make_console()
        console.print(
            f"searched: --recompute={','.join(recompute_modes)} --zero={','.join(map(str, shardings))}{kept_text}, "
            f"{shares[0]:.0%} effective training time",
            soft_wrap=True,
        )
        render.print_layouts(results, tokens, shares, console, title)
        render.print_assumptions(results[:1], console)
        render.print_cost(costs[0], console)
        _print_skipped(skipped, console)
        print_choice(results[0].scenario.config, "the first, to paste:")
        _print_sensitivities(sensitivities, console)
    if toml is not None:
        write_text(toml, results[0].scenario.config.to_toml(), "--toml")
    if csv is not None:
        _write_csv([result.as_dict() for result in results], csv)
    if plot is not None:
        best = results[0]
        title = f"{best.scenario.gpus:,} GPUs, {best.seconds:.2f} s per step"
        simulation_plots.plot_tornado(sensitivities, 0.2, plot, title)


def _parse_recompute(text: str) -> list[str]:
    """Return the values of --recompute. Raises ConfigError for an unknown value."""
    from megascale.simulate.software import ENGINE_RECOMPUTE

    modes = text.split(",")
    for mode in modes:
        if mode not in ENGINE_RECOMPUTE:
            raise ConfigError(f"--recompute={text}: {mode!r} is unknown; choose among {', '.join(ENGINE_RECOMPUTE)}")
    return modes


def _is_on_command_line(key: str, arguments: list[str]) -> bool:
    """Return whether the settings of the command line have a key."""
    return any(argument.partition("=")[0] == f"--{key}" for argument in arguments)


def _list_fixed_columns(config: Config, arguments: list[str]) -> dict[str, int]:
    """Return the sizes of the layout that the command line sets, by the search's column."""
    sizes: dict[str, tuple[str, int | None]] = {  # (column, size) by key
        "parallel.tensor": ("tensor", config.parallel.tensor),
        "parallel.context": ("context", config.parallel.context),
        "parallel.pipeline": ("pipeline", config.parallel.pipeline),
        "parallel.virtual_stages": ("virtual", config.parallel.virtual_stages),
        "parallel.data": ("data", config.parallel.data),
        "train.micro_batch": ("micro", config.train.micro_batch),
    }
    fixed_columns = {}
    for key, (column, size) in sizes.items():
        if size is not None and _is_on_command_line(key, arguments):
            fixed_columns[column] = size
    return fixed_columns


def _parse_shardings(text: str | None, config: Config) -> list[int]:
    """Return the values of parallel.zero to search: those of --zero, else the value that is set, else 1, 2 and 3."""
    from megascale.simulate.defaults import SHARDINGS, is_set

    if text is not None:
        values = parse_numbers("--zero", text, "1,3")
        for value in values:
            if value not in (0, 1, 2, 3):
                raise ConfigError(f"--zero={text}: {value} is unknown; choose among 0, 1, 2, 3")
        return values
    if is_set(config, "parallel.zero") or config.train.lora is not None:
        return [config.parallel.zero]
    return list(SHARDINGS)


def _print_sensitivities(sensitivities: dict[str, tuple[float, float]], console: Any) -> None:
    """Print how the step's time changes with each figure of the machine, except figures without effect."""
    from megascale.simulate import render

    rows = []
    for name, (lower, higher) in sensitivities.items():
        if max(abs(lower), abs(higher)) >= _MIN_SHOWN_CHANGE:
            rows.append([name, f"{lower:+.1%}", f"{higher:+.1%}"])
    render.show_rows(["figure of the machine", "20% less", "20% more"], rows, console, "change of the step's time")


def _parse_gpu_range(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of GPUs of --gpus."""
    low, _, high = text.partition(":")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise ConfigError(f"--gpus={text!r} is neither a number nor a range such as 1024:16384") from None


def _list_variants(base: Scenario, batches: str | None, precisions: str | None, shardings: list[int]) -> list[Scenario]:
    """Return a scenario per combination of precision, global batch and parallel.zero, labelled by its precision.

    Raises ConfigError for unknown or unsupported values.
    """
    from megascale.simulate.search import set_zero
    from megascale.simulate.series import vary_scenario

    sizes = [base.config.train.global_batch]
    if batches:
        sizes = parse_numbers("--batches", batches, "1536,3072,6144")
    scenarios = []
    names = precisions.split(",") if precisions else [""]  # "": the precision that is configured
    for precision in names:
        if precision not in ("", "bfloat16", "float8"):
            raise ConfigError(f"--precisions={precisions!r}: {precision!r} is unknown; choose bfloat16 or float8")
        if precision == "float8" and base.cluster.gpu.float8_tflops is None:
            raise ConfigError(
                f"--precisions=float8: cluster {base.cluster.name} has no float8 rate of {base.cluster.gpu.name}; set "
                "gpu.float8_tflops in a cluster file"
            )
        variant = base
        if precision:
            variant = vary_scenario(base, "train.linear_precision", _LINEAR_PRECISIONS[precision])
        label = precision or base.software.precision
        for size in sizes:
            variant_of_size = replace(vary_scenario(variant, "train.global_batch", size), label=label)
            for zero in shardings:
                scenarios.append(variant_of_size.with_config(set_zero(variant_of_size.config, zero)))
    return scenarios


def effective(
    context: typer.Context,
    file: Path | None = FILE,
    gpus: int = GPUS,
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    tokens: float = TOKENS,
    host_mtbf: float | None = typer.Option(
        None, "--host-mtbf", min=0.1, max=1e9, callback=check_finite, help="Days between faults of one host."
    ),
    detect: float | None = typer.Option(
        None, "--detect", min=0, max=1e9, callback=check_finite, help="Seconds to detect a fault and name the host."
    ),
    restart: float | None = typer.Option(
        None,
        "--restart",
        min=0,
        max=1e9,
        callback=check_finite,
        help="Seconds from detection to the first step.",
    ),
    spares: int | None = typer.Option(None, "--spares", min=0, help="Number of spare hosts."),
    repair: float | None = typer.Option(
        None, "--repair", min=0, max=1e9, callback=check_finite, help="Days until a faulty host is a spare again."
    ),
    save_stall: float | None = typer.Option(
        None, "--save-stall", min=0, max=1e9, callback=check_finite, help="Seconds that a checkpoint delays the step."
    ),
    interval: float | None = typer.Option(
        None, "--interval", min=1, max=1e9, callback=check_finite, help="Seconds between checkpoints; default: best."
    ),
    trials: int = typer.Option(400, "--trials", min=10, max=100_000, help="Number of simulated runs."),
    seed: int = typer.Option(0, "--seed", help="Seed of the simulated faults."),
    as_json: bool = JSON,
    plot: Path | None = PLOT,
) -> None:
    """Estimate the effective training time when hosts fail, and the best checkpoint interval.

    The simulated runs include faults, detection, spares and checkpoints.

    Example:

      megascale simulate effective examples/gpt-175b.toml --gpus 12288 --spares 4 --plot effective.png
    """
    from megascale.simulate import effective as monte_carlo
    from megascale.simulate import render, simulation_plots
    from megascale.simulate.step import estimate_step

    options = {
        "host_mtbf_days": host_mtbf,
        "detect": detect,
        "restart": restart,
        "spares": spares,
        "repair_days": repair,
        "save_stall": save_stall,
    }
    changes: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    faults = replace(monte_carlo.FaultRates(), **changes)
    scenario, is_chosen = _load_scenario(file, context.args, gpus, cluster, calibration, software)
    result = estimate_step(scenario)
    hosts = max(1, gpus // result.scenario.cluster.gpus_per_host)
    work_seconds = result.days(tokens) * monte_carlo.DAY
    best_interval, curve = monte_carlo.find_best_interval(work_seconds, hosts, faults, max(50, trials // 2), seed)
    outcome = monte_carlo.simulate_run(work_seconds, hosts, faults, interval or best_interval, trials, seed)
    young_daly_interval = monte_carlo.compute_young_daly_interval(faults, hosts)
    wall_days = outcome.wall / monte_carlo.DAY
    record = {
        "gpus": gpus,
        "hosts": hosts,
        "faults": {key: getattr(faults, key) for key in monte_carlo.SOURCES},
        "step_seconds": result.seconds,
        "stepping_days": work_seconds / monte_carlo.DAY,
        "best_interval_s": best_interval,
        "young_daly_s": young_daly_interval,
        "interval_s": outcome.interval,
        "effective": float(outcome.effective.mean()),
        "effective_p10": outcome.quantile(0.1),
        "effective_p90": outcome.quantile(0.9),
        "wall_days": float(wall_days.mean()),
        "wall_days_p90": float(sorted(wall_days)[int(0.9 * len(wall_days))]),
        "faults_a_run": float(outcome.faults.mean()),
        "curve": curve,
    }
    if as_json:
        print_json(record, indent=2)
    else:
        _print_effective(record, monte_carlo.SOURCES)
        render.print_assumptions([result], make_console())
        if is_chosen:
            print_choice(scenario.config, CHOICE_REASON)
    if plot is not None:
        marks = {"best": best_interval, "Young-Daly": young_daly_interval}
        title = f"{gpus:,} GPUs, MTBF of {faults.host_mtbf_days:g} days per host"
        simulation_plots.plot_effective_share(curve, marks, plot, title)


def _print_effective(record: dict[str, Any], sources: dict[str, str]) -> None:
    console = make_console()
    console.print(
        f"stepping {record['stepping_days']:.2f} days at {record['step_seconds']:.2f} s per step on "
        f"{record['hosts']:,} hosts; {record['faults_a_run']:.1f} faults per run"
    )
    console.print(
        f"[bold]effective training time {record['effective']:.1%}[/bold] (P10 {record['effective_p10']:.1%}, P90 "
        f"{record['effective_p90']:.1%}); wall-clock {record['wall_days']:.2f} days, P90 {record['wall_days_p90']:.2f}"
    )
    console.print(
        f"checkpoint every {record['interval_s']:.0f} s (best of the grid {record['best_interval_s']:.0f} s, "
        f"Young-Daly {record['young_daly_s']:.0f} s)"
    )
    for key, value in record["faults"].items():
        console.print(f"[dim]  {key} = {value:g}: {sources[key]}[/dim]", soft_wrap=True)
