"""Custom losses: functions from the logits of some tokens to the loss of each token, for `train.loss`.

A loss is written as if it saw a token's whole row of logits. With tensor parallelism each rank has some columns, and
`TokenLogits` offers reductions over whole rows. The loss is called for a chunk of tokens at a time and differentiated
by autograd. Evaluation uses cross-entropy for any training loss, so that runs can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale.config.parts import LOSSES, PartFacts
from megascale.config.registry import Registry

AllReduce = Callable[[Tensor], Any]


class _RowSum(torch.autograd.Function):
    """Sum over the ranks that share a row; each rank's part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, all_reduce: AllReduce) -> Tensor:
        total = part.clone()
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None


@dataclass(frozen=True)
class TokenLogits:
    """The logits of T tokens that a loss reads.

    Attributes:
        values: this rank's columns of the vocabulary, [T, columns], float32 or wider; they carry the loss's gradient.
        targets: ids of the next tokens, [T]; ignored tokens (-100) have id 0 and a loss that is dropped.
        start: id of the first column.
        all_reduce_max, all_reduce_sum: reduce in place over the ranks that share a row; None if a rank has whole rows.
    """

    values: Tensor
    targets: Tensor
    start: int = 0
    all_reduce_max: AllReduce | None = None
    all_reduce_sum: AllReduce | None = None

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of [T, columns] over whole rows: [T]."""
        part = values.sum(-1)
        return part if self.all_reduce_sum is None else _RowSum.apply(part, self.all_reduce_sum)  # type: ignore[no-any-return]

    def log_sum_exp(self) -> Tensor:
        """Return the log-sum-exp of whole rows: [T]."""
        columns = self.values.detach()
        top = columns.amax(-1) if columns.shape[-1] else columns.new_full(self.targets.shape, -torch.inf)
        if self.all_reduce_max is not None:
            self.all_reduce_max(top)
        return top + self.sum((self.values - top[:, None]).exp()).log()

    def target_logits(self) -> Tensor:
        """Return the logits of the targets: [T]."""
        columns = torch.arange(self.start, self.start + self.values.shape[-1], device=self.values.device)
        return self.sum(self.values.where(columns == self.targets[:, None], 0))


TokenLoss = Callable[[TokenLogits], Tensor]
KINDS: Registry[TokenLoss | None] = Registry("train.loss", {"cross_entropy": None}, home="megascale.ops")


def register(name: str, loss: TokenLoss, description: str = "") -> None:
    """Register `name` for `train.loss`: loss(logits) -> the loss of each token, [T], differentiable.

    On a GPU it must not wait for the device (no `.item()`), since chunks are captured in CUDA graphs.
    """
    LOSSES.register(name, PartFacts(description))
    KINDS.register(name, loss)
