"""Staging memory as a trainer sees it: shared with the service, page-locked where there is a device to copy from."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megascale.checkpoint.background.service_protocol import AwaitPages, Staged
from megascale.checkpoint.format.archive import element_size
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.mapping import fill_pages
from megascale.checkpoint.format.write_plan import RankPart, data_file, make_offer
from megascale.checkpoint.saver import Slice, dtype_name
from megascale.checkpoint.storage.base import PAGE
from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.services.conversation import Conversation

log = logging.getLogger(__name__)

_TELL = 32 << 20  # bytes after which the service hears how far a copy is


@dataclass
class SaveOutcome:
    """What became of a save.

    Attributes:
        step: which.
        committed: it stands in storage, whole. Only the first process learns of it; on others, and for copies that
            stay in memory, it is False with an empty `why`.
        why: what went wrong, "" if nothing did.
        record: the fault as a code.
        bytes: size of the checkpoint.
        stall: seconds that training stood still for it on this process, copy included.
        seconds: from the start of the copy to the end of the service's work (to the commit where that is known).
        replica: what went wrong with the copy to a peer, None if nothing did.
    """

    step: int
    committed: bool = False
    reason: str = ""
    bytes: int = 0
    stall: float = 0.0
    seconds: float = 0.0
    replica: str | None = None
    record: ExitRecord = NO_RECORD


@dataclass
class SnapshotCopy:
    """A copy under way.

    Attributes:
        copied: set once all is in host memory; kept: once it is complete there and at the peer, or has failed.
    """

    outcome: SaveOutcome
    message: Staged
    started: float
    copied: threading.Event = field(default_factory=threading.Event)
    replicated: threading.Event = field(default_factory=threading.Event)
    event: torch.cuda.Event | None = None
    waits: tuple[torch.cuda.Event, torch.cuda.Event] | None = None


class Staging:
    """One snapshot in shared memory, seen from the trainer, with the thread that looks after it.

    held: generation of a complete snapshot that is in it already.

    Attributes:
        prepared: set once `prepare` is over; failed: it did not succeed.
        free: nobody works on it.
    """

    def __init__(
        self,
        handle: int,
        size: int,
        index: CheckpointIndex,
        chunks: Sequence[Slice],
        device: torch.device,
        held: str = "",
    ) -> None:
        self.map = mmap.mmap(handle, max(size, PAGE), mmap.MAP_SHARED)
        os.close(handle)
        self._device, self.pinned, self._tried = device, False, False
        self.prepared, self.failed = threading.Event(), False
        memory = torch.frombuffer(self.map, dtype=torch.uint8)
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for row, chunk in enumerate(chunks):
            at, info = int(index.columns["data"][row]), chunk.info
            count = chunk.box.count * element_size(info.dtype)
            target = memory[at : at + count].view(getattr(torch, info.dtype)).reshape(chunk.box.sizes)
            self.pairs.append((target, chunk.view()))
        self.free = threading.Event()
        self.filled = held  # generation of the snapshot
        self.whole = bool(held)  # whether the service has all of it
        self.work: queue.SimpleQueue[SnapshotCopy | None] = queue.SimpleQueue()

    def prepare(self, service: Conversation, question: AwaitPages, stop: threading.Event) -> None:
        """Once the service has cleared the pages, map them; of tens of gigabytes this takes many seconds, beside
        training. Raises OSError where memory lacks."""
        while not stop.is_set() and not service.request(question).ready:
            pass
        fill_pages(self.map, stop=stop)

    def is_prepared(self) -> None:
        """From now on it may be filled, unless that failed."""
        if not self.failed:
            self.free.set()
        self.prepared.set()

    def page_lock(self) -> bool:
        """Whether it is, for a device's copies; tried once. The driver launches nothing meanwhile, and ranks wait for
        each other's kernels: they do it together between steps."""
        if self._device.type == "cuda" and not self._tried:
            self.pinned, self._tried = _pin(self.map, len(self.map)), True
        return self.pinned

    def copy(self) -> Iterator[int]:
        """Copy all chunks, in file order; now and then, and at last, how many are in place."""
        since = 0
        for row, (target, source) in enumerate(self.pairs):
            target.copy_(source)
            since += target.nbytes
            if since >= _TELL and row + 1 < len(self.pairs):
                yield row + 1
                since = 0
        yield len(self.pairs)

    def close(self) -> None:
        """Give the memory back to the service alone."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(ctypes.c_char.from_buffer(self.map)))
            self.pinned = False
        self.pairs.clear()
        with contextlib.suppress(BufferError):  # a tensor still looks at it; then it goes with that
            self.map.close()


def next_slot(
    free: Sequence[bool], whole: Sequence[bool], filled: Sequence[str], origin: Sequence[bool], resumed: bool
) -> int | None:
    """Which slot the next snapshot goes to, None if none may be given up yet.

    Each process must take the same one, and a snapshot that is complete everywhere must stay until another is: else a
    kill could leave each process with a snapshot of another step.

    Args:
        free, whole: of each slot whether on every process nobody works on it, and whether its snapshot is complete.
        filled: generation of each slot's snapshot, as this process has it; the same on all where it is complete on all.
        origin: of each slot whether some process has in it what the run began from (others may have it from a peer).
        resumed: the run began from memory. As long as nothing newer is complete everywhere, one is made at a time.
    """
    if resumed and not any(whole) and not all(free):
        return None
    slots = range(len(free))
    worth = [a or b for a, b in zip(whole, origin, strict=True)]
    usable = [i for i in slots if free[i] and (not worth[i] or len(free) == 1 or any(whole[:i]) or any(whole[i + 1 :]))]
    # What is worth nothing goes first, then the oldest.
    return min(usable, key=lambda i: (worth[i], filled[i] if whole[i] else ""), default=None)


def _pin(memory: mmap.mmap, size: int) -> bool:
    """Page-lock shared memory for copies from the device; False (and a line in the log) where that is refused."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = torch.cuda.cudart().cudaHostRegister(address, size, 0)
    if int(code) != 0:
        log.warning("%s bytes of staging memory could not be page-locked (CUDA error %s): slow copies", size, code)
        return False
    return True


def own_index(shards: Sequence[TensorShard], part: RankPart, rank: int) -> CheckpointIndex:
    """The chunks that this process writes, in file order."""
    offer = make_offer((s.name, s.shape, dtype_name(s.tensor), s.box) for s in shards)
    columns = {
        "tensor": offer.tensor[part.chunks],
        "in_file": np.zeros(len(part.chunks), np.int32),
        "start": part.start,
        "length": part.length,
        "data": part.data,
        "crc": np.zeros(len(part.chunks), np.uint32),
        "box": offer.box[part.chunks],
    }
    return CheckpointIndex(offer.tensors, [data_file(rank)], columns)
