"""Memory of a GPU in pages that are mapped at several addresses (CUDA's virtual memory management)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from megascale import torch_private
from megascale.parallel import rendezvous_numbers
from megascale.parallel.collectives import Axis

_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED


class SharedBlock(NamedTuple):
    """Memory of this rank that peers can read.

    Attributes:
        memory: its available bytes, uint8.
        handle: the driver's handle of the complete block.
        nbytes: bytes of the complete block.
    """

    memory: torch.Tensor
    handle: int
    nbytes: int


class Pages(Protocol):
    """Memory that can be mapped in pages.

    Attributes:
        page_bytes: bytes of a page.
        lead_bytes: first bytes of a shared block that are not available.
    """

    page_bytes: int
    lead_bytes: int

    def allocate_shared(self, nbytes: int) -> SharedBlock:
        """Return memory with `nbytes` available bytes. All ranks must allocate the same blocks in the same order."""
        ...

    def open_peers(self, block: SharedBlock) -> list[torch.Tensor]:
        """Return the available bytes of every rank's block. Collective over the axis."""
        ...

    def allocate(self, nbytes: int, like: int) -> int:
        """Return the handle of new memory with the properties of the memory with handle `like`."""
        ...

    def reserve(self, nbytes: int) -> int:
        """Return the first address of a range without memory."""
        ...

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map the complete memory of a handle at an address."""
        ...

    def allow_access(self, address: int, nbytes: int) -> None:
        """Allow reads and writes of mapped memory."""
        ...

    def view(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        """Return mapped memory as uint8. The tensor's storage keeps `owner` alive."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap memory."""
        ...

    def free(self, address: int, nbytes: int) -> None:
        """Free a range of addresses."""
        ...

    def release(self, handle: int) -> None:
        """Release a handle. Its memory is freed when it has no handle and no mapping."""
        ...

    def synchronize(self) -> None:
        """Wait until the device no longer uses any memory."""
        ...


def make_pages(axis: Axis, device: torch.device) -> Pages:
    """Return the pages of a device. Raises RuntimeError, OSError or AttributeError if the driver has none."""
    return DevicePages(axis, device)


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; the eight bytes of its last member are not divided."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_data", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


_POINTER = ctypes.POINTER
_u64 = ctypes.c_uint64
_CALLS: dict[str, list[Any]] = {
    "cuMemGetAddressRange_v2": [_POINTER(_u64), _POINTER(ctypes.c_size_t), _u64],
    "cuMemRetainAllocationHandle": [_POINTER(_u64), ctypes.c_void_p],
    "cuMemGetAllocationPropertiesFromHandle": [_POINTER(_Properties), _u64],
    "cuMemGetAllocationGranularity": [_POINTER(ctypes.c_size_t), _POINTER(_Properties), ctypes.c_int],
    "cuMemCreate": [_POINTER(_u64), ctypes.c_size_t, _POINTER(_Properties), _u64],
    "cuMemAddressReserve": [_POINTER(_u64), ctypes.c_size_t, ctypes.c_size_t, _u64, _u64],
    "cuMemMap": [_u64, ctypes.c_size_t, ctypes.c_size_t, _u64, _u64],
    "cuMemSetAccess": [_u64, ctypes.c_size_t, _POINTER(_Access), ctypes.c_size_t],
    "cuMemUnmap": [_u64, ctypes.c_size_t],
    "cuMemAddressFree": [_u64, ctypes.c_size_t],
    "cuMemRelease": [_u64],
    "cuGetErrorName": [ctypes.c_int, _POINTER(ctypes.c_char_p)],
}


class _Range:
    """A range of addresses that torch reads as a tensor.

    Args:
        owner: an object that must live as long as tensors of the range.
    """

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


class DevicePages:
    """Pages of a GPU, see `Pages`. Shared blocks are torch's symmetric memory.

    Every method raises RuntimeError with the function of the driver, its arguments and the error's name.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis = axis
        self._device = device
        self._owners: list[Any] = []  # of the memory of all ranks; peers' views do not keep it
        library = ctypes.CDLL("libcuda.so.1")
        self._calls: dict[str, Callable[..., int]] = {}
        for name, arguments in _CALLS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
            self._calls[name] = function
        probe = torch_private.symmetric_memory.empty(1, dtype=torch.uint8, device=device)
        base, _ = self._find_allocation(probe.data_ptr())
        self.lead_bytes = probe.data_ptr() - base
        handle = self._retain(probe.data_ptr())
        try:
            granularity = ctypes.c_size_t()
            properties = self._read_properties(handle)
            self._call(
                "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), _RECOMMENDED
            )
            self.page_bytes = int(granularity.value)
        finally:
            self.release(handle)

    def allocate_shared(self, nbytes: int) -> SharedBlock:
        memory = torch_private.symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._device)
        base, total_bytes = self._find_allocation(memory.data_ptr())
        if memory.data_ptr() - base != self.lead_bytes:
            lead = memory.data_ptr() - base
            raise RuntimeError(f"symmetric memory begins {lead} bytes after its allocation, not {self.lead_bytes}")
        return SharedBlock(memory, self._retain(base), total_bytes)

    def open_peers(self, block: SharedBlock) -> list[torch.Tensor]:
        memory = block.memory
        handle = rendezvous_numbers.rendezvous(memory, self._axis.group.group_name)
        self._owners.append((memory, handle))
        return [handle.get_buffer(rank, memory.shape, torch.uint8) for rank in range(self._axis.size)]

    def allocate(self, nbytes: int, like: int) -> int:
        properties = self._read_properties(like)
        handle = _u64()
        self._call("cuMemCreate", ctypes.byref(handle), nbytes, ctypes.byref(properties), 0)
        return int(handle.value)

    def reserve(self, nbytes: int) -> int:
        address = _u64()
        self._call("cuMemAddressReserve", ctypes.byref(address), nbytes, self.page_bytes, 0, 0)
        return int(address.value)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow_access(self, address: int, nbytes: int) -> None:
        access = _Access(_Location(1, self._device.index), _READ_WRITE)  # 1: CU_MEM_LOCATION_TYPE_DEVICE
        self._call("cuMemSetAccess", address, nbytes, ctypes.byref(access), 1)

    def view(self, address: int, nbytes: int, owner: Any) -> torch.Tensor:
        tensor = torch.as_tensor(_Range(address, nbytes, owner), device=self._device)
        if tensor.data_ptr() != address:
            raise RuntimeError(f"torch has copied the memory at {address:#x} instead of viewing it")
        return tensor

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _find_allocation(self, address: int) -> tuple[int, int]:
        """Return the first address and the bytes of the allocation that contains an address."""
        base, nbytes = _u64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
        return int(base.value), int(nbytes.value)

    def _retain(self, address: int) -> int:
        """Return a new handle of the memory at an address."""
        handle = _u64()
        self._call("cuMemRetainAllocationHandle", ctypes.byref(handle), address)
        return int(handle.value)

    def _read_properties(self, handle: int) -> _Properties:
        properties = _Properties()
        self._call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), handle)
        return properties

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if not code:
            return
        text = ctypes.c_char_p()
        self._calls["cuGetErrorName"](code, ctypes.byref(text))
        error = (text.value or b"unknown error").decode()
        numbers = ", ".join(hex(value) for value in arguments if isinstance(value, int))
        raise RuntimeError(f"{name}({numbers}) failed with error {code}, {error}")
