"""How a micro-batch passes through a chunk: what the pipeline executor asks for, and the plain way of doing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

# (chunk, micro-batch, input or None for the model's first chunk) -> output. On the model's last chunk the output is the
# micro-batch's share of the loss, a scalar.
Forward = Callable[[int, int, Tensor | None], Tensor]


class ChunkRunner(Protocol):
    """Forward and backward of the micro-batches of one step, in the order in which the schedule asks for them."""

    def forward(self, chunk: int, i: int, x: Tensor | None) -> Tensor:
        """Micro-batch `i` through `chunk`; x: what came from the chunk before, None for the model's first. The output
        may be read until the micro-batch's backward."""

    def backward(self, chunk: int, i: int, grad: Tensor | None) -> Tensor | None:
        """Its backward; grad: of its output, None for the model's last chunk. The gradient of its input, if it has
        one; parameters' gradients go into their sinks."""


class EagerRunner:
    """Each operator launched as Python comes to it."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._live: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def forward(self, chunk: int, i: int, x: Tensor | None) -> Tensor:
        """See ChunkRunner."""
        if x is not None:
            x = x.detach().requires_grad_()
        y = self._forward(chunk, i, x)
        self._live[chunk, i] = x, y
        return y.detach()

    def backward(self, chunk: int, i: int, grad: Tensor | None) -> Tensor | None:
        """See ChunkRunner."""
        x, y = self._live.pop((chunk, i))
        torch.autograd.backward(y, grad)
        return None if x is None else x.grad
