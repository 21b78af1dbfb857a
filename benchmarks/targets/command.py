"""`python -m benchmarks targets`: measured figures next to this project's targets, which they must reach.

Cases are data (targets.toml). Each run is a bench in a process of its own; small cases run side by side on GPUs of
their own. Every run is kept as soon as it is done, so that a call goes on where the last one was stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import typer

from benchmarks.targets.cases import TargetCase, load
from megascale.core.gpus import visible_gpu_names


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("targets", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(targets)


def targets(
    context: typer.Context,
    listed: bool = typer.Option(False, "--list", help="Print the cases, what they need and what they stand for."),
    predict: bool = typer.Option(False, "--predict", help="Print, as TOML, what the simulator says of a step."),
    only: list[str] = typer.Option(
        [], help="Only these cases (and those they compare with), such as --only T1; may be given again."
    ),
    file: Path | None = typer.Option(None, help="TOML file of cases; default: the shipped ones."),
    gpus: int | None = typer.Option(None, min=0, help="Use so many GPUs; default: all that this process sees."),
    seconds: float = typer.Option(600.0, min=0, help="Start no run that would not be done by then, and end the rest."),
    repeats: int = typer.Option(2, min=1, help="Runs of each case; every second pass goes in reverse order."),
    alone: bool = typer.Option(False, "--alone", help="One run at a time: power and host are shared between runs."),
    out: Path = typer.Option(Path("bench-targets.json"), help="JSON file; runs that it holds are not made again."),
) -> None:
    """Measure the figures with targets on this machine's GPUs, and print them next to the targets.

    A case is a model in a layout. It runs with as many replicas as there is room for, up to those of its target
    ("DP1 of 2": half of them). One that needs more memory by its plan than a GPU has is left out and named.

    Small cases run side by side. A failed one leaves the others alone; called again, only what is missing is run.
    Any setting can be given as --section.key=value; it holds for all cases.

    Exit codes: 0 done or out of time, with any result; 1 if a run failed; 130 interrupted.

    Examples:

      python -m benchmarks targets --list

      python -m benchmarks targets --only T1 --only F2 --repeats 3 --alone

      python -m benchmarks targets --seconds 1800 --out targets.json

      python -m benchmarks targets --only T3 --overlap.gemms=off --out gemms.json

      python -m benchmarks targets --only EhD --predict
    """
    from benchmarks.targets.others import list_other_commands
    from benchmarks.targets.predicted import lines
    from benchmarks.targets.runs import Record, missing, run_all
    from benchmarks.targets.table import show
    from megascale.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigError

    began = time.monotonic()
    every = [case.model_copy(update={"arguments": case.arguments + context.args}) for case in load(file)]
    by_name = {case.name: case for case in every}
    cases = _chosen(every, only)
    for case in cases:
        case.config(case.data)  # before anything starts
    if listed:
        for case in cases:
            _print_case(case)
        if file is None and not only:
            typer.echo("\n".join(["", *list_other_commands()]))
        return
    if predict:
        for line in lines(cases):
            typer.echo(line)
        return
    devices = _devices(gpus, every)
    record = Record(out, len(devices))
    if all(case.replicas(len(devices)) is None for case in cases):
        raise ConfigError(
            f"no case fits the {len(devices)} GPUs that there are; benchmarks targets --list says what each needs"
        )
    for case in cases:
        replicas = case.replicas(len(devices))
        if replicas is not None:
            case.config(replicas)
            if record.has_other(case, replicas):
                typer.echo(f"{case.name} has changed since {out} was written: it is measured again")
    gib = _gpu_gib(len(devices))
    cases, too_large = _fitting(cases, len(devices), gib)
    if too_large:
        needs = ", ".join(f"{name} ({needed:.0f})" for name, needed in too_large.items())
        output = f"their plans take more GiB of a GPU than the {gib:.0f} here: {needs}; fewer layers may fit"
        if all(case.replicas(len(devices)) is None for case in cases):
            raise ConfigError(f"no case fits: {output}, by --model.layers=N")
        typer.echo(f"left out, since {output}, by --model.layers=N")
    interrupted = False
    try:
        run_all(missing(cases, record, repeats), devices, began + seconds, record.keep, alone)
    except KeyboardInterrupt:
        interrupted = True
    show(cases, by_name, record)
    failed = [
        case.name for case in cases if any(r.failed for r in record.runs(case, case.replicas(record.gpus)).values())
    ]
    remaining = [job for job in missing(cases, record, repeats) if job.case.name not in failed]
    if remaining:
        names = dict.fromkeys(f"{job.case.name} ({job.seconds:.0f} s)" for job in remaining)
        typer.echo(f"{len(remaining)} runs are missing: {', '.join(names)}; call again, or give more --seconds")
    typer.echo(f"metrics: {out}")
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _chosen(cases: Sequence[TargetCase], only: Sequence[str]) -> list[TargetCase]:
    """The cases asked for and those that they compare with, in the file's order."""
    from megascale.errors import ConfigError

    by_name = {case.name: case for case in cases}
    for name in only:
        if name not in by_name:
            raise ConfigError(f"--only={name}: there are {', '.join(by_name)}")
    names = set(only or by_name)
    names |= {over for name in names if (over := by_name[name].over) is not None}
    return [case for case in cases if case.name in names]


def _devices(expected: int | None, cases: Sequence[TargetCase]) -> list[str]:
    """Names of GPUs as CUDA_VISIBLE_DEVICES has them; ConfigError if there are fewer than `wanted`."""
    from megascale import api
    from megascale.errors import ConfigError

    present = 0
    if expected != 0 and any(case.gpus for case in cases):
        present = api.visible_gpus()
    if expected is not None and expected > present:
        raise ConfigError(f"--gpus={expected}: this process sees {present}; leave it out to use all")
    return visible_gpu_names(present if expected is None else expected)


def _gpu_gib(gpus: int) -> float:
    """Memory of the smallest GPU; without GPUs no bound."""
    if gpus == 0:
        return float("inf")
    import torch

    return min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpus)) / 2**30


def _fitting(cases: Sequence[TargetCase], gpus: int, gib: float) -> tuple[list[TargetCase], dict[str, float]]:
    """The cases whose tensors a GPU's memory holds by their plan, and GiB that the others need, by name."""
    from megascale.simulate.planner.layout_cost import make_plan
    from megascale.simulate.planner.layout_figures import RESERVE_GIB

    fit, too_large = [], {}
    for case in cases:
        replicas = case.replicas(gpus)
        if replicas is not None and case.gpus:
            needed = make_plan(case.config(replicas), replicas * case.gpus, gib).needed_gib - RESERVE_GIB
            if needed > gib:
                too_large[case.name] = needed
                continue
        fit.append(case)
    return fit, too_large


def _print_case(case: TargetCase) -> None:
    """One case of --list."""
    from benchmarks.targets.predicted import predicted

    needs = "the CPU"
    if case.gpus:
        if case.least < case.data:
            fewer = f", at least {case.gpus * case.least}"
        else:
            fewer = ""
        needs = f"{case.slots} GPU{'s' if case.slots > 1 else ''}{fewer}"
    compared = f" over {case.over}" if case.over else ""
    output = predicted(case, case.data)
    if output is None:
        report = ""
    else:
        report = f"; predicted {output:.3f} s"
    goals = f"{case.goals or 'no target'}{compared}{report}"
    typer.echo(f"{case.name}: {case.title}; {needs}, about {case.seconds:.0f} s; {goals}")
    typer.echo(f"  {case.line(case.data)}")
