"""Grouped GEMMs in `megascale bench kernels`: experts of two models, compared with a loop and with torch's operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megascale.bench.kernel_cases import Bench, KernelRow, distance
from megascale.ops.grouped_gemm import (
    BLOCK_ROWS_TILING,
    GATHERED_TILING,
    GRADIENT_TILING,
    ROWS_TILING,
    Tiling,
    accumulate_group_gradients,
    accumulate_group_gradients_reference,
    multiply_groups,
    multiply_groups_reference,
    plan_tiles,
)

BF16 = torch.bfloat16
SPREAD = 0.3  # sizes of groups differ from their mean by up to this fraction
# Norm-wise distance from the loop: two roundings to bfloat16 (the interpreter cuts), and sums in float32.
ROUNDED, SUMMED = 8e-3, 1e-5


@dataclass(frozen=True)
class GroupedShape:
    """One matrix of a layer of experts: each token is multiplied with the matrices of `chosen` experts."""

    name: str
    tokens: int
    experts: int
    chosen: int
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
BLOCK_TILINGS = [BLOCK_ROWS_TILING, Tiling(128, 256, 64, 16, 8, 4), Tiling(128, 256, 64, 8, 8, 3)]
GRADIENT_TILINGS = [
    GRADIENT_TILING,
    Tiling(128, 128, 32, 8, 4, 4),
    Tiling(128, 128, 64, 8, 4, 3),
    Tiling(128, 128, 64, 8, 8, 4),
    Tiling(128, 256, 64, 8, 8, 3),
    Tiling(128, 256, 32, 8, 8, 5),
]


def make_group_offsets(shape: GroupedShape, device: torch.device) -> Tensor:
    """Return offsets [experts + 1] of groups whose sizes spread around their mean, the same in each run."""
    generator = torch.Generator().manual_seed(3)
    shares = 1 + SPREAD * (2 * torch.rand(shape.experts, generator=generator, dtype=torch.float64) - 1)
    rows = shape.tokens * shape.chosen
    counts = (shares / shares.sum() * rows).long().tolist()
    counts[-1] += rows - sum(counts)
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)


def _label(tiling: Tiling) -> str:
    return f"{tiling.rows} x {tiling.columns} x {tiling.inner}, {tiling.warps} warps, {tiling.stages} stages"


def _measure_shape(bench: Bench, shape: GroupedShape, tilings: list[Tiling], gradient_tilings: list[Tiling]) -> None:
    device = bench.device
    offsets = make_group_offsets(shape, device)
    rows = shape.tokens * shape.chosen
    index = torch.randint(0, shape.tokens, (rows,), device=device, dtype=torch.int32)
    x = torch.randn(shape.tokens, shape.inner, device=device).to(BF16)
    dy = torch.randn(rows, shape.columns, device=device).to(BF16)
    weights = (torch.randn(shape.experts, shape.columns, shape.inner, device=device) * shape.inner**-0.5).to(BF16)
    main_grad = torch.zeros(shape.experts, shape.columns, shape.inner, device=device)
    text = f"{rows} in {shape.experts} x {shape.columns} x {shape.inner}"
    flops = 2.0 * rows * shape.columns * shape.inner
    permuted = x[index]

    def add_row(gemm: str, function: Callable[[], Any], result: Tensor, expected: Tensor, limit: float) -> KernelRow:
        row = KernelRow(f"grouped {shape.name}: {gemm}", text, distance=distance(result, expected))
        bench.add(row, limit)
        bench.seconds(row, "fused", function)
        row.set_tflops(flops)
        return row

    expected_y = multiply_groups_reference(x, weights, offsets, index)
    expected_dx = multiply_groups_reference(dy, weights, offsets, transposed=True)
    for tiling in tilings:
        label = _label(tiling)
        tiles = plan_tiles(offsets, rows, tiling.rows)
        forward = partial(multiply_groups, x, weights, offsets, index, tiles=tiles, tiling=tiling)
        dgrad = partial(multiply_groups, dy, weights, offsets, transposed=True, tiles=tiles, tiling=tiling)
        add_row(f"y, {label}", forward, forward(), expected_y, ROUNDED)
        add_row(f"dx, {label}", dgrad, dgrad(), expected_dx, ROUNDED)
    for tiling in BLOCK_TILINGS:
        label = f"blocks of {_label(tiling)}, bands of {tiling.grouped_rows}"
        tiles = plan_tiles(offsets, rows, tiling.rows)
        blocks = partial(multiply_groups, offsets=offsets, tiles=tiles, tiling=tiling, by_blocks=True)
        forward = partial(blocks, permuted, weights)
        dgrad = partial(blocks, dy, weights, transposed=True)
        add_row(f"y of permuted rows, {label}", forward, forward(), expected_y, ROUNDED)
        add_row(f"dx, {label}", dgrad, dgrad(), expected_dx, ROUNDED)
    expected = torch.zeros_like(main_grad)
    accumulate_group_gradients_reference(expected, dy, x, offsets, index)
    for tiling in gradient_tilings:
        wgrad = partial(accumulate_group_gradients, main_grad, dy, x, offsets, index, tiling=tiling)
        main_grad.zero_()
        wgrad()
        add_row(f"dw, {_label(tiling)}", wgrad, main_grad.clone(), expected, SUMMED)
    del expected
    loop = lambda: multiply_groups_reference(x, weights, offsets, index)
    add_row("y, loop", loop, expected_y, expected_y, ROUNDED)
    grouped_mm = getattr(torch, "_grouped_mm", None)
    if device.type == "cuda" and grouped_mm is not None:
        ends = offsets[1:].contiguous()
        call = lambda: grouped_mm(permuted, weights.transpose(1, 2), offs=ends)
        add_row("y of permuted rows, torch._grouped_mm", call, call(), expected_y, ROUNDED)
        call_dx = lambda: grouped_mm(dy, weights, offs=ends)
        add_row("dx, torch._grouped_mm", call_dx, call_dx(), expected_dx, ROUNDED)


def measure(bench: Bench, tiny: bool) -> None:
    """Measure forward, gradient of the input and gradient of the matrix, for each shape and tiling."""
    for shape in TINY_SHAPES if tiny else SHAPES:
        tilings = TILINGS[:1] if tiny else TILINGS
        gradient_tilings = GRADIENT_TILINGS[:1] if tiny else GRADIENT_TILINGS
        bench.guard("grouped", shape.name, partial(_measure_shape, bench, shape, tilings, gradient_tilings))
