"""Rows of `python -m benchmarks shapes`: their file and their table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.atomic_files import write_atomically

OURS = "megascale"
TRAINERS = (OURS, "megatron-core")


class RowFile:
    """The JSON file of a call: facts of the call, and a row per task. It is written after each row.

    Attributes:
        rows: rows so far.
    """

    def __init__(self, path: Path, head: dict[str, Any] | None = None) -> None:
        """Create the file, or read it if `head` is None."""
        self._path = path
        if head is None:
            self._head: dict[str, Any] = {}
            self.rows: list[dict[str, Any]] = []
            self.read()
        else:
            self._head = head
            self.rows = []
            self._write()

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and write the file."""
        self.rows.append(row)
        self._write()

    def read(self) -> None:
        """Read what another process has written."""
        self._head = strict_json.loads(self._path.read_text())
        self.rows = self._head.pop("rows")

    def _write(self) -> None:
        write_atomically(self._path, strict_json.dumps(self._head | {"rows": self.rows}, indent=1) + "\n")


def name_row(row: dict[str, Any]) -> str:
    """Return trainer, shape and label of a row, and whether the time limit cut it."""
    return " ".join(part for part in (row["trainer"], row["shape"], row["label"], mark_cut(row)) if part)


def mark_cut(row: dict[str, Any]) -> str:
    """Return "(cut, 4 steps)" for a row that the time limit ended after four timed steps, "" for other rows."""
    if not row.get("cut"):
        return ""
    return f"(cut, {len(row['all_step_seconds'])} steps)"


def describe_row(row: dict[str, Any]) -> str:
    """Return a row as one line."""
    name = name_row(row)
    if "failed" in row:
        return f"{name}: failed: {row['failed']}"
    parts = [f"{row['step_seconds']:.4f} s", f"{row['tokens_per_second_per_device']:,.0f} tokens/s per GPU"]
    if row["mfu"] is not None:
        parts.append(f"MFU {100 * row['mfu']:.1f}%")
    if row["peak_memory_gib"] is not None:
        parts.append(f"{row['peak_memory_gib']:.1f} GiB")
    if "seconds_in_all" in row:  # not in a row of processes that have ended
        parts.append(f"{row['seconds_in_all']:.0f} s in all")
    if row.get("earlier_shapes"):
        parts.append(f"after {row['earlier_shapes']} other shapes in the same processes")
    if row.get("cut"):
        parts.append(row["cut"])
    if row.get("end_error"):
        parts.append(f"after its result: {row['end_error']}")
    return f"{name}: {', '.join(parts)}"


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table, and the reasons of failures below it."""
    from rich import box
    from rich.table import Table

    from megascale.core.output_console import OutputConsole

    console = OutputConsole(highlight=False)
    columns = ("shape", "s/step", "tokens/s per GPU", "MFU", "GiB", "loss", "rank load", "GEMM TFLOP/s")
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        name = " ".join(part for part in (row["shape"], row["label"], mark_cut(row)) if part)
        if "failed" in row:
            table.add_row(name, "failed")
            continue
        table.add_row(
            name,
            f"{row['step_seconds']:.4f}",
            f"{row['tokens_per_second_per_device']:,.0f}",
            format_optional(row["mfu"], "{:.1%}"),
            format_optional(row["peak_memory_gib"], "{:.1f}"),
            " -> ".join(f"{loss:.4f}" for loss in row["losses"]),
            format_optional(row.get("expert_rank_load_max"), "{:.2f}"),
            ", ".join(f"{rate / 1e12:.0f}" for rate in row["gemm_flop_per_s"] or []),
        )
    console.print(table)
    measured = [row for row in rows if "failed" not in row]
    if measured:
        first = measured[0]
        versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
        console.print(f"{first['device']}, {versions}, {first['date']}; MFU: {first['mfu_convention']}", soft_wrap=True)
    for row in rows:
        if "failed" in row or "cut" in row or "end_error" in row:
            console.print(describe_row(row), soft_wrap=True, markup=False)


def format_optional(value: float | None, form: str) -> str:
    """Return a formatted value, or "" for None."""
    if value is None:
        return ""
    return form.format(value)
