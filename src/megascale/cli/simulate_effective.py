"""`megascale simulate effective`: effective training time of a run in which hosts fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from megascale.cli.common import JSON, check_finite, make_console, print_choice, print_json
from megascale.cli.simulate_measured import CALIBRATION, SOFTWARE
from megascale.cli.simulate_options import CHOICE_REASON, CLUSTER, FILE, GPUS, PLOT, TOKENS, load_scenario
from megascale.errors import FitError


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
    import numpy as np

    from megascale.simulate import effective as monte_carlo
    from megascale.simulate import render, simulation_plots
    from megascale.simulate.step import estimate_step

    # Values of --host-mtbf to --save-stall by field of FaultRates, which has a default for each.
    fault_options = {
        "host_mtbf_days": host_mtbf,
        "detect": detect,
        "restart": restart,
        "spares": spares,
        "repair_days": repair,
        "save_stall": save_stall,
    }
    given_rates: dict[str, Any] = {key: value for key, value in fault_options.items() if value is not None}
    faults = replace(monte_carlo.FaultRates(), **given_rates)
    scenario, is_chosen = load_scenario(
        file, context.args, gpus=gpus, cluster=cluster, calibration=calibration, software=software
    )
    step_estimate = estimate_step(scenario)
    hosts = -(-gpus // scenario.cluster.gpus_per_host)  # rounded up
    stepping_seconds = step_estimate.days(tokens) * monte_carlo.DAY
    # Half of the trials per interval of the grid are enough to compare intervals.
    best_interval, curve = monte_carlo.find_best_interval(
        stepping_seconds, hosts, faults=faults, trials=max(50, trials // 2), seed=seed
    )
    outcome = monte_carlo.simulate_run(
        stepping_seconds, hosts, faults=faults, interval=interval or best_interval, trials=trials, seed=seed
    )
    if not np.isfinite(outcome.wall).all():
        mean_between_faults = faults.host_mtbf_days * monte_carlo.DAY / hosts
        raise FitError(
            f"{stepping_seconds / monte_carlo.DAY:.3g} days of steps with a fault of {hosts:,} hosts every "
            f"{mean_between_faults:,.0f} s: a simulated run does not end within {monte_carlo.MAX_FAULTS:,} faults; "
            "lower --tokens or --interval, or raise --host-mtbf"
        )
    young_daly_interval = monte_carlo.compute_young_daly_interval(faults, hosts)
    wall_days = outcome.wall / monte_carlo.DAY  # [trials]
    record = {
        "gpus": gpus,
        "hosts": hosts,
        "faults": {key: getattr(faults, key) for key in monte_carlo.SOURCES},
        "step_seconds": step_estimate.seconds,
        "stepping_days": stepping_seconds / monte_carlo.DAY,
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
        sources = monte_carlo.SOURCES | dict.fromkeys(given_rates, "given")
        _print_effective(record, sources)
        render.print_assumptions([step_estimate], make_console())
        if is_chosen:
            print_choice(scenario.config, CHOICE_REASON)
    if plot is not None:
        marked_intervals = {"best": best_interval, "Young-Daly": young_daly_interval}
        title = f"{gpus:,} GPUs, MTBF of {faults.host_mtbf_days:g} days per host"
        simulation_plots.plot_effective_share(curve, marked_intervals, path=plot, title=title)


def _print_effective(record: dict[str, Any], sources: dict[str, str]) -> None:
    """Print the record of `effective`, and the source of each fault rate (`sources`, by key)."""
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
        console.print(f"  {key} = {value:g}: {sources[key]}", style="dim", markup=False, soft_wrap=True)
