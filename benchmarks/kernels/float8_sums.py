"""`python -m benchmarks float8-sums`: a model of how Hopper's tensor cores add float8 products, on a CPU.

Each instruction adds 32 products to the sum. All 33 numbers are cut at 13 bits below the largest one's exponent, as
DeepSeek-V3's report describes (arXiv 2412.19437, section 3.5.2). The command compares the error of these sums with that
of the cast to E4M3. `megascale bench kernels --only experts_float8` measures the error of the kernels.
"""

from __future__ import annotations

from pathlib import Path

import torch
import typer
from torch import Tensor

from megascale.core import strict_json
from megascale.ops.float8.cast import cast_rows
from megascale.ops.float8.formats import E4M3, dequantise

PRODUCTS = 32  # per instruction
KEPT_BITS = 13  # below the exponent of the largest number


def register(app: typer.Typer) -> None:
    """Add `float8-sums` to the benchmarks."""
    app.command("float8-sums")(main)


def add_like_tensor_cores(products_NK: Tensor, interval: int | None) -> Tensor:
    """Return the sums of the rows of float64 products [N, K].

    Args:
        interval: number of products after which the sum is added to another one in float32; None: never.
    """
    total = products_NK.new_zeros(len(products_NK))
    partial_sum = torch.zeros_like(total)
    for start in range(0, products_NK.shape[1], PRODUCTS):
        numbers = torch.cat((products_NK[:, start : start + PRODUCTS], partial_sum.unsqueeze(1)), 1)
        _, exponent = torch.frexp(numbers.abs().amax(1).clamp_min(1e-30))
        unit = torch.exp2(exponent - 1.0 - KEPT_BITS).unsqueeze(1)
        partial_sum = (torch.trunc(numbers / unit) * unit).sum(1)
        if interval is not None and (start + PRODUCTS) % interval == 0:
            total += partial_sum
            partial_sum = torch.zeros_like(total)
    return total + partial_sum


def main(
    out: Path = typer.Option(Path("float8-sums.json"), "--out", help="JSON file to write."),
    rows: int = typer.Option(2000, help="Sums per length."),
    lengths: list[int] = typer.Option([4096, 14336, 28672], "--length", help="Products per sum."),
) -> None:
    """Estimate the error of float8 sums of products of Gaussians, next to that of the cast to E4M3.

    The fast error is that of one sum in the tensor cores. The precise error is that of sums of 128 products, which are
    added in float32. All errors are norm-wise.
    """
    generator = torch.Generator().manual_seed(0)
    result = []
    for length in lengths:
        factors = [torch.randn(rows, length, generator=generator, dtype=torch.float64) for _ in range(2)]
        casts = [dequantise(*cast_rows(factor, E4M3).require_rows(), torch.float64) for factor in factors]
        exact = (factors[0] * factors[1]).sum(1)
        products = casts[0] * casts[1]
        expected = products.sum(1)
        row = {"products": length, "cast": ((expected - exact).norm() / exact.norm()).item()}
        for name, interval in (("fast", None), ("precise", 128)):
            error = (add_like_tensor_cores(products, interval) - expected).norm() / expected.norm()
            row[name] = error.item()
        result.append(row)
        print(f"{length} products: cast {row['cast']:.2%}, fast {row['fast']:.3%}, precise {row['precise']:.4%}")
    out.write_text(strict_json.dumps(result, indent=1))
