"""Numbers of the rendezvous of GPU memory: ranks that are behind catch up, and others end with an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megascale import torch_private
from megascale.errors import TrainingError
from megascale.parallel import rendezvous_numbers
from megascale.parallel.rendezvous_numbers import align_rendezvous, catch_up, meet_itself

CPU = torch.device("cpu")


class RankCounter:
    """The number of a rank's next rendezvous, which each rendezvous with itself increases by `step`."""

    def __init__(self, number: int, step: int = 1) -> None:
        self.number = number
        self._step = step

    def meet(self) -> int:
        self.number += self._step
        return self.number


def run_ranks(counters: Sequence[RankCounter]) -> list[int | str]:
    """Let all ranks catch up, each in a thread, and return the calls or the error of each rank."""
    values = [0] * len(counters)
    results: list[int | str] = [""] * len(counters)
    barrier = threading.Barrier(len(counters))

    def run(rank: int) -> None:
        def all_gather(value: int) -> list[int]:
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        try:
            results[rank] = catch_up(all_gather, counters[rank].meet)
        except TrainingError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(counters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@given(st.lists(st.integers(0, 60), min_size=2, max_size=5))
def test_all_ranks_have_the_same_number_afterwards(numbers: list[int]) -> None:
    counters = [RankCounter(number) for number in numbers]
    assert run_ranks(counters) == [1 + max(numbers) - number for number in numbers]
    assert {counter.number for counter in counters} == {1 + max(numbers)}


def test_all_ranks_end_if_one_cannot_reach_the_number() -> None:
    errors = run_ranks([RankCounter(0, step=2), RankCounter(4), RankCounter(3)])
    for error in errors:
        assert isinstance(error, str)
        assert "different numbers on different ranks: 5, 6; new processes begin at 0" in error


def test_ranks_without_rendezvous_meet_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_numbers, "_call_count", 0)
    assert align_rendezvous(lambda number: [number, number], CPU) == 0  # CPU memory is not symmetric


@pytest.fixture
def rendezvous_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Replace torch's rendezvous, which needs a GPU, by its store calls: two keys per rendezvous, numbered."""
    next_number = 7

    class Memory:
        @staticmethod
        def rendezvous(memory: torch.Tensor, name: str) -> None:
            nonlocal next_number
            group = torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
            assert (group.rank(), group.size()) == (0, 1)
            for _ in range(keys_per_call):
                dist.PrefixStore("", stores[-1]).set(f"CUDASymmetricMemory/{next_number}/0", "x")
                next_number += 1

    class Module:
        _SymmetricMemory = Memory

        @staticmethod
        def empty(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

    keys_per_call = 1
    stores: list[dist.Store] = []
    recorder = rendezvous_numbers._KeyRecorder

    def make_recorder() -> dist.Store:
        stores.append(recorder())
        return stores[-1]

    def set_keys(count: int) -> None:
        nonlocal keys_per_call
        keys_per_call = count

    monkeypatch.setitem(vars(torch_private), "symmetric_memory", Module)
    monkeypatch.setattr(rendezvous_numbers, "_KeyRecorder", make_recorder)
    return set_keys


def test_the_next_number_comes_from_the_keys_of_the_store(rendezvous_calls: Callable[[int], None]) -> None:
    assert [meet_itself(CPU) for _ in range(3)] == [8, 9, 10]
    rendezvous_calls(2)  # as with multicast
    assert meet_itself(CPU) == 12
    rendezvous_calls(0)  # a release of torch that meets in another way
    assert meet_itself(CPU) == 0


def test_ranks_with_equal_calls_compare_the_numbers_of_torch(
    rendezvous_calls: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed peer may have interrupted the last call of this rank before torch counted it."""
    monkeypatch.setattr(rendezvous_numbers, "_call_count", 3)
    gathered = iter([[3, 3], [8, 10], [10, 10]])
    assert align_rendezvous(lambda number: next(gathered), CPU) == 3
