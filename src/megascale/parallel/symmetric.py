"""Symmetric memory of the GPUs of one host, and the CUDA streams of an exchange over it (exchange.py).

The memory is torch's symmetric memory, without multicast. CUDA's stream-memory operations write and await flags and
need no SM: a small kernel would wait behind the GEMM that fills the device.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.ops.dispatch import HAS_TRITON
from megascale.ops.peer_max import RELEASED, WORD_BYTES, PeerMax
from megascale.parallel.collectives import Axis
from megascale.parallel.exchange import Exchange
from megascale.parallel.peer_watch import Member, PeerWatch, describe_process, make_page

FLAG = 128  # bytes from one flag to the next
_AT_LEAST, _EQUAL = 0, 1  # CU_STREAM_WAIT_VALUE_GEQ, modulo 2**32, and _EQ
_WAIT_VALUE, _WRITE_VALUE = 1, 2  # CU_STREAM_MEM_OP_*_VALUE_32
_WRITE_WORD = 5  # CU_STREAM_MEM_OP_WRITE_VALUE_64
_FLAG_VALUES = 1 << 32
_TEXT_BYTES = 500  # of what a rank tells the others about itself
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


def make_exchange(
    axis: Axis,
    shard_bytes: int,
    device: torch.device,
    on_side_stream: bool = False,
    timeout: float = 600.0,
    resident_bytes: int = 0,
) -> Exchange | str:
    """Make the exchange of an axis collectively, or return why it is unavailable, the same on every rank.

    Args:
        axis: any axis of one host: tensor, data or another.
        shard_bytes: the largest shard that will be gathered, or part that will be scattered.
        on_side_stream: see Exchange.
        timeout: seconds after which calls without progress end with an error.
        resident_bytes: bytes of `Exchange.resident` of each rank.
    """
    if axis.size == 1:
        return "a group of one rank needs no exchange"
    if device.type != "cuda":
        return f"{device.type} tensors have no symmetric memory"
    # A kept engine would miss the collectives below, also where they end without an exchange.
    axis.runtime.rejoin_obstacle = "its ranks agree on an exchange between GPUs when an engine is made"
    world_rank = dist.get_global_rank(axis.group, axis.rank)
    local_facts: dict[str, Any] = {"member": describe_process(world_rank), "page": ""}
    if axis.rank == 0:
        local_facts["page"] = make_page(axis.size)
    facts = [json.loads(text) for text in _gather_text(json.dumps(local_facts), axis, device)]
    members = [Member(*fact["member"]) for fact in facts]
    reason = ""
    exchange: Exchange | None = None
    try:
        exchange, streams = _allocate(axis, shard_bytes, device, on_side_stream, resident_bytes)
        exchange.watch = PeerWatch(
            axis.rank,
            members,
            page=facts[0]["page"],
            release=streams.release_waits,
            count_calls=exchange.count_calls,
            is_idle=streams.is_idle,
            timeout=timeout,
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    # All ranks or none: a rank that exchanged alone would wait forever.
    reasons = _gather_text(reason, axis, device)
    if axis.rank == 0:
        Path(local_facts["page"]).unlink(missing_ok=True)
    for rank, text in enumerate(reasons):
        if text:
            if exchange is not None:
                exchange.close()
            return f"rank {rank} of the group: {text}"
    return exchange or "the exchange was not made"


def _gather_text(text: str, axis: Axis, device: torch.device) -> list[str]:
    """Return every rank's text, cut to a fixed number of bytes."""
    encoded = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    local_row = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    rows = [torch.empty_like(local_row) for _ in range(axis.size)]
    dist.all_gather(rows, local_row, group=axis.group)
    return [bytes(row.cpu().tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def _allocate(
    axis: Axis, shard_bytes: int, device: torch.device, on_side_stream: bool, resident_bytes: int
) -> tuple[Exchange, CudaStreams]:
    shard_bytes = -(-shard_bytes // 512) * 512
    flags_start = Exchange.bytes_needed(axis.size, shard_bytes)
    # A flag for each peer, and two for captured calls; then the memory of PeerMax.
    peer_max_start = flags_start + 3 * axis.size * FLAG
    peer_max_stop = peer_max_start + PeerMax.bytes_needed(axis.size)
    resident_start = -(-peer_max_stop // 512) * 512
    nbytes = resident_start + resident_bytes
    buffer = torch_private.symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    buffer.zero_()
    torch.cuda.synchronize(device)
    handle = torch_private.symmetric_memory.rendezvous(buffer, axis.group.group_name)
    dist.barrier(axis.group)  # no flag is written before all are zero
    memory = [handle.get_buffer(rank, buffer.shape, torch.uint8) for rank in range(axis.size)]
    peer_max_words = [part[peer_max_start:peer_max_stop].view(torch.int64) for part in memory]
    streams = CudaStreams(
        axis.rank, [part.data_ptr() + flags_start for part in memory], device, words=peer_max_words[axis.rank]
    )
    exchange = Exchange(
        axis.rank,
        axis.size,
        memory,
        shard_bytes,
        streams,
        owner=(buffer, handle),
        on_side_stream=on_side_stream,
        runtime=axis.runtime,
        kind=axis.kind,
        resident=[part[resident_start:] for part in memory],
    )
    if HAS_TRITON:
        exchange.peer_max = PeerMax(axis.rank, peer_max_words)
    return exchange, streams


class CudaStreams:
    """The queues of an exchange as CUDA streams; main is the caller's current one.

    It calls the driver directly, which costs the host less than torch's streams and events do.

    Args:
        rank: rank in the group.
        flags: address of each rank's flags: one for each peer, then two for each for captured calls.
        words: this rank's memory of PeerMax.
    """

    def __init__(self, rank: int, flags: list[int], device: torch.device, words: torch.Tensor) -> None:
        self._rank = rank
        self._words = words
        self._last_awaited = 0  # number of the last call that was not captured
        self._capture_lock = threading.Lock()  # a capture fails if the watch looks at its stream
        self._flags = flags
        self._device = device.index
        self._is_capturing = False
        self._copy_stream = torch.cuda.Stream(device, priority=-1).cuda_stream  # from torch's pool, which keeps it
        self._side_stream = torch.cuda.Stream(device)
        self._driver = _Driver()
        # The highest priority has a hardware queue of its own, which no blocked stream of torch shares.
        self._release_stream = self._driver.urgent_stream()
        self._context = self._driver.context()
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
        self._last_awaited = number
        self._driver.wait(self._copy_stream, self._flags[self._rank] + FLAG * peer, number % _FLAG_VALUES)

    def _captured_flag(self, waiter: int, signaller: int, number: int) -> int:
        """Return the address at rank `waiter` of the flag that rank `signaller` sets in captured call `number`."""
        size = len(self._flags)
        return self._flags[waiter] + FLAG * (size * (1 + number % 2) + signaller)

    def capture(self, on: bool) -> None:
        with self._capture_lock:
            self._is_capturing = on

    def is_idle(self) -> bool:
        """Return whether the copy queue has nothing left to do; for a thread other than the caller's."""
        with self._capture_lock:
            if self._is_capturing:
                return True
            self._driver.enter(self._context)
            return self._driver.is_idle(self._copy_stream)

    def release_waits(self) -> None:
        """End the waits of this rank that have been queued, by setting all of its flags; for another thread.

        A captured wait clears its flag, so that later ones wait again: release them repeatedly.
        """
        self._driver.enter(self._context)
        size = len(self._flags)
        own_flags = self._flags[self._rank]
        # Half the numbers are "at least" another, so this value also passes the next billion calls.
        number = (self._last_awaited + (1 << 30)) % _FLAG_VALUES
        operations = [(_WRITE_VALUE, own_flags + FLAG * peer, number, 0) for peer in range(size)]
        for flag in range(size, 3 * size):
            operations.append((_WRITE_VALUE, own_flags + FLAG * flag, 1, 0))
        for word in range(self._words.numel()):
            operations.append((_WRITE_WORD, self._words.data_ptr() + WORD_BYTES * word, RELEASED % (1 << 64), 0))
        self._driver.batch(self._release_stream, *operations)

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
        self._query = function("cuStreamQuery", pointer)
        self._get_context = function("cuCtxGetCurrent", ctypes.POINTER(pointer))
        self._set_context = function("cuCtxSetCurrent", pointer)
        integer = ctypes.POINTER(ctypes.c_int)
        self._get_priorities = function("cuCtxGetStreamPriorityRange", integer, integer)
        self._create_stream = function(
            "cuStreamCreateWithPriority", ctypes.POINTER(pointer), ctypes.c_uint, ctypes.c_int
        )

    def context(self) -> int:
        """Return the calling thread's context."""
        context = ctypes.c_void_p()
        code = self._get_context(ctypes.byref(context))
        if code:
            raise _failed("cuCtxGetCurrent", code)
        return int(context.value or 0)

    def enter(self, context: int) -> None:
        """Make a context the calling thread's."""
        code = self._set_context(context)
        if code:
            raise _failed("cuCtxSetCurrent", code)

    def urgent_stream(self) -> int:
        """Return a new stream of the highest priority, which does not wait for the default stream."""
        lowest, highest = ctypes.c_int(), ctypes.c_int()
        code = self._get_priorities(ctypes.byref(lowest), ctypes.byref(highest))
        if code:
            raise _failed("cuCtxGetStreamPriorityRange", code)
        stream = ctypes.c_void_p()
        code = self._create_stream(ctypes.byref(stream), _NON_BLOCKING, highest.value)
        if code:
            raise _failed("cuStreamCreateWithPriority", code)
        return int(stream.value or 0)

    def is_idle(self, stream: int) -> bool:
        """Return whether all work of a stream has ended, or has failed."""
        return self._query(stream) != _NOT_READY

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
