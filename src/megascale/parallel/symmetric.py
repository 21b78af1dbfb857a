"""Memory that the GPUs of one host read of each other, and the streams of an exchange over it (exchange.py).

The memory is torch's symmetric memory; no multicast is used. Flags are written and awaited by CUDA's stream-memory
operations, which need no multiprocessor: a small kernel would wait behind the product that fills the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megascale.parallel.collectives import Axis
from megascale.parallel.exchange import Exchange

FLAG = 128  # bytes from one flag to the next
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, modulo 2**32
_NUMBERS = 1 << 32


def prepare(axis: Axis, shard_bytes: int, device: torch.device) -> Exchange | str:
    """The group's exchange, made collectively; or why it cannot be had, on every rank alike.

    Args:
        shard_bytes: of the largest part of one rank that will be gathered or scattered.
    """
    if axis.size == 1:
        return "one rank has nobody to exchange with"
    if device.type != "cuda":
        return f"{device.type} tensors have no symmetric memory"
    reason, exchange = "", None
    try:
        exchange = _exchange(axis, shard_bytes, device)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    # All or none: a rank that exchanged alone would wait for ever.
    reasons: list[Any] = [None] * axis.size
    dist.all_gather_object(reasons, reason, group=axis.group)
    said = next((f"rank {r} of the group: {text}" for r, text in enumerate(reasons) if text), None)
    return exchange if said is None and exchange is not None else str(said)


def _exchange(axis: Axis, shard_bytes: int, device: torch.device) -> Exchange:
    from torch.distributed import _symmetric_memory as symmetric

    shard_bytes = -(-shard_bytes // 512) * 512
    space = Exchange.bytes_needed(axis.size, shard_bytes)
    whole = symmetric.empty(space + axis.size * FLAG, dtype=torch.uint8, device=device)
    whole.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(whole, axis.group.group_name)
    dist.barrier(axis.group)  # no flag is written before all are zero
    memory = [handle.get_buffer(r, whole.shape, torch.uint8) for r in range(axis.size)]
    flags = [part.data_ptr() + space for part in memory]
    exchange = Exchange(axis.rank, axis.size, memory, shard_bytes, CudaStreams(axis.rank, flags, device))
    exchange.keeps = (whole, handle)  # type: ignore[attr-defined]  # the memory lives as long as the exchange
    return exchange


class CudaStreams:
    """The three queues of an exchange as CUDA streams; main is the caller's current one.

    Args:
        rank: in the group.
        flags: address of each rank's flags, one for each peer.
    """

    def __init__(self, rank: int, flags: list[int], device: torch.device) -> None:
        self._rank, self._flags = rank, flags
        # Where both are ready, the early part of a product is started first, and copies before both.
        self._early = torch.cuda.Stream(device, priority=-1)
        self._side = torch.cuda.Stream(device, priority=-2)
        driver = ctypes.CDLL("libcuda.so.1")
        self._write, self._wait = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
        for call in (self._write, self._wait):
            call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
            call.restype = ctypes.c_int
        own = flags[rank] + FLAG * rank
        _check(self._write(self._side.cuda_stream, own, 1, 0))
        _check(self._wait(self._side.cuda_stream, own, 1, _AT_LEAST))
        self._side.synchronize()

    def compute(self, work: Callable[[], Any], early: bool = False) -> None:
        """See Streams."""
        if not early:
            work()
            return
        with torch.cuda.stream(self._early):
            work()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """See Streams."""
        with torch.cuda.stream(self._side):
            to.copy_(source, non_blocking=True)

    def tell(self, peer: int, number: int) -> None:
        """See Streams."""
        flag = self._flags[peer] + FLAG * self._rank
        _check(self._write(self._side.cuda_stream, flag, number % _NUMBERS, 0))

    def hear(self, peer: int, number: int) -> None:
        """See Streams."""
        flag = self._flags[self._rank] + FLAG * peer
        _check(self._wait(self._side.cuda_stream, flag, number % _NUMBERS, _AT_LEAST))

    def mark(self, queue: str) -> torch.cuda.Event:
        """See Streams."""
        event = torch.cuda.Event()
        event.record(self._stream(queue))
        return event

    def follow(self, queue: str, mark: torch.cuda.Event) -> None:
        """See Streams."""
        self._stream(queue).wait_event(mark)

    def _stream(self, queue: str) -> torch.cuda.Stream:
        if queue == "main":
            return torch.cuda.current_stream()
        return self._early if queue == "early" else self._side


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"a CUDA stream-memory operation failed with error {code}")
