"""The report of a fault campaign: one table on the terminal, one JSON file."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.faults.site import Row

PHASES = {"detect": "detect", "stop": "stop", "load": "load", "step": "first step", "total": "total"}


def describe_machine() -> dict[str, Any]:
    """Return date, cores, processor, Python and load of this machine."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "load": list(os.getloadavg()),
    }


def show(rows: Sequence[Row], kinds: Sequence[str], console: Console | None = None) -> None:
    """Print one line per kind of fault that has rows: counts, seconds by phase as median (worst), lost steps."""
    heads = ["fault", "right", "same weights"] + list(PHASES.values()) + ["lost steps", "actions"]
    table = Table(*heads, title="seconds: median (worst)", box=None, padding=(0, 2))
    for kind in dict.fromkeys(kinds):
        of_kind = [row for row in rows if row["kind"] == kind]
        if of_kind:
            table.add_row(kind, *_cells(of_kind))
    (console or Console(width=160)).print(table)


def _cells(rows: Sequence[Row]) -> list[str]:
    if "skipped" in rows[0]:
        return ["skipped"]
    compared = [row["same"] for row in rows if row.get("same") is not None]
    actions = sorted({" ".join(row.get("actions", [])) or "none" for row in rows})
    return [
        f"{sum(row['right'] for row in rows)} of {len(rows)}",
        f"{sum(compared)} of {len(compared)}" if compared else "-",
        *(_median_and_worst(rows, phase, ".1f") for phase in PHASES),
        _median_and_worst(rows, "lost", ".0f"),
        ", ".join(actions),
    ]


def _median_and_worst(rows: Sequence[Row], key: str, form: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    if not values:
        return "-"
    return f"{median(values):{form}} ({max(values):{form}})"
