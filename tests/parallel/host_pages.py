"""Memory of the host in pages that are mapped at several addresses, in place of a GPU's."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import torch

from megascale.parallel.collectives import Axis
from megascale.parallel.device_pages import SharedBlock

_FIXED = 0x10  # MAP_FIXED
_FAILED = ctypes.c_void_p(-1).value


class HostPages:
    """Pages of anonymous files, see `Pages`.

    Args:
        lead_bytes: bytes at the start of each shared block that are not available, as in torch from 2.12 on.

    Attributes:
        open_files, ranges: files and ranges of addresses that are in use.
        mapped: number of mappings that are in use.
    """

    def __init__(self, axis: Axis, lead_bytes: int = 0) -> None:
        self.page_bytes = mmap.PAGESIZE
        self.lead_bytes = lead_bytes
        self.open_files: set[int] = set()
        self.ranges: set[tuple[int, int]] = set()
        self.mapped: set[tuple[int, int]] = set()
        self._axis = axis
        self._library = ctypes.CDLL(None, use_errno=True)
        self._library.mmap.restype = ctypes.c_void_p
        self._library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def allocate_shared(self, nbytes: int) -> SharedBlock:
        """Return memory of this rank; the last page of a block is a trailer, like torch's signals."""
        total_bytes = (self.lead_bytes + nbytes + 2 * self.page_bytes - 1) // self.page_bytes * self.page_bytes
        handle = self.allocate(total_bytes, like=0)
        address = self._map(0, total_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, handle)
        memory = self.view(address, total_bytes, None)
        return SharedBlock(memory[self.lead_bytes : self.lead_bytes + nbytes], handle, total_bytes)

    def open_peers(self, block: SharedBlock) -> list[torch.Tensor]:
        """Return this rank's memory. The counterparts of other ranks have undefined values."""
        memory = [torch.full_like(block.memory, 255) for _ in range(self._axis.size)]
        memory[self._axis.rank] = block.memory
        return memory

    def allocate(self, nbytes: int, like: int) -> int:
        handle = os.memfd_create("pages")
        os.ftruncate(handle, nbytes)
        self.open_files.add(handle)
        return handle

    def reserve(self, nbytes: int) -> int:
        address = self._map(0, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.ranges.add((address, nbytes))
        return address

    def map(self, address: int, nbytes: int, handle: int) -> None:
        assert os.fstat(handle).st_size == nbytes, "a driver maps memory as a whole"
        assert address % self.page_bytes == 0
        assert any(start <= address and address + nbytes <= start + size for start, size in self.ranges)
        for start, size in self.mapped:
            assert address + nbytes <= start or start + size <= address, "a driver maps an address once"
        self._map(address, nbytes, 0, mmap.MAP_SHARED | _FIXED, handle)
        self.mapped.add((address, nbytes))

    def allow_access(self, address: int, nbytes: int) -> None:
        mapped_bytes = sum(size for start, size in self.mapped if address <= start < address + nbytes)
        assert mapped_bytes == nbytes, "a driver sets the access of mapped memory only"
        self._library.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE)

    def view(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        array = (ctypes.c_uint8 * nbytes).from_address(address)
        array.owner = owner
        return torch.frombuffer(array, dtype=torch.uint8)

    def unmap(self, address: int, nbytes: int) -> None:
        self.mapped.remove((address, nbytes))

    def free(self, address: int, nbytes: int) -> None:
        self.ranges.remove((address, nbytes))
        assert not self._library.munmap(address, nbytes)

    def release(self, handle: int) -> None:
        self.open_files.remove(handle)
        os.close(handle)

    def synchronize(self) -> None:
        """Do nothing: the host's operations have ended."""

    def _map(self, address: int, nbytes: int, protection: int, flags: int, handle: int) -> int:
        result = self._library.mmap(address, nbytes, protection, flags, handle, 0)
        assert result != _FAILED, os.strerror(ctypes.get_errno())
        return int(result)
