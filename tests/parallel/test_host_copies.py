"""Page-locked host memory: how long it stays locked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.optim.offload import HostMemory
from megascale.parallel.host_copies import PageLockError, page_lock

CUDA = torch.device("cuda")
ELEMENTS = 2**24  # 64 MiB, which the C library maps apart from the heap


class CudaRuntime:
    """The functions of CUDA's runtime that lock and unlock host memory."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, code: int = 0) -> None:
        self._code = code
        self.locked: list[int] = []
        self.was_mapped: list[bool] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked.append(address)
        return self._code

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        self.was_mapped.append(is_mapped(address))
        return 0


def is_mapped(address: int) -> bool:
    """Return whether this process has memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= address < stop:
            return True
    return False


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    runtime = CudaRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


@pytest.mark.parametrize("last_user", ["tensor", "view", "detached view"])
def test_memory_is_unlocked_after_its_last_user_and_before_it_is_freed(runtime: CudaRuntime, last_user: str) -> None:
    memory = torch.zeros(ELEMENTS)
    page_lock(memory, CUDA)
    users: dict[str, Any] = {"tensor": memory, "view": memory[2:], "detached view": memory[2:].detach()}
    user = users[last_user]
    del memory, users
    assert len(runtime.locked) == 1
    assert user.sum() == 0
    del user
    assert runtime.locked == []
    assert runtime.was_mapped == [True]


def test_state_of_an_optimizer_is_unlocked_with_the_last_tensor(runtime: CudaRuntime) -> None:
    """A second engine of a process may get the same addresses, which CUDA refuses to lock twice."""
    host = HostMemory(ELEMENTS, torch.float32, CUDA)
    parts = [host.allocate(ELEMENTS // 2), host.allocate(ELEMENTS // 2)]
    del host
    parts.pop()
    assert len(runtime.locked) == 1
    parts.pop()
    assert runtime.locked == []


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: CudaRuntime(code=2))
    with pytest.raises(PageLockError, match=r"cudaHostRegister of 0\.1 GiB failed with 2"):
        page_lock(torch.zeros(ELEMENTS), CUDA)
