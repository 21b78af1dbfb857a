"""Results of `benchmarks targets`: figures from a bench's JSON, verdicts, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.targets.cases import FIGURES, TargetCase
from benchmarks.targets.predicted import predicted
from benchmarks.targets.runs import Record, TargetRun

WIDTH = 100  # of the table; what it says needs more than 80


def figures(case: TargetCase, report: Mapping[str, Any]) -> dict[str, float]:
    """Figures of one run by name (targets_cases.FIGURES), those that the bench told."""
    return (_of_train if case.bench == "train" else _of_exposed)(report)


def _of_train(report: Mapping[str, Any]) -> dict[str, float]:
    import numpy as np

    steps = report["all_step_seconds"]
    tenth = max(1, len(steps) // 10)
    median = statistics.median(steps)
    result = {
        "step_seconds": report["step_seconds"],
        "mfu": report["mfu"],
        "memory_gib": report["peak_memory_gib"],
        "p99_over_median": float(np.percentile(steps, 99)) / median,
        "first_over_last": abs(statistics.median(steps[:tenth]) / statistics.median(steps[-tenth:]) - 1),
    }
    return {name: value for name, value in result.items() if value is not None}


def _of_exposed(report: Mapping[str, Any]) -> dict[str, float]:
    from benchmarks.training.exposed import COMPUTE, IDLE, table

    result = {"step_seconds": report["step_seconds"]}
    rows = {row["kind"]: row for row in table(dict(report))}
    for name, kinds in (("tensor", ["tensor"]), ("pipeline", ["pipeline"]), ("data", ["data gather", "data reduce"])):
        present = [rows[kind] for kind in kinds if kind in rows]
        by_itself = sum(row["alone"] for row in present)
        if by_itself:
            result[f"{name}_exposed"] = sum(row["exposed"] for row in present) / by_itself
    shares = []
    for rank in report["ranks"]:
        times = rank["times"]
        idle = times[IDLE]["busy"]
        full = idle + times[COMPUTE]["busy"] + sum(kind.get("exposed", 0.0) for kind in times.values())
        shares.append(idle / full)
    return result | {"idle_share": statistics.mean(shares)}


def of_gemm(report: Mapping[str, Any]) -> float | None:
    """FLOP/s of a step as a share of what plain GEMMs sustained on the first GPU before and after it."""
    from megascale.config import ModelConfig
    from megascale.core.flops import flops_per_token

    if report.get("gemm_flop_per_s") is None:
        return None
    flops = flops_per_token(ModelConfig.model_validate(report["settings"]["model"])).training
    return flops * report["tokens_per_second_per_device"] / statistics.mean(report["gemm_flop_per_s"])


def series(case: TargetCase, runs: Mapping[int, TargetRun], base: Mapping[int, TargetRun]) -> dict[str, list[float]]:
    """Each figure of a case, one value a repeat; ratios are to the step of `base` in the same repeat."""
    result: dict[str, list[float]] = {}
    for repeat, run in runs.items():
        if run.told is None:
            continue
        local = figures(case, run.told)
        share = of_gemm(run.told)
        if share is not None:
            local["of_gemm"] = share
        if repeat in base and (second := base[repeat].told) is not None:
            local["step_ratio"] = local["step_seconds"] / second["step_seconds"]
            local["speed_up"] = 1 / local["step_ratio"]
        for name, value in local.items():
            result.setdefault(name, []).append(value)
    return result


def verdict(case: TargetCase, name: str, value: float | None, replicas: int) -> str:
    """Return the verdict of a value. It is open if fewer replicas ran than the target states."""
    if value is None:
        return "not known"
    if replicas < case.data:
        return "smaller run"
    figure = FIGURES[name]
    if not figure.meets(value, case.must[name]):
        return "missed"
    if name in case.aim and figure.meets(value, case.aim[name]):
        return "aim reached"
    return "reached"


def layout(case: TargetCase, replicas: int) -> str:
    """Such as "TP2 PP2x5 DP1 of 2"."""
    parallel = case.config(replicas).parallel
    if parallel.tensor > 1:
        parts = [f"TP{parallel.tensor}"]
    else:
        parts = []
    if parallel.pipeline > 1:
        if parallel.virtual_stages > 1:
            chunks = f"x{parallel.virtual_stages}"
        else:
            chunks = ""
        parts.append(f"PP{parallel.pipeline}{chunks}")
    if case.data > 1:
        parts.append(f"DP{replicas}" + (f" of {case.data}" if replicas < case.data else ""))
    if not case.gpus:
        return " ".join(["CPU"] + parts)
    return " ".join(parts) or "1 GPU"


@dataclass
class TargetRow:
    """A case in the table; goals are (figure, what came, what must, verdict), predicted is seconds of a step."""

    case: TargetCase
    layout: str
    steps: list[float]
    values: dict[str, float]
    goals: list[tuple[str, str, str, str]]
    predicted: float | None = None

    @property
    def relative_spread(self) -> float:
        """Return the relative spread of repeats."""
        return (max(self.steps) - min(self.steps)) / statistics.median(self.steps)


def row(case: TargetCase, record: Record, by_name: Mapping[str, TargetCase]) -> TargetRow:
    """Return the recorded figures of a case."""
    replicas = case.replicas(record.gpus)
    if replicas is None:
        return TargetRow(case, f"needs {case.gpus * case.least} GPUs", [], {}, [])
    runs = record.runs(case, replicas)
    if case.over:
        base = record.runs(by_name[case.over], replicas)
    else:
        base = {}
    result = series(case, runs, base)
    values = {name: statistics.median(them) for name, them in result.items()}
    goals = []
    for name, bound in case.must.items():
        figure, value = FIGURES[name], values.get(name)
        if value is None:
            received = ""
        else:
            received = figure.form.format(value)
        if result:
            output = verdict(case, name, value, replicas)
        else:
            output = ""
        goals.append((figure.label, received, figure.bound(bound), output))
    if not result and any(run.failed for run in runs.values()):
        goals = [(label, came, must, "failed") for label, came, must, _ in goals] or [("", "", "", "failed")]
    steps = result.get("step_seconds", [])
    return TargetRow(case, layout(case, replicas), steps, values, goals, predicted(case, replicas))


def show(cases: Sequence[TargetCase], by_name: Mapping[str, TargetCase], record: Record) -> None:
    """The table, and below it what does not fit into it."""
    from rich import box
    from rich.table import Table

    console = Console(highlight=False)
    if console.width < WIDTH:
        console = Console(highlight=False, width=WIDTH)
    rows = [row(case, record, by_name) for case in cases]
    cells = [_cells(item) for item in rows]
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for head in cells[0]:
        if any(cell[head] for cell in cells):  # not what these machines or benches do not tell
            remaining = head in ("case", "what", "figure", "verdict")
            # Of three repeats and more the step takes another line, nothing else does.
            table.add_column(
                head,
                justify="left" if remaining else "right",
                no_wrap=head != "step, s",
                min_width=11 * (head == "step, s"),
            )
    for cell in cells:
        table.add_row(*(cell[str(column.header)] for column in table.columns))
    console.print(_describe_machines(cases, record))
    console.print(table)
    for note in notes(cases, rows, record):
        console.print(note, markup=False, soft_wrap=True)


def _cells(single: TargetRow) -> dict[str, str]:
    """A row of the table by heading, empty where nothing is known."""
    value = {name: figure.form.format(single.values[name]) for name, figure in FIGURES.items() if name in single.values}
    if len(single.steps) > 1:
        each = " ".join(f"{s:.3f}" for s in single.steps)
    else:
        each = ""
    if "of_gemm" in single.values:
        share = f"{single.values['of_gemm']:.3f}"
    else:
        share = ""
    figure, received, must, output = ("\n".join(goal[n] for goal in single.goals) for n in range(4))
    return {
        "case": single.case.name,
        "what": f"{single.case.title}\n[dim]{single.layout}[/dim]",
        "step, s": f"{value['step_seconds']}\n[dim]{each}[/dim]" if single.steps else "",
        "said\napart": "\n".join(
            [
                "" if single.predicted is None else f"{single.predicted:.3f}",
                f"[dim]{single.relative_spread:.1%}[/dim]" if each else "",
            ]
        ).rstrip(),
        "MFU\nGEMM": f"{value.get('mfu', '')}\n[dim]{share}[/dim]" if "mfu" in value or share else "",
        "GiB": value.get("memory_gib", ""),
        "figure": figure,
        "came": received,
        "must": must,
        "verdict": output,
    }


def _describe_machines(cases: Sequence[TargetCase], record: Record) -> str:
    """Return the machine, the software and the date of each run."""
    report = [run.told for case in cases for run in record.runs(case, case.replicas(record.gpus)).values() if run.told]
    devices = sorted({item["device"].split(" x ")[-1] for item in report})
    versions = sorted({f"torch {item['versions']['torch']}" for item in report})
    dates = sorted({item["date"] for item in report})
    if dates:
        days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    else:
        days = ""
    return ", ".join([f"{record.gpus} GPU{'s' * (record.gpus != 1)}"] + devices + versions + ([days] if days else []))


def notes(cases: Sequence[TargetCase], rows: Sequence[TargetRow], record: Record) -> list[str]:
    """Return the explanation of the table, and facts of a run that have no column."""
    from benchmarks.training.exposed import bounding, table
    from megascale.bench.gpu_watch import summarize_samples

    output = []
    conventions = {
        run.told["mfu_convention"]: None
        for case in cases
        for run in record.runs(case, case.replicas(record.gpus)).values()
        if run.told is not None and run.told.get("mfu") is not None
    }
    output += [f"MFU: {convention}" for convention in conventions]
    if any("of_gemm" in item.values for item in rows):
        output.append(
            "GEMM: share of what plain GEMMs sustained on the first GPU right before and after; medians of repeats"
        )
    if any(target_row.predicted is not None for target_row in rows):
        output.append(
            "said: step that the simulator said before, s (targets_predicted.toml); below, how far repeats lie apart"
        )
    meanings: dict[str, list[str]] = {}
    for figure in {FIGURES[name].label: FIGURES[name] for case in cases for name in case.must}.values():
        if figure.about:
            meanings.setdefault(figure.about, []).append(figure.label)
    output += [f"{', '.join(labels)}: {details}" for details, labels in meanings.items()]
    if any(goal[3] == "smaller run" for item in rows for goal in item.goals):
        output.append("smaller run: fewer replicas than the target is stated for, so it says nothing for certain of it")
    for case in cases:
        waits: dict[str, list[str]] = {}
        most: list[str] = []
        for repeat, run in record.runs(case, case.replicas(record.gpus)).items():
            if run.told is None:
                output.append(f"{case.name}, repeat {repeat + 1}: failed with " + "\n  ".join(run.failed))
            elif case.bench == "exposed":
                bound = bounding(run.told)
                if bound is not None and bound["share"] is not None:
                    most.append(f"{bound['share']:.1%} (stage {bound['stage']})")
                for item in table(run.told):
                    if item["waits"]:
                        waits.setdefault(item["kind"], []).append(f"{1e3 * item['waits']:.1f}")
            elif run.told.get("watched") is not None:
                output.append(f"{case.name}, repeat {repeat + 1}: {summarize_samples(run.told['watched'])}")
        if most:
            output.append(f"{case.name}: pipeline on the stage that computes most: {', '.join(most)}")
        if waits:
            each = "; ".join(f"{kind} {', '.join(times)}" for kind, times in waits.items())
            output.append(f"{case.name}: waits for other ranks' compute, not counted, ms: {each}")
    return output
