"""Shards of the flat buffers: together the data-parallel ranks own every element of every logical tensor once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config import from_tree
from megascale.model.transformer import Chunk
from megascale.parallel.buffers import Axes, FlatChunk, extent_boxes
from megascale.parallel.collectives import Axis


def chunk(tensor: Axis, **options) -> Chunk:
    model = {"hidden": 12, "heads": 4, "layers": 2, "sequence_length": 8, "vocab_size": 21, "vocab_multiple": 8}
    config = from_tree({"model": {**model, **options}}).model
    return Chunk(config, range(2), first=True, last=True, axis=tensor, dtype=torch.float64)


@given(
    st.integers(1, 5),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 2]),
    st.one_of(st.none(), st.integers(1, 3000)),
    st.sampled_from(["serial", "parallel"]),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_element_is_owned_once(data, tensor, zero, bucket, block, tied):
    owned: dict[str, np.ndarray] = {}
    for t in range(tensor):
        for d in range(data):
            module = chunk(Axis(None, tensor, t), block=block, tied_embeddings=tied)
            axes = Axes(data=Axis(None, data, d), tensor=Axis(None, tensor, t))
            flat = FlatChunk(module, torch.device("cpu"), axes, zero, bucket)
            for shard in flat.shards:
                assert shard.params.shape == shard.grads.shape
                assert shard.params.is_contiguous()
                edges = [edge for e in shard.extents for edge in (e.start, e.stop)]
                assert edges == sorted(edges)
                for extent in shard.extents:
                    # Replicas all own what they hold; it counts on the first of them only.
                    if (extent.spec.shared and t > 0) or (zero == 0 and d > 0):
                        continue
                    for piece, offsets, view in extent_boxes(extent, shard.params):
                        whole = owned.setdefault(piece.name, np.zeros(piece.shape, int))
                        whole[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))] += 1
    for name, count in owned.items():
        assert (count == 1).all(), name


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parameters_and_gradients_are_views_of_the_buffers(zero):
    """What a shard updates is what the next forward reads, and what backward writes is what a shard sees."""
    module = chunk(Axis())
    flat = FlatChunk(module, torch.device("cpu"), zero=zero, bucket_elements=500)
    for shard in flat.shards:
        for extent in shard.extents:
            shard.params[extent.start : extent.stop] = 7.0
    for p in module.parameters():
        real = sum(piece.box.count for piece in p.spec.pieces)
        assert (p.view(-1)[:real] == 7.0).all()
        assert (p.view(-1)[real:] == 0.0).all()
        p.main_grad.fill_(3.0)
    for shard in flat.shards:
        for extent in shard.extents:
            assert (shard.grads[extent.start : extent.stop] == 3.0).all()
