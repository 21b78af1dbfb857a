"""Shared by the operator tests: forward and gradients of a fused operator against its float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Norm-wise. Triton's interpreter truncates to bfloat16 where hardware rounds: twice the error of 2^-9 / sqrt(3).
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}


def distance(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    difference = (value.double() - reference.double()).norm().item()
    return difference / max(reference.double().norm().item(), 1e-30) if difference else 0.0


def compare(
    fused: Callable[..., Tensor], reference: Callable[..., Tensor], tensors: Sequence[Tensor | None], tolerance: float
) -> None:
    """Assert that outputs and all gradients agree, with the reference run in float64 on the same numbers."""

    def run(function: Callable[..., Tensor], inputs: list[Tensor | None], upstream: Tensor) -> list[Tensor]:
        y = function(*inputs)
        expected = [t for t in inputs if t is not None]
        return [y] + list(torch.autograd.grad(y, expected, upstream.to(y.dtype)))

    supplied = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    shape = reference(*wide).shape
    first = next(t for t in tensors if t is not None)
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(first.dtype)
    for i, (a, b) in enumerate(
        zip(run(fused, supplied, upstream), run(reference, wide, upstream.double()), strict=True)
    ):
        assert a.shape == b.shape
        assert distance(a, b) <= tolerance, f"{'output' if i == 0 else f'gradient {i}'}: {distance(a, b):.2e}"
