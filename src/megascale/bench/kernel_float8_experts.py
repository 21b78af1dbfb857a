"""Float8 GEMMs and casts of experts in `megascale bench kernels`, next to the bfloat16 GEMMs of the same shapes.

The error of a GEMM is the distance from the product of the same float8 numbers in float64. It holds the precision of
the tensor cores' sums and the rounding of the result, and not that of the casts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megascale.bench.kernel_grouped import BF16_LIMIT, SHAPES, TINY_SHAPES, GroupedShape, make_group_offsets
from megascale.bench.kernel_rows import Bench, KernelRow, compute_distance
from megascale.ops.float8.cast import cast_rows
from megascale.ops.float8.formats import E4M3, dequantise
from megascale.ops.float8.grouped import (
    FLOAT8_TILING,
    PRECISE_TILING,
    multiply_float8_groups,
    multiply_float8_groups_reference,
)
from megascale.ops.float8.stacks import cast_activation, cast_stack
from megascale.ops.grouped_gemm import multiply_groups, multiply_groups_reference
from megascale.ops.grouped_tiles import Tiling

BF16 = torch.bfloat16
# Limit of the norm-wise error of sums in about 14 bits, rounded to bfloat16. A wrong scale or group exceeds it by far.
FAST_LIMIT = 2e-2
# Limit of the error of a cast to E4M3 of Gaussians, whose steps are 6% to 12% of a number.
CAST_LIMIT = 4e-2
# Tilings of float8 GEMMs, and whether their sums are precise.
TILINGS = [
    (FLOAT8_TILING, False),
    (FLOAT8_TILING._replace(stages=3), False),
    (FLOAT8_TILING._replace(grouped_rows=16), False),
    (PRECISE_TILING, True),
]


def _describe_tiling(tiling: Tiling, precise: bool) -> str:
    precision = "precise" if precise else "fast"
    return (
        f"{tiling.rows} x {tiling.columns} x {tiling.inner}, {tiling.stages} stages, bands of {tiling.grouped_rows}, "
        f"{precision} sums"
    )


def _measure_shape(bench: Bench, shape: GroupedShape, tilings: list[tuple[Tiling, bool]]) -> None:
    device = bench.device
    offsets = make_group_offsets(shape, device)
    row_count = shape.tokens * shape.top_k
    x = torch.randn(row_count, shape.inner, device=device).to(BF16)
    dy = torch.randn(row_count, shape.columns, device=device).to(BF16)
    weights = (torch.randn(shape.experts, shape.columns, shape.inner, device=device) * shape.inner**-0.5).to(BF16)
    shape_text = f"{row_count} in {shape.experts} x {shape.columns} x {shape.inner}"
    flops = 2.0 * row_count * shape.columns * shape.inner

    def add_row(name: str, function: Callable[[], Any], distance: float | None, limit: float) -> KernelRow:
        row = KernelRow(f"grouped {shape.name}: {name}", shape_text, dtype="float8", distance=distance)
        bench.add(row, limit)
        bench.measure_seconds(row, "fused", function)
        return row

    def add_bf16_row(name: str, rows: Tensor, transposed: bool) -> None:
        multiply = partial(multiply_groups, rows, weights, offsets, transposed=transposed, by_blocks=True)
        expected = multiply_groups_reference(rows, weights, offsets, transposed=transposed)
        row = add_row(f"{name}, bfloat16", multiply, compute_distance(multiply(), expected), BF16_LIMIT)
        row.dtype = "bfloat16"
        row.set_tflops(flops)

    def add_float8_rows(name: str, rows: Tensor, matrices: tuple[Tensor, Tensor]) -> None:
        factors = *cast_rows(rows, E4M3).require_rows(), *matrices, offsets
        expected = multiply_float8_groups_reference(*factors, torch.float64)
        for tiling, precise in tilings:
            multiply = partial(multiply_float8_groups, *factors, dtype=BF16, tiling=tiling, precise=precise)
            limit = BF16_LIMIT if precise else FAST_LIMIT
            distance = compute_distance(multiply(), expected)
            row = add_row(f"{name}, {_describe_tiling(tiling, precise)}", multiply, distance, limit)
            row.set_tflops(flops)

    stack = cast_stack(weights)
    add_bf16_row("y", x, transposed=False)
    add_float8_rows("y", x, stack.require_rows())
    add_bf16_row("dx", dy, transposed=True)
    add_float8_rows("dx", dy, stack.require_columns())

    stack_error = max(
        compute_distance(dequantise(*stack.require_rows()), weights),
        compute_distance(dequantise(*stack.require_columns()), weights.transpose(1, 2)),
    )
    copy_rate = bench.facts["copy_bytes_per_s"]
    row = add_row("cast of matrices", partial(cast_stack, weights), stack_error, CAST_LIMIT)
    row.bound = weights.numel() * (2 + 2) / copy_rate  # read bfloat16, write rows and columns
    cast_error = compute_distance(dequantise(*cast_rows(dy, E4M3).require_rows()), dy)
    row = add_row("cast of dy", partial(cast_rows, dy, E4M3), cast_error, CAST_LIMIT)
    row.bound = dy.numel() * (2 + 1) / copy_rate
    activated = cast_activation("swiglu", dy)
    gate, up = dy.float().chunk(2, -1)
    activation_error = compute_distance(dequantise(*activated), torch.nn.functional.silu(gate) * up)
    row = add_row("cast of the activation of y", partial(cast_activation, "swiglu", dy), activation_error, CAST_LIMIT)
    row.bound = dy.numel() * (2 + 0.5) / copy_rate


def measure(bench: Bench, tiny: bool) -> None:
    """Measure the GEMMs of rows in bfloat16 and float8, and the casts, for each shape."""
    if bench.device.type == "cuda" and torch.cuda.get_device_capability(bench.device) < (9, 0):
        return  # kernels exist for Hopper and newer GPUs only
    for shape in TINY_SHAPES if tiny else SHAPES:
        tilings = TILINGS[:1] if tiny else TILINGS
        bench.run_guarded("float8 grouped", shape.name, partial(_measure_shape, bench, shape, tilings))
