"""Memory of rounded reductions: what is received lies apart from what is kept, and in the buffer where it fits."""

from __future__ import annotations

import pytest
import torch

from megascale.parallel.collectives import Axis, _receive_buffer


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
def test_received_parts_never_lie_on_the_slice_that_is_kept(size, wide, narrow):
    shard = 6
    buffer = torch.arange(size * shard, dtype=wide)
    half = buffer.nbytes // 2
    for rank in range(size):
        part = buffer.view(size, -1)[rank]
        before = part.clone()
        received = _receive_buffer(buffer, Axis(size=size, rank=rank), narrow)
        assert (received.numel(), received.dtype) == (buffer.numel(), narrow)
        shares_memory = received.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        first, stop = rank * part.nbytes, (rank + 1) * part.nbytes
        fits = received.nbytes == half and (stop <= half or first >= half)
        assert shares_memory == fits
        received.fill_(-1)
        assert torch.equal(part, before)
