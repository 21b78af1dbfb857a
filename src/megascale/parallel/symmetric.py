"""Construction of exchanges (exchange.py): symmetric memory of the GPUs of one host, and CUDA streams.

An exchange copies data between the GPUs of one host, and signals with flags in memory. The memory is torch's symmetric
memory, without multicast. CUDA's stream-memory operations write and await flags without an SM. A small kernel for a
flag would wait behind the GEMM that fills the device.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.ops.dispatch import HAS_TRITON
from megascale.ops.peer_max import RELEASED, WORD_BYTES, PeerMax
from megascale.ops.peer_sum import PeerSum
from megascale.parallel import rendezvous_numbers
from megascale.parallel.collectives import Axis
from megascale.parallel.exchange import Exchange
from megascale.parallel.exchange_buffers import count_buffer_bytes, count_lent_bytes
from megascale.parallel.exchange_streams import list_copy_queues
from megascale.parallel.peer_watch import Member, PeerWatch, describe_process, explain_separation, make_page

FLAG_BYTES = 128  # from the start of one flag to the start of the next one
_AT_LEAST, _EQUAL = 0, 1  # CU_STREAM_WAIT_VALUE_GEQ (modulo 2**32) and CU_STREAM_WAIT_VALUE_EQ
_WAIT_VALUE, _WRITE_VALUE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32
_WRITE_WORD = 5  # CU_STREAM_MEM_OP_WRITE_VALUE_64
_ALIGN_BYTES = 512  # alignment of buffers and of the peer memory
_FLAG_VALUES = 1 << 32  # a flag has 32 bits
_TEXT_BYTES = 500  # length of a text that ranks gather
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


def make_exchange(
    axis: Axis,
    shard_bytes: int,
    device: torch.device,
    on_side_stream: bool = False,
    timeout: float = 600.0,
    peer_memory_bytes: int = 0,
    lends: bool = False,
    exchange_type: type[Exchange] = Exchange,
) -> Exchange | str:
    """Return the exchange of an axis, or why it is unavailable; the same on every rank. Collective over the axis.

    Args:
        axis: an axis of any kind; its ranks must be on one host.
        shard_bytes: size of the largest shard that will be gathered, or part that will be scattered.
        on_side_stream: as for `Exchange`.
        timeout: seconds after which calls without progress end with an error.
        peer_memory_bytes: bytes of `Exchange.peer_memory` of each rank.
        lends: allocate slots for gathers with `lend`.
        exchange_type: class of the exchange; benchmarks measure others.
    """
    if axis.size == 1:
        return "a group of one rank needs no exchange"
    if device.type != "cuda":
        return f"{device.type} tensors have no symmetric memory"
    # An engine that rejoins new groups does not call this function. A new engine on another rank would then wait for it
    # in the collectives below.
    axis.runtime.rejoin_obstacle = "its ranks agree on an exchange between GPUs when an engine is made"
    world_rank = dist.get_global_rank(axis.group, axis.rank)
    # "page" is the path of the file in which the members watch each other; rank 0 makes it.
    local_process: dict[str, Any] = {"member": describe_process(world_rank), "page": ""}
    if axis.rank == 0:
        local_process["page"] = make_page(axis.size)
    processes = [json.loads(text) for text in _gather_text(json.dumps(local_process), axis, device)]
    members = [Member(*process["member"]) for process in processes]
    separation = explain_separation(members)
    if separation:
        if axis.rank == 0:
            Path(local_process["page"]).unlink()
        return separation
    reason = ""
    exchange: Exchange | None = None
    try:
        exchange, streams = _allocate(
            axis,
            shard_bytes,
            device,
            on_side_stream=on_side_stream,
            peer_memory_bytes=peer_memory_bytes,
            lends=lends,
            exchange_type=exchange_type,
        )
        exchange.watch = PeerWatch(
            axis.rank,
            members,
            page=processes[0]["page"],
            release=streams.release_waits,
            count_calls=exchange.count_calls,
            is_idle=streams.is_idle,
            timeout=timeout,
        )
    except Exception as error:  # any failure makes the exchange unavailable on all ranks
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    # Use the exchange on all ranks or on none: a rank with an exchange would wait for its peers for ever.
    failure = find_failure(reason, axis, device)
    if axis.rank == 0:
        Path(local_process["page"]).unlink(missing_ok=True)  # all members have mapped the file by now
    if failure:
        if exchange is not None:
            exchange.close()
        return failure
    return exchange or "the exchange was not made"


def find_failure(reason: str, axis: Axis, device: torch.device) -> str:
    """Return the reason of the first rank that has failed, the same on every rank; "" if none has. Collective.

    Args:
        reason: why this rank has failed, or "".
    """
    for rank, text in enumerate(_gather_text(reason, axis, device)):
        if text:
            return f"rank {rank} of the group: {text}"
    return ""


def _gather_text(text: str, axis: Axis, device: torch.device) -> list[str]:
    """Return every rank's text, cut to `_TEXT_BYTES`."""
    encoded = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    local_row = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    rows = [torch.empty_like(local_row) for _ in range(axis.size)]
    dist.all_gather(rows, local_row, group=axis.group)
    return [bytes(row.cpu().tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


class _MemoryLayout(NamedTuple):
    """Layout of a rank's symmetric memory, in bytes from its start.

    The buffers of gathers and scatters come first. Then come three flags per rank: one for eager calls and two for
    captured calls. After the flags come the memory of PeerMax and PeerSum, the peer memory, and the slots of pushed
    results.
    """

    flags_start: int
    peer_max_start: int
    peer_sum_stop: int
    peer_memory_start: int
    peer_memory_stop: int
    lent_start: int
    nbytes: int


def _lay_out(size: int, shard_bytes: int, peer_memory_bytes: int, lends: bool) -> _MemoryLayout:
    """Return the layout of the memory of one of `size` ranks; the arguments are those of `make_exchange`."""
    flags_start = count_buffer_bytes(size, shard_bytes)
    peer_max_start = flags_start + 3 * size * FLAG_BYTES
    peer_sum_stop = peer_max_start + PeerMax.count_memory_bytes(size) + PeerSum.count_memory_bytes(size)
    peer_memory_start = _round_up(peer_sum_stop)
    peer_memory_stop = peer_memory_start + peer_memory_bytes
    lent_start = _round_up(peer_memory_stop)
    nbytes = lent_start
    if lends:
        nbytes += count_lent_bytes(size, shard_bytes)
    return _MemoryLayout(
        flags_start=flags_start,
        peer_max_start=peer_max_start,
        peer_sum_stop=peer_sum_stop,
        peer_memory_start=peer_memory_start,
        peer_memory_stop=peer_memory_stop,
        lent_start=lent_start,
        nbytes=nbytes,
    )


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _allocate(
    axis: Axis,
    shard_bytes: int,
    device: torch.device,
    on_side_stream: bool,
    peer_memory_bytes: int,
    lends: bool,
    exchange_type: type[Exchange],
) -> tuple[Exchange, CudaStreams]:
    """Allocate symmetric memory, and return the exchange and its streams. Collective over the axis."""
    shard_bytes = _round_up(shard_bytes)
    layout = _lay_out(axis.size, shard_bytes, peer_memory_bytes, lends)
    buffer = torch_private.symmetric_memory.empty(layout.nbytes, dtype=torch.uint8, device=device)
    buffer.zero_()
    torch.cuda.synchronize(device)
    handle = rendezvous_numbers.rendezvous(buffer, axis.group.group_name)
    dist.barrier(axis.group)  # the flags of all ranks are zero before a rank writes one
    memory = [handle.get_buffer(rank, buffer.shape, torch.uint8) for rank in range(axis.size)]
    words = [rank_memory[layout.peer_max_start : layout.peer_sum_stop].view(torch.int64) for rank_memory in memory]
    flag_addresses = [rank_memory.data_ptr() + layout.flags_start for rank_memory in memory]
    streams = CudaStreams(axis.rank, flag_addresses, device, words=words[axis.rank])
    peer_memory = [rank_memory[layout.peer_memory_start : layout.peer_memory_stop] for rank_memory in memory]
    lent_memory: list[torch.Tensor] = []
    if lends:
        lent_memory = [rank_memory[layout.lent_start :] for rank_memory in memory]
    exchange = exchange_type(
        axis.rank,
        axis.size,
        memory,
        shard_bytes,
        streams,
        owner=(buffer, handle),
        on_side_stream=on_side_stream,
        runtime=axis.runtime,
        kind=axis.kind,
        peer_memory=peer_memory,
        lent_memory=lent_memory,
    )
    if HAS_TRITON:
        peer_max_length = PeerMax.count_memory_bytes(axis.size) // WORD_BYTES
        exchange.peer_max = PeerMax(axis.rank, [rank_words[:peer_max_length] for rank_words in words])
        exchange.peer_sum = PeerSum(axis.rank, [rank_words[peer_max_length:] for rank_words in words])
    return exchange, streams


class CudaStreams:
    """CUDA streams as the queues of an exchange, see `Streams` in exchange_streams.py. Main is the current stream.

    Operations call the CUDA driver directly, which costs the host less time than torch's streams and events.

    Args:
        flags: address of each rank's flags: one for each peer, then two for each peer for captured calls.
        words: words of this rank that `PeerMax` and `PeerSum` wait for, int64.
    """

    def __init__(self, rank: int, flags: list[int], device: torch.device, words: torch.Tensor) -> None:
        self._rank = rank
        self._words = words
        self._last_awaited = 0  # number of the last eager call for which a wait was queued
        # A capture fails if the watch's thread queries the stream, so the query takes this lock.
        self._capture_lock = threading.Lock()
        self._flag_addresses = flags
        self._device = device.index
        self._is_capturing = False
        # By queue of copies: writes of flags and waits that the stream has not received yet. One call of the driver,
        # and one node of a graph, submits all of them.
        self._flag_operations: dict[str, list[tuple[int, int, int, int]]] = {}
        self._copy_streams: dict[str, int] = {}
        for queue in list_copy_queues(len(flags)):
            # torch's pool keeps the stream alive.
            self._copy_streams[queue] = torch.cuda.Stream(device, priority=-1).cuda_stream
            self._flag_operations[queue] = []
        self._copy_stream = self._copy_streams["copy"]
        self._side_stream = torch.cuda.Stream(device)
        self._driver = _Driver()
        # The highest priority has a hardware queue of its own, so that no blocked stream of torch can block it.
        self._release_stream = self._driver.create_urgent_stream()
        self._context = self._driver.get_context()
        self._idle_events: list[int] = []  # driver events that can be recorded again
        # Write and await this rank's own flag once, so that missing support raises an error now.
        own_flag = flags[rank] + FLAG_BYTES * rank
        self._driver.batch(self._copy_stream, (_WRITE_VALUE, own_flag, 1, 0), (_WAIT_VALUE, own_flag, 1, _AT_LEAST))
        torch.cuda.synchronize(device)

    def compute(self, work: Callable[[], Any], queue: str = "main") -> None:
        """Run `work` as `Streams.compute` says. On the side stream, `work` may not allocate memory."""
        if queue == "main":
            work()
        else:
            with torch.cuda.stream(self._side_stream):
                work()

    def copy(self, to: torch.Tensor, source: torch.Tensor, queue: str = "copy") -> None:
        self.submit_flags(queue)
        self._driver.copy(to.data_ptr(), source.data_ptr(), to.nbytes, self._stream(queue))

    def signal(self, peer: int, number: int, queue: str = "copy") -> None:
        if self._is_capturing:
            operation = (_WRITE_VALUE, self._captured_flag(peer, self._rank, number), 1, 0)
        else:
            flag = self._flag_addresses[peer] + FLAG_BYTES * self._rank
            operation = (_WRITE_VALUE, flag, number % _FLAG_VALUES, 0)
        self._flag_operations[queue].append(operation)

    def wait_for(self, peer: int, number: int, queue: str = "copy") -> None:
        if self._is_capturing:
            flag = self._captured_flag(self._rank, peer, number)
            self._flag_operations[queue] += [(_WAIT_VALUE, flag, 1, _EQUAL), (_WRITE_VALUE, flag, 0, 0)]
            return
        self._last_awaited = number
        flag = self._flag_addresses[self._rank] + FLAG_BYTES * peer
        self._flag_operations[queue].append((_WAIT_VALUE, flag, number % _FLAG_VALUES, _AT_LEAST))

    def submit_flags(self, queue: str = "copy") -> None:
        """Submit the writes of flags and the waits since the last operation on a queue. They run in order."""
        operations = self._flag_operations.get(queue)
        if operations:
            self._driver.batch(self._copy_streams[queue], *operations)
            operations.clear()

    def _captured_flag(self, waiter: int, signaller: int, number: int) -> int:
        """Return the address at rank `waiter` of the flag that rank `signaller` sets in captured call `number`."""
        size = len(self._flag_addresses)
        return self._flag_addresses[waiter] + FLAG_BYTES * (size * (1 + number % 2) + signaller)

    def capture(self, on: bool) -> None:
        with self._capture_lock:
            self._is_capturing = on
        for operations in self._flag_operations.values():
            operations.clear()  # of a failed capture; all other calls have submitted theirs

    def is_idle(self) -> bool:
        """Return whether the copy queue is empty; True during a capture. Called by the watch's thread."""
        with self._capture_lock:
            if self._is_capturing:
                return True
            self._driver.set_context(self._context)
            return self._driver.is_idle(self._copy_stream)

    def release_waits(self) -> None:
        """End this rank's queued waits by setting all of its flags. Called by the watch's thread.

        A captured wait clears its flag, and the next one waits again, so this must be called repeatedly.
        """
        self._driver.set_context(self._context)
        size = len(self._flag_addresses)
        own_flags = self._flag_addresses[self._rank]
        # "At least" compares modulo 2**32: a flag with value n ends waits for the 2**31 numbers up to n. This value
        # therefore ends all queued waits, and those of the next 2**30 calls.
        number = (self._last_awaited + (1 << 30)) % _FLAG_VALUES
        operations = [(_WRITE_VALUE, own_flags + FLAG_BYTES * peer, number, 0) for peer in range(size)]
        for flag in range(size, 3 * size):
            operations.append((_WRITE_VALUE, own_flags + FLAG_BYTES * flag, 1, 0))
        for word in range(self._words.numel()):
            operations.append((_WRITE_WORD, self._words.data_ptr() + WORD_BYTES * word, RELEASED % (1 << 64), 0))
        self._driver.batch(self._release_stream, *operations)

    def record_event(self, queue: str) -> RecordedEvent:
        self.submit_flags(queue)
        if self._idle_events:
            event = self._idle_events.pop()
        else:
            event = self._driver.create_event()
        self._driver.record(event, self._stream(queue))
        return RecordedEvent(event, self._idle_events)

    def stream_wait(self, queue: str, event: RecordedEvent) -> None:
        self.submit_flags(queue)
        self._driver.stream_wait(self._stream(queue), event.event)

    def _stream(self, queue: str) -> int:
        """Return the driver's handle of a queue's stream."""
        if queue == "main":
            return int(torch_private.current_raw_stream(self._device))
        if queue == "side":
            return int(self._side_stream.cuda_stream)
        return self._copy_streams[queue]


class RecordedEvent:
    """A recorded event. When its last reference is gone, the driver's event joins the idle events, for the next record.

    Args:
        event: the driver's handle.
        idle_events: handles of events that can be recorded again.
    """

    __slots__ = ("_idle_events", "event")

    def __init__(self, event: int, idle_events: list[int]) -> None:
        self.event = event
        self._idle_events = idle_events

    def __del__(self) -> None:
        self._idle_events.append(self.event)


class _MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of the CUDA driver for a wait or a write, padded to the 48 bytes of the C union."""

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


class _Driver:
    """The functions of the CUDA driver that an exchange needs.

    Every method raises RuntimeError if the driver reports an error. The constructor raises OSError or AttributeError if
    the library or a function is missing.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_void_p
        u64 = ctypes.c_uint64

        def bind(name: str, *arguments: Any) -> Callable[..., int]:
            symbol = getattr(library, name)
            symbol.argtypes = arguments
            symbol.restype = ctypes.c_int
            return symbol  # type: ignore[no-any-return]

        self._batch = bind("cuStreamBatchMemOp_v2", pointer, ctypes.c_uint, pointer, ctypes.c_uint)
        self._copy = bind("cuMemcpyDtoDAsync_v2", u64, u64, ctypes.c_size_t, pointer)
        self._create = bind("cuEventCreate", ctypes.POINTER(pointer), ctypes.c_uint)
        self._record = bind("cuEventRecord", pointer, pointer)
        self._stream_wait = bind("cuStreamWaitEvent", pointer, pointer, ctypes.c_uint)
        self._query = bind("cuStreamQuery", pointer)
        self._get_context = bind("cuCtxGetCurrent", ctypes.POINTER(pointer))
        self._set_context = bind("cuCtxSetCurrent", pointer)
        integer = ctypes.POINTER(ctypes.c_int)
        self._get_priorities = bind("cuCtxGetStreamPriorityRange", integer, integer)
        self._create_stream = bind("cuStreamCreateWithPriority", ctypes.POINTER(pointer), ctypes.c_uint, ctypes.c_int)

    def get_context(self) -> int:
        """Return the address of the calling thread's context."""
        context = ctypes.c_void_p()
        code = self._get_context(ctypes.byref(context))
        if code:
            raise _make_error("cuCtxGetCurrent", code)
        return int(context.value or 0)

    def set_context(self, context: int) -> None:
        """Make `context` the calling thread's context."""
        code = self._set_context(context)
        if code:
            raise _make_error("cuCtxSetCurrent", code)

    def create_urgent_stream(self) -> int:
        """Return a new stream of the highest priority, which does not wait for the default stream."""
        lowest, highest = ctypes.c_int(), ctypes.c_int()
        code = self._get_priorities(ctypes.byref(lowest), ctypes.byref(highest))
        if code:
            raise _make_error("cuCtxGetStreamPriorityRange", code)
        stream = ctypes.c_void_p()
        code = self._create_stream(ctypes.byref(stream), _NON_BLOCKING, highest.value)
        if code:
            raise _make_error("cuStreamCreateWithPriority", code)
        return int(stream.value or 0)

    def is_idle(self, stream: int) -> bool:
        """Return whether all work of a stream has ended, or has failed."""
        return self._query(stream) != _NOT_READY

    def batch(self, stream: int, *operations: tuple[int, int, int, int]) -> None:
        """Run several operations in order, each (kind, address, value, flags)."""
        parameters = (_MemoryOperation * len(operations))(*[_MemoryOperation(*operation) for operation in operations])
        code = self._batch(stream, len(operations), parameters, 0)
        if code:
            raise _make_error("cuStreamBatchMemOp", code)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        code = self._copy(to, source, nbytes, stream)
        if code:
            raise _make_error("cuMemcpyDtoDAsync", code)

    def create_event(self) -> int:
        event = ctypes.c_void_p()
        code = self._create(ctypes.byref(event), _NO_TIMING)
        if code:
            raise _make_error("cuEventCreate", code)
        return int(event.value or 0)

    def record(self, event: int, stream: int) -> None:
        code = self._record(event, stream)
        if code:
            raise _make_error("cuEventRecord", code)

    def stream_wait(self, stream: int, event: int) -> None:
        code = self._stream_wait(stream, event, 0)
        if code:
            raise _make_error("cuStreamWaitEvent", code)


def _make_error(name: str, code: int) -> RuntimeError:
    return RuntimeError(f"{name} failed with error {code} of the CUDA driver")
