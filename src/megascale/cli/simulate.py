"""`megascale simulate`: what a step takes on a machine you do not have. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli import simulate_network
from megascale.cli.common import DEFAULT_CLUSTER, OVERRIDES, check_picture, finite, load_for_gpus
from megascale.cli.simulate_measured import CALIBRATION, JSON, SOFTWARE, calibrate, compare, measure, predict, validate
from megascale.core import strict_json

if TYPE_CHECKING:
    from megascale.config import Config
    from megascale.simulate.step import Scenario, StepEstimate

TOKENS = 300e9

_HELP = """Predict step time, MFU, days and memory of any layout on thousands of GPUs, without one.

Two levels behind one interface: a closed form (milliseconds), and the schedule's own actions event by event
(--level event). Constants come from measurements, each with its source; `validate` prints how well they predict.

  megascale simulate step examples/gpt-175b.toml --gpus 12288

  megascale simulate search examples/gpt-175b.toml --gpus 1024:16384 --days 2

  megascale simulate validate
"""

# Options that several commands share.
FILE = typer.Argument(None, metavar="[FILE.toml]", help="Configuration; settings follow as --section.key=value.")
GPUS = typer.Option(..., "--gpus", min=1, metavar="N", help="GPUs to lay the model over.")
CLUSTER = typer.Option(
    DEFAULT_CLUSTER,
    "--cluster",
    help="Shipped: a100-roce, a100-hdr, a800, h100-dgx, h100-host, h800, h200-host, b200-dgx; or a TOML file.",
)
LEVEL = typer.Option("closed", "--level", help="closed (formula) or event (schedule's actions, jitter, slow hosts).")
CSV = typer.Option(None, "--csv", metavar="FILE", help="Write the rows as CSV too.")
PLOT = typer.Option(None, "--plot", metavar="FILE.png", help="Draw it.", callback=check_picture)
PRICE = typer.Option(
    None, "--price", min=0, max=1e9, callback=finite, help="Price of one GPU for one hour: prints what the run costs."
)
WATTS = typer.Option(
    None,
    "--watts",
    min=0,
    max=1e7,
    callback=finite,
    help="Power of one GPU with its part of host and cooling: prints energy.",
)
MEMORY = typer.Option(
    True, "--memory/--no-memory", help="Refuse what does not fit this engine's memory; other stacks need another."
)
HOW_MANY = typer.Option(TOKENS, "--tokens", min=1, max=1e20, callback=finite, help="Tokens of the whole run, for days.")


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="markdown")
    for name, command in (
        ("step", step),
        ("ablate", ablate),
        ("sweep", sweep),
        ("search", search),
        ("effective", effective),
        ("calibrate", calibrate),
        ("measure", measure),
        ("predict", predict),
        ("compare", compare),
        ("validate", validate),
    ):
        takes_overrides = name in ("step", "ablate", "sweep", "search", "effective")
        group.command(name, context_settings=OVERRIDES if takes_overrides else {})(command)
    app.add_typer(group, name="simulate")


def _config(context: typer.Context, file: Path | None) -> Config:
    extra = list(context.args)
    if file is not None and str(file).startswith("--"):
        # Without FILE the first override lands in its place.
        extra.insert(0, str(file))
        file = None
    return load_for_gpus(file, extra)


def _scenario(config: Config, gpus: int, cluster: str, calibration: str | None, software: str | None) -> Scenario:
    """The configuration under MegaScale's stack for the GPU, or the one named; block and window are the file's own."""
    from megascale.simulate.calibration import load_calibration
    from megascale.simulate.cluster import load_cluster
    from megascale.simulate.software import stack
    from megascale.simulate.step import Scenario, engine_software

    machine = load_cluster(cluster)
    name = software or ("megascale-h200" if "cudnn" in machine.kernels.attention else "megascale")
    base = stack(name)
    constants = load_calibration(calibration, machine.name, base.family)
    return Scenario(config, gpus, machine, constants, engine_software(config, base), name, base=base)


def _baseline(scenario: Scenario, name: str | None, calibration: str | None) -> Scenario:
    """Return the same layout under a stack without MegaScale's techniques, with that stack's constants."""
    from dataclasses import replace

    from megascale.simulate.calibration import load_calibration
    from megascale.simulate.software import stack
    from megascale.simulate.step import baseline_software

    if name is None:
        name = "megatron-2023" if "flash1" in scenario.cluster.kernels.attention else "megatron-core-h200"
    base = stack(name)
    software = baseline_software(scenario.config, base)
    constants = load_calibration(calibration, scenario.cluster.name, base.family)
    return replace(scenario, software=software, label=name, base=base, baseline=True, calibration=constants)


def _level(name: str) -> Any:
    from megascale.errors import ConfigError

    if name not in ("closed", "event"):
        raise ConfigError(f"--level={name!r} is unknown; closed or event")
    return name


def _write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    import csv

    flat = [
        {
            **{k: v for k, v in row.items() if not isinstance(v, dict)},
            **{f"part_{k}": v for k, v in row["parts"].items()},
        }
        for row in rows
    ]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(flat)


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def step(
    context: typer.Context,
    file: Path | None = FILE,
    gpus: int = GPUS,
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    against: str | None = typer.Option(
        None, "--against", help="Stack to set beside it (default: Megatron-LM's of the paper); none: only the one."
    ),
    level: str = LEVEL,
    slow_hosts: float | None = typer.Option(
        None,
        "--slow-hosts",
        min=0,
        max=1,
        callback=finite,
        help="Share of hosts that are slow; default: the cluster's figure.",
    ),
    seed: int = typer.Option(0, "--seed", help="Event level: which hosts are slow, and the jitter."),
    tokens: float = HOW_MANY,
    price: float | None = PRICE,
    watts: float | None = WATTS,
    memory: bool = MEMORY,
    context_ranks: int = typer.Option(1, "--context", min=1, help="Ranks that a sequence is cut over (closed form)."),
    experts: int = typer.Option(1, "--experts", min=1, help="Experts of each layer, each as wide as the MLP."),
    top_k: int = typer.Option(1, "--top-k", min=1, help="Experts that see a token."),
    expert_parallel: int = typer.Option(1, "--expert-parallel", min=1, help="Ranks that experts are spread over."),
    as_json: bool = JSON,
    csv: Path | None = CSV,
    plot: Path | None = PLOT,
    trace: Path | None = typer.Option(
        None, "--trace", metavar="FILE.json", help="Event level: timeline for ui.perfetto.dev (.gz compresses)."
    ),
    fabric: str | None = simulate_network.FABRIC,
    changes: list[str] = simulate_network.SET,
    placement: str = simulate_network.PLACEMENT,
    queue_pairs: int = simulate_network.QUEUE_PAIRS,
    starts: int = simulate_network.STARTS,
    outages: list[str] = simulate_network.OUTAGE,
    at: float = simulate_network.AT,
) -> None:
    """Time of one step, where it goes, days of a run, memory; MegaScale's stack beside Megatron-LM's.

    Exit 3, with the reason, for what does not divide or does not fit the memory.

    Examples:

      megascale simulate step examples/gpt-175b.toml --gpus 12288

      megascale simulate step examples/gpt-175b.toml --gpus 1024 --train.global_batch=768 --level event --trace t.json

      megascale simulate step --model.preset=gpt-13b --gpus 8 --cluster h200-host --parallel.tensor=2 --json

      megascale simulate step examples/gpt-175b.toml --gpus 12288 --fabric megascale --placement random
    """
    from dataclasses import replace

    from megascale.errors import ConfigError
    from megascale.simulate import perfetto, render, simulation_plots
    from megascale.simulate.cluster import with_figure
    from megascale.simulate.run_cost import run_cost
    from megascale.simulate.step import run

    how: Any = _level("event" if trace is not None else level)
    scenario = _scenario(_config(context, file), gpus, cluster, calibration, software)
    scenario = replace(scenario, context=context_ranks, experts=experts, top_k=top_k, expert_parallel=expert_parallel)
    if scenario.beyond_training and how == "event":
        raise ConfigError("--context and experts are priced in closed form only; leave out --level event and --trace")
    if slow_hosts is not None:
        scenario = replace(scenario, cluster=with_figure(scenario.cluster, "stragglers", "slow_hosts", slow_hosts))
    scenarios = [scenario] if against == "none" else [_baseline(scenario, against, calibration), scenario]
    network = simulate_network.chosen(fabric, changes, placement, queue_pairs, starts, outages, at, seed)
    on_network = []
    if network is None:
        results: list[StepEstimate] = [run(s, how, fleet=seed, seed=seed, check_memory=memory) for s in scenarios]
    else:
        from megascale.simulate.fabric_study import step_on_network

        with simulate_network.working(network, gpus):
            on_network = step_on_network(scenarios, network, how, fleet=seed, seed=seed, check_memory=memory)
        results = [each.median for each in on_network]
    if as_json:
        bills = [run_cost(r, tokens, 1.0, price, watts).as_dict() for r in results]
        records = [r.as_dict() | {"cost": b} for r, b in zip(results, bills, strict=True)]
        if on_network:
            records = [r | {"network": each.as_dict()} for r, each in zip(records, on_network, strict=True)]
        typer.echo(strict_json.dumps(records, indent=2))
    else:
        console = _console()
        render.headline(results, tokens, console)
        render.bill(run_cost(results[-1], tokens, 1.0, price, watts), console)
        render.waterfall(results, console)
        _say_slow(results, console)
        if network is not None:
            simulate_network.show(on_network, network, console)
    if csv is not None:
        _write_csv([r.as_dict() for r in results], csv)
    if plot is not None:
        simulation_plots.waterfall(results, plot)
    if trace is not None:
        if results[-1].event is None:
            raise ConfigError("--trace needs --level event")
        count = perfetto.write(results[-1], trace)
        if not as_json:
            typer.echo(f"{count:,} events in {trace}; open it at https://ui.perfetto.dev")


def _say_slow(results: list[StepEstimate], console: Any) -> None:
    for result in results:
        if result.event is not None:
            slow = int((result.event.slow > 1).sum())
            console.print(
                f"[dim]{result.scenario.label}: {slow} of {result.event.slow.size:,} (replica, stage) pairs on a slow "
                f"host; it costs {result.parts['stragglers'] / result.seconds:.2%} of the step[/dim]"
            )


def ablate(
    context: typer.Context,
    file: Path | None = FILE,
    gpus: int = GPUS,
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    level: str = LEVEL,
    off: str | None = typer.Option(
        None, "--off", help="Only these techniques, comma-separated: how much slower without each."
    ),
    as_json: bool = JSON,
    csv: Path | None = CSV,
    plot: Path | None = PLOT,
) -> None:
    """What each MegaScale technique is worth here: switched on one after another, and each left out of the whole.

    Techniques: parallel-block, window, tp-overlap, pp-overlap, dp-overlap, operators, data.

    Example:

      megascale simulate ablate examples/gpt-175b.toml --gpus 256 --train.global_batch=256 --plot ablation.png
    """
    from dataclasses import replace

    from megascale.simulate import render, simulation_plots
    from megascale.simulate.series import ablate_in_turn, cumulative
    from megascale.simulate.software import TECHNIQUES

    scenario = _scenario(_config(context, file), gpus, cluster, calibration, None)
    names = [n.strip() for n in off.split(",")] if off else list(TECHNIQUES)
    # One machine with one set of constants, on which techniques are switched.
    baseline = replace(_baseline(scenario, None, calibration), calibration=scenario.calibration)
    up = cumulative(baseline, scenario, names, _level(level))
    down = ablate_in_turn(scenario, names, _level(level))
    if as_json:
        both = {"cumulative": up, "leave_one_out": down}
        typer.echo(
            strict_json.dumps(
                {k: [{"technique": n, "change": c, **r.as_dict()} for n, r, c in v] for k, v in both.items()}
            )
        )
    else:
        console = _console()
        render.ablation_chart(up, f"one after another, {gpus:,} GPUs", "time saved", console)
        render.ablation_chart(down, "each left out of the whole", "slower by", console)
    if csv is not None:
        _write_csv([{"technique": n, **r.as_dict()} for n, r, _ in [*up, *down]], csv)
    if plot is not None:
        simulation_plots.ablation_chart([n for n, _, _ in up], [100 * r.mfu for _, r, _ in up], plot)


def sweep(
    context: typer.Context,
    file: Path | None = FILE,
    vary: list[str] = typer.Option(
        ...,
        "--vary",
        metavar="KEY=VALUES",
        help="gpus, section.key or cluster.part.key; a,b,c or a:b (doubling).",
    ),
    gpus: int = typer.Option(8, "--gpus", min=1, help="GPUs where they are not varied."),
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    against: str | None = typer.Option("none", "--against", help="Stack to set beside it; none: only the one."),
    level: str = LEVEL,
    memory: bool = MEMORY,
    as_json: bool = JSON,
    csv: Path | None = CSV,
    plot: Path | None = PLOT,
) -> None:
    """Steps over a range of anything: GPUs, a setting, a figure of the cluster. What cannot run is left out, and said.

    Examples:

      megascale simulate sweep examples/gpt-175b.toml --vary gpus=768:12288 --against megatron-2023 --plot scaling.png

      megascale simulate sweep examples/gpt-175b.toml --gpus 3072 --vary cluster.between.gbs=12.5,25,50 --csv nic.csv
    """
    from megascale.simulate import simulation_plots
    from megascale.simulate.series import parse_vary, sweep_rows

    base = _scenario(_config(context, file), gpus, cluster, calibration, software)
    axes = [parse_vary(text) for text in vary]
    stacks = [None] if against == "none" else [against or "megatron-2023", None]
    rows, left_out = sweep_rows(
        base, axes, [_baseline(base, s, calibration) if s else base for s in stacks], _level(level), memory
    )
    keys = [key for key, _ in axes]
    if as_json:
        typer.echo(strict_json.dumps({"rows": rows, "left_out": left_out}, indent=2))
    else:
        _show_sweep(rows, keys, left_out)
    if csv is not None and rows:
        _write_csv(rows, csv)
    if plot is not None and rows:
        simulation_plots.sweep(rows, keys, plot)


def _show_sweep(rows: list[dict[str, Any]], keys: list[str], left_out: list[str]) -> None:
    from megascale.simulate import render

    short = [".".join(key.split(".")[-2:]) for key in keys]
    names = [*short, "software", "step, s", "P10-P90", "MFU", "tokens/s", "GiB"]
    cells = [
        [
            *(str(row[k]) for k in keys),
            row["label"],
            f"{row['seconds']:.3f}",
            f"{row['p10']:.2f}-{row['p90']:.2f}",
            f"{100 * row['mfu']:.1f}%",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['memory_gib']:.1f}",
        ]
        for row in rows
    ]
    console = _console()
    render.show_rows(names, cells, console)
    for text in left_out:
        console.print(f"[yellow]left out[/yellow] {text}", soft_wrap=True)


def search(
    context: typer.Context,
    file: Path | None = FILE,
    gpus: str = typer.Option(..., "--gpus", metavar="N|A:B", help="GPUs, or the range to look in."),
    days: float | None = typer.Option(
        None, "--days", min=0, max=1e9, callback=finite, help="Deadline: the fewest GPUs that meet it."
    ),
    tokens: float = HOW_MANY,
    share: float | None = typer.Option(
        None,
        "--effective",
        min=0.01,
        max=1,
        callback=finite,
        help="Share of time spent stepping; default 1 (see --faults).",
    ),
    faults: bool = typer.Option(
        False, "--faults", help="Share of time spent stepping by faults of hosts, for each number of GPUs."
    ),
    batches: str | None = typer.Option(None, "--batches", metavar="A,B", help="Batches to try; default: the file's."),
    precisions: str | None = typer.Option(
        None, "--precisions", help="bfloat16, float8 or both, comma-separated; default: the file's."
    ),
    recompute: str = typer.Option(
        "none,norms,activation,selective,full", "--recompute", help="What backward may recompute, comma-separated."
    ),
    memory: bool = MEMORY,
    price: float | None = PRICE,
    watts: float | None = WATTS,
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    as_json: bool = JSON,
    csv: Path | None = CSV,
    plot: Path | None = typer.Option(
        None, "--plot", metavar="FILE.png", help="Draw what the answer hangs on.", callback=check_picture
    ),
) -> None:
    """The best layouts for N GPUs, or the fewest GPUs that meet a deadline; memory is checked; sensitivities.

    A batch trains as well as another only within limits that no simulator knows: --batches says which to try.

    Examples:

      megascale simulate search examples/gpt-175b.toml --gpus 12288

      megascale simulate search examples/gpt-175b.toml --gpus 64:16384 --days 2 --faults --price 2.5

      megascale simulate search --model.preset=gpt-13b --gpus 64 --cluster h100-dgx --precisions bfloat16,float8
    """
    from megascale.errors import ConfigError, FitError
    from megascale.simulate import effective as monte_carlo
    from megascale.simulate import render, simulation_plots
    from megascale.simulate import search as finder
    from megascale.simulate.run_cost import run_cost
    from megascale.simulate.software import ENGINE_RECOMPUTE

    kinds = recompute.split(",")
    if unknown := [kind for kind in kinds if kind not in ENGINE_RECOMPUTE]:
        raise ConfigError(f"--recompute={recompute}: {unknown[0]!r} is unknown; known: {', '.join(ENGINE_RECOMPUTE)}")
    low, _, high = gpus.partition(":")
    try:
        ends = (int(low), int(high or low))
    except ValueError:
        raise ConfigError(f"--gpus={gpus!r} is neither a number nor a range such as 1024:16384") from None
    if share is not None and faults:
        raise ConfigError("--effective gives the share that --faults would estimate; give one of them")
    base = _config(context, file)
    machine = _scenario(base, ends[1], cluster, calibration, software)
    per_host = machine.cluster.gpus_per_host

    def stepping(count: Any) -> Any:
        if faults:
            return monte_carlo.first_order_share(monte_carlo.FaultRates(), count / per_host)
        return count * 0.0 + (share or 1.0)

    results: list[StepEstimate] = []
    refused: list[str] = []
    for scenario in _variants(machine, batches, precisions):
        config = scenario.config
        found = finder.search(config, scenario.cluster, scenario.calibration, scenario.software, *ends, kinds)
        try:
            if days is not None:
                least = finder.fewest(found, config, scenario, tokens, days, stepping, memory)
                results += finder.best(found, config, scenario, least.scenario.gpus, 4, memory)
            else:
                results += finder.best(found, config, scenario, int(found.gpus.max()), 4, memory)
        except FitError as error:
            refused.append(f"{scenario.label}, batch {config.train.global_batch:,}: {str(error).splitlines()[0]}")
    if not results:
        raise FitError("\n".join(refused))
    if days is not None:
        results.sort(key=lambda r: (r.scenario.gpus, r.days(tokens)))
        title = f"fewest GPUs for {tokens:.3g} tokens in {days:g} days"
    else:
        results.sort(key=lambda r: r.days(tokens))
        title = f"fastest layouts on {results[0].scenario.gpus:,} GPUs"
    shares = [float(stepping(r.scenario.gpus)) for r in results]
    title += f", {shares[0]:.0%} of the time stepping; recompute of {', '.join(kinds)}"
    bills = [run_cost(r, tokens, s, price, watts) for r, s in zip(results, shares, strict=True)]
    changes = finder.sensitivities(results[0].scenario)
    if as_json:
        layouts = [r.as_dict() | {"cost": b.as_dict()} for r, b in zip(results, bills, strict=True)]
        typer.echo(strict_json.dumps({"layouts": layouts, "sensitivities": changes, "left_out": refused}, indent=2))
    else:
        console = _console()
        render.layouts(results, tokens, shares, console, title)
        render.bill(bills[0], console)
        for text in refused:
            console.print(f"[yellow]left out[/yellow] {text}", soft_wrap=True)
        for name, (lower, higher) in changes.items():
            console.print(f"  {name:26s} -20%: step {lower:+.1%}   +20%: step {higher:+.1%}")
    if csv is not None:
        _write_csv([r.as_dict() for r in results], csv)
    if plot is not None:
        simulation_plots.tornado(
            changes, 0.2, plot, f"{results[0].scenario.gpus:,} GPUs, {results[0].seconds:.2f} s a step"
        )


def _variants(machine: Scenario, batches: str | None, precisions: str | None) -> list[Scenario]:
    """Return the scenario with each batch and each precision; ConfigError for what cannot be."""
    from dataclasses import replace

    from megascale.errors import ConfigError
    from megascale.simulate.series import varied

    try:
        sizes = [int(n) for n in batches.split(",")] if batches else [machine.config.train.global_batch]
    except ValueError:
        raise ConfigError(f"--batches={batches!r} are not whole numbers such as 1536,3072,6144") from None
    scenarios = []
    for precision in precisions.split(",") if precisions else [None]:
        if precision not in (None, "bfloat16", "float8"):
            raise ConfigError(f"--precisions={precisions!r}: {precision!r} is unknown; bfloat16 or float8")
        if precision == "float8" and machine.cluster.gpu.float8_tflops is None:
            raise ConfigError(
                f"--precisions=float8: cluster {machine.cluster.name} gives {machine.cluster.gpu.name} no float8 rate "
                "(gpu.float8_tflops)"
            )
        chosen = machine
        if precision is not None:
            chosen = varied(machine, "train.linear_precision", "float8" if precision == "float8" else "default")
        label = precision or machine.software.precision
        scenarios += [replace(varied(chosen, "train.global_batch", size), label=label) for size in sizes]
    return scenarios


def effective(
    context: typer.Context,
    file: Path | None = FILE,
    gpus: int = GPUS,
    cluster: str = CLUSTER,
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    tokens: float = HOW_MANY,
    host_mtbf: float | None = typer.Option(
        None, "--host-mtbf", min=0.1, max=1e9, callback=finite, help="Days between faults of one host."
    ),
    detect: float | None = typer.Option(
        None, "--detect", min=0, max=1e9, callback=finite, help="Seconds to detect a fault and name the host."
    ),
    restart: float | None = typer.Option(
        None, "--restart", min=0, max=1e9, callback=finite, help="Seconds from there to the first step."
    ),
    spares: int | None = typer.Option(None, "--spares", min=0, help="Hosts that stand by."),
    repair: float | None = typer.Option(
        None, "--repair", min=0, max=1e9, callback=finite, help="Days until a faulty host is a spare again."
    ),
    save_stall: float | None = typer.Option(
        None, "--save-stall", min=0, max=1e9, callback=finite, help="Seconds a checkpoint holds the step."
    ),
    interval: float | None = typer.Option(
        None, "--interval", min=1, max=1e9, callback=finite, help="Seconds between checkpoints; else the best."
    ),
    trials: int = typer.Option(400, "--trials", min=10, max=100_000, help="Simulated runs."),
    seed: int = typer.Option(0, "--seed"),
    as_json: bool = JSON,
    plot: Path | None = PLOT,
) -> None:
    """Share of the time spent stepping when hosts fail: faults, detection, spares, checkpoints; the best interval.

    Example:

      megascale simulate effective examples/gpt-175b.toml --gpus 12288 --spares 4 --plot effective.png
    """
    from dataclasses import replace

    from megascale.simulate import effective as monte_carlo
    from megascale.simulate import simulation_plots
    from megascale.simulate.step import run

    given = {
        "host_mtbf_days": host_mtbf,
        "detect": detect,
        "restart": restart,
        "spares": spares,
        "repair_days": repair,
        "save_stall": save_stall,
    }
    faults = replace(monte_carlo.FaultRates(), **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    result = run(_scenario(_config(context, file), gpus, cluster, calibration, software))
    hosts = max(1, gpus // result.scenario.cluster.gpus_per_host)
    work = result.days(tokens) * monte_carlo.DAY
    best, curve = monte_carlo.best_interval(work, hosts, faults, max(50, trials // 2), seed)
    outcome = monte_carlo.simulate_run(work, hosts, faults, interval or best, trials, seed)
    first_order = monte_carlo.young_daly(faults, hosts)
    wall = outcome.wall / monte_carlo.DAY
    record = {
        "gpus": gpus,
        "hosts": hosts,
        "faults": {k: getattr(faults, k) for k in monte_carlo.SOURCES},
        "step_seconds": result.seconds,
        "stepping_days": work / monte_carlo.DAY,
        "best_interval_s": best,
        "young_daly_s": first_order,
        "interval_s": outcome.interval,
        "effective": float(outcome.effective.mean()),
        "effective_p10": outcome.quantile(0.1),
        "effective_p90": outcome.quantile(0.9),
        "wall_days": float(wall.mean()),
        "wall_days_p90": float(sorted(wall)[int(0.9 * len(wall))]),
        "faults_a_run": float(outcome.faults.mean()),
        "curve": curve,
    }
    if as_json:
        typer.echo(strict_json.dumps(record, indent=2))
    else:
        _show_effective(record, monte_carlo.SOURCES)
    if plot is not None:
        marks = {"best": best, "Young-Daly": first_order}
        simulation_plots.effective(
            curve, marks, plot, f"{gpus:,} GPUs, a fault of a host every {faults.host_mtbf_days:g} days"
        )


def _show_effective(record: dict[str, Any], sources: dict[str, str]) -> None:
    console = _console()
    console.print(
        f"stepping {record['stepping_days']:.2f} days at {record['step_seconds']:.2f} s a step on {record['hosts']:,} "
        f"hosts; {record['faults_a_run']:.1f} faults a run"
    )
    console.print(
        f"[bold]effective time {record['effective']:.1%}[/bold] (P10 {record['effective_p10']:.1%}, P90 "
        f"{record['effective_p90']:.1%}); wall-clock {record['wall_days']:.2f} days, P90 {record['wall_days_p90']:.2f}"
    )
    console.print(
        f"checkpoint every {record['interval_s']:.0f} s (best of the grid {record['best_interval_s']:.0f} s, "
        f"Young-Daly {record['young_daly_s']:.0f} s)"
    )
    for key, value in record["faults"].items():
        console.print(f"[dim]  {key} = {value:g}: {sources[key]}[/dim]", soft_wrap=True)
