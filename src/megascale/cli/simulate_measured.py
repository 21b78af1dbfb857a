"""The commands of `megascale simulate` that hold it against measurements: calibrate, predict, compare, validate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from megascale.cli.common import finite
from megascale.core import strict_json

CALIBRATION = typer.Option(None, "--calibration", help="Shipped calibration or TOML file; default: the cluster's own.")
SOFTWARE = typer.Option(
    None, "--software", help="Stack: megascale, megatron-2023, megatron-core, ...; default: MegaScale's for the GPU."
)
GPUS = typer.Option(None, "--gpus", min=1, help="GPUs that the run had, where its folder does not say.")
JSON = typer.Option(False, "--json", help="Print JSON instead of tables.")


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


def calibrate(
    run: list[Path] = typer.Option(
        [],
        "--run",
        metavar="RUN",
        help="Run folder, or a file of `bench train` or `python -m benchmarks targets`, to fit to; repeat.",
    ),
    anchor: str | None = typer.Option(
        None,
        "--anchor",
        help="Fit to a shipped table: paper, h200-peers, h100-peers, own-first, own-h100 or nemo-h100.",
    ),
    cluster: str = typer.Option("h200-host", "--cluster", help="Cluster that the runs ran on."),
    software: str | None = SOFTWARE,
    fit: str = typer.Option("compute", "--fit", help="Constants, comma-separated: compute, overhead, fixed, ..."),
    start: str | None = typer.Option(None, "--start", help="Calibration that gives the constants not fitted."),
    name: str | None = typer.Option(None, "--name", help="Name of the calibration; default: the cluster's."),
    gpus: int | None = GPUS,
    out: Path | None = typer.Option(None, "--out", metavar="FILE.toml", help="Where to write it; default: print it."),
) -> None:
    """Fit constants to measured steps and write them with errors, evidence and what could not be told apart.

    A run folder's measurement is its median step after the first five, a bench's the median of its timed steps. One
    run decides one constant: a warning names what the runs cannot decide.

    Examples:

      megascale bench train gpt-13b --parallel.tensor=2 --out tp2.json; megascale simulate calibrate --run tp2.json

      python -m benchmarks targets --out all.json; megascale simulate calibrate --run all.json --fit compute,tp_residual

      megascale simulate calibrate --run runs/a7-1.3b-mb4 --run runs/a7-13b-tp2 --fit compute,fixed --out mine.toml

      megascale simulate calibrate --anchor paper --cluster a100-roce --fit compute,fixed
    """
    from megascale.simulate.calibrating import calibrate as fit_rows

    calibration, table = fit_rows(run, anchor, cluster, software, fit, start, name, gpus)
    if out is not None:
        out.write_text(calibration.to_toml())
        console = _console()
        for row, measured, predicted in table:
            console.print(
                f"{row}: measured {measured:.3f} s, fitted {predicted:.3f} s ({predicted / measured - 1:+.1%})"
            )
        for key, error in (calibration.fitted or {}).items():
            console.print(f"{key} = {getattr(calibration.constants, key):.4g} ± {error:.2g}")
        for warning in calibration.warnings:
            console.print(f"[yellow]warning[/yellow]: {warning}", soft_wrap=True)
        console.print(f"written to {out}; use it with --calibration {out}")
    else:
        typer.echo(calibration.to_toml())


def measure(
    like: str = typer.Option("h200-host", "--like", help="Shipped cluster that gives what is not measured."),
    name: str = typer.Option("this-machine", "--name", help="Name of the cluster and of the calibration."),
    seconds: float = typer.Option(
        4.0, "--seconds", min=0.01, max=3600, callback=finite, help="Seconds for each kind of kernel."
    ),
    processes: int | None = typer.Option(None, "--processes", min=1, help="For collectives; default: the GPUs here."),
    device: str = typer.Option("auto", "--device", help="auto, cuda or cpu."),
    out: Path = typer.Option(Path("."), "--out", metavar="FOLDER", help="Folder for NAME.toml, NAME-calibration.toml."),
    as_json: bool = JSON,
) -> None:
    """Measure this machine's kernels, launches, collectives and power into a cluster file and a calibration file.

    Minutes on one GPU; with several GPUs on the host the collectives among them too. What is not measured keeps the
    figures of --like, and the file says so of each. Steps are measured by `megascale bench train` or a run, and fitted
    with `simulate calibrate`.

    Example: megascale simulate measure --name my-h100 --like h100-dgx --out machines
    """
    from megascale.cli.common import need
    from megascale.errors import ConfigError
    from megascale.simulate import measured_machine
    from megascale.simulate.cluster import load_cluster

    need("torch", "torch")
    import torch

    from megascale.observe import machine_figures
    from megascale.train.device_choice import choose_device

    here = choose_device(device)
    base = load_cluster(like)
    many = processes or (torch.cuda.device_count() if here.type == "cuda" else 1)
    if here.type == "cuda" and many > torch.cuda.device_count():
        raise ConfigError(f"--processes={many} but this host has {torch.cuda.device_count()} GPUs")
    figures = machine_figures.figures(here, seconds, many)
    cluster = measured_machine.cluster_from(figures, base, name)
    calibration = measured_machine.calibration_from(figures, cluster)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.toml").write_text(measured_machine.cluster_toml(cluster))
    (out / f"{name}-calibration.toml").write_text(calibration.to_toml())
    if as_json:
        typer.echo(strict_json.dumps(figures, indent=2))
        return
    for row in calibration.rows:
        typer.echo(row)
    files = f"--cluster {out / name}.toml --calibration {out / name}-calibration.toml"
    typer.echo(f"written; plan for this machine with {files}")


def predict(
    plan: Path = typer.Argument(..., metavar="RUNS.toml", help="[[run]] tables of name, gpus and settings."),
    cluster: str = typer.Option("h200-host", "--cluster", help="Cluster that the runs will run on."),
    calibration: str | None = CALIBRATION,
    software: str = typer.Option("megascale-h200", "--software", help="Stack assumed of the engine."),
    note: str = typer.Option("", "--note", help="What stands in the file beside the date, such as what is known."),
    out: Path | None = typer.Option(None, "--out", metavar="FILE.toml", help="Where to write it; default: print it."),
) -> None:
    """Say the step times of runs before they are measured, in a file that `validate` and `compare` hold against them.

    Event level, no slow hosts. Each run is named, so that `megascale train` with its settings makes the run folder
    that will be compared.

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
        None, help="JSON of `simulate step --json`; or a run folder or a file of `bench train --out`, alone."
    ),
    second: Path | None = typer.Argument(None, help="JSON of `simulate step --json`, to compare with."),
    runs: Path | None = typer.Option(None, "--runs", help="Folder of run folders: all that were predicted."),
    predictions: str = typer.Option("h200", "--predictions", help="Shipped predictions or a TOML file."),
    cluster: str = typer.Option("h200-host", "--cluster", help="Cluster that a run folder ran on."),
    calibration: str | None = CALIBRATION,
    software: str | None = SOFTWARE,
    gpus: int | None = GPUS,
    as_json: bool = JSON,
) -> None:
    """Two predictions part by part; a run against its prediction, with what would explain the gap; or all at once.

    Examples:

      megascale simulate compare before.json after.json

      megascale simulate compare runs/a7-1.3b-mb4

      megascale simulate compare --runs runs --predictions h200
    """
    from megascale.errors import ConfigError
    from megascale.simulate import comparing

    if runs is not None:
        rows = comparing.predicted_and_measured(runs, predictions)
    elif first is not None and (first.is_dir() or second is None):
        rows = comparing.explain_run(first, cluster, calibration, software, gpus)
    elif first is not None and second is not None:
        rows = comparing.two_results(first, second)
    else:
        raise ConfigError("give two JSON files of `simulate step --json`, one run, or --runs FOLDER")
    if as_json:
        typer.echo(strict_json.dumps(rows, indent=2))
        return
    from megascale.simulate import render

    cells = [[f"{v:,.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    render.show_rows(list(rows[0]), cells, _console())


def validate(
    data: Path | None = typer.Option(
        None, "--data", help="Folder with data of others; default: MEGASCALE_ANCHORS, else ../shared/data."
    ),
    runs: Path | None = typer.Option(None, "--runs", help="Folder of own run folders, for A7."),
    only: str | None = typer.Option(None, "--only", help="Checks, comma-separated, such as A1,A5."),
    rows: bool = typer.Option(False, "--rows", help="List every row, fitted and held out."),
    as_json: bool = JSON,
    plot: Path | None = typer.Option(None, "--plot", metavar="FOLDER", help="Draw measured against predicted."),
) -> None:
    """How well the simulator predicts: checks A1 to A13, reached beside target, pass or miss. Exit 1 if one misses.

    Each names what was fitted on which rows and what could not be identified. Checks whose data are not here are
    skipped, and say so.

    Example:

      megascale simulate validate --data ../shared/data --rows
    """
    from megascale.observe.analysis.operation_trace import read_trace
    from megascale.observe.analysis.whatif import what_if
    from megascale.simulate import render, simulation_plots
    from megascale.simulate.validation.anchors import data_folder
    from megascale.simulate.validation.validation_report import validate as run_checks

    checks = run_checks(
        data_folder(data), runs, lambda file: what_if(read_trace(file)), only.split(",") if only else None
    )
    if as_json:
        records = [
            {
                "key": c.key,
                "what": c.title,
                "figures": {n: {"reached": a, "target": t, "unit": u.strip()} for n, (a, t, u) in c.figures.items()},
                "passed": c.passed,
                "fitted": c.fitted,
                "skipped": c.skipped,
                "notes": c.notes,
                "columns": [vars(column) for column in c.columns],
                "rows": [{"row": n, "measured": m, "predicted": p, "fitted": f} for n, m, p, f in c.rows],
            }
            for c in checks
        ]
        typer.echo(strict_json.dumps(records, indent=2))
    else:
        render.checks(checks, _console(), rows)
    if plot is not None:
        for check in checks:
            if check.rows:
                simulation_plots.scatter(check.rows, plot / f"{check.key.lower()}.png", f"{check.key}: {check.title}")
            if check.bars:
                names, printed, predicted = zip(*check.bars, strict=True)
                simulation_plots.ablation_chart(names, predicted, plot / f"{check.key.lower()}-mfu.png", printed)
    if any(check.passed is False for check in checks):
        raise typer.Exit(1)
