"""Rendezvous of symmetric memory, with the same number on all ranks after a process has survived an attempt.

torch numbers the rendezvous of a process from 0, over all groups, and the number is part of the keys under which ranks
meet in the store. A process that stays for the next attempt would count on, and a new process would begin with 0, so
that each waits for keys that the other never writes. `align_rendezvous` lets the processes that are behind catch up by
rendezvous with themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.errors import TrainingError

log = logging.getLogger("megascale.train")
_MAX_CATCH_UP = 10_000  # rendezvous with itself that a process makes before it reports an error
_call_count = 0  # rendezvous of this process by `rendezvous` and `align_rendezvous`


class _KeyRecorder(dist.Store):
    """Store of a group of one rank. It keeps the keys that are set, and no values, since no other rank reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def set(self, key: str, value: Any) -> None:
        self.keys.append(key)


def rendezvous(memory: torch.Tensor, group_name: str) -> Any:
    """Map the symmetric memory of all ranks of a group, and return torch's handle of it. Collective over the group."""
    global _call_count
    _call_count += 1
    return torch_private.symmetric_memory.rendezvous(memory, group_name)


def align_rendezvous(all_gather: Callable[[int], Sequence[int]], device: torch.device) -> int:
    """Let the next rendezvous have the same number on all ranks. Collective over all ranks.

    Args:
        all_gather: returns the values of all ranks for this rank's value.

    Returns:
        Number of rendezvous that this process has made with itself.

    Raises:
        TrainingError: on all ranks, if they cannot have the same number.
    """
    # Equal counts of calls prove nothing: a failed peer may have interrupted the last call of some ranks earlier than
    # that of others.
    if not any(all_gather(_call_count)):
        return 0
    return catch_up(all_gather, lambda: meet_itself(device))


def catch_up(all_gather: Callable[[int], Sequence[int]], meet: Callable[[], int]) -> int:
    """Call `meet` until its next number is the largest next number of all ranks. Return the number of calls.

    Args:
        meet: makes a rendezvous of this process with itself, and returns the number that the next one will have.

    Raises:
        TrainingError: on all ranks, if `meet` has gone past that number on a rank, or does not reach it. A process that
            was interrupted between the numbers of one rendezvous is at an odd distance.
    """
    next_number = meet()
    call_count = 1
    target = max(all_gather(next_number))
    while next_number < target and call_count < _MAX_CATCH_UP:
        next_number = meet()
        call_count += 1
    numbers = sorted(set(all_gather(next_number)))
    if len(numbers) > 1:
        raise TrainingError(
            f"the rendezvous of GPU memory have different numbers on different ranks: {', '.join(map(str, numbers))}; "
            "new processes begin at 0. Set --resilience.keep_seconds=0 if that happens in each recovery"
        )
    return call_count


def meet_itself(device: torch.device) -> int:
    """Make a rendezvous in a new group of this process alone, and return the number that the next one will have.

    Return 0 if torch does not number rendezvous in the store.
    """
    global _call_count
    _call_count += 1
    store = _KeyRecorder()
    name = f"megascale-rendezvous-{_call_count}"
    with torch_private.register_lone_group(store, name):
        memory = torch_private.symmetric_memory.empty(1, dtype=torch.uint8, device=device)
        torch_private.symmetric_memory._SymmetricMemory.rendezvous(memory, name)
    if not store.keys:
        return 0
    return 1 + max(int(key.split("/")[-2]) for key in store.keys)
