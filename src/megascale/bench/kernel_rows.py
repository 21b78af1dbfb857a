"""Table of `megascale bench kernels`: the sizes, a row per operator and pass, and the bench that collects the rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megascale.bench import timing
from megascale.core import strict_json

# Limit of the norm-wise distance from float64 of results that are summed or updated in float32.
FLOAT32_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured tensors. The defaults are those of gpt-13b, llama-8b and gpt2-124m."""

    tokens: int = 8192
    batch: int = 4
    hidden: int = 5120  # gpt-13b's
    llama_hidden: int = 4096
    llama_ffn: int = 14336
    heads: int = 32  # attention heads
    groups: int = 8  # key-value heads
    head_size: int = 128
    vocab: int = 64000
    head_tokens: int = 4096  # tokens of the language-model head
    elements: int = 256 << 20  # of the optimizer's flat shard
    small_hidden: int = 768  # gpt2-124m's


TINY = Sizes(
    tokens=8,
    batch=2,
    hidden=32,
    llama_hidden=32,
    llama_ffn=24,
    heads=2,
    groups=1,
    head_size=16,
    vocab=100,
    head_tokens=8,
    elements=5000,
    small_hidden=20,
)


@dataclass
class KernelRow:
    """One row of the table.

    Attributes:
        op, shape: operator and sizes of its tensors, as text.
        fused, eager, compiled: device seconds per call of this package's operator, of the reference, and of the
            reference compiled by torch; None if not measured.
        bound: seconds that the operator's bytes take at the machine's copy rate.
        distance: norm-wise distance from the float64 reference.
        tflops: TFLOP/s of the fused kernel.
        host: seconds that the host takes to launch the fused kernel.
        error: why a figure is missing or wrong; empty if none is.
    """

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

    def set_tflops(self, flops: float) -> None:
        """Compute TFLOP/s from the fused kernel's seconds."""
        if self.fused:
            self.tflops = flops / self.fused / 1e12


class Bench:
    """Collects the rows of the table and writes them to a JSON file.

    If a measurement fails, the error is a row, and the next operator is measured.

    Args:
        compile_until: seconds after the start after which no further reference is compiled.

    Attributes:
        facts: properties and rates of the machine, by key of the JSON file.
    """

    def __init__(self, sizes: Sizes, device: torch.device, compile_until: float, out: Path) -> None:
        self.sizes = sizes
        self.device = device
        self.compile_until = compile_until
        self.out = out
        self.start = time.monotonic()
        self.rows: list[KernelRow] = []
        self.facts: dict[str, Any] = {}

    def run_guarded(self, op: str, shape: str, function: Callable[[], Any]) -> None:
        """Run a measurement; an exception becomes a row of the table."""
        print(f"{time.monotonic() - self.start:6.1f} s  {op} {shape}", file=sys.stderr, flush=True)
        try:
            function()
        except Exception as error:  # The remaining operators are still measured.
            self.rows.append(KernelRow(op, shape, error=f"{type(error).__name__}: {str(error).strip()[:300]}"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.save()

    def add(self, row: KernelRow, limit: float) -> None:
        """Add a row. Set its `error` if its distance from the reference is above `limit`, or NaN."""
        self.rows.append(row)
        if row.distance is not None and not row.distance <= limit:  # true for NaN
            row.error = f"norm-wise error {row.distance:.1e}, limit {limit:.1e}"

    def save(self) -> None:
        """Write the results so far, so that the file exists even if the bench is interrupted."""
        self.out.write_text(strict_json.dumps(self.make_result(), indent=1))

    def make_result(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return {**self.facts, "rows": [asdict(row) for row in self.rows]}

    def compile(self, function: Callable[..., Any], op: str) -> Callable[..., Any] | None:
        """Return a reference compiled by torch.compile, or None after `compile_until` seconds and for dropout.

        Dropout is not compiled, since the integer arithmetic of Philox takes the compiler minutes.
        """
        if "dropout" in op or time.monotonic() - self.start > self.compile_until:
            return None
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    def measure_seconds(self, row: KernelRow, field: str, function: Callable[[], Any]) -> None:
        """Set `field` of a row to the device seconds of a call, or add the exception to the row's error."""
        try:
            setattr(row, field, timing.measure_device_seconds(function))
        except Exception as error:
            row.error += f"{field}: {type(error).__name__}: {str(error).strip()[:160]} "


def compute_distance(value: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the reference, computed in float64."""
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm().clamp(min=1e-300)).item()
