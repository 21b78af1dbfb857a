"""Grouped GEMMs in `megascale bench kernels`: GEMMs of experts, compared with a loop and with torch._grouped_mm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megascale.bench.kernel_rows import Bench, KernelRow, compute_distance
from megascale.ops.dispatch import use_fused
from megascale.ops.grouped_gemm import multiply_groups, multiply_groups_reference
from megascale.ops.grouped_gradients import accumulate_group_gradients, accumulate_group_gradients_reference
from megascale.ops.grouped_tiles import (
    BLOCK_ROWS_TILING,
    GATHERED_TILING,
    GRADIENT_TILING,
    ROWS_TILING,
    Tiling,
    plan_tiles,
)

BF16 = torch.bfloat16
SPREAD = 0.3  # the size of a group differs from the mean size by up to this fraction
# Limits of the norm-wise distance between kernel and loop. Both round y and dx to bfloat16. Triton's interpreter
# truncates them instead, which gives the larger distance. dw is summed in float32.
BF16_LIMIT, FLOAT32_LIMIT = 8e-3, 1e-5


@dataclass(frozen=True)
class GroupedShape:
    """A projection of a layer of experts: each token is multiplied with the matrices of `top_k` experts.

    A matrix is [columns, inner].
    """

    name: str
    tokens: int
    experts: int
    top_k: int
    inner: int
    columns: int


SHAPES = [
    GroupedShape("qwen3-30b-a3b gate + up", 16384, 128, 8, 2048, 1536),
    GroupedShape("qwen3-30b-a3b down", 16384, 128, 8, 768, 2048),
    GroupedShape("qwen3-30b-a3b, a quarter of the experts", 65536, 32, 2, 2048, 1536),
    GroupedShape("mixtral-8x7b gate + up", 8192, 8, 2, 4096, 28672),
    GroupedShape("mixtral-8x7b down", 8192, 8, 2, 14336, 4096),
]
TINY_SHAPES = [GroupedShape("tiny", 32, 4, 2, 32, 48)]
TILINGS = [ROWS_TILING, GATHERED_TILING]
BLOCK_TILINGS = [BLOCK_ROWS_TILING, Tiling(columns=256, grouped_rows=16), Tiling(columns=256, stages=3)]
GRADIENT_TILINGS = [
    GRADIENT_TILING,
    Tiling(inner=32, warps=4),
    Tiling(warps=4, stages=3),
    Tiling(),
    Tiling(columns=256, stages=3),
    Tiling(columns=256, inner=32, stages=5),
]


def make_group_offsets(shape: GroupedShape, device: torch.device) -> Tensor:
    """Return the first row of each group and the row count, int32 [experts + 1].

    Sizes of groups vary by SPREAD and are the same in each run.
    """
    generator = torch.Generator().manual_seed(3)
    weights = 1 + SPREAD * (2 * torch.rand(shape.experts, generator=generator, dtype=torch.float64) - 1)
    row_count = shape.tokens * shape.top_k
    group_sizes = (weights / weights.sum() * row_count).long().tolist()
    group_sizes[-1] += row_count - sum(group_sizes)
    return torch.tensor([0, *accumulate(group_sizes)], dtype=torch.int32, device=device)


def _describe_tiling(tiling: Tiling) -> str:
    return f"{tiling.rows} x {tiling.columns} x {tiling.inner}, {tiling.warps} warps, {tiling.stages} stages"


def _measure_shape(bench: Bench, shape: GroupedShape, tilings: list[Tiling], gradient_tilings: list[Tiling]) -> None:
    device = bench.device
    offsets = make_group_offsets(shape, device)
    row_count = shape.tokens * shape.top_k
    # The token of each row.
    index = torch.randint(0, shape.tokens, (row_count,), device=device, dtype=torch.int32)
    x = torch.randn(shape.tokens, shape.inner, device=device).to(BF16)
    dy = torch.randn(row_count, shape.columns, device=device).to(BF16)
    weights = (torch.randn(shape.experts, shape.columns, shape.inner, device=device) * shape.inner**-0.5).to(BF16)
    main_grad = torch.zeros(shape.experts, shape.columns, shape.inner, device=device)
    shape_text = f"{row_count} in {shape.experts} x {shape.columns} x {shape.inner}"
    flops = 2.0 * row_count * shape.columns * shape.inner
    permuted_x = x[index]

    def add_row(gemm: str, function: Callable[[], Any], result: Tensor, expected: Tensor, limit: float) -> KernelRow:
        row = KernelRow(f"grouped {shape.name}: {gemm}", shape_text, distance=compute_distance(result, expected))
        bench.add(row, limit)
        bench.measure_seconds(row, "fused", function)
        row.set_tflops(flops)
        return row

    expected_y = multiply_groups_reference(x, weights, offsets, index)
    expected_dx = multiply_groups_reference(dy, weights, offsets, transposed=True)

    def plan(tiling: Tiling) -> tuple[Tensor, Tensor] | None:
        """Return the tiles of a kernel, or None where the reference runs."""
        if not use_fused("grouped GEMM", x):
            return None
        return plan_tiles(offsets, row_count, tiling.rows)

    for tiling in tilings:
        label = _describe_tiling(tiling)
        tiles = plan(tiling)
        forward = partial(multiply_groups, x, weights, offsets, index, tiles=tiles, tiling=tiling)
        dgrad = partial(multiply_groups, dy, weights, offsets, transposed=True, tiles=tiles, tiling=tiling)
        add_row(f"y, {label}", forward, forward(), expected_y, BF16_LIMIT)
        add_row(f"dx, {label}", dgrad, dgrad(), expected_dx, BF16_LIMIT)
    for tiling in BLOCK_TILINGS:
        label = f"blocks of {_describe_tiling(tiling)}, bands of {tiling.grouped_rows}"  # band: row tiles that share L2
        tiles = plan(tiling)
        blocks = partial(multiply_groups, offsets=offsets, tiles=tiles, tiling=tiling, by_blocks=True)
        forward = partial(blocks, permuted_x, weights)
        dgrad = partial(blocks, dy, weights, transposed=True)
        add_row(f"y of permuted rows, {label}", forward, forward(), expected_y, BF16_LIMIT)
        add_row(f"dx, {label}", dgrad, dgrad(), expected_dx, BF16_LIMIT)
    expected = torch.zeros_like(main_grad)
    accumulate_group_gradients_reference(expected, dy, x, offsets, index)
    for tiling in gradient_tilings:
        wgrad = partial(accumulate_group_gradients, main_grad, dy, x, offsets, index, tiling=tiling)
        main_grad.zero_()
        wgrad()
        add_row(f"dw, {_describe_tiling(tiling)}", wgrad, main_grad.clone(), expected, FLOAT32_LIMIT)
    del expected
    run_loop = lambda: multiply_groups_reference(x, weights, offsets, index)
    add_row("y, loop", run_loop, expected_y, expected_y, BF16_LIMIT)
    grouped_mm = getattr(torch, "_grouped_mm", None)
    if device.type == "cuda" and grouped_mm is not None:
        ends = offsets[1:].contiguous()
        torch_forward = lambda: grouped_mm(permuted_x, weights.transpose(1, 2), offs=ends)
        add_row("y of permuted rows, torch._grouped_mm", torch_forward, torch_forward(), expected_y, BF16_LIMIT)
        torch_dgrad = lambda: grouped_mm(dy, weights, offs=ends)
        add_row("dx, torch._grouped_mm", torch_dgrad, torch_dgrad(), expected_dx, BF16_LIMIT)


def measure(bench: Bench, tiny: bool) -> None:
    """Measure the forward GEMM and the gradients of input and weights, for each shape and tiling."""
    for shape in TINY_SHAPES if tiny else SHAPES:
        tilings = TILINGS[:1] if tiny else TILINGS
        gradient_tilings = GRADIENT_TILINGS[:1] if tiny else GRADIENT_TILINGS
        bench.run_guarded("grouped", shape.name, partial(_measure_shape, bench, shape, tilings, gradient_tilings))
