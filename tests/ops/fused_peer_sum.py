"""Sums over ranks through Triton's interpreter: the bits of additions one after another, in the order of ranks."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import pytest
import torch

from megascale.ops import dispatch
from megascale.ops.peer_max import RELEASED
from megascale.ops.peer_sum import BLOCK, MAX_RANKS, PARTS_BLOCK_BYTES, PeerSum, sum_over_peers, sum_parts


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("count", [5, BLOCK, 2 * BLOCK + 3])
def test_parts_are_added_in_the_order_of_ranks(ranks, count):
    generator = torch.Generator().manual_seed(count)
    parts = torch.randn(ranks, count, generator=generator) * 10.0 ** torch.arange(ranks)[:, None]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    for rank in range(ranks):
        staging = torch.full((ranks - 1, count + 7), float("nan"))
        staging[:, :count] = torch.cat((parts[:rank], parts[rank + 1 :]))
        for mode in ("fused", "reference"):
            own = parts[rank].clone()
            with dispatch.Kernels(mode).as_current():
                out = torch.ones(count)
                sum_over_peers(own, staging, rank, out, accumulate=True)
                assert torch.equal(own, parts[rank])
                sum_over_peers(own, staging, rank, own)
            assert torch.equal(own, expected)
            assert torch.equal(out, expected + 1)


def test_narrower_parts_are_added_in_the_wider_type():
    generator = torch.Generator().manual_seed(0)
    local = torch.randn(BLOCK + 5, generator=generator)
    received = torch.randn(3, BLOCK + 8, generator=generator).bfloat16()
    wide = received[:, : len(local)].float()
    expected = wide[0] + local + wide[1] + wide[2]
    for mode in ("fused", "reference"):
        total = local.clone()
        with dispatch.Kernels(mode).as_current():
            sum_over_peers(total, received, 1, total)
        assert torch.equal(total, expected)


def test_sums_of_narrow_parts_are_rounded_once():
    local = torch.tensor([256.0]).bfloat16()
    received = torch.tensor([[1.0], [1.0]]).bfloat16()  # 257 is no bfloat16, and 258 is
    for mode in ("fused", "reference"):
        out = torch.zeros_like(local)
        with dispatch.Kernels(mode).as_current():
            sum_over_peers(local, received, 0, out)
        assert out.item() == 258.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_sums_of_parts_have_the_bits_of_sums_over_peers(dtype, ranks, blocks):
    """Two programs take the blocks in turn, and the last block is not full."""
    count = blocks * PARTS_BLOCK_BYTES // 8 // dtype.itemsize + 5
    generator = torch.Generator().manual_seed(count)
    parts = (torch.randn(ranks, count, generator=generator) * 10.0 ** torch.arange(ranks)[:, None]).to(dtype)
    for mode in ("fused", "reference"):
        with dispatch.Kernels(mode).as_current():
            expected, out = torch.ones(2, count, dtype=dtype)
            sum_over_peers(parts[0], parts[1:], 0, expected)
            sum_parts(list(parts), out, programs=2)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("ranks", [1, MAX_RANKS + 1])
def test_other_numbers_of_parts_are_refused(ranks):
    with pytest.raises(ValueError, match=f"2 to 8 parts, not {ranks}"):
        sum_parts([torch.zeros(4)] * ranks, torch.zeros(4), programs=2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sum_signals_its_peers_and_awaits_them(ranks):
    words = [torch.zeros(ranks, dtype=torch.int64) for _ in range(ranks)]
    sums = [PeerSum(rank, words, programs=2) for rank in range(ranks)]
    count = 3 * PARTS_BLOCK_BYTES // 8 // 4 + 5
    for call in (1, 2, 3):
        parts = torch.randn(ranks, count, generator=torch.Generator().manual_seed(call))
        expected, out = torch.empty(2, count)
        sum_over_peers(parts[0], parts[1:], 0, expected)
        for rank in range(ranks):
            for peer in range(ranks):
                if peer != rank:
                    words[rank][peer] = call  # as if all peers had begun the call
            sums[rank](list(parts), out, lambda launch: launch())
            assert torch.equal(out, expected)
            for peer in range(ranks):
                assert words[peer][rank] == (0 if peer == rank else call)


def test_released_words_end_a_sum_that_awaits_a_dead_peer():
    words = [torch.full((2,), RELEASED), torch.zeros(2, dtype=torch.int64)]
    peer_sum = PeerSum(0, words, programs=2)
    for _ in range(3):  # later calls end as well
        peer_sum([torch.ones(8), torch.ones(8)], torch.empty(8), lambda launch: launch())
