"""`megascale bench kernels`: check every fused operator against its float64 reference, then time it.

The command compares each operator's time with eager PyTorch, with torch.compile and with a bound: the time that
reading and writing the operator's bytes takes at the copy rate of the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from megascale.errors import ConfigError, TrainingError

# Seconds after the start of the bench. References that would be compiled later are not, because compiling takes most of
# the time.
COMPILE_UNTIL = 130.0
_SEED = 1


def _format_us(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.1f}"


def print_result(result: dict[str, Any]) -> None:
    """Print the table of `kernel_measures.run`'s result, the errors of its rows, and the rates of the machine."""
    from rich import box
    from rich.table import Table

    from megascale.core.output_console import OutputConsole

    console = OutputConsole(highlight=False)
    title = f"{result['device']}, torch {result['torch']}, triton {result['triton']}, {result['date']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("op", "shape", "dtype"):
        table.add_column(name, no_wrap=True)
    for name in ("fused us", "eager us", "compile us", "bound us", "of bound", "TFLOP/s", "host us", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        if row["bound"] and row["fused"]:
            bound_ratio = f"{row['bound'] / row['fused']:.0%}"
        else:
            bound_ratio = ""
        if row["distance"] is None:
            distance = ""
        else:
            distance = f"{row['distance']:.1e}"
        table.add_row(
            row["op"],
            row["shape"],
            row["dtype"],
            _format_us(row["fused"]),
            _format_us(row["eager"]),
            _format_us(row["compiled"]),
            _format_us(row["bound"]),
            bound_ratio,
            "" if row["tflops"] is None else f"{row['tflops']:.0f}",
            _format_us(row["host"]),
            f"{distance} !" if row["error"] else distance,
        )
    if table.row_count:
        console.print(table)
    for row in result["rows"]:
        if row["error"]:
            console.print(f"! {row['op']}: {row['error']}", soft_wrap=True, markup=False)
    console.print(
        f"copy {result['copy_bytes_per_s'] / 1e12:.2f} TB/s; bf16 GEMM {result['gemm_burst_flop_per_s'] / 1e12:.0f} "
        f"TFLOP/s in a burst, {result['gemm_held_flop_per_s'] / 1e12:.0f} sustained before the measurements and "
        f"{result['gemm_held_again_flop_per_s'] / 1e12:.0f} after; the bench took {result['seconds']:.0f} s"
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
        "",
        help="What to measure, with commas: operators, head, linear, grouped, experts_float8, optimizers, attention, "
        "float8.",
    ),
) -> None:
    """Check every fused operator against float64, then time it.

    Columns of device time, from replayed CUDA graphs: the fused kernel, and the plain PyTorch reference (eager and
    compiled). "bound" is the time that the operator's bytes take at the copy rate of the same run, and "of bound" the
    ratio of that time to the fused kernel's. "host us" is the host's time to launch a call. "error" is the norm-wise
    distance from the float64 reference.

    Float8 rows (on devices with float8): casts, and the GEMMs y, dx and dw of each linear layer of gpt-1.3b, half of
    gpt-13b (DP2, TP2) and llama-8b with fast and precise sums, compared with bfloat16.

    Grouped rows: GEMMs of experts for each tiling, compared with a loop of GEMMs and with torch._grouped_mm. They also
    have the float8 GEMMs and casts of experts, which `--only experts_float8` measures alone.

    Example: megascale bench kernels --only float8 --out kernels.json
    """
    import torch

    from megascale.bench.kernel_measures import MEASUREMENTS, run
    from megascale.bench.kernel_rows import TINY, Sizes

    if only:
        measurements = tuple(name.strip() for name in only.split(","))
    else:
        measurements = MEASUREMENTS
    unknown = [name for name in measurements if name not in MEASUREMENTS]
    if unknown:
        raise ConfigError(f"--only={only!r}: {unknown[0]!r} is unknown; choose from {', '.join(MEASUREMENTS)}")
    has_cuda = torch.cuda.is_available()
    if not has_cuda and not tiny:
        raise ConfigError("megascale bench kernels measures a CUDA device and none is visible; --tiny runs the checks")
    device = torch.device("cuda" if has_cuda else "cpu")
    torch.manual_seed(_SEED)  # errors of small shapes vary with the values
    if tiny:
        result = run(TINY, device, compile_until=0.0, out=out, measurements=measurements)
    else:
        result = run(Sizes(), device, compile_until=compile_until, out=out, measurements=measurements)
    print_result(result)
    failed_ops = [row["op"] for row in result["rows"] if row["error"]]
    if failed_ops:
        raise TrainingError(f"{len(failed_ops)} rows are wrong or incomplete, see above: {', '.join(failed_ops)}")
