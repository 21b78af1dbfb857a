"""Custom losses: functions from the logits of some tokens to the loss of each token, for `train.loss`.

With tensor parallelism each rank has some columns of a token's row of logits. `TokenLogits` has reductions over whole
rows, so that a loss need not know the layout. A loss is called for one chunk of tokens at a time, and autograd
differentiates it. Evaluation uses cross-entropy for every training loss, so that runs can be compared.
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
    """Sum over the ranks that share a row. The gradient of each rank's sum is the gradient of the total."""

    @staticmethod
    def forward(ctx: Any, local_sum: Tensor, all_reduce: AllReduce) -> Tensor:
        total = local_sum.clone()
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None


@dataclass(frozen=True)
class TokenLogits:
    """The logits of T tokens that a loss reads.

    Attributes:
        values: this rank's columns of the logits [T, columns], float32 or wider, with respect to which the loss is
            differentiated.
        targets: ids of the next tokens [T]. Ignored tokens (-100) have id 0 here, and their losses are not used.
        start: token id of the first column.
        all_reduce_max, all_reduce_sum: in-place reductions over the ranks that share a row; None: rows are whole.
    """

    values: Tensor
    targets: Tensor
    start: int = 0
    all_reduce_max: AllReduce | None = None
    all_reduce_sum: AllReduce | None = None

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [T, columns] over whole rows, [T]."""
        local_sum = values.sum(-1)
        if self.all_reduce_sum is None:
            return local_sum
        return _RowSum.apply(local_sum, self.all_reduce_sum)  # type: ignore[no-any-return]

    def log_sum_exp(self) -> Tensor:
        """Return the log-sum-exp of whole rows, [T]."""
        values = self.values.detach()
        if values.shape[-1]:
            max_logit = values.amax(-1)
        else:
            max_logit = values.new_full(self.targets.shape, -torch.inf)
        if self.all_reduce_max is not None:
            self.all_reduce_max(max_logit)
        return max_logit + self.sum((self.values - max_logit[:, None]).exp()).log()

    def target_logits(self) -> Tensor:
        """Return the logits of the targets, [T]."""
        token_ids = torch.arange(self.start, self.start + self.values.shape[-1], device=self.values.device)
        return self.sum(self.values.where(token_ids == self.targets[:, None], 0))


TokenLoss = Callable[[TokenLogits], Tensor]
TOKEN_LOSSES: Registry[TokenLoss | None] = Registry("train.loss", {"cross_entropy": None}, home="megascale.ops")


def register(name: str, loss: TokenLoss, description: str = "") -> None:
    """Register a value of train.loss.

    Args:
        loss: returns the differentiable loss of each token [T]. It must not wait for the device (no `.item()`), because
            chunks are captured in CUDA graphs.
        description: one line for the reference.
    """
    LOSSES.register(name, PartFacts(description))
    TOKEN_LOSSES.register(name, loss)
