"""The largest of one number over ranks, each rank's kernel interpreted in turn: what others write is there before."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import pytest
import torch

from megascale.ops.peer_max import RELEASED, WORD_BYTES, PeerMax


def word(call: int, value: float) -> int:
    """Return the value that a rank writes to its peers."""
    return call << 32 | int(torch.tensor(value).view(torch.int32))


@pytest.mark.parametrize("size", [2, 4])
def test_the_largest_of_all_ranks(size):
    memory = [torch.zeros(PeerMax.count_memory_bytes(size) // WORD_BYTES, dtype=torch.int64) for _ in range(size)]
    ranks = [PeerMax(rank, memory) for rank in range(size)]
    values = [[0.0, 3.5, 1e30][(rank + 1) % 3] + rank for rank in range(size)]
    for call in (1, 2, 3):
        turn, report = call % 2 * size, [value * call for value in values]
        result = []
        for rank in range(size):
            before = memory[rank].clone()
            for peer in range(size):  # as if all others had come first
                if peer != rank:
                    memory[rank][turn + peer] = word(call, report[peer])
            x = torch.tensor(report[rank])
            assert ranks[rank](x) is x
            result.append(float(x))
            for peer in range(size):
                if peer != rank:
                    assert memory[peer][turn + rank] == word(call, report[rank])
            second = slice(size, None) if turn == 0 else slice(0, size)
            assert torch.equal(memory[rank][second], before[second])  # the words of the call before may still be read
        assert result == [float(torch.tensor(max(report)))] * size


def test_not_a_number_is_the_largest():
    memory = [torch.zeros(PeerMax.count_memory_bytes(2) // WORD_BYTES, dtype=torch.int64) for _ in range(2)]
    memory[0][2 + 1] = word(1, float("nan"))
    assert PeerMax(0, memory)(torch.tensor(7.0)).isnan()


def test_released_words_end_the_wait_for_a_dead_peer():
    memory = [torch.zeros(PeerMax.count_memory_bytes(2) // WORD_BYTES, dtype=torch.int64) for _ in range(2)]
    memory[0].fill_(RELEASED)
    for _ in range(3):  # later calls end as well
        assert PeerMax(0, memory)(torch.tensor(7.0)).isnan()


def test_what_it_does_not_take():
    single = PeerMax(0, [torch.zeros(4, dtype=torch.int64) for _ in range(2)])
    with pytest.raises(ValueError, match="takes one float32 number"):
        single(torch.zeros(2))
    with pytest.raises(ValueError, match="float64"):
        single(torch.zeros((), dtype=torch.float64))
