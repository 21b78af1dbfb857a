"""Tables of `python -m benchmarks exchange`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.kernels.exchange_operations import GRAPH_CALLS, MEGABYTES, OPERATIONS, REPLAYS
from benchmarks.kernels.exchange_ranks import SCENARIOS
from megascale.core.output_console import OutputConsole


def print_results(record: dict[str, Any]) -> None:
    """Print the tables of rates and of ended peers."""
    console = OutputConsole(highlight=False)
    console.print(f"{record['ranks']} x {record['device']}, torch {record['torch']}, {record['date']}")
    console.print(
        "GB/s of the whole tensor (bfloat16), and the ratio to NCCL. in place: a GEMM has written the parts into the "
        f"exchange's memory. long graph: {GRAPH_CALLS} calls in place. equal: NCCL's bits, launched and in "
        f"{record['replays']} replays."
    )
    if record["error"]:
        console.print(record["error"], soft_wrap=True, markup=False)
    console.print(make_rate_table(record))
    console.print(make_end_table(record))


def make_rate_table(record: dict[str, Any]) -> Table:
    """Return a table with a row per operation and size."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = ("operation", "MB", "NCCL", "exchange", "in place", "graph", "graph, in place", "long graph", "equal")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in record["rates"]:
        rates = row["rates"]
        cells = [f"{rates['nccl']:.0f}"]
        for way in ("exchange", "in_place", "graph", "graph_in_place", "long_graph"):
            cells.append(f"{rates[way]:.0f} {rates[way] / rates['nccl']:.2f}x")
        table.add_row(row["operation"], str(row["megabytes"]), *cells, "yes" if row["equal"] else "NO")
    return table


def make_end_table(record: dict[str, Any]) -> Table:
    """Return a table with a row per scenario in which the last rank ends."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("the last rank is", "seconds to the error", "message"):
        table.add_column(heading)
    for scenario in record["seconds_to_error"]:
        description = SCENARIOS[scenario]
        seconds = record["seconds_to_error"][scenario]
        cell = "NO ERROR" if seconds is None else f"{seconds:.2f}"
        table.add_row(description, cell, record["messages"][scenario])
    return table


def print_variants(record: dict[str, Any]) -> None:
    """Print the table of variants."""
    console = OutputConsole(highlight=False)
    console.print(f"{record['ranks']} x {record['device']}, torch {record['torch']}, {record['date']}")
    console.print(
        f"GB/s of the whole tensor at {', '.join(map(str, MEGABYTES))} MB (bfloat16), and the ratio to NCCL. in place: "
        f"a graph of one call whose parts a GEMM has written. long: {GRAPH_CALLS} such calls, with the fixed time per "
        "call and the rate of a GPU's remote bytes in the limit. equal: NCCL's bits, launched and in "
        f"{REPLAYS} replays."
    )
    if record["error"]:
        console.print(record["error"], soft_wrap=True, markup=False)
    if record["floors"]:
        floors = record["floors"]
        console.print(
            f"A call without data takes {floors['flags']:.1f} us, a graph without calls {floors['graph']:.1f} us."
        )
    console.print(make_variant_table(record))


def make_variant_table(record: dict[str, Any]) -> Table:
    """Return a table with a row per operation and variant, after NCCL's row of the operation."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, heading in enumerate(("operation", "variant", "in place", "long", "fixed us", "limit GB/s", "equal")):
        table.add_column(heading, justify="right" if index > 1 else "left", no_wrap=True)
    remote_share = 1 - 1 / record["ranks"]
    for kind in OPERATIONS:
        nccl = [item["rate"] for item in record["nccl"] if item["operation"] == kind.name]
        table.add_row(kind.name, "NCCL", *[" ".join(f"{rate:.0f}" for rate in nccl)] * 2, "", "", "")
        rows = [row for row in record["variants"] if row["operation"] == kind.name]
        for name in dict.fromkeys(row["variant"] for row in rows):
            rows_of_variant = [row for row in rows if row["variant"] == name]
            cells = []
            for way in ("graph_in_place", "long_graph"):
                rates = [1e3 * row["megabytes"] / row["microseconds"][way] for row in rows_of_variant]
                ratios = " ".join(f"{rate / peer:.2f}" for rate, peer in zip(rates, nccl, strict=True))
                cells.append(" ".join(f"{rate:.0f}" for rate in rates) + f"  {ratios}")
            fixed, slope = fit_line([(row["megabytes"], row["microseconds"]["long_graph"]) for row in rows_of_variant])
            cells += [f"{fixed:.0f}", f"{1e3 * remote_share / slope:.0f}"]
            equal = "yes" if all(row["equal"] for row in rows_of_variant) else "NO"
            table.add_row("", name, *cells, equal)
    return table


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the intercept and the slope of the least-squares line through points (x, y) with two x or more."""
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    variance = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / variance
    return mean_y - slope * mean_x, slope
