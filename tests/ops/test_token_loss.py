"""Reductions over whole rows of logits, cut over ranks: values and gradients are those of the whole row."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from megascale.ops.token_loss import TokenLogits

TOKENS, COLUMNS = 5, 8


class Ranks:
    """All-reduces between threads, a thread per rank."""

    def __init__(self, size: int) -> None:
        self._barrier = Barrier(size, timeout=30.0)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size

    def all_reduce(self, rank: int, tensor: torch.Tensor, is_max: bool) -> None:
        self._parts[rank] = tensor.detach().clone()
        self._barrier.wait()
        stacked = torch.stack(self._parts)
        tensor.copy_(stacked.amax(0) if is_max else stacked.sum(0))
        self._barrier.wait()


def compute(logits: TokenLogits) -> tuple[torch.Tensor, ...]:
    return logits.log_sum_exp(), logits.target_logits(), logits.sum(logits.values**3)


def reference(row: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return row.logsumexp(-1), row.gather(-1, targets[:, None])[:, 0], (row**3).sum(-1)


@pytest.mark.parametrize("cuts", [[8], [3, 5], [1, 6, 1], [8, 0]])
def test_values_and_gradients_of_cut_rows(cuts):
    """Each rank has some columns, one perhaps none; logits of 1e3 would overflow without the maximum of the row."""
    generator = torch.Generator().manual_seed(1)
    full_logits = torch.randn(TOKENS, COLUMNS, dtype=torch.float64, generator=generator)
    full_logits[1] += 1000
    full_logits[2, 4] -= 1000
    targets = torch.tensor([0, 7, 3, 2, 5])
    upstream = torch.randn(3, TOKENS, dtype=torch.float64, generator=generator)
    ranks = Ranks(len(cuts))

    def run(rank: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        start = sum(cuts[:rank])
        values = full_logits[:, start : start + cuts[rank]].clone().requires_grad_()
        if len(cuts) == 1:
            logits = TokenLogits(values, targets)
        else:
            reduce_max = lambda tensor: ranks.all_reduce(rank, tensor, True)
            reduce_sum = lambda tensor: ranks.all_reduce(rank, tensor, False)
            logits = TokenLogits(values, targets, start, reduce_max, reduce_sum)
        results = compute(logits)
        (gradient,) = torch.autograd.grad(results, values, list(upstream))
        return results, gradient

    with ThreadPoolExecutor(len(cuts)) as pool:
        outcomes = list(pool.map(run, range(len(cuts))))
    row = full_logits.clone().requires_grad_()
    expected = reference(row, targets)
    (expected_gradient,) = torch.autograd.grad(expected, row, list(upstream))
    for results, _ in outcomes:
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in outcomes], 1), expected_gradient)
