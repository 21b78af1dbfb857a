"""Queue of weight gradients that a schedule computes in an action of its own (BACKWARD_WEIGHT)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class WeightGradientQueue:
    """The queued weight gradients of one rank, by chunk and micro-batch.

    Attributes:
        limit_bytes: the most that operands in the queue may hold.
        is_deferring: whether linear layers queue their weights' gradients now.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.is_deferring = False
        self._key = (0, 0)
        self._queued: dict[tuple[int, int], list[Callable[[], None]]] = {}

    @contextmanager
    def defer(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Queue the weight gradients of the backward that runs within."""
        self._key = chunk, microbatch
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False

    def add(self, accumulate: Callable[[], None], *operands: object) -> None:
        """Queue a gradient, which `accumulate` computes from `operands`."""
        self._queued.setdefault(self._key, []).append(accumulate)

    @torch.no_grad()
    def flush(self, chunk: int, microbatch: int) -> None:
        """Compute the queued gradients of a chunk's micro-batch, in order."""
        for accumulate in self._queued.pop((chunk, microbatch), []):
            accumulate()
