"""`python -m tests.chaos soak --report FILE --report FILE`: tables in Markdown over the reports of several soaks."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megascale.errors import ConfigError
from tests.chaos.soak.endurance import COSTS, KINDS

_PART_COLUMNS = (
    "report",
    "part",
    "start (UTC)",
    "minutes",
    "load",
    "cores",
    "faults",
    "recovered",
    "problem",
    "remains",
)
_KIND_COLUMNS = ("fault", "faults", "recovered", "mean cost", "largest cost", "mean lost steps", "largest lost steps")
_REPORT_KEYS = ("seed", "every", "calls", "faults")


def make_tables(files: Sequence[Path]) -> str:
    """Return a table of all parts of the reports and one of the sums per kind of fault, in Markdown.

    A cost is the seconds from the fault to the end of its recovery, and those of the lost steps. Costs and lost steps
    are those of the recovered faults.

    Raises ConfigError for a file that is not the report of `soak --minutes`, or that is named twice.
    """
    repeated = [file for file, count in Counter(file.resolve() for file in files).items() if count > 1]
    if repeated:
        raise ConfigError(f"--report={repeated[0]} is given twice, which would count its faults twice; give it once")
    reports = [_read_report(file) for file in files]
    parts: list[tuple[str, ...]] = []
    for file, report in zip(files, reports, strict=True):
        parts += _list_parts(file.stem, report)
    faults = [fault for report in reports for fault in report["faults"]]
    kinds = [_sum_faults(kind, [fault for fault in faults if fault["kind"] == kind]) for kind in KINDS]
    for name, members in COSTS.items():
        label = f"each {name}: {', '.join(members)}"
        kinds.append(_sum_faults(label, [fault for fault in faults if fault["kind"] in members]))
    kinds.append(_sum_faults("all", faults))
    calls = [call for report in reports for call in report["calls"]]
    hours = sum(call["seconds"] for call in calls) / 3600
    recovered_count = sum(not fault["problem"] for fault in faults)
    seeds = ", ".join(str(report["seed"]) for report in reports)
    summary = (
        f"Sum: {hours:.2f} hours in {len(calls)} parts of {len(reports)} soaks (seeds {seeds}), {len(faults)} faults, "
        f"{recovered_count} recovered, {sum(bool(call['problem']) for call in calls)} parts with a problem, "
        f"{sum(len(call['remains']) for call in calls)} remains."
    )
    return "\n".join([*_format_table(_PART_COLUMNS, parts), "", *_format_table(_KIND_COLUMNS, kinds), "", summary])


def _read_report(file: Path) -> dict[str, Any]:
    """Return a report. Raises ConfigError for another file."""
    try:
        report = json.loads(file.read_text())
        missing = [key for key in _REPORT_KEYS if key not in report]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--report={file} cannot be read ({error}); name a file of soak --minutes --out") from None
    if missing:
        raise ConfigError(f"--report={file} lacks {', '.join(missing)}; name a file of soak --minutes --out")
    return report  # type: ignore[no-any-return]


def _list_parts(name: str, report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the row of each part of a report. The faults of the parts follow each other in the report."""
    first_fault = 0
    for number, call in enumerate(report["calls"], 1):
        faults = report["faults"][first_fault : first_fault + call["faults"]]
        first_fault += call["faults"]
        counts = Counter(fault["kind"] for fault in faults)
        kinds = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
        yield (
            f"{name} (seed {report['seed']})",
            str(number),
            datetime.fromtimestamp(call["began"], UTC).strftime("%Y-%m-%d %H:%M"),
            f"{call['seconds'] / 60:.1f}",
            " to ".join(f"{load:.1f}" for load in call["load"]),
            str(call["cores"]),
            f"{len(faults)}: {kinds}" if faults else "0",
            str(sum(not fault["problem"] for fault in faults)),
            call["problem"] or "none",
            "; ".join(call["remains"]) or "none",
        )


def _sum_faults(label: str, faults: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the row of some faults: their number, and cost and lost steps of those that were recovered."""
    recovered = [fault for fault in faults if not fault["problem"]]
    counts = (label, str(len(faults)), str(len(recovered)))
    if not recovered:
        return (*counts, "", "", "", "")
    costs = [fault["cost"] for fault in recovered]
    lost_steps = [fault["lost"] for fault in recovered]
    return (
        *counts,
        f"{statistics.fmean(costs):.2f} s",
        f"{max(costs):.2f} s",
        f"{statistics.fmean(lost_steps):.2f}",
        str(max(lost_steps)),
    )


def _format_table(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table. A bar within a cell would begin another one."""
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        cells = [" ".join(cell.replace("|", "\\|").split()) for cell in row]
        yield f"| {' | '.join(cells)} |"
