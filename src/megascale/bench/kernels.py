"""`megascale bench kernels`: check every fused operator against its float64 reference, then time it.

Its time is compared with eager PyTorch, torch.compile and the time its bytes need at the copy rate of the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from megascale.errors import ConfigError, TrainingError

COMPILE_UNTIL = 130.0  # seconds after which no reference is compiled, so that the bench ends in time


def _us(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.1f}"


def show(result: dict[str, Any]) -> None:
    """Print the table, its errors, and the rates of the machine."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=170)
    title = f"{result['device']}, torch {result['torch']}, triton {result['triton']}, {result['date']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("op", "shape", "dtype"):
        table.add_column(name, no_wrap=True)
    for name in ("fused us", "eager us", "compile us", "bound us", "of bound", "TFLOP/s", "host us", "away"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        if row["bound"] and row["fused"]:
            share = f"{row['bound'] / row['fused']:.0%}"
        else:
            share = ""
        if row["distance"] is None:
            away = ""
        else:
            away = f"{row['distance']:.1e}"
        table.add_row(
            row["op"],
            row["shape"],
            row["dtype"],
            _us(row["fused"]),
            _us(row["eager"]),
            _us(row["compiled"]),
            _us(row["bound"]),
            share,
            "" if row["tflops"] is None else f"{row['tflops']:.0f}",
            _us(row["host"]),
            f"{away} !" if row["error"] else away,
        )
    if table.row_count:
        console.print(table)
    for row in result["rows"]:
        if row["error"]:
            console.print(f"! {row['op']}: {row['error']}", soft_wrap=True, markup=False)
    console.print(
        f"copy {result['copy_bytes_per_s'] / 1e12:.2f} TB/s; bf16 GEMM {result['gemm_burst_flop_per_s'] / 1e12:.0f} "
        f"TFLOP/s in a burst, {result['gemm_held_flop_per_s'] / 1e12:.0f} held, "
        f"{result['gemm_held_again_flop_per_s'] / 1e12:.0f} held at the end; {result['seconds']:.0f} s in all"
    )
    for line in result.get("attention", []) + [result.get("float8")]:
        if line:
            console.print(line, soft_wrap=True, markup=False)


def register(app: typer.Typer) -> None:
    """Add `kernels` to `megascale bench`."""
    app.command("kernels")(main)


def main(
    out: Path = typer.Option(Path("kernels.json"), "--out", help="JSON file to write."),
    tiny: bool = typer.Option(False, "--tiny", help="Small shapes: the checks, on any machine; no meaningful times."),
    compile_until: float = typer.Option(COMPILE_UNTIL, help="Seconds after which torch.compile is not measured."),
    only: str = typer.Option(
        "", help="Parts to measure: operators, head, linear, grouped, optimizers, attention, float8 (with commas)."
    ),
) -> None:
    """Check every fused operator against float64, then time it.

    Columns: the fused kernel, the plain PyTorch reference (eager and compiled), and the time its bytes take at the
    copy rate measured in the same run. Device time, from replayed CUDA graphs; "host us" is what issuing a call
    costs; "away" is the norm-wise distance from the float64 reference.

    Float8 rows (on devices that have it): casts, and the GEMMs y, dx and dw of each linear layer of gpt-1.3b, half of
    gpt-13b (DP2, TP2) and llama-8b with fast and precise sums, compared with bfloat16.

    Grouped rows: GEMMs of experts for each tiling, compared with a loop of GEMMs and with torch._grouped_mm.

    Example: megascale bench kernels --only float8 --out kernels.json
    """
    import torch

    from megascale.bench.kernel_cases import TINY, Sizes
    from megascale.bench.kernel_measures import PARTS, run

    if only:
        parts = tuple(part.strip() for part in only.split(","))
    else:
        parts = PARTS
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ConfigError(f"--only={only!r}: no part is called {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    cuda = torch.cuda.is_available()
    if not cuda and not tiny:
        raise ConfigError("megascale bench kernels measures a CUDA device and none is visible; --tiny runs the checks")
    device = torch.device("cuda" if cuda else "cpu")
    result = run(TINY if tiny else Sizes(), device, 0.0 if tiny else compile_until, out, parts)
    show(result)
    wrong = [row["op"] for row in result["rows"] if row["error"]]
    if wrong:
        raise TrainingError(f"{len(wrong)} rows are wrong or incomplete, see above: {', '.join(wrong)}")
