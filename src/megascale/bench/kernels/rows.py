"""Rows of the table of `megascale bench kernels`, and what collects them; a failure is a row."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.bench import timing
from megascale.bench.kernels.cases import Sizes
from megascale.core import strict_json


@dataclass
class KernelRow:
    """One line of the table; seconds, None where not measured. error: why a figure is missing or wrong."""

    op: str
    shape: str
    dtype: str = "bfloat16"
    fused: float | None = None
    eager: float | None = None
    compiled: float | None = None
    bound: float | None = None
    distance: float | None = None
    tflops: float | None = None
    host: float | None = None
    error: str = ""
    compared: bool = False  # a row of the table that has other packages
    others: dict[str, float] = field(default_factory=dict)  # seconds of other packages' operators
    notes: dict[str, str] = field(default_factory=dict)  # why one of them has no figure


class Bench:
    """Collects rows; a failure becomes a row and the next operator is measured."""

    def __init__(self, sizes: Sizes, device: torch.device, compile_until: float, out: Path) -> None:
        self.sizes, self.device, self.compile_until, self.out = sizes, device, compile_until, out
        self.began = time.monotonic()
        self.rows: list[KernelRow] = []
        self.facts: dict[str, Any] = {}

    def guard(self, op: str, shape: str, function: Callable[[], Any]) -> None:
        """Run a measurement; an exception is a row."""
        print(f"{time.monotonic() - self.began:6.1f} s  {op} {shape}", file=sys.stderr, flush=True)
        try:
            function()
        except Exception as error:  # the table must be whole whatever one operator does
            self.rows.append(KernelRow(op, shape, error=f"{type(error).__name__}: {str(error).strip()[:300]}"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.save()

    def save(self) -> None:
        """Write what there is, so that a bench that is stopped has still measured something."""
        self.out.write_text(strict_json.dumps(self.result(), indent=1))

    def result(self) -> dict[str, Any]:
        """What the JSON file holds."""
        return {**self.facts, "rows": [asdict(row) for row in self.rows]}

    def compiled(self, function: Callable[..., Any], op: str) -> Callable[..., Any] | None:
        """torch.compile of a reference, or None when the time for that is over.

        Philox's rounds of integer arithmetic keep the compiler busy for minutes, so dropout is not compiled.
        """
        if "dropout" in op or time.monotonic() - self.began > self.compile_until:
            return None
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    @staticmethod
    def timed(function: Callable[[], Any]) -> float:
        """Seconds of device time of one call."""
        return timing.device_seconds(function)

    def seconds(self, row: KernelRow, field: str, function: Callable[[], Any]) -> None:
        """Fill one figure of a row, or say in the row why not."""
        try:
            setattr(row, field, timing.device_seconds(function))
        except Exception as error:
            row.error += f"{field}: {type(error).__name__}: {str(error).strip()[:160]} "


def distance(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm().clamp(min=1e-300)).item()
