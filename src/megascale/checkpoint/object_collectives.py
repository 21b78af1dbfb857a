"""Small collectives over plain values (plain_values.py), the same for one process alone and for a process group."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.checkpoint.plain_values import decode_value, dump
from megascale.errors import TrainingError

_LIMIT = 8 << 30  # bytes of one value: the index of the largest checkpoint takes some hundred million

_controls: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _control(group: Any) -> Any:
    """A group of the same processes that works on host memory, made once: talk must not wait for the device."""
    if "gloo" in str(dist.get_backend_config(group)):
        return group
    if group not in _controls:
        ranks = dist.get_process_group_ranks(group)
        with torch_private.gloo_loop_shared():
            _controls[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _controls[group]


class Peers:
    """The processes that save or load together. Every method but the properties is collective."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.alone = not (dist.is_available() and dist.is_initialized())
        if not self.alone:
            self.data_group = group or dist.group.WORLD
            self.size = dist.get_world_size(group)
            self.alone = self.size == 1
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else self.size
        if not self.alone:
            self.group = _control(self.data_group)

    def all_true(self, flag: bool) -> bool:
        """Whether everyone's flag is set."""
        return self.each([flag])[0]

    def each(self, flags: Sequence[bool]) -> list[bool]:
        """Of each flag whether everyone's is set."""
        if self.alone:
            return list(flags)
        words = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(words, dist.ReduceOp.MIN, group=self.group)
        return [bool(word) for word in words.tolist()]

    def gather(self, value: Any, kind: Any) -> list[Any]:
        """Everyone's value (of type `kind`) on the first process, an empty list elsewhere."""
        if self.alone:
            return [value]
        mine, sizes = self._sized(dump(value))
        longest = max(sizes)
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if self.rank == 0 else None
        dist.gather(_padded(mine, longest), rows, group=self.group, group_dst=0)
        return [decode_value(row[:size].numpy().data, kind) for row, size in zip(rows or [], sizes, strict=False)]

    def broadcast(self, value: Any, kind: Any) -> Any:
        """The first process's value (of type `kind`), on everyone."""
        if self.alone:
            return value
        mine = _bytes(dump(value)) if self.rank == 0 else None
        size = torch.tensor([len(mine) if mine is not None else 0])
        dist.broadcast(size, group=self.group, group_src=0)
        _bounded(int(size))
        data = mine if mine is not None else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, group=self.group, group_src=0)
        return value if self.rank == 0 else decode_value(data.numpy().data, kind)

    def scatter(self, values: list[Any], kind: Any) -> Any:
        """The first process hands each its own (of type `kind`); others pass an empty list."""
        if self.alone:
            return values[0]
        parts = [_bytes(dump(value)) for value in values] if self.rank == 0 else []
        sizes = torch.tensor([len(part) for part in parts] or [0] * self.size)
        dist.broadcast(sizes, group=self.group, group_src=0)
        longest = int(sizes.max())
        _bounded(longest)
        out = torch.empty(longest, dtype=torch.uint8)
        rows = [_padded(part, longest) for part in parts] if self.rank == 0 else None
        dist.scatter(out, rows, group=self.group, group_src=0)
        return values[0] if self.rank == 0 else decode_value(out[: int(sizes[self.rank])].numpy().data, kind)

    def all_gather(self, value: Any, kind: Any) -> list[Any]:
        """Everyone's value (of type `kind`), on everyone."""
        if self.alone:
            return [value]
        mine, sizes = self._sized(dump(value))
        longest = max(sizes)
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(rows, _padded(mine, longest), group=self.group)
        return [decode_value(row[:size].numpy().data, kind) for row, size in zip(rows, sizes, strict=True)]

    def _sized(self, data: bytes) -> tuple[torch.Tensor, list[int]]:
        """Own bytes, and how many each process has."""
        sizes = torch.empty(self.size, dtype=torch.int64)
        dist.all_gather(list(sizes.split(1)), torch.tensor([len(data)]), group=self.group)
        _bounded(int(sizes.max()))
        return _bytes(data), sizes.tolist()

    @property
    def wire(self) -> torch.device:
        """Where `swap` takes bytes from: this process's GPU where the group has NCCL, which is the quick way between
        GPUs of a host and over fast networks; else host memory."""
        if not self.alone and "nccl" in str(dist.get_backend_config(self.data_group)):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def swap(self, outgoing: torch.Tensor, counts: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Send `counts[i]` bytes of `outgoing` to process i, one after the other, and get `sizes[i]` from it; uint8 on
        `wire`. They have come when it returns, for other threads and streams too."""
        incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=outgoing.device)
        if not self.alone:
            group = self.data_group if outgoing.is_cuda else self.group
            dist.all_to_all_single(incoming, outgoing, list(sizes), list(counts), group=group)
            if outgoing.is_cuda:
                torch.cuda.current_stream(outgoing.device).synchronize()
        return list(incoming.split(list(sizes)))


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _padded(data: torch.Tensor, size: int) -> torch.Tensor:
    """Collectives want one length of all."""
    out = torch.zeros(size, dtype=torch.uint8)
    out[: len(data)] = data
    return out


def _bounded(size: int) -> None:
    if not 0 < size <= _LIMIT:
        raise TrainingError(f"another process of the group announced {size:,} bytes; at most {_LIMIT:,} are taken")
