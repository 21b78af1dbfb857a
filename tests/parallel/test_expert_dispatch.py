"""Tokens on their way to the ranks of their experts and back, between real processes: empty ways among them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megascale.parallel.collectives import Axis
from megascale.parallel.expert_dispatch import TokenDispatch
from tests.exact.conftest import pool  # noqa: F401 - a fixture

pytestmark = pytest.mark.xdist_group("processes")

TOKENS, WIDTH, TOP_K = 5, 3, 2
FIRST, COUNT = 4, 2  # experts before those of the axis, and experts of each rank
LOADS = ("mixed", "all to rank 0", "none", "only rank 1 sends")


def make_inputs(load: str, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's tokens and their experts, of which some belong to other tensor-parallel ranks."""
    generator = torch.Generator().manual_seed(rank)
    x_TC = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    experts = FIRST + size * COUNT + 2
    indices_TK = torch.rand(TOKENS, experts, generator=generator).argsort(1)[:, :TOP_K]
    if load == "all to rank 0":
        indices_TK = torch.tensor([[FIRST, FIRST + 1]] * TOKENS)
    elif load == "none" or (load == "only rank 1 sends" and rank != 1):
        indices_TK = torch.tensor([[0, experts - 1]] * TOKENS)
    return x_TC, indices_TK


def list_owners(indices_K: torch.Tensor, size: int) -> list[int]:
    """Return the ranks of the experts, one for each choice of an expert of the axis."""
    owners = [(index - FIRST) // COUNT for index in indices_K.tolist()]
    return [owner for owner in owners if 0 <= owner < size]


def send_and_return(rank: int, world: int) -> list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return for each load: choices, the received tokens and experts, and each token's sum of what ranks return."""
    axis = Axis(dist.group.WORLD, world, rank)
    results = []
    for load in LOADS:
        x_TC, indices_TK = make_inputs(load, rank, world)
        dispatch = TokenDispatch.plan(indices_TK, FIRST, COUNT, axis)
        sending_x = dispatch.send(x_TC)
        sending_indices = dispatch.send(indices_TK)
        # A result may be waited for after a later one.
        received_indices = sending_indices.wait()
        received_x = sending_x.wait()
        returning = [dispatch.return_results(received_x * (rank + 1)), dispatch.return_results(received_x)]
        scaled, plain = (pending.wait() for pending in returning)
        results.append((dispatch.choice_count, received_x, received_indices, scaled + 100 * plain))
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_reach_the_ranks_of_their_experts_and_their_sums_return(pool, size):  # noqa: F811
    for rank, results in enumerate(pool.run(send_and_return, size)):
        for load, (choices, received_x, received_indices, sums) in zip(LOADS, results, strict=True):
            inputs = [make_inputs(load, sender, size) for sender in range(size)]
            rows = []
            count = 0
            for sender_x, sender_indices in inputs:
                for token, indices_K in zip(sender_x, sender_indices, strict=True):
                    own_choices = list_owners(indices_K, size).count(rank)
                    count += own_choices
                    if own_choices:
                        rows.append((token, indices_K))
            assert choices == count, load
            assert len(received_x) == len(rows), load
            for row, (token, indices_K) in enumerate(rows):
                assert torch.equal(received_x[row], token)
                assert torch.equal(received_indices[row], indices_K)
            own_x, own_indices = inputs[rank]
            factors = [sum(owner + 101 for owner in set(list_owners(indices_K, size))) for indices_K in own_indices]
            torch.testing.assert_close(sums, own_x * torch.tensor(factors).unsqueeze(1))
