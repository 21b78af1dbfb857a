"""Collectives over Python values, with the same interface for a single process and a process group.

Values are encoded as MessagePack, and the receiver names their type, so that no received data is executed. The types
are numbers, texts, bytes, lists, tuples, dictionaries, dataclasses of these, and arrays of numbers.
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

_MAX_VALUE_BYTES = 8 << 30  # the index of the largest checkpoint has some hundred million bytes
_Array = tuple[str, tuple[int, ...], bytes]  # dtype, shape, contents

_gloo_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Peers:
    """Processes that save or load together. Every method is collective.

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
            self.group = _get_gloo_group(self.data_group)

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

    def gather(self, value: Any, value_type: Any) -> list[Any]:
        """Return all processes' values (of type `value_type`) on the first process, and an empty list on the others."""
        if self.is_single:
            return [value]
        data, sizes = self._exchange_sizes(encode_value(value))
        longest = max(sizes)
        if self.rank == 0:
            rows = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        else:
            rows = None
        dist.gather(_pad(data, longest), rows, group=self.group, group_dst=0)
        if rows is None:
            return []
        return [decode_value(row[:size].numpy().data, value_type) for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, value: Any, value_type: Any) -> Any:
        """Return the first process's value (of type `value_type`) on every process."""
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
        return decode_value(data.numpy().data, value_type)

    def compute_once(self, compute: Callable[[], Any], value_type: Any) -> Any:
        """Call `compute` on the first process, and return its result (of type `value_type`) on every process."""
        return self.broadcast(compute() if self.rank == 0 else None, value_type)

    def scatter(self, values: list[Any], value_type: Any) -> Any:
        """Return the element for this process of the first process's `values` (of type `value_type`).

        The other processes pass an empty list.
        """
        if self.is_single:
            return values[0]
        if self.rank == 0:
            encoded_values = [_to_tensor(encode_value(value)) for value in values]
        else:
            encoded_values = []
        sizes = torch.zeros(self.size, dtype=torch.int64)
        if self.rank == 0:
            sizes = torch.tensor([len(data) for data in encoded_values])
        dist.broadcast(sizes, group=self.group, group_src=0)
        longest = int(sizes.max())
        _check_size(longest)
        out = torch.empty(longest, dtype=torch.uint8)
        if self.rank == 0:
            rows = [_pad(data, longest) for data in encoded_values]
        else:
            rows = None
        dist.scatter(out, rows, group=self.group, group_src=0)
        if self.rank == 0:
            return values[0]
        return decode_value(out[: int(sizes[self.rank])].numpy().data, value_type)

    def all_gather(self, value: Any, value_type: Any) -> list[Any]:
        """Return every process's value (of type `value_type`) on every process."""
        if self.is_single:
            return [value]
        data, sizes = self._exchange_sizes(encode_value(value))
        longest = max(sizes)
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(rows, _pad(data, longest), group=self.group)
        return [decode_value(row[:size].numpy().data, value_type) for row, size in zip(rows, sizes, strict=True)]

    def find_first_problem(self, problem: str | None) -> str | None:
        """Return the problem of the lowest rank that has one, or None. The result is the same on all processes."""
        return next((text for text in self.all_gather(problem, str | None) if text), None)

    def _exchange_sizes(self, data: bytes) -> tuple[torch.Tensor, list[int]]:
        """Return this process's bytes as a tensor, and the number of bytes of every process."""
        sizes = torch.empty(self.size, dtype=torch.int64)
        dist.all_gather(list(sizes.split(1)), torch.tensor([len(data)]), group=self.group)
        _check_size(int(sizes.max()))
        return _to_tensor(data), sizes.tolist()

    @property
    def exchange_device(self) -> torch.device:
        """Return the device of the bytes that `all_to_all` exchanges.

        If the group has NCCL, the device is this process's GPU, because NCCL is faster than gloo within a host and over
        fast networks. Otherwise the device is the CPU.
        """
        if not self.is_single and "nccl" in str(dist.get_backend_config(self.data_group)):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def all_to_all(
        self, outgoing: torch.Tensor, outgoing_bytes: Sequence[int], incoming_bytes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Exchange bytes (uint8 tensors on `exchange_device`) with every process.

        Args:
            outgoing: bytes for the processes in the order of their ranks.
            outgoing_bytes: number of bytes of `outgoing` for each process.
            incoming_bytes: number of bytes that each process sends to this process.

        Returns:
            The bytes from each process. They are complete for all streams of the device.
        """
        incoming = torch.empty(sum(incoming_bytes), dtype=torch.uint8, device=outgoing.device)
        if not self.is_single:
            if outgoing.is_cuda:
                group = self.data_group
            else:
                group = self.group
            dist.all_to_all_single(incoming, outgoing, list(incoming_bytes), list(outgoing_bytes), group=group)
            if outgoing.is_cuda:
                torch.cuda.current_stream(outgoing.device).synchronize()
        return list(incoming.split(list(incoming_bytes)))


def _get_gloo_group(group: Any) -> Any:
    """Return a gloo group of the same processes, so that collectives on values do not wait for the GPU.

    The group is made once and kept in `_gloo_groups`.
    """
    if "gloo" in str(dist.get_backend_config(group)):
        return group
    if group not in _gloo_groups:
        ranks = dist.get_process_group_ranks(group)
        with torch_private.share_gloo_loop():
            _gloo_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _gloo_groups[group]


def forget_groups() -> None:
    """Remove the gloo groups that were made for other groups, because all groups have been aborted."""
    _gloo_groups.clear()


def encode_value(value: Any) -> bytes:
    """Return a value as bytes. Raises TypeError for a type that cannot be encoded."""
    return msgspec.msgpack.encode(value, enc_hook=_encode_array)


def decode_value(data: bytes | bytearray | memoryview, value_type: Any) -> Any:
    """Return the value of type `value_type` in `data`. Raises TrainingError if the bytes have another type."""
    try:
        return msgspec.msgpack.decode(data, type=value_type, dec_hook=_decode_array)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError, MemoryError) as error:
        raise TrainingError(f"another process of the group sent a value of an unexpected type: {error}") from None


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent to other processes")


def _decode_array(value_type: type, value: Any) -> np.ndarray:
    if value_type is not np.ndarray:
        raise TypeError(f"a {value_type.__name__} cannot be received from other processes")
    name, shape, data = msgspec.convert(value, _Array)
    dtype = np.dtype(name)
    if dtype.kind not in "biuf" or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of {name}{list(shape)} in {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _pad(data: torch.Tensor, size: int) -> torch.Tensor:
    """Return the bytes padded with zeros to `size`, because collectives need equal lengths on all processes."""
    out = torch.zeros(size, dtype=torch.uint8)
    out[: len(data)] = data
    return out


def _check_size(size: int) -> None:
    if not 0 < size <= _MAX_VALUE_BYTES:
        raise TrainingError(
            f"another process of the group announced {size:,} bytes; 1 to {_MAX_VALUE_BYTES:,} are allowed"
        )
