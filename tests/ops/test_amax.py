"""Memory of amaxes: zeroed, aligned for cuBLASLt, never shared, and new for each capture."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megascale.ops.amax import POOL_SIZE, AmaxPool

CPU = torch.device("cpu")


class CalledOperators(TorchDispatchMode):
    """Records the names of the torch operators that run in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def test_amaxes_are_zero_aligned_and_never_shared():
    pool = AmaxPool()
    amaxes = [pool.allocate(CPU) for _ in range(2 * POOL_SIZE + 1)]
    addresses = {amax.data_ptr() for amax in amaxes}
    assert len(addresses) == len(amaxes)
    assert all(address % 16 == 0 for address in addresses)
    for index, amax in enumerate(amaxes):
        assert amax.shape == ()
        assert amax.item() == 0
        amax.fill_(index)
    assert [amax.item() for amax in amaxes] == list(range(len(amaxes)))


def test_an_allocation_serves_many_amaxes_without_another_operator():
    pool = AmaxPool()
    pool.allocate(CPU)
    with CalledOperators() as called:
        for _ in range(POOL_SIZE - 1):
            pool.allocate(CPU)
    assert called.names == []
    with CalledOperators() as called:
        pool.allocate(CPU)
    assert "zeros" in called.names


def test_a_capture_gets_memory_of_its_own():
    pool = AmaxPool()
    earlier = pool.allocate(CPU)
    pool.renew()
    later = pool.allocate(CPU)
    assert later.untyped_storage().data_ptr() != earlier.untyped_storage().data_ptr()
