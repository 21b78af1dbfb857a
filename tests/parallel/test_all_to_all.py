"""The all-to-all of equal parts by a collective, between real processes, and its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megascale.parallel.collectives import SINGLE_RANK, Axis, all_to_all_parts, transpose_sequence
from tests.exact.conftest import pool  # noqa: F401 - a fixture

pytestmark = pytest.mark.xdist_group("processes")

ROWS, WIDTH = 3, 5


def make_input(rank: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size * ROWS, WIDTH, generator=generator, dtype=torch.float64)


def exchange_parts(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the received parts, the gradient of their squared norm, and the parts after a second all-to-all."""
    axis = Axis(dist.group.WORLD, world, rank)
    x = make_input(rank, world).requires_grad_()
    received = transpose_sequence(x, axis)
    received.pow(2).sum().backward()
    assert x.grad is not None
    restored = all_to_all_parts(received.detach(), axis).wait()
    return received.detach(), x.grad, restored


@pytest.mark.parametrize("size", [2, 4])
def test_equal_parts_go_to_their_ranks_and_gradients_return(pool, size):  # noqa: F811
    inputs = [make_input(rank, size) for rank in range(size)]
    parts = torch.stack(inputs).view(size, size, ROWS, WIDTH)
    for rank, (received, grad, restored) in enumerate(pool.run(exchange_parts, size)):
        assert torch.equal(received, parts[:, rank].flatten(0, 1))
        assert torch.equal(grad, 2 * inputs[rank])
        assert torch.equal(restored, inputs[rank])


def test_a_single_rank_keeps_its_tensor():
    x = torch.zeros(3, 2)
    assert transpose_sequence(x, SINGLE_RANK) is x
    assert all_to_all_parts(x, SINGLE_RANK).wait() is x
