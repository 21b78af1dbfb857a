"""Commands of `megascale simulate` that use measurements: calibrate, measure, predict and compare."""

from __future__ import annotations

from pathlib import Path

import typer

from megascale.cli.common import JSON, check_finite, make_console, print_json, print_marked, require_package
from megascale.errors import ConfigError

CALIBRATION = typer.Option(None, "--calibration", help="Shipped calibration or TOML file; default: the cluster's own.")
SOFTWARE = typer.Option(
    None, "--software", help="Stack: megascale, megatron-2023, megatron-core, ...; default: MegaScale's for the GPU."
)
GPUS = typer.Option(None, "--gpus", min=1, help="Number of GPUs of the run, if its folder does not record it.")


def calibrate(
    run: list[Path] = typer.Option(
        [],
        "--run",
        metavar="RUN",
        help="Run folder, or a file of `bench train` or `python -m benchmarks targets`, to fit to; repeatable.",
    ),
    cluster: str = typer.Option("h200-host", "--cluster", help="Cluster of the runs."),
    software: str | None = SOFTWARE,
    fit: str = typer.Option("compute", "--fit", help="Constants, comma-separated: compute, overhead, fixed, ..."),
    start: str | None = typer.Option(
        None, "--start", help="Calibration whose values are used for constants that are not fitted."
    ),
    name: str | None = typer.Option(None, "--name", help="Name of the calibration; default: the cluster's."),
    gpus: int | None = GPUS,
    out: Path | None = typer.Option(None, "--out", metavar="FILE.toml", help="File to write; default: print it."),
) -> None:
    """Fit constants to measured steps; write them with errors, evidence and constants that the runs cannot separate.

    A run folder's measurement is its median step after the first five, a bench's the median of its timed steps. One
    run determines one constant: a warning names those that the runs do not determine.

    Examples:

      megascale bench train gpt-13b --parallel.tensor=2 --out tp2.json; megascale simulate calibrate --run tp2.json

      python -m benchmarks targets --out all.json; megascale simulate calibrate --run all.json --fit compute,tp_residual

      megascale simulate calibrate --run runs/a7-1.3b-mb4 --run runs/a7-13b-tp2 --fit compute,fixed --out mine.toml
    """
    from megascale.simulate.calibrating import calibrate as fit_constants
    from megascale.simulate.calibrating import measure_runs
    from megascale.simulate.cluster import load_cluster

    machine = load_cluster(cluster)
    steps = measure_runs(run, machine, software, gpus)
    # Rows are (name of the run, measured seconds per step, seconds per step with the fitted constants).
    calibration, rows = fit_constants(steps, machine, fit, start, name)
    if out is None:
        typer.echo(calibration.to_toml())
        return
    out.write_text(calibration.to_toml())
    console = make_console()
    for run_name, measured, predicted in rows:
        console.print(
            f"{run_name}: measured {measured:.3f} s, fitted {predicted:.3f} s ({predicted / measured - 1:+.1%})"
        )
    for key, error in (calibration.fitted or {}).items():
        value = getattr(calibration.constants, key)
        console.print(f"{key} = {value:.4g} ± {error:.2g}")
    for warning in calibration.warnings:
        print_marked(console, "warning:", "yellow", warning)
    console.print(f"written to {out}; use it with --calibration {out}", markup=False, soft_wrap=True)


def measure(
    like: str = typer.Option(
        "h200-host", "--like", help="Shipped cluster whose values are used for figures that are not measured."
    ),
    name: str = typer.Option("this-machine", "--name", help="Name of the cluster and of the calibration."),
    seconds: float = typer.Option(
        4.0, "--seconds", min=0.01, max=3600, callback=check_finite, help="Seconds per kind of kernel."
    ),
    processes: int | None = typer.Option(
        None, "--processes", min=1, help="Processes of collectives; default: the number of GPUs here."
    ),
    device: str = typer.Option("auto", "--device", help="auto, cuda or cpu."),
    out: Path = typer.Option(Path("."), "--out", metavar="FOLDER", help="Folder for NAME.toml, NAME-calibration.toml."),
    as_json: bool = JSON,
) -> None:
    """Measure this machine's kernels, launches, collectives and power into a cluster file and a calibration file.

    It takes minutes on one GPU; with several GPUs on the host it measures the collectives among them too. Other figures
    are those of --like, and the file marks each of them. Steps are measured by `megascale bench train` or a run, and
    fitted with `simulate calibrate`.

    Example: megascale simulate measure --name my-h100 --like h100-dgx --out machines
    """
    from megascale.simulate import measured_machine
    from megascale.simulate.cluster import load_cluster

    require_package("torch", "torch")
    import torch

    from megascale.observe import machine_figures
    from megascale.train.rank_info import choose_device

    torch_device = choose_device(device)
    base = load_cluster(like)
    gpus = 1
    if torch_device.type == "cuda":
        gpus = torch.cuda.device_count()
        if processes is not None and processes > gpus:
            raise ConfigError(f"--processes={processes} but this host has {gpus} GPUs")
    with make_console(stderr=True).status("measuring") as status:
        figures = machine_figures.measure_machine(
            torch_device, seconds, processes or gpus, report=lambda name: status.update(f"measuring {name}")
        )
    cluster = measured_machine.make_cluster(figures, base, name)
    calibration = measured_machine.make_calibration(figures, cluster)
    cluster_file = out / f"{name}.toml"
    calibration_file = out / f"{name}-calibration.toml"
    out.mkdir(parents=True, exist_ok=True)
    cluster_file.write_text(measured_machine.format_cluster_toml(cluster))
    calibration_file.write_text(calibration.to_toml())
    if as_json:
        print_json(figures, indent=2)
        return
    for row in calibration.rows:
        typer.echo(row)
    typer.echo(f"written; plan for this machine with --cluster {cluster_file} --calibration {calibration_file}")


def predict(
    plan: Path = typer.Argument(..., metavar="RUNS.toml", help="[[run]] tables of name, gpus and settings."),
    cluster: str = typer.Option("h200-host", "--cluster", help="Cluster of the future runs."),
    calibration: str | None = CALIBRATION,
    software: str = typer.Option("megascale-h200", "--software", help="Stack assumed for the engine."),
    note: str = typer.Option("", "--note", help="Remark at the beginning of the file, next to the date."),
    out: Path | None = typer.Option(None, "--out", metavar="FILE.toml", help="File to write; default: print it."),
) -> None:
    """Predict the step times of runs before they are measured, in a file that `compare` reads.

    Event level, no slow hosts. Each run has a name, so that `megascale train` with its settings makes the run folder
    that is compared.

    Example: megascale simulate predict runs.toml --calibration h200-engine --out predicted.toml
    """
    from megascale.simulate import predicting

    text = predicting.predict(plan, cluster, calibration, software, note)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text)
        typer.echo(f"written to {out}; measure, then: megascale simulate compare --runs runs --predictions {out}")


def compare(
    first: Path | None = typer.Argument(
        None, help="JSON of `simulate step --json`; or, alone, a run folder or a file of `bench train --out`."
    ),
    second: Path | None = typer.Argument(None, help="JSON of `simulate step --json`, to compare with."),
    runs: Path | None = typer.Option(None, "--runs", help="Folder of run folders: all predicted runs."),
    predictions: Path | None = typer.Option(None, "--predictions", help="File of `simulate predict`; with --runs."),
    cluster: str = typer.Option("h200-host", "--cluster", help="Cluster of a run folder."),
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    gpus: int | None = GPUS,
    as_json: bool = JSON,
) -> None:
    """Compare two predictions part by part, a run with its prediction and possible reasons, or all predicted runs.

    Examples:

      megascale simulate compare before.json after.json

      megascale simulate compare runs/a7-1.3b-mb4

      megascale simulate compare --runs runs --predictions predicted.toml
    """
    from megascale.simulate import comparing

    if runs is not None and predictions is None:
        raise ConfigError("--runs needs --predictions FILE, which `megascale simulate predict` writes before the runs")
    if runs is not None and predictions is not None:
        rows = comparing.predicted_and_measured(runs, predictions)
    elif first is None:
        raise ConfigError("give two JSON files of `simulate step --json`, one run, or --runs FOLDER")
    elif second is None or first.is_dir():
        rows = comparing.explain_run(first, cluster, calibration, software, gpus)
    else:
        rows = comparing.compare_results(first, second)
    if as_json:
        print_json(rows, indent=2)
        return
    from megascale.simulate import render

    cells = []
    for row in rows:
        cells.append([f"{value:,.3f}" if isinstance(value, float) else str(value) for value in row.values()])
    render.show_rows(list(rows[0]), cells, make_console())
