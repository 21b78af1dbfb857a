"""Measurements of the optimizers' kernels by `megascale bench kernels`: AdamW, LAMB and the norm on a flat shard."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.bench.kernel_rows import FLOAT32_TOLERANCE, Bench, KernelRow, compute_distance
from megascale.ops.adam import adamw_apply, adamw_apply_reference
from megascale.ops.lamb import lamb_apply, lamb_direction, lamb_direction_reference
from megascale.ops.segments import Segments

_CHECKED_ELEMENTS = 20_000  # elements of the shard that is compared with float64


def measure_optimizers(bench: Bench) -> None:
    """Measure AdamW, both LAMB passes and the norm on a flat shard."""
    device, n = bench.device, bench.sizes.elements
    rate = bench.facts["copy_bytes_per_s"]
    # Four tensors of different sizes; the second has no weight decay.
    edges = [0, n // 2, n // 2 + n // 64, n - n // 4, n]
    ranges = []  # start, stop, whether weight decay applies, tensor index
    for tensor_index, (start, stop) in enumerate(itertools.pairwise(edges)):
        ranges.append((start, stop, tensor_index != 1, tensor_index))
    segments = Segments(ranges, 4, device)
    adam: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "segments": segments}
    adam |= {"grad_scale": torch.tensor(0.5, device=device), "skip": torch.tensor(False, device=device), "step": 3}

    adamw_distance, lamb_distance = _measure_distances(adam, device)

    w, m, v, grad = _draw_state(n, torch.float32, device)
    out = torch.empty(n, dtype=torch.bfloat16, device=device)
    shape = f"{n >> 20} Mi" if n >= 1 << 20 else str(n)

    def add_row(op: str, float32_arrays: int, bfloat16_arrays: int, distance: float | None = None) -> KernelRow:
        """Add a row whose bound counts arrays that are read or written once."""
        bound = (4 * float32_arrays + 2 * bfloat16_arrays) * n / rate
        row = KernelRow(op, shape, "float32", distance=distance, bound=bound)
        bench.add(row, FLOAT32_TOLERANCE)
        return row

    # AdamW reads weights, both moments and the gradient. It writes weights, moments and the weights' bfloat16 copy.
    adamw_row = add_row("adamw", 7, 1, adamw_distance)
    bench.measure_seconds(adamw_row, "fused", lambda: adamw_apply(w, m, v, grad, out, lr=1e-6, **adam))
    bench.measure_seconds(adamw_row, "eager", lambda: adamw_apply_reference(w, m, v, grad, out, lr=1e-6, **adam))
    if device.type == "cuda":
        torch_row = KernelRow("adamw by torch (fused) + copy to bf16", shape, "float32")
        bench.rows.append(torch_row)
        bench.measure_seconds(torch_row, "eager", _make_torch_adamw(w, m, v, grad=grad, out=out))
    # The direction reads weights, both moments and the gradient. It writes the moments and, over the gradient, itself.
    direction_row = add_row("lamb, direction", 7, 0, lamb_distance)
    bench.measure_seconds(direction_row, "fused", lambda: lamb_direction(w, m, v, grad, grad, **adam))
    norm_sums = torch.ones(2, 4, dtype=torch.float64, device=device)  # squared norms of weights and directions
    trust: dict[str, Any] = {"lr": 1e-9, "trust_min": 0.0, "trust_max": 10.0, "segments": segments}
    # The application reads weights and direction. It writes weights and their bfloat16 copy.
    apply_row = add_row("lamb, apply", 3, 1)
    bench.measure_seconds(apply_row, "fused", lambda: lamb_apply(w, grad, out, norm_sums, **trust))


def _draw_state(element_count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return random weights, first and second moments, and gradients."""
    generator = torch.Generator(device).manual_seed(3)
    w, m, grad = (torch.randn(element_count, device=device, generator=generator) for _ in range(3))
    return [t.to(dtype) for t in (w, 0.1 * m, m.square() + 0.01, grad)]


def _measure_distances(adam: dict[str, Any], device: torch.device) -> tuple[float, float]:
    """Return the largest norm-wise distances of AdamW and of LAMB's direction from float64, on a small shard.

    Args:
        adam: keyword arguments of both operators; their segments are replaced.
    """
    # Two tensors with an element of padding in between; the second has no weight decay.
    segments = Segments([(0, 5000, True, 0), (5001, _CHECKED_ELEMENTS, False, 1)], 2, device)
    small_adam = adam | {"segments": segments}
    w, m, v, grad = _draw_state(_CHECKED_ELEMENTS, torch.float32, device)
    w64, m64, v64, grad64 = _draw_state(_CHECKED_ELEMENTS, torch.float64, device)
    adamw_apply(w, m, v, grad, None, lr=0.1, **small_adam)
    adamw_apply_reference(w64, m64, v64, grad64, None, lr=0.1, **small_adam)
    pairs = [(w, w64), (m, m64), (v, v64), (grad, grad64)]
    adamw_distance = max(compute_distance(value, exact) for value, exact in pairs)
    square_sums32 = lamb_direction(w, m, v, grad, grad, **small_adam)
    square_sums64 = lamb_direction_reference(w64, m64, v64, grad64, grad64, **small_adam)
    lamb_distance = max(compute_distance(square_sums32, square_sums64), compute_distance(grad, grad64))
    return adamw_distance, lamb_distance


def _make_torch_adamw(w: Tensor, m: Tensor, v: Tensor, *, grad: Tensor, out: Tensor) -> Callable[[], None]:
    """Return a function that runs torch's fused AdamW and copies the weights to `out`."""
    step = torch.tensor(3.0, device=w.device)

    def run_torch_adamw() -> None:
        torch_private.fused_adamw_(
            [w],
            [grad],
            [m],
            [v],
            [],
            [step],
            lr=1e-6,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        out.copy_(w)

    return run_torch_adamw
