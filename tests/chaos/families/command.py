"""`python -m tests.chaos families`: drawn models of every Hugging Face family give the logits of `transformers`."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from megascale.errors import ConfigError, TrainingError

_ERRORS = ("float32", "rounding", "own_rounding", "float64", "gradients")


def register(app: typer.Typer) -> None:
    """Add the campaign."""
    app.command("families")(families)


def families(
    names: str = typer.Option("", "--families", help="families, comma-separated; default: all"),
    draws: int = typer.Option(40, min=1, help="drawn configurations per family"),
    seed: int = typer.Option(0, help="seed of the draws; seed 0 begins with the draws of the test suite"),
    out: Path = typer.Option(Path("bench-families.json"), help="JSON file for the results"),
) -> None:
    """Compare logits with `transformers` in float32 and float64, and gradients of one configuration per family.

    Exit 1 if an error is above its limit: 1e-5 (or three times the rounding of `transformers`, for ill-conditioned
    models) and 1e-10 of the maximum logit, 1e-9 of a tensor's maximum gradient. Rounding is the difference of float32
    from `transformers` in float64; "ours / theirs" is the geometric mean over draws.
    Example: python -m tests.chaos families --families llama,gemma3_text --draws 10
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from megascale.model.huggingface.families import FAMILIES

    chosen = [name.strip() for name in names.split(",") if name.strip()] or list(FAMILIES)
    unknown = [name for name in chosen if name not in FAMILIES]
    if unknown:
        raise ConfigError(f"--families={names}: {unknown[0]} is unknown; choose among {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    console = Console()
    records = []
    faults: list[str] = []
    for family in chosen:
        record = _measure_family(family, draws, seed, faults)
        records.append(record)
        console.print(f"{family}: {draws} draws in {record['seconds']:.0f} s", highlight=False)
    table = Table(title=f"maximum errors next to transformers, seed {seed}")
    columns = ("family", "draws", "logits, float32", "their rounding", "our rounding", "ours / theirs")
    for column in (*columns, "logits, float64", "gradients, float64"):
        table.add_column(column, justify="left" if column == "family" else "right")
    for record in records:
        errors = {key: f"{record[key]:.1e}" for key in _ERRORS}
        ratio = f"{record['rounding_ratio']:.2f}"
        single = [errors[key] for key in ("float32", "rounding", "own_rounding")]
        table.add_row(record["family"], str(record["draws"]), *single, ratio, errors["float64"], errors["gradients"])
    console.print(table)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    result = {"date": date, "seed": seed, "families": records, "faults": faults}
    out.write_text(strict_json.dumps(result, indent=1) + "\n")
    if faults:
        raise TrainingError(f"{len(faults)} comparisons failed: " + "; ".join(faults[:5]))


def _measure_family(family: str, draws: int, seed: int, faults: list[str]) -> dict[str, Any]:
    """Return the maximum errors of a family. Failed comparisons are appended to `faults`."""
    from tests.chaos.families.measures import (
        GRADIENT_LIMIT,
        LogitErrors,
        draw_family,
        measure_gradients,
        measure_logits,
    )

    began = time.monotonic()
    worst = LogitErrors()
    ratios = []
    for number in range(draws):
        settings = draw_family(family, number, seed)
        with temporary_folder() as folder:
            errors = measure_logits(family, settings, Path(folder))
        worst = worst.max_with(errors)
        ratios.append(errors.own_rounding / errors.rounding)
        fault = errors.find_fault()
        if fault:
            faults.append(f"{family}, draw {number}: {fault}, with {settings}")
    with temporary_folder() as folder:
        gradients = measure_gradients(family, Path(folder))
    if not gradients <= GRADIENT_LIMIT:
        faults.append(f"{family}, gradients: {gradients:.1e}")
    return {
        "family": family,
        "draws": draws,
        **asdict(worst),
        "gradients": gradients,
        "rounding_ratio": statistics.geometric_mean(ratios),
        "seconds": time.monotonic() - began,
    }
