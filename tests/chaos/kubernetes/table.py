"""The table of `python -m tests.chaos kubernetes`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

_PHASES = ("detect", "stop", "load", "step", "total")


def show(rows: list[dict[str, Any]], kinds: Sequence[str]) -> None:
    """Print a line for each kind that has been run."""
    from rich.console import Console
    from rich.table import Table

    heads = ("fault", "right", "same weights", "doubles", "detect", "stop", "load", "first step", "in all", "lost")
    table = Table(*heads, "actions", "machine's load", title="seconds: median (worst)", box=None, padding=(0, 2))
    for kind in dict.fromkeys(kinds):
        own = [row for row in rows if row["kind"] == kind]
        if not own:
            continue
        lost = [row["lost"] for row in own if row["lost"] is not None]
        compared = [row["same"] for row in own if row["same"] is not None]
        loads = [row["machine_load"] for row in own]
        table.add_row(
            kind,
            f"{sum(row['right'] for row in own)} of {len(own)}",
            f"{sum(compared)} of {len(compared)}" if compared else "-",
            str(sum(bool(row["doubles"]) for row in own)),
            *(_seconds(own, key) for key in _PHASES),
            str(max(lost)) if lost else "-",
            ", ".join(sorted({" ".join(row.get("actions", [])) or "none" for row in own})),
            f"{min(loads):.0f}-{max(loads):.0f}",
        )
    Console(width=170).print(table)


def _seconds(rows: list[dict[str, Any]], key: str) -> str:
    found = [row[key] for row in rows if row.get(key) is not None]
    return f"{median(found):.1f} ({max(found):.1f})" if found else "-"
