"""Shares of targets in the loss of a step: 1 / tokens each, or their weights over the global sum of weights."""

from __future__ import annotations

import torch

from megascale.parallel.collectives import Axis, Pending, all_reduce


class LossWeights:
    """Divides loss weights by their sum over the step, which stays on the device.

    Every rank of the last stage knows the sum of its own samples' weights when the step begins. One small all-reduce
    adds up the sums during the first forward. The host does not wait for it.

    Args:
        stage: the ranks of the stage.
        counts: whether this rank's samples count; of several ranks with the same samples one counts.
        dtype: type of the losses.
        device: device of the losses.

    Attributes:
        counted_sum: sum of the weights in the present step that this rank counts.
    """

    def __init__(self, stage: Axis, counts: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.counted_sum = 0.0
        self._stage = stage
        self._counts = counts
        self._device = device
        self._inverse = torch.zeros((), dtype=dtype, device=device)  # captured graphs read it: never replaced
        # A GPU loads the kernels now, and not while another stage waits for a transfer.
        self._pending: Pending | None = Pending(torch.zeros((), dtype=torch.float64, device=device))
        self.finish_sum()

    def begin_step(self, local_sum: float) -> None:
        """Start the sum over ranks; `local_sum`: sum of the weights of this rank's samples."""
        if self._counts:
            self.counted_sum = local_sum
        total = torch.full((), self.counted_sum, dtype=torch.float64, device=self._device)
        self._pending = all_reduce(total, self._stage)

    def finish_sum(self) -> None:
        """Let the device wait for the sum, once per step. Call it before the last chunk's forward, also of a graph."""
        if self._pending is None:
            return
        total = self._pending.wait()
        self._pending = None
        # Without any weight all shares are zero; the step is skipped.
        self._inverse.copy_(torch.where(total > 0, 1 / total, 0))

    def shares(self, weights_SB: torch.Tensor) -> torch.Tensor:
        """Return each target's share of the step's loss, [s, b] in the type of the losses."""
        return weights_SB.to(self._inverse.dtype) * self._inverse
