"""Small collectives over values, the same for a single process and for a process group.

Values travel as MessagePack, and both ends name their type, so nothing received is ever run: numbers, texts, bytes,
lists, tuples, dictionaries, dataclasses of these, and arrays of numbers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.errors import TrainingError

_MAX_BYTES = 8 << 30  # of one value: the index of the largest checkpoint takes some hundred million
_Array = tuple[str, tuple[int, ...], bytes]  # dtype, shape, contents

_gloo_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Peers:
    """The processes that save or load together. Every method is collective.

    Attributes:
        rank: this process's rank in the group.
        size: number of processes.
        is_single: whether this process is the only one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank = 0
        self.size = 1
        if dist.is_available() and dist.is_initialized():
            self.size = dist.get_world_size(group)
        self.is_single = self.size == 1
        if not self.is_single:
            self.rank = dist.get_rank(group)
            self.data_group = group or dist.group.WORLD
            self.group = _gloo_group(self.data_group)

    def all_true(self, flag: bool) -> bool:
        """Return whether the flag is set on every process."""
        return self.all_true_each([flag])[0]

    def all_true_each(self, flags: Sequence[bool]) -> list[bool]:
        """Return, for each flag, whether it is set on every process."""
        if self.is_single:
            return list(flags)
        values = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self.group)
        return [bool(value) for value in values.tolist()]

    def gather(self, value: Any, kind: Any) -> list[Any]:
        """Return every process's value (of type `kind`) on the first process, an empty list on the others."""
        if self.is_single:
            return [value]
        data, sizes = self._exchange_sizes(encode_value(value))
        longest = max(sizes)
        if self.rank == 0:
            rows = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        else:
            rows = None
        dist.gather(_pad(data, longest), rows, group=self.group, group_dst=0)
        return [decode_value(row[:size].numpy().data, kind) for row, size in zip(rows or [], sizes, strict=False)]

    def broadcast(self, value: Any, kind: Any) -> Any:
        """Return the first process's value (of type `kind`) on every process."""
        if self.is_single:
            return value
        if self.rank == 0:
            data = _to_tensor(encode_value(value))
        else:
            data = torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(data)])
        dist.broadcast(size, group=self.group, group_src=0)
        _check_size(int(size))
        if self.rank != 0:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, group=self.group, group_src=0)
        if self.rank == 0:
            return value
        return decode_value(data.numpy().data, kind)

    def compute_once(self, compute: Callable[[], Any], kind: Any) -> Any:
        """Return the result of `compute` (of type `kind`), called on the first process only, on every process."""
        return self.broadcast(compute() if self.rank == 0 else None, kind)

    def scatter(self, values: list[Any], kind: Any) -> Any:
        """Return this process's entry of the first process's `values` (of type `kind`); others pass an empty list."""
        if self.is_single:
            return values[0]
        if self.rank == 0:
            parts = [_to_tensor(encode_value(value)) for value in values]
        else:
            parts = []
        sizes = torch.tensor([len(part) for part in parts] or [0] * self.size)
        dist.broadcast(sizes, group=self.group, group_src=0)
        longest = int(sizes.max())
        _check_size(longest)
        out = torch.empty(longest, dtype=torch.uint8)
        if self.rank == 0:
            rows = [_pad(part, longest) for part in parts]
        else:
            rows = None
        dist.scatter(out, rows, group=self.group, group_src=0)
        if self.rank == 0:
            return values[0]
        return decode_value(out[: int(sizes[self.rank])].numpy().data, kind)

    def all_gather(self, value: Any, kind: Any) -> list[Any]:
        """Return every process's value (of type `kind`) on every process."""
        if self.is_single:
            return [value]
        data, sizes = self._exchange_sizes(encode_value(value))
        longest = max(sizes)
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(rows, _pad(data, longest), group=self.group)
        return [decode_value(row[:size].numpy().data, kind) for row, size in zip(rows, sizes, strict=True)]

    def first_problem(self, problem: str | None) -> str | None:
        """Return the first process's problem that is not empty, the same on every process; None if there is none."""
        return next((text for text in self.all_gather(problem, str | None) if text), None)

    def _exchange_sizes(self, data: bytes) -> tuple[torch.Tensor, list[int]]:
        """Return this process's bytes as a tensor, and the number of bytes of each process."""
        sizes = torch.empty(self.size, dtype=torch.int64)
        dist.all_gather(list(sizes.split(1)), torch.tensor([len(data)]), group=self.group)
        _check_size(int(sizes.max()))
        return _to_tensor(data), sizes.tolist()

    @property
    def exchange_device(self) -> torch.device:
        """Return the device of the bytes that `all_to_all` exchanges.

        It is this process's GPU where the group has NCCL, the fast way between the GPUs of a host and over fast
        networks; otherwise it is host memory.
        """
        if not self.is_single and "nccl" in str(dist.get_backend_config(self.data_group)):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def all_to_all(self, outgoing: torch.Tensor, counts: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Exchange bytes (uint8) on `exchange_device` with every process; they are complete on return for any stream.

        Args:
            outgoing: bytes for the processes, one after the other.
            counts: bytes of `outgoing` for each process.
            sizes: bytes expected from each process.
        """
        incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=outgoing.device)
        if not self.is_single:
            if outgoing.is_cuda:
                group = self.data_group
            else:
                group = self.group
            dist.all_to_all_single(incoming, outgoing, list(sizes), list(counts), group=group)
            if outgoing.is_cuda:
                torch.cuda.current_stream(outgoing.device).synchronize()
        return list(incoming.split(list(sizes)))


def _gloo_group(group: Any) -> Any:
    """Return a gloo group of the same processes, made once, so that collectives on values do not wait for the GPU."""
    if "gloo" in str(dist.get_backend_config(group)):
        return group
    if group not in _gloo_groups:
        ranks = dist.get_process_group_ranks(group)
        with torch_private.share_gloo_loop():
            _gloo_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _gloo_groups[group]


def forget_groups() -> None:
    """Drop the groups that were made for others, because all groups have been aborted."""
    _gloo_groups.clear()


def encode_value(value: Any) -> bytes:
    """Return a value as bytes. Raises TypeError for a type that cannot travel."""
    return msgspec.msgpack.encode(value, enc_hook=_encode_array)


def decode_value(data: bytes | bytearray | memoryview, kind: Any) -> Any:
    """Return the value of type `kind`. Raises TrainingError if the bytes are not one."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError, MemoryError) as error:
        raise TrainingError(f"another process of the group sent a value of an unexpected type: {error}") from None


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to other processes")


def _decode_array(kind: type, value: Any) -> np.ndarray:
    if kind is not np.ndarray:
        raise TypeError(f"a {kind.__name__} cannot be received from other processes")
    name, shape, data = msgspec.convert(value, _Array)
    dtype = np.dtype(name)
    if dtype.kind not in "biuf" or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of {name}{list(shape)} in {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _pad(data: torch.Tensor, size: int) -> torch.Tensor:
    """Return the bytes padded with zeros: collectives need equal lengths on all processes."""
    out = torch.zeros(size, dtype=torch.uint8)
    out[: len(data)] = data
    return out


def _check_size(size: int) -> None:
    if not 0 < size <= _MAX_BYTES:
        raise TrainingError(f"another process of the group announced {size:,} bytes; 1 to {_MAX_BYTES:,} are allowed")
