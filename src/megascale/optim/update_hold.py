"""Holding back updates: a rank whose groups are aborted keeps the state of its last whole step.

On a GPU the host queues an update before the gradients are there. Once communicators are aborted, queued work goes on
with undefined gradients. The flag here is raised before the abort, and each update reads it on the device after its
last collective: an update that sees it changes nothing. An update that does not has only used complete results.
"""

from __future__ import annotations

import torch


class UpdateHold:
    """Keeps updates that are queued on a device from changing the state, and counts those that have changed it.

    It adds three operations of one element to a step.

    Args:
        device: device of the optimizer's state.
    """

    def __init__(self, device: torch.device) -> None:
        # Page-locked memory is read when the copy runs, not when it is queued.
        self._request = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._request_array = self._request.numpy()
        self._is_held = torch.zeros(1, dtype=torch.int64, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)

    def request(self) -> None:
        """Hold back all updates whose last collective has not ended; for any thread."""
        self._request_array[0] = 1

    def release(self) -> None:
        """Let updates change the state again. No update may be queued."""
        self._request_array[0] = 0

    def begin(self, step: int) -> None:
        """Note that the optimizer has the state of `step`; the next update makes the state of the step after it."""
        self._step.fill_(step)

    def apply(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the gradient's norm (0-d), or NaN if the update is held back. Call it once per update."""
        self._is_held.copy_(self._request, non_blocking=True)
        self._step += 1 - self._is_held
        return torch.where(self._is_held[0] == 0, norm, torch.nan)

    def read_step(self) -> int:
        """Return the step whose state the optimizer has; waits for the device."""
        return int(self._step.item())
