"""Loss weights of targets, normalised by the sum of all weights in the global batch."""

from __future__ import annotations

import torch

from megascale.parallel.collectives import Axis, Pending, all_reduce


class LossWeights:
    """Divides loss weights by their sum over the step, which stays on the device.

    Every rank of the last stage knows the sum of its samples' weights when the step begins. One small all-reduce adds
    these sums during the first forward, without making the host wait.

    Args:
        stage: the ranks of the stage.
        counts_samples: whether this rank adds its samples' weights. Of several ranks with the same samples, one adds
            them.
        dtype: type of the losses.

    Attributes:
        counted_sum: what this rank adds to the sum of weights in the present step.
    """

    def __init__(self, stage: Axis, counts_samples: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.counted_sum = 0.0
        self._stage = stage
        self._counts_samples = counts_samples
        self._device = device
        # 1 / sum of all weights. Captured graphs read this tensor, so it is only written in place.
        self._inverse = torch.zeros((), dtype=dtype, device=device)
        # Run `finish_sum` once now, so that a GPU does not load its kernels while another stage waits for a transfer.
        self._pending: Pending | None = Pending(torch.zeros((), dtype=torch.float64, device=device))
        self.finish_sum()

    def begin_step(self, local_sum: float) -> None:
        """Start the sum over ranks.

        Args:
            local_sum: sum of the weights of this rank's samples.
        """
        if self._counts_samples:
            self.counted_sum = local_sum
        total = torch.full((), self.counted_sum, dtype=torch.float64, device=self._device)
        self._pending = all_reduce(total, self._stage)

    def finish_sum(self) -> None:
        """Let the device wait for the sum, once per step. Call it before each forward or graph of the last chunk."""
        if self._pending is None:
            return
        total = self._pending.wait()
        self._pending = None
        # If all weights are 0, so are the normalised weights, and the step is skipped.
        self._inverse.copy_(torch.where(total > 0, 1 / total, 0))

    def normalise(self, weights_SB: torch.Tensor) -> torch.Tensor:
        """Return the weights divided by the sum of all weights, [s, b] in the type of the losses."""
        return weights_SB.to(self._inverse.dtype) * self._inverse
