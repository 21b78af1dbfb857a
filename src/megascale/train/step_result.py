"""The results of a training step, and the vector in which all ranks add up their scalars."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale.train.expert_balance import ExpertCounts

_LOSS = 0
_STOP_REQUEST = 1
HOLD_INDEX = 2  # index of the hold requests in `StepScalars.vector`
_CAST_COUNTS = slice(3, 6)


@dataclass
class StepResult:
    """Results of a step. The tensors are on the device, and reading them makes the host wait for the step.

    Attributes:
        loss: mean over the global batch's tokens, weighted if they have weights; the same on every rank.
        grad_norm: norm of the whole model's gradient before clipping.
        stop_sum: sum of the stop requests of all ranks, above 0 if any rank wants to stop after this step; the same on
            every rank.
        hold_sum: number of ranks that held back their update, because they leave the attempt or have lost a peer. If
            it is above 0, the step has changed nothing on any rank, and its other results are undefined.
        cast_counts: float64 [3]: values that casts to float8 clipped, flushed to zero and processed, summed over all
            ranks; zeros if nothing was counted.
        read_checksum: float64: the numbers that `take_read_checksum` of `Engine.step` returned, summed over all ranks;
            empty without it.
        weight_sum: float64: sum of the loss weights of the global batch, None without weights. If the sum is 0, the
            loss is 0 and the step has changed nothing.
        expert_counts: routing of the global batch, None without experts.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    stop_sum: torch.Tensor
    hold_sum: torch.Tensor
    cast_counts: torch.Tensor
    read_checksum: torch.Tensor
    weight_sum: torch.Tensor | None = None
    expert_counts: ExpertCounts | None = None


@dataclass(frozen=True)
class StepScalars:
    """The scalars of a step, which the all-reduce of the gradient norm also sums over all ranks.

    The properties are views of `vector`, so that each rank can write its addends into them.

    Attributes:
        vector: float64: loss, stop request, hold request, three counts of casts, read checksum, counts of experts, sum
            of loss weights. The optimizer reads the last one, if samples carry loss weights.
        checksum_length: number of values of the read checksum.
        has_weight_sum: whether samples carry loss weights.
    """

    vector: torch.Tensor
    checksum_length: int
    has_weight_sum: bool

    @classmethod
    def make_zeros(
        cls, checksum_length: int, expert_length: int, *, has_weight_sum: bool, device: torch.device
    ) -> StepScalars:
        """Return scalars of zeros.

        Args:
            expert_length: number of scalars of the experts, 0 for a model without experts.
        """
        length = _CAST_COUNTS.stop + checksum_length + expert_length + int(has_weight_sum)
        vector = torch.zeros(length, dtype=torch.float64, device=device)
        return cls(vector, checksum_length, has_weight_sum)

    @property
    def loss(self) -> torch.Tensor:
        return self.vector[_LOSS]

    @property
    def stop_request(self) -> torch.Tensor:
        return self.vector[_STOP_REQUEST]

    @property
    def hold_request(self) -> torch.Tensor:
        return self.vector[HOLD_INDEX]

    @property
    def cast_counts(self) -> torch.Tensor:
        return self.vector[_CAST_COUNTS]

    @property
    def read_checksum(self) -> torch.Tensor:
        first = _CAST_COUNTS.stop
        return self.vector[first : first + self.checksum_length]

    @property
    def expert_counts(self) -> torch.Tensor:
        first = _CAST_COUNTS.stop + self.checksum_length
        return self.vector[first : len(self.vector) - int(self.has_weight_sum)]

    @property
    def weight_sum(self) -> torch.Tensor | None:
        return self.vector[-1] if self.has_weight_sum else None
