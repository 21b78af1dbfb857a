"""`python -m benchmarks tensor-precision`: precisions of linear layers under tensor parallelism, against one process.

Every run is a `megascale bench train` of its own: the same weights and the same random tokens.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from megascale.errors import TrainingError

BASELINE = "float8"


@dataclass
class PrecisionRun:
    """One precision in one layout.

    Attributes:
        precision: train.linear_precision.
        tensor: tensor-parallel ranks.
        step_seconds: median of the timed steps.
        losses: of the first and of the last step.
        memory_gib: peak memory of rank 0, None on a CPU.
    """

    precision: str
    tensor: int
    step_seconds: float
    losses: list[float]
    memory_gib: float | None


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("tensor-precision", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        tensor_precision
    )


def tensor_precision(
    context: typer.Context,
    preset: str = typer.Argument("gpt-13b", help="A shipped model shape."),
    tensor: int = typer.Option(2, min=2, help="Tensor-parallel ranks."),
    precisions: list[str] = typer.Option(
        ["default", "float8", "float8_rowwise", "float8_rowwise_wgrad"],
        "--precision",
        help="train.linear_precision; may be given again.",
    ),
    steps: int = typer.Option(20, min=1, help="Timed steps of each run."),
    out: Path = typer.Option(Path("bench-tensor-precision.json"), help="JSON file for the metrics."),
) -> None:
    """Step time and loss of each precision of linear layers, on one process and on tensor-parallel ranks.

    Any setting can be given as --section.key=value; it holds for all runs. The model must fit on one GPU.

    Example: python -m benchmarks tensor-precision gpt-13b --model.layers=8 --train.micro_batch=4
    --train.global_batch=16

    Example: python -m benchmarks tensor-precision tiny --steps 2 --train.device=cpu --train.precision=float64
    """
    runs = []
    with temporary_folder("bench-tensor-precision") as folder:
        for precision in precisions:
            for ranks in (1, tensor):
                runs.append(_measure(preset, precision, ranks, steps, Path(folder), arguments=context.args))
    rows = compare(runs)
    _show(rows)
    out.write_text(strict_json.dumps({"preset": preset, "arguments": context.args, "rows": rows}, indent=1) + "\n")
    typer.echo(f"metrics: {out}")


def _measure(preset: str, precision: str, ranks: int, steps: int, folder: Path, arguments: list[str]) -> PrecisionRun:
    """Run `megascale bench train` once. Raises TrainingError if it fails."""
    record = folder / f"{precision}-{ranks}.json"
    command = [sys.executable, "-m", "megascale", "bench", "train", preset, f"--steps={steps}", f"--out={record}"]
    command += ["--train.precision=bfloat16", *arguments]
    command += [f"--train.linear_precision={precision}", f"--parallel.tensor={ranks}"]
    if subprocess.run(command, cwd=folder, check=False).returncode:
        raise TrainingError(f"the run failed: {' '.join(command[1:])}")
    result = strict_json.loads(record.read_text())
    return PrecisionRun(precision, ranks, result["step_seconds"], result["losses"], result.get("peak_memory_gib"))


def compare(runs: list[PrecisionRun]) -> list[dict[str, Any]]:
    """Return each run with its step time relative to tensor-wise float8's, and the errors of its losses.

    The step time is compared at the same number of ranks. A loss is compared with that of one process in the same
    precision, as a share of the first loss: the tokens repeat, so the last loss is close to 0.
    """
    by_key = {(run.precision, run.tensor): run for run in runs}
    rows = []
    for run in runs:
        baseline = by_key.get((BASELINE, run.tensor))
        single = by_key[run.precision, 1]
        row: dict[str, Any] = asdict(run)
        row["relative_step"] = run.step_seconds / baseline.step_seconds if baseline else None
        first_loss = abs(single.losses[0])
        row["loss_errors"] = [abs(a - b) / first_loss for a, b in zip(run.losses, single.losses, strict=True)]
        rows.append(row)
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    columns = (
        "precision",
        "TP",
        "step, s",
        f"step / {BASELINE}'s",
        "last loss",
        "first loss's error",
        "last loss's error",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        relative = "" if row["relative_step"] is None else f"{row['relative_step']:.3f}"
        errors = [f"{error:.1e}" for error in row["loss_errors"]]
        cells = (row["precision"], str(row["tensor"]), f"{row['step_seconds']:.4f}", relative)
        table.add_row(*cells, f"{row['losses'][-1]:.5f}", *errors)
    Console().print(table)
