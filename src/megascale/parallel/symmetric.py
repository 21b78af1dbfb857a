"""Memory that the GPUs of one host read of each other, and the streams of an exchange over it (exchange.py).

The memory is torch's symmetric memory; no multicast is used. Flags are written and awaited by CUDA's stream-memory
operations, which need no SM: a small kernel would wait behind the GEMM that fills the device.
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
_NUMBERS = 1 << 32
_REASON = 500  # bytes in which a rank says why it cannot
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


def make_exchange(axis: Axis, shard_bytes: int, device: torch.device, on_side_stream: bool = False) -> Exchange | str:
    """The group's exchange, made collectively; or why it cannot be had, on every rank alike.

    Args:
        shard_bytes: of the largest part of one rank that will be gathered or scattered.
        on_side_stream: see Exchange.
    """
    if axis.size == 1:
        return "one rank has nobody to exchange with"
    if device.type != "cuda":
        return f"{device.type} tensors have no symmetric memory"
    reason, exchange = "", None
    try:
        exchange = _exchange(axis, shard_bytes, device, on_side_stream)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    # All or none: a rank that exchanged alone would wait for ever.
    mine = torch.zeros(_REASON, dtype=torch.uint8)
    text = reason.encode()[:_REASON]
    mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    reasons = [torch.empty(_REASON, dtype=torch.uint8, device=device) for _ in range(axis.size)]
    dist.all_gather(reasons, mine.to(device), group=axis.group)
    words = [bytes(row.cpu().tolist()).rstrip(b"\0").decode(errors="replace") for row in reasons]
    said = next((f"rank {r} of the group: {text}" for r, text in enumerate(words) if text), None)
    return exchange if said is None and exchange is not None else str(said)


def _exchange(axis: Axis, shard_bytes: int, device: torch.device, on_side_stream: bool) -> Exchange:
    shard_bytes = -(-shard_bytes // 512) * 512
    space = Exchange.bytes_needed(axis.size, shard_bytes)
    # A flag for each peer, and two for captured calls; words for scalars.
    words = space + 3 * axis.size * FLAG
    nbytes = words + PeerMax.bytes_needed(axis.size)
    whole = torch_private.symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    whole.zero_()
    torch.cuda.synchronize(device)
    handle = torch_private.symmetric_memory.rendezvous(whole, axis.group.group_name)
    dist.barrier(axis.group)  # no flag is written before all are zero
    memory = [handle.get_buffer(r, whole.shape, torch.uint8) for r in range(axis.size)]
    flags = [part.data_ptr() + space for part in memory]
    streams = CudaStreams(axis.rank, flags, device)
    exchange = Exchange(
        axis.rank, axis.size, memory, shard_bytes, streams, (whole, handle), on_side_stream, axis.runtime
    )
    if HAVE_TRITON:
        exchange.peer_max = PeerMax(axis.rank, [part[words:nbytes].view(torch.int64) for part in memory])
    return exchange


class CudaStreams:
    """The queues of an exchange as CUDA streams; main is the caller's current one.

    It speaks to the driver directly, which costs the host less than torch's streams and events do.

    Args:
        rank: in the group.
        flags: address of each rank's flags: one for each peer, then two for each, of captured calls.
    """

    def __init__(self, rank: int, flags: list[int], device: torch.device) -> None:
        self._rank, self._flags, self._device, self._capturing = rank, flags, device.index, False
        self._copy_stream = torch.cuda.Stream(device, priority=-1).cuda_stream  # from torch's pool, which keeps it
        self._side_stream = torch.cuda.Stream(device)
        self._driver = _Driver()
        self._idle: list[int] = []  # events that nobody waits for
        own = flags[rank] + FLAG * rank
        self._driver.write(self._copy_stream, own, 1)
        self._driver.wait(self._copy_stream, own, 1)
        torch.cuda.synchronize(device)

    def compute(self, work: Callable[[], Any], queue: str = "main") -> None:
        """See Streams. On the side stream, `work` may only write into memory that is there already."""
        if queue == "main":
            work()
        else:
            with torch.cuda.stream(self._side_stream):
                work()

    def copy(self, to: torch.Tensor, source: torch.Tensor, queue: str = "copy") -> None:
        """See Streams."""
        self._driver.copy(to.data_ptr(), source.data_ptr(), to.nbytes, self._stream(queue))

    def signal(self, peer: int, number: int) -> None:
        """See Streams."""
        if self._capturing:
            self._driver.batch(self._copy_stream, (_WRITE_VALUE, self._captured_flag(peer, self._rank, number), 1, 0))
            return
        self._driver.write(self._copy_stream, self._flags[peer] + FLAG * self._rank, number % _NUMBERS)

    def wait_for(self, peer: int, number: int) -> None:
        """See Streams."""
        if self._capturing:
            flag = self._captured_flag(self._rank, peer, number)
            self._driver.batch(self._copy_stream, (_WAIT_VALUE, flag, 1, _EQUAL), (_WRITE_VALUE, flag, 0, 0))
            return
        self._driver.wait(self._copy_stream, self._flags[self._rank] + FLAG * peer, number % _NUMBERS)

    def _captured_flag(self, at: int, of: int, number: int) -> int:
        """The address, at rank `at`, of the flag that rank `of` sets in a captured call of this number."""
        size = len(self._flags)
        return self._flags[at] + FLAG * (size * (1 + number % 2) + of)

    def capture(self, on: bool) -> None:
        """See Streams."""
        self._capturing = on

    def record_event(self, queue: str) -> RecordedEvent:
        """See Streams."""
        event = self._idle.pop() if self._idle else self._driver.event()
        self._driver.record(event, self._stream(queue))
        return RecordedEvent(event, self._idle)

    def stream_wait(self, queue: str, event: RecordedEvent) -> None:
        """See Streams."""
        self._driver.stream_wait(self._stream(queue), event.event)

    def _stream(self, queue: str) -> int:
        if queue == "main":
            return int(torch_private.current_raw_stream(self._device))
        return self._copy_stream if queue == "copy" else self._side_stream.cuda_stream


class RecordedEvent:
    """A recorded event; it may be recorded anew when nobody can wait for it any more."""

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
    """The few functions of CUDA's driver that an exchange needs. RuntimeError where one fails or is missing."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, u64, u32, word = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint

        def function(name: str, *arguments: Any) -> Callable[..., int]:
            found = getattr(library, name)
            found.argtypes, found.restype = arguments, ctypes.c_int
            return found  # type: ignore[no-any-return]

        self._write = function("cuStreamWriteValue32_v2", pointer, u64, u32, word)
        self._wait = function("cuStreamWaitValue32_v2", pointer, u64, u32, word)
        self._batch = function("cuStreamBatchMemOp_v2", pointer, word, pointer, word)
        self._copy = function("cuMemcpyDtoDAsync_v2", u64, u64, ctypes.c_size_t, pointer)
        self._create = function("cuEventCreate", ctypes.POINTER(pointer), word)
        self._record = function("cuEventRecord", pointer, pointer)
        self._stream_wait = function("cuStreamWaitEvent", pointer, pointer, word)

    def write(self, stream: int, address: int, value: int) -> None:
        if code := self._write(stream, address, value, 0):
            raise _failed("cuStreamWriteValue32", code)

    def wait(self, stream: int, address: int, value: int) -> None:
        if code := self._wait(stream, address, value, _AT_LEAST):
            raise _failed("cuStreamWaitValue32", code)

    def batch(self, stream: int, *operations: tuple[int, int, int, int]) -> None:
        """Several at once, each (kind, address, value, flags): the only form that a capture takes."""
        parameters = (_MemoryOperation * len(operations))(*(_MemoryOperation(*one) for one in operations))
        if code := self._batch(stream, len(operations), parameters, 0):
            raise _failed("cuStreamBatchMemOp", code)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        if code := self._copy(to, source, nbytes, stream):
            raise _failed("cuMemcpyDtoDAsync", code)

    def event(self) -> int:
        found = ctypes.c_void_p()
        if code := self._create(ctypes.byref(found), _NO_TIMING):
            raise _failed("cuEventCreate", code)
        return int(found.value or 0)

    def record(self, event: int, stream: int) -> None:
        if code := self._record(event, stream):
            raise _failed("cuEventRecord", code)

    def stream_wait(self, stream: int, event: int) -> None:
        if code := self._stream_wait(stream, event, 0):
            raise _failed("cuStreamWaitEvent", code)


def _failed(name: str, code: int) -> RuntimeError:
    return RuntimeError(f"{name} failed with error {code} of the CUDA driver")
