"""Results of `benchmarks targets`: figures from the benchmarks' reports, verdicts, the table and its notes."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.targets.cases import FIGURES, TargetCase
from benchmarks.targets.predicted import find_predicted_seconds
from benchmarks.targets.runs import ResultFile, TargetRun

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Columns of a terminal for the table with its descriptions of the cases. Narrower ones get a list of them above it.
FULL_WIDTH = 108
# Share of the sustained FLOP/s of plain GEMMs. It is a figure of the table without targets.
GEMM_SHARE = "gemm_share"
_TEXT_COLUMNS = ("case", "model, layout", "figure", "verdict")
_EXPOSED_KINDS = {
    "tensor_exposed": ("tensor",),
    "pipeline_exposed": ("pipeline",),
    "data_exposed": ("data gather", "data reduce"),
}


def compute_figures(case: TargetCase, report: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of one run by name (cases.FIGURES). Figures that the report lacks are left out."""
    if case.bench == "train":
        return _compute_train_figures(report)
    return _compute_exposed_figures(report)


def _compute_train_figures(report: Mapping[str, Any]) -> dict[str, float]:
    import numpy as np

    steps = report["all_step_seconds"]
    tenth = max(1, len(steps) // 10)
    first_median = statistics.median(steps[:tenth])
    last_median = statistics.median(steps[-tenth:])
    figures = {
        "step_seconds": report["step_seconds"],
        "mfu": report["mfu"],
        "memory_gib": report["peak_memory_gib"],
        "p99_over_median": float(np.percentile(steps, 99)) / statistics.median(steps),
        "first_over_last": abs(first_median / last_median - 1),
        GEMM_SHARE: compute_gemm_share(report),
    }
    return {name: value for name, value in figures.items() if value is not None}


def _compute_exposed_figures(report: Mapping[str, Any]) -> dict[str, float]:
    from benchmarks.training import exposed

    figures = {"step_seconds": report["step_seconds"]}
    rows = {row["kind"]: row for row in exposed.table(dict(report))}
    for name, kinds in _EXPOSED_KINDS.items():
        kind_rows = [rows[kind] for kind in kinds if kind in rows]
        alone_seconds = sum(row["alone"] for row in kind_rows)
        if alone_seconds:
            figures[name] = sum(row["exposed"] for row in kind_rows) / alone_seconds
    idle_shares = []
    for rank in report["ranks"]:
        times = rank["times"]
        idle_seconds = times[exposed.IDLE]["busy"]
        exposed_seconds = sum(kind.get("exposed", 0.0) for kind in times.values())
        step_seconds = idle_seconds + times[exposed.COMPUTE]["busy"] + exposed_seconds
        idle_shares.append(idle_seconds / step_seconds)
    figures["idle_share"] = statistics.mean(idle_shares)
    return figures


def compute_gemm_share(report: Mapping[str, Any]) -> float | None:
    """Return a step's FLOP/s over the FLOP/s that plain GEMMs sustained before and after it, or None without them."""
    from megascale.config import ModelConfig
    from megascale.core.flops import flops_per_token

    if report.get("gemm_flop_per_s") is None:
        return None
    flops = flops_per_token(ModelConfig.model_validate(report["settings"]["model"])).training
    return flops * report["tokens_per_second_per_device"] / statistics.mean(report["gemm_flop_per_s"])


def collect_figures(
    case: TargetCase, runs: Mapping[int, TargetRun], baseline_runs: Mapping[int, TargetRun]
) -> dict[str, list[float]]:
    """Return each figure of a case, one value per repeat.

    The ratios compare with the step of the same repeat in `baseline_runs`. Repeats without one have no ratio.
    """
    values_by_figure: dict[str, list[float]] = defaultdict(list)
    for repeat, run in runs.items():
        if run.report is None:
            continue
        figures = compute_figures(case, run.report)
        if repeat in baseline_runs:
            baseline_report = baseline_runs[repeat].report
            if baseline_report is not None:
                figures["step_ratio"] = figures["step_seconds"] / baseline_report["step_seconds"]
                figures["speed_up"] = 1 / figures["step_ratio"]
        for name, value in figures.items():
            values_by_figure[name].append(value)
    return dict(values_by_figure)


def judge(case: TargetCase, name: str, value: float | None, replicas: int) -> str:
    """Return the verdict on the figure `name`. A run with fewer replicas than the target assumes decides nothing."""
    if value is None:
        return "not measured"
    if replicas < case.data:
        return "smaller run"
    figure = FIGURES[name]
    if not figure.meets(value, case.target[name]):
        return "missed"
    if name in case.stretch and figure.meets(value, case.stretch[name]):
        return "stretch met"
    return "met"


def describe_layout(case: TargetCase, replicas: int) -> str:
    """Return the layout as text, such as "TP2 PP2x5 DP1 of 2": five virtual stages, one of two replicas."""
    parallel = case.make_config(replicas).parallel
    parts = []
    if case.gpus == 0:
        parts.append("CPU")
    if parallel.tensor > 1:
        parts.append(f"TP{parallel.tensor}")
    if parallel.pipeline > 1:
        virtual_stages = f"x{parallel.virtual_stages}" if parallel.virtual_stages > 1 else ""
        parts.append(f"PP{parallel.pipeline}{virtual_stages}")
    if case.data > 1:
        parts.append(f"DP{replicas}")
        if replicas < case.data:
            parts.append(f"of {case.data}")
    return " ".join(parts) or "1 GPU"


@dataclass
class Goal:
    """A figure with a target, as texts of the table."""

    figure: str
    measured: str
    target: str
    verdict: str


@dataclass
class TargetRow:
    """A case in the table.

    Attributes:
        case: the case.
        layout: its layout with the replicas that ran, or why it did not run.
        steps: step time of each repeat in seconds.
        figures: medians of the repeats by name (cases.FIGURES).
        goals: figures with targets.
        predicted_seconds: step time that the simulator predicted, or None.
    """

    case: TargetCase
    layout: str
    steps: list[float]
    figures: dict[str, float]
    goals: list[Goal]
    predicted_seconds: float | None = None

    @property
    def relative_spread(self) -> float:
        """Return the range of the repeats' steps over their median."""
        return (max(self.steps) - min(self.steps)) / statistics.median(self.steps)


def make_row(case: TargetCase, results: ResultFile, by_name: Mapping[str, TargetCase]) -> TargetRow:
    """Return the table's row of a case. `by_name` has its baseline."""
    replicas = case.count_replicas(results.gpus)
    if replicas is None:
        return TargetRow(case, f"needs {case.gpus * case.min_data} GPUs", steps=[], figures={}, goals=[])
    runs = results.get_runs(case, replicas)
    baseline_runs = {}
    if case.baseline is not None:
        baseline_runs = results.get_runs(by_name[case.baseline], replicas)
    repeats = collect_figures(case, runs, baseline_runs)
    figures = {name: statistics.median(values) for name, values in repeats.items()}
    if repeats:
        goals = [_make_goal(case, name, figures.get(name), replicas) for name in case.target]
    else:
        goals = _list_goals_without_results(case, runs)
    return TargetRow(
        case,
        describe_layout(case, replicas),
        steps=repeats.get("step_seconds", []),
        figures=figures,
        goals=goals,
        predicted_seconds=find_predicted_seconds(case, replicas),
    )


def _make_goal(case: TargetCase, name: str, value: float | None, replicas: int) -> Goal:
    figure = FIGURES[name]
    measured = "" if value is None else figure.format(value)
    verdict = judge(case, name, value, replicas)
    return Goal(figure.label, measured, target=figure.format_bound(case.target[name]), verdict=verdict)


def _list_goals_without_results(case: TargetCase, runs: Mapping[int, TargetRun]) -> list[Goal]:
    has_failed = any(run.failure for run in runs.values())
    verdict = "failed" if has_failed else ""
    goals = []
    for name, bound in case.target.items():
        figure = FIGURES[name]
        goals.append(Goal(figure.label, "", target=figure.format_bound(bound), verdict=verdict))
    if has_failed and not goals:
        goals.append(Goal("", "", target="", verdict=verdict))
    return goals


def print_results(cases: Sequence[TargetCase], by_name: Mapping[str, TargetCase], results: ResultFile) -> None:
    """Print the machine, the table of the cases, and its notes."""
    console = _make_console()
    rows = [make_row(case, results, by_name) for case in cases]
    is_full = console.width >= FULL_WIDTH
    console.print(_describe_machine(cases, results))
    if not is_full:
        for row in rows:
            console.print(f"{row.case.name}: {row.case.title}, {row.layout}", markup=False)
    console.print(_make_table(rows, with_descriptions=is_full))
    for note in list_notes(cases, rows, results):
        console.print(note, markup=False, soft_wrap=True)


def _make_console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    # The width of a terminal and COLUMNS are the reader's wish. A pipe without them has rich's default of 80.
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(highlight=False, width=max(console.width, FULL_WIDTH))


def _make_table(rows: Sequence[TargetRow], with_descriptions: bool) -> Table:
    from rich import box
    from rich.table import Table

    cells = [_format_cells(row) for row in rows]
    has_predictions = any(row.predicted_seconds is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    # A benchmark or a machine may lack a figure in all cases, such as MFU on the CPU.
    titles = [title for title in cells[0] if any(row_cells[title] for row_cells in cells)]
    if not with_descriptions:
        titles.remove("model, layout")
    for title in titles:
        # Only the steps may take a third line, from three repeats on.
        is_step = title == "step, s"
        table.add_column(
            title if has_predictions else title.removeprefix("predicted\n"),
            justify="left" if title in _TEXT_COLUMNS else "right",
            no_wrap=not is_step,
            min_width=11 if is_step else None,
        )
    for row_cells in cells:
        table.add_row(*[row_cells[title] for title in titles])
    return table


def _format_cells(row: TargetRow) -> dict[str, str]:
    """Return the cells of a row by column title. A cell without a value is empty."""
    steps = ""
    spread = ""
    if len(row.steps) > 1:
        steps = " ".join(f"{seconds:.3f}" for seconds in row.steps)
        spread = f"{row.relative_spread:.1%}"
    mfu = _format(row.figures.get("mfu"), ".1%")
    gemm_share = _format(row.figures.get(GEMM_SHARE), ".3f")
    return {
        "case": row.case.name,
        "model, layout": _join_lines(row.case.title, row.layout),
        "step, s": _join_lines(_format(row.figures.get("step_seconds"), ".3f"), steps),
        "predicted\nspread": _join_lines(_format(row.predicted_seconds, ".3f"), spread),
        "MFU\nGEMM": _join_lines(mfu, gemm_share),
        "GiB": _format(row.figures.get("memory_gib"), ".1f"),
        "figure": "\n".join(goal.figure for goal in row.goals),
        "measured": "\n".join(goal.measured for goal in row.goals),
        "target": "\n".join(goal.target for goal in row.goals),
        "verdict": "\n".join(goal.verdict for goal in row.goals),
    }


def _format(value: float | None, number_format: str) -> str:
    return "" if value is None else format(value, number_format)


def _join_lines(first: str, second: str) -> str:
    """Return a cell of two lines, the second one dim."""
    if not second:
        return first
    return f"{first}\n[dim]{second}[/dim]"


def _describe_machine(cases: Sequence[TargetCase], results: ResultFile) -> str:
    """Return the GPUs, the versions and the dates of the runs."""
    reports = [run.report for _, _, run in _list_runs(cases, results) if run.report is not None]
    devices = {report["device"].split(" x ")[-1] for report in reports}
    versions = {f"torch {report['versions']['torch']}" for report in reports}
    dates = sorted({report["date"] for report in reports})
    plural = "" if results.gpus == 1 else "s"
    parts = [f"{results.gpus} GPU{plural}", *sorted(devices), *sorted(versions)]
    if len(dates) > 1:
        parts.append(f"{dates[0]} to {dates[-1]}")
    else:
        parts += dates
    return ", ".join(parts)


def _list_runs(cases: Sequence[TargetCase], results: ResultFile) -> Iterator[tuple[TargetCase, int, TargetRun]]:
    """Yield case, repeat and run of each run of the cases."""
    for case in cases:
        for repeat, run in results.get_runs(case, case.count_replicas(results.gpus)).items():
            yield case, repeat, run


def list_notes(cases: Sequence[TargetCase], rows: Sequence[TargetRow], results: ResultFile) -> list[str]:
    """Return the explanation of the table, then failures and facts of the runs that have no column."""
    notes = _explain_columns(cases, rows, results)
    notes += _explain_figures(cases)
    if any(goal.verdict == "smaller run" for row in rows for goal in row.goals):
        notes.append("smaller run: it has fewer replicas than the target assumes, so it does not decide the target")
    for case in cases:
        runs = results.get_runs(case, case.count_replicas(results.gpus))
        for repeat, run in runs.items():
            notes += _describe_run(case, repeat, run)
        if case.bench == "exposed":
            notes += _describe_traces(case, [run.report for run in runs.values() if run.report is not None])
    return notes


def _explain_columns(cases: Sequence[TargetCase], rows: Sequence[TargetRow], results: ResultFile) -> list[str]:
    notes = []
    for _, _, run in _list_runs(cases, results):
        if run.report is not None and run.report.get("mfu") is not None:
            note = f"MFU: {run.report['mfu_convention']}"
            if note not in notes:
                notes.append(note)
    if any(GEMM_SHARE in row.figures for row in rows):
        notes.append(
            "GEMM: FLOP/s of the step as a share of what plain GEMMs sustained on the first GPU right before and after"
        )
    if any(row.predicted_seconds is not None for row in rows):
        notes.append(
            "predicted: step in seconds that the simulator predicted before the measurement (targets_predicted.toml)"
        )
    if any(len(row.steps) > 1 for row in rows):
        notes.append("spread: range of the repeats' steps over their median; other columns show medians of the repeats")
    return notes


def _explain_figures(cases: Sequence[TargetCase]) -> list[str]:
    """Return the meanings of the figures with targets. Figures with the same meaning share a line."""
    labels_by_meaning: dict[str, list[str]] = {}
    for case in cases:
        for name in case.target:
            figure = FIGURES[name]
            labels = labels_by_meaning.setdefault(figure.description, [])
            if figure.label not in labels:
                labels.append(figure.label)
    return [f"{', '.join(labels)}: {meaning}" for meaning, labels in labels_by_meaning.items() if meaning]


def _describe_run(case: TargetCase, repeat: int, run: TargetRun) -> list[str]:
    from megascale.bench.gpu_watch import summarize_samples

    name = f"{case.name}, repeat {repeat + 1}"
    if run.report is None:
        return [f"{name}: failed: " + "\n  ".join(run.failure)]
    if run.report.get("watched") is not None:
        return [f"{name}: {summarize_samples(run.report['watched'])}"]
    return []


def _describe_traces(case: TargetCase, reports: Sequence[dict[str, Any]]) -> list[str]:
    from benchmarks.training import exposed

    bounds = []
    waits_ms: dict[str, list[str]] = defaultdict(list)
    for report in reports:
        bound = exposed.bounding(report)
        if bound is not None and bound["share"] is not None:
            bounds.append(f"{bound['share']:.1%} (stage {bound['stage']})")
        for row in exposed.table(report):
            if row["waits"]:
                waits_ms[row["kind"]].append(f"{1e3 * row['waits']:.1f}")
    notes = []
    if bounds:
        notes.append(f"{case.name}: PP comm of the stage with the most compute: {', '.join(bounds)}")
    if waits_ms:
        waits = "; ".join(f"{kind} {', '.join(times)}" for kind, times in waits_ms.items())
        notes.append(f"{case.name}: waits for other ranks' compute, not counted as exposed, in ms: {waits}")
    return notes
