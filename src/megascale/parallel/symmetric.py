"""Symmetric memory of the GPUs of one host, and the CUDA streams of an exchange over it (exchange.py).

The memory is torch's symmetric memory, without multicast. CUDA's stream-memory operations write and await flags and
need no SM: a small kernel would wait behind the GEMM that fills the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.ops.dispatch import HAVE_TRITON
from megascale.ops.peer_max import PeerMax
from megascale.parallel.collectives import Axis
from megascale.parallel.exchange import Exchange

FLAG = 128  # bytes from one flag to the next
_AT_LEAST, _EQUAL = 0, 1  # CU_STREAM_WAIT_VALUE_GEQ, modulo 2**32, and _EQ
_WAIT_VALUE, _WRITE_VALUE = 1, 2  # CU_STREAM_MEM_OP_*_VALUE_32
_FLAG_VALUES = 1 << 32
_REASON_BYTES = 500  # of the reason that a rank reports
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


def make_exchange(axis: Axis, shard_bytes: int, device: torch.device, on_side_stream: bool = False) -> Exchange | str:
    """Make the group's exchange collectively, or return why it is unavailable, the same on every rank.

    Args:
        shard_bytes: the largest shard that will be gathered or scattered.
        on_side_stream: see Exchange.
    """
    if axis.size == 1:
        return "a group of one rank needs no exchange"
    if device.type != "cuda":
        return f"{device.type} tensors have no symmetric memory"
    reason = ""
    exchange: Exchange | None = None
    try:
        exchange = _allocate(axis, shard_bytes, device, on_side_stream)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    # All ranks or none: a rank that exchanged alone would wait forever.
    encoded = reason.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
    own_reason = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    reasons = [torch.empty_like(own_reason) for _ in range(axis.size)]
    dist.all_gather(reasons, own_reason, group=axis.group)
    for rank, row in enumerate(reasons):
        text = bytes(row.cpu().tolist()).rstrip(b"\0").decode(errors="replace")
        if text:
            return f"rank {rank} of the group: {text}"
    assert exchange is not None
    return exchange


def _allocate(axis: Axis, shard_bytes: int, device: torch.device, on_side_stream: bool) -> Exchange:
    shard_bytes = -(-shard_bytes // 512) * 512
    flags_start = Exchange.bytes_needed(axis.size, shard_bytes)
    # A flag for each peer, and two for captured calls; then the memory of PeerMax.
    peer_max_start = flags_start + 3 * axis.size * FLAG
    nbytes = peer_max_start + PeerMax.bytes_needed(axis.size)
    buffer = torch_private.symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    buffer.zero_()
    torch.cuda.synchronize(device)
    handle = torch_private.symmetric_memory.rendezvous(buffer, axis.group.group_name)
    dist.barrier(axis.group)  # no flag is written before all are zero
    memory = [handle.get_buffer(rank, buffer.shape, torch.uint8) for rank in range(axis.size)]
    streams = CudaStreams(axis.rank, [part.data_ptr() + flags_start for part in memory], device)
    exchange = Exchange(
        axis.rank,
        axis.size,
        memory,
        shard_bytes,
        streams,
        owner=(buffer, handle),
        on_side_stream=on_side_stream,
        runtime=axis.runtime,
    )
    if HAVE_TRITON:
        exchange.peer_max = PeerMax(axis.rank, [part[peer_max_start:nbytes].view(torch.int64) for part in memory])
    return exchange


class CudaStreams:
    """The queues of an exchange as CUDA streams; main is the caller's current one.

    It calls the driver directly, which costs the host less than torch's streams and events do.

    Args:
        rank: rank in the group.
        flags: address of each rank's flags: one for each peer, then two for each for captured calls.
    """

    def __init__(self, rank: int, flags: list[int], device: torch.device) -> None:
        self._rank = rank
        self._flags = flags
        self._device = device.index
        self._is_capturing = False
        self._copy_stream = torch.cuda.Stream(device, priority=-1).cuda_stream  # from torch's pool, which keeps it
        self._side_stream = torch.cuda.Stream(device)
        self._driver = _Driver()
        self._idle: list[int] = []  # events without a waiter
        own_flag = flags[rank] + FLAG * rank
        self._driver.write(self._copy_stream, own_flag, 1)
        self._driver.wait(self._copy_stream, own_flag, 1)
        torch.cuda.synchronize(device)

    def compute(self, work: Callable[[], Any], queue: str = "main") -> None:
        """See Streams. On the side stream, `work` may only write into allocated memory."""
        if queue == "main":
            work()
        else:
            with torch.cuda.stream(self._side_stream):
                work()

    def copy(self, to: torch.Tensor, source: torch.Tensor, queue: str = "copy") -> None:
        self._driver.copy(to.data_ptr(), source.data_ptr(), to.nbytes, self._stream(queue))

    def signal(self, peer: int, number: int) -> None:
        if self._is_capturing:
            self._driver.batch(self._copy_stream, (_WRITE_VALUE, self._captured_flag(peer, self._rank, number), 1, 0))
            return
        self._driver.write(self._copy_stream, self._flags[peer] + FLAG * self._rank, number % _FLAG_VALUES)

    def wait_for(self, peer: int, number: int) -> None:
        if self._is_capturing:
            flag = self._captured_flag(self._rank, peer, number)
            self._driver.batch(self._copy_stream, (_WAIT_VALUE, flag, 1, _EQUAL), (_WRITE_VALUE, flag, 0, 0))
            return
        self._driver.wait(self._copy_stream, self._flags[self._rank] + FLAG * peer, number % _FLAG_VALUES)

    def _captured_flag(self, waiter: int, signaller: int, number: int) -> int:
        """Return the address at rank `waiter` of the flag that rank `signaller` sets in captured call `number`."""
        size = len(self._flags)
        return self._flags[waiter] + FLAG * (size * (1 + number % 2) + signaller)

    def capture(self, on: bool) -> None:
        self._is_capturing = on

    def record_event(self, queue: str) -> RecordedEvent:
        if self._idle:
            event = self._idle.pop()
        else:
            event = self._driver.event()
        self._driver.record(event, self._stream(queue))
        return RecordedEvent(event, self._idle)

    def stream_wait(self, queue: str, event: RecordedEvent) -> None:
        self._driver.stream_wait(self._stream(queue), event.event)

    def _stream(self, queue: str) -> int:
        if queue == "main":
            return int(torch_private.current_raw_stream(self._device))
        if queue == "copy":
            return self._copy_stream
        return self._side_stream.cuda_stream


class RecordedEvent:
    """A recorded event, reused after the last reference to it is gone."""

    __slots__ = ("_idle", "event")

    def __init__(self, event: int, idle: list[int]) -> None:
        self.event, self._idle = event, idle

    def __del__(self) -> None:
        self._idle.append(self.event)


class _MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a wait or a write, a union of 48 bytes."""

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


class _Driver:
    """The functions of the CUDA driver that an exchange needs. RuntimeError if one fails or is missing."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_void_p
        u64 = ctypes.c_uint64
        u32 = ctypes.c_uint32

        def function(name: str, *arguments: Any) -> Callable[..., int]:
            symbol = getattr(library, name)
            symbol.argtypes = arguments
            symbol.restype = ctypes.c_int
            return symbol  # type: ignore[no-any-return]

        self._write = function("cuStreamWriteValue32_v2", pointer, u64, u32, ctypes.c_uint)
        self._wait = function("cuStreamWaitValue32_v2", pointer, u64, u32, ctypes.c_uint)
        self._batch = function("cuStreamBatchMemOp_v2", pointer, ctypes.c_uint, pointer, ctypes.c_uint)
        self._copy = function("cuMemcpyDtoDAsync_v2", u64, u64, ctypes.c_size_t, pointer)
        self._create = function("cuEventCreate", ctypes.POINTER(pointer), ctypes.c_uint)
        self._record = function("cuEventRecord", pointer, pointer)
        self._stream_wait = function("cuStreamWaitEvent", pointer, pointer, ctypes.c_uint)

    def write(self, stream: int, address: int, value: int) -> None:
        code = self._write(stream, address, value, 0)
        if code:
            raise _failed("cuStreamWriteValue32", code)

    def wait(self, stream: int, address: int, value: int) -> None:
        code = self._wait(stream, address, value, _AT_LEAST)
        if code:
            raise _failed("cuStreamWaitValue32", code)

    def batch(self, stream: int, *operations: tuple[int, int, int, int]) -> None:
        """Run several operations, each (kind, address, value, flags): the only form that a capture accepts."""
        parameters = (_MemoryOperation * len(operations))(*[_MemoryOperation(*operation) for operation in operations])
        code = self._batch(stream, len(operations), parameters, 0)
        if code:
            raise _failed("cuStreamBatchMemOp", code)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        code = self._copy(to, source, nbytes, stream)
        if code:
            raise _failed("cuMemcpyDtoDAsync", code)

    def event(self) -> int:
        event = ctypes.c_void_p()
        code = self._create(ctypes.byref(event), _NO_TIMING)
        if code:
            raise _failed("cuEventCreate", code)
        return int(event.value or 0)

    def record(self, event: int, stream: int) -> None:
        code = self._record(event, stream)
        if code:
            raise _failed("cuEventRecord", code)

    def stream_wait(self, stream: int, event: int) -> None:
        code = self._stream_wait(stream, event, 0)
        if code:
            raise _failed("cuStreamWaitEvent", code)


def _failed(name: str, code: int) -> RuntimeError:
    return RuntimeError(f"{name} failed with error {code} of the CUDA driver")
