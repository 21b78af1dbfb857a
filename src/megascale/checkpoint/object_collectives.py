"""Small collectives over Python objects, the same for one process alone and for a process group."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_controls: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _control(group: Any) -> Any:
    """A group of the same processes that works on host memory, made once: talk must not wait for the device."""
    if "gloo" in str(dist.get_backend_config(group)):
        return group
    if group not in _controls:
        ranks = dist.get_process_group_ranks(group)
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

    def all(self, flag: bool) -> bool:
        """Whether everyone's flag is set."""
        return self.each([flag])[0]

    def each(self, flags: Sequence[bool]) -> list[bool]:
        """Of each flag whether everyone's is set."""
        if self.alone:
            return list(flags)
        words = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(words, dist.ReduceOp.MIN, group=self.group)
        return [bool(word) for word in words.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value on the first process, an empty list elsewhere."""
        if self.alone:
            return [value]
        out: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, out, group=self.group, group_dst=0)
        return out or []

    def share(self, value: Any) -> Any:
        """The first process's value, on everyone."""
        if self.alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def scatter(self, values: list[Any]) -> Any:
        """The first process hands each its own; others pass an empty list."""
        if self.alone:
            return values[0]
        out: list[Any] = [None]
        dist.scatter_object_list(out, values if self.rank == 0 else None, group=self.group, group_src=0)
        return out[0]

    def exchange(self, value: Any) -> list[Any]:
        """Everyone's value, on everyone."""
        if self.alone:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out

    def swap(self, sends: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Send bytes to each process and get `sizes[i]` bytes from process i; uint8, in host memory or on the device
        that the group's backend works on."""
        if self.alone:
            return [torch.empty(0, dtype=torch.uint8)]
        device, group = torch.device("cpu"), self.group
        if "nccl" in str(dist.get_backend_config(self.data_group)):
            # Between devices of a host, and over fast networks, this is the quick way.
            group = self.data_group
            device = torch.device("cuda", torch.cuda.current_device())
        flat = [piece for pieces in sends for piece in pieces]
        counts = [sum(len(piece) for piece in pieces) for pieces in sends]
        outgoing = torch.cat(flat).to(device) if flat else torch.empty(0, dtype=torch.uint8, device=device)
        incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.all_to_all_single(incoming, outgoing, list(sizes), counts, group=group)
        return list(incoming.split(list(sizes)))
