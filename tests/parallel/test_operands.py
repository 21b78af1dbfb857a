"""Operands whose rows have scales: they arrive with their scales, by an exchange and by collectives."""

from __future__ import annotations

import random

import pytest
import torch

from megascale.ops.linear import Operand
from megascale.parallel.collectives import Axis
from megascale.parallel.tensor import _exchange_and_consume
from tests.parallel.test_exchange import SHAPE, exchanges_of, run


def random_operand(rank: int, scales: int) -> Operand:
    """A shard of SHAPE, with so many scales per row; 0: one scale."""
    generator = torch.Generator().manual_seed(rank)
    data = torch.randint(0, 255, SHAPE, generator=generator).to(torch.uint8)
    if not scales:
        return Operand(data, torch.tensor(0.5))
    return Operand(data, torch.rand(SHAPE[0], scales, generator=generator))


@pytest.mark.parametrize("on_side_stream", [False, True])
@pytest.mark.parametrize("scales", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_consumed_with_their_own_scales_in_every_order_of_queues(size, scales, on_side_stream):
    for seed in range(12):
        devices, exchanges = exchanges_of(size, on_side_stream)
        shards = [random_operand(rank, scales) for rank in range(size)]
        consumed: list[dict[int, Operand]] = [{} for _ in range(size)]
        gathered = []
        for rank, exchange in enumerate(exchanges):

            def consume(x: Operand, source: int, shards_of_rank: dict[int, Operand] = consumed[rank]) -> None:
                assert x.scale is not None
                shards_of_rank[source] = Operand(x.data.clone(), x.scale.clone())

            axis = Axis(None, size, rank, exchange=exchange)
            gathered.append(_exchange_and_consume(shards[rank], axis, consume, keep_local=True))
        run(devices, random.Random(seed))
        for rank in range(size):
            for source, shard in enumerate(shards):
                assert torch.equal(consumed[rank][source].data, shard.data)
                assert torch.equal(consumed[rank][source].scale, shard.scale)
            assert torch.equal(gathered[rank].data, torch.cat([shard.data for shard in shards]))
            if scales:
                assert torch.equal(gathered[rank].scale, torch.cat([shard.scale for shard in shards]))


def test_rows_are_selected_with_their_scales():
    data, scales = torch.arange(12).view(6, 2), torch.arange(6.0).view(6, 1)
    part = Operand(data, scales).select_rows(2, 4)
    assert torch.equal(part.data, data[2:4])
    assert torch.equal(part.scale, scales[2:4])
    scale = torch.tensor(3.0)
    assert Operand(data, scale).select_rows(2, 4).scale is scale
