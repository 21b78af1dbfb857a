"""`python -m benchmarks targets`: measured figures next to the project's targets.

TOML files hold the cases (targets.toml). Each run is a benchmark in a process of its own. Small cases run side by side,
each on its own GPUs. Every run is saved when it ends, so that a later call continues where an earlier one stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from benchmarks.targets.cases import TargetCase, load_cases
from megascale.core.gpus import visible_gpu_names

if TYPE_CHECKING:
    from benchmarks.targets.runs import ResultFile


def register(app: typer.Typer) -> None:
    """Add the benchmark."""
    app.command("targets", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(targets)


def targets(
    context: typer.Context,
    is_list: bool = typer.Option(False, "--list", help="Print the cases with their commands, targets and GPUs."),
    is_prediction: bool = typer.Option(
        False, "--predict", help="Print the simulator's step times of cases without a prediction, as TOML."
    ),
    only: list[str] = typer.Option([], help="Run only this case and its baseline, such as --only T1. Repeatable."),
    file: Path | None = typer.Option(None, help="TOML file of cases. Default: the shipped files."),
    gpus: int | None = typer.Option(None, min=0, help="Number of GPUs to use. Default: all visible ones."),
    seconds: float = typer.Option(
        600.0, min=0, help="Time limit. Runs that would exceed it do not start; at the limit, runs are ended."
    ),
    repeats: int = typer.Option(2, min=1, help="Runs per case. Every second repeat has the reverse order."),
    is_sequential: bool = typer.Option(
        False, "--alone", help="Run one case at a time, so that cases do not share power and host."
    ),
    out: Path = typer.Option(Path("bench-targets.json"), help="JSON file of results. Its runs are not repeated."),
) -> None:
    """Measure the project's performance figures on this machine and compare them with their targets.

    A case is a model in a layout. With fewer GPUs than its target assumes, it runs with fewer replicas ("DP1 of 2").

    A case is left out, with a message, if its planned memory exceeds that of a GPU.

    Small cases run side by side. If a run fails, the other cases go on. A further call makes only the missing runs.

    A setting --section.key=value applies to all cases.

    Exit codes: 0 after all runs or at the time limit, even if targets are missed; 1 if a run failed; 130 interrupted.

    Examples:

      python -m benchmarks targets --list

      python -m benchmarks targets --only T1 --only F2 --repeats 3 --alone

      python -m benchmarks targets --seconds 1800 --out targets.json

      python -m benchmarks targets --only T3 --overlap.gemms=off --out gemms.json

      python -m benchmarks targets --only EhD --predict
    """
    from benchmarks.targets.runs import ResultFile, list_remaining_jobs, run_jobs
    from benchmarks.targets.table import print_results
    from megascale.errors import EXIT_FAILED, EXIT_INTERRUPTED

    deadline = time.monotonic() + seconds
    all_cases = [case.model_copy(update={"arguments": case.arguments + context.args}) for case in load_cases(file)]
    cases = _select_cases(all_cases, only)
    for case in cases:
        case.make_config(case.data)  # a wrong setting fails before any run
    if is_list:
        _print_list(cases, with_command_targets=file is None and not only)
        return
    if is_prediction:
        _print_predictions(cases)
        return
    devices = _get_gpu_names(gpus, all_cases)
    results = ResultFile(out, len(devices))
    cases = _leave_out_impossible_cases(cases, results)
    interrupted = False
    try:
        jobs = list_remaining_jobs(cases, results, repeats)
        run_jobs(jobs, devices, deadline, results.save, is_sequential=is_sequential)
    except KeyboardInterrupt:
        interrupted = True
    print_results(cases, {case.name: case for case in all_cases}, results)
    failed_names = _list_failed_cases(cases, results)
    _print_missing_runs(cases, results, repeats, failed_names)
    typer.echo(f"metrics: {out}")
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if failed_names:
        raise typer.Exit(EXIT_FAILED)


def _select_cases(cases: Sequence[TargetCase], names: Sequence[str]) -> list[TargetCase]:
    """Return the named cases and their baselines, or all for no names, in the order of the file."""
    from megascale.errors import ConfigError

    by_name = {case.name: case for case in cases}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"--only={name} is not a case; name one of {', '.join(by_name)}")
    selected = set(names or by_name)
    selected |= {case.baseline for case in cases if case.name in selected and case.baseline is not None}
    return [case for case in cases if case.name in selected]


def _get_gpu_names(requested: int | None, cases: Sequence[TargetCase]) -> list[str]:
    """Return the names of `requested` GPUs, or of all for None, as in CUDA_VISIBLE_DEVICES.

    Raises ConfigError if fewer are visible.
    """
    from megascale import api
    from megascale.errors import ConfigError

    visible = 0
    if requested != 0 and any(case.gpus for case in cases):
        visible = api.visible_gpus()
    if requested is None:
        return visible_gpu_names(visible)
    if requested > visible:
        raise ConfigError(f"--gpus={requested}, but {visible} GPUs are visible; leave --gpus out to use all")
    return visible_gpu_names(requested)


def _leave_out_impossible_cases(cases: Sequence[TargetCase], results: ResultFile) -> list[TargetCase]:
    """Return the cases whose planned memory the GPUs have, and print why others are left out.

    Raises ConfigError if no case can run.
    """
    from megascale.errors import ConfigError

    gpus = results.gpus
    if not _has_case_for(cases, gpus):
        raise ConfigError(
            f"no case can run on {gpus} GPUs; `python -m benchmarks targets --list` prints how many each needs"
        )
    for case in cases:
        replicas = case.count_replicas(gpus)
        if replicas is None:
            continue
        case.make_config(replicas)  # a batch that fewer replicas do not divide fails before any run
        if results.has_outdated_run(case, replicas):
            typer.echo(f"case {case.name} has changed since its run in {results.file}: it is measured again")
    gib = _get_gpu_gib(gpus)
    fitting, too_large = _split_by_memory(cases, gpus, gib)
    if too_large:
        needs = ", ".join(f"{name} {needed_gib:.0f} GiB" for name, needed_gib in too_large.items())
        reason = f"a GPU has {gib:.0f} GiB and the plans need more: {needs}; --model.layers=N makes cases smaller"
        if not _has_case_for(fitting, gpus):
            raise ConfigError(f"no case fits the GPUs' memory: {reason}")
        typer.echo(f"cases left out: {reason}")
    return fitting


def _has_case_for(cases: Sequence[TargetCase], gpus: int) -> bool:
    return any(case.count_replicas(gpus) is not None for case in cases)


def _get_gpu_gib(gpus: int) -> float:
    """Return the memory of the smallest GPU in GiB, infinite without GPUs."""
    if gpus == 0:
        return float("inf")
    import torch

    return min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpus)) / 2**30


def _split_by_memory(cases: Sequence[TargetCase], gpus: int, gib: float) -> tuple[list[TargetCase], dict[str, float]]:
    """Return the cases whose planned tensors fit into `gib` per GPU, and the GiB that each of the others needs by name.

    A case that needs more GPUs than there are counts as fitting.
    """
    from megascale.simulate.planner.layout_cost import make_plan
    from megascale.simulate.planner.layout_figures import RESERVE_GIB

    fitting = []
    too_large = {}
    for case in cases:
        replicas = case.count_replicas(gpus)
        if replicas is not None and case.gpus:
            needed_gib = make_plan(case.make_config(replicas), replicas * case.gpus, gib).needed_gib - RESERVE_GIB
            if needed_gib > gib:
                too_large[case.name] = needed_gib
                continue
        fitting.append(case)
    return fitting, too_large


def _list_failed_cases(cases: Sequence[TargetCase], results: ResultFile) -> list[str]:
    """Return the names of the cases with a failed run."""
    names = []
    for case in cases:
        runs = results.get_runs(case, case.count_replicas(results.gpus))
        if any(run.failure for run in runs.values()):
            names.append(case.name)
    return names


def _print_missing_runs(
    cases: Sequence[TargetCase], results: ResultFile, repeats: int, failed_names: Sequence[str]
) -> None:
    from benchmarks.targets.runs import list_remaining_jobs

    jobs = [job for job in list_remaining_jobs(cases, results, repeats) if job.case.name not in failed_names]
    if not jobs:
        return
    descriptions = dict.fromkeys(f"{job.case.name} ({job.seconds:.0f} s)" for job in jobs)
    runs = "1 run is" if len(jobs) == 1 else f"{len(jobs)} runs are"
    typer.echo(f"{runs} missing: {', '.join(descriptions)}; repeat the command, or raise --seconds")


def _print_predictions(cases: Sequence[TargetCase]) -> None:
    from benchmarks.targets.predicted import format_new_predictions

    for table in format_new_predictions(cases):
        typer.echo(table)


def _print_list(cases: Sequence[TargetCase], with_command_targets: bool) -> None:
    from benchmarks.targets.others import format_command_targets

    for case in cases:
        for line in _describe_case(case):
            typer.echo(line)
    if with_command_targets:
        typer.echo("")
        for line in format_command_targets():
            typer.echo(line)


def _describe_case(case: TargetCase) -> list[str]:
    """Return the lines of --list for a case: title and needs, targets and prediction, command."""
    from benchmarks.targets.predicted import find_predicted_seconds

    if case.gpus == 0:
        needs = "CPU"
    elif case.max_gpus == 1:
        needs = "1 GPU"
    elif case.min_data < case.data:
        needs = f"{case.gpus * case.min_data} to {case.max_gpus} GPUs"
    else:
        needs = f"{case.max_gpus} GPUs"
    goals = f"target {case.describe_targets()}" if case.target else "no target"
    if case.baseline is not None:
        goals += f", compared with {case.baseline}"
    predicted_seconds = find_predicted_seconds(case, case.data)
    if predicted_seconds is not None:
        goals += f"; predicted step {predicted_seconds:.3f} s"
    return [
        f"{case.name}: {case.title}; {needs}; about {case.seconds:.0f} s per run",
        f"  {goals}",
        f"  {case.format_command(case.data)}",
    ]
