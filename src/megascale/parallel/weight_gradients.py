"""Queue of weight gradients that are computed after the gradients of activations.

A schedule may split a backward into two actions. The first one computes the gradients of activations, for which the
previous stage waits, and queues each weight's gradient. The second one computes the queued gradients at a time at which
the stage would otherwise be idle. A queued gradient keeps its operands in memory. When the operands exceed a limit, the
oldest gradients are computed at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megascale.ops.linear import Operand


@dataclass(frozen=True)
class _QueuedGradient:
    """One weight's gradient of one micro-batch.

    Attributes:
        chunk, microbatch: the backward that queued the gradient.
        accumulate: computes the gradient and adds it to its sink.
        storage_bytes: bytes of each storage that the operands use, by its address.
    """

    chunk: int
    microbatch: int
    accumulate: Callable[[], None]
    storage_bytes: dict[int, int]


class WeightGradientQueue:
    """The queued weight gradients of one rank.

    Every gradient is added to its sink exactly once. If micro-batches are flushed in the order in which they were
    queued, the gradients of each weight are added in that order too. The sums then have the same bits as without a
    queue.

    Attributes:
        limit_bytes: largest memory of the operands in the queue; set it before the first `defer`.
        is_deferring: whether linear layers queue their weights' gradients now.
        nbytes, peak_bytes: memory of the operands in the queue, now and at most so far.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.is_deferring = False
        self.nbytes = 0
        self.peak_bytes = 0
        self._key = (0, 0)  # chunk and micro-batch of the backward that is queueing
        self._queue: deque[_QueuedGradient] = deque()
        self._reader_counts: Counter[int] = Counter()  # number of queued gradients that read a storage, by its address

    def __len__(self) -> int:
        return len(self._queue)

    @contextmanager
    def defer(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Queue the weight gradients of the enclosed backward. Raises ValueError without a limit."""
        if self.limit_bytes <= 0:
            raise ValueError("a queue of weight gradients needs a limit on its memory; set limit_bytes first")
        self._key = chunk, microbatch
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False

    def add(self, accumulate: Callable[[], None], *operands: Operand) -> None:
        """Queue a gradient. If the operands exceed `limit_bytes`, compute the oldest gradients first.

        A gradient whose operands alone exceed the limit is computed at once.
        """
        storage_bytes: dict[int, int] = {}
        for operand in operands:
            for tensor in (operand.data, operand.scale):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storage_bytes[storage.data_ptr()] = storage.nbytes()
        while self._queue and self._count_bytes_with(storage_bytes) > self.limit_bytes:
            self._run(self._queue.popleft())
        gradient = _QueuedGradient(*self._key, accumulate, storage_bytes)
        if self._count_bytes_with(storage_bytes) > self.limit_bytes:
            self._accumulate(gradient)
            return
        self.nbytes = self._count_bytes_with(storage_bytes)
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        self._reader_counts.update(storage_bytes.keys())
        self._queue.append(gradient)

    def flush(self, chunk: int | None = None, microbatch: int | None = None) -> None:
        """Compute the queued gradients of a chunk's micro-batch in order; None stands for all of them."""
        remaining: deque[_QueuedGradient] = deque()
        while self._queue:
            gradient = self._queue.popleft()
            if chunk not in (None, gradient.chunk) or microbatch not in (None, gradient.microbatch):
                remaining.append(gradient)
            else:
                self._run(gradient)
        self._queue = remaining

    def clear(self) -> None:
        """Drop all queued gradients, because their step has failed."""
        self._queue.clear()
        self._reader_counts.clear()
        self.nbytes = 0

    def _count_bytes_with(self, storage_bytes: dict[int, int]) -> int:
        """Return the bytes of the operands in the queue if these storages are added to it."""
        total_bytes = self.nbytes
        for address, nbytes in storage_bytes.items():
            if not self._reader_counts[address]:
                total_bytes += nbytes
        return total_bytes

    def _run(self, gradient: _QueuedGradient) -> None:
        """Compute a gradient that has left the queue."""
        self._accumulate(gradient)
        for address, nbytes in gradient.storage_bytes.items():
            self._reader_counts[address] -= 1
            if not self._reader_counts[address]:
                del self._reader_counts[address]
                self.nbytes -= nbytes

    @torch.no_grad()
    def _accumulate(self, gradient: _QueuedGradient) -> None:
        """Compute a gradient without queueing it again."""
        was_deferring = self.is_deferring
        self.is_deferring = False
        try:
            gradient.accumulate()
        finally:
            self.is_deferring = was_deferring
