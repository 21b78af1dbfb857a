"""A flag on the device that makes queued updates change nothing.

With the flag a rank whose process groups are aborted keeps the optimizer state of its last complete step.

On a GPU the host queues an update before the gradients are ready. When communicators are aborted, queued work continues
with undefined gradients. `UpdateHold.request` sets the flag before the abort. Each update reads the flag on the device
after its last collective. If the flag is set, the update changes nothing. If it is clear, the collectives completed
before the abort, so the gradients are valid.

The waits of an exchange between GPUs end before the abort (`parallel/peer_watch.py`), and communicators still pass on
what follows from them. Each rank therefore also adds its flag to the step's sum over ranks, after its gradients are
complete. If one rank's flag is set, the update changes nothing on any rank.
"""

from __future__ import annotations

import torch


class UpdateHold:
    """Keeps updates that are queued on a device from changing the state, and counts those that have changed it.

    It adds eight operations of one element to a step.

    Args:
        device: device of the optimizer's state.
    """

    def __init__(self, device: torch.device) -> None:
        # The flag on the host is page-locked, because such memory is read when a copy runs, not when it is queued.
        self._host_flag = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host_flag_array = self._host_flag.numpy()
        self._device_flag = torch.zeros(1, dtype=torch.int64, device=device)
        self._device_step = torch.zeros(1, dtype=torch.int64, device=device)

    def request(self) -> None:
        """Hold back all updates whose last collective has not ended. May be called from any thread."""
        self._host_flag_array[0] = 1

    def release(self) -> None:
        """Let updates change the state again. No update may be queued during the call."""
        self._host_flag_array[0] = 0

    def set_step(self, step: int) -> None:
        """Set the step that the optimizer's state has reached. Each update that is not held back adds 1."""
        self._device_step.fill_(step)

    def write_request(self, out: torch.Tensor) -> None:
        """Write 1 into `out` (0-d) on the device if the updates of this rank are held back, else 0."""
        # A copy that also converted the type would read the flag when it is queued.
        self._device_flag.copy_(self._host_flag, non_blocking=True)
        out.copy_(self._device_flag[0])

    def mask_norm(self, norm: torch.Tensor, request_sum: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient's norm (0-d), or NaN if the update is held back. Call it once per update.

        The optimizer skips an update whose norm is NaN.

        Args:
            request_sum: sum over the ranks of what `write_request` wrote before the norm's collective; None: only
                this rank's request holds the update back.
        """
        self._device_flag.copy_(self._host_flag, non_blocking=True)
        must_skip = self._device_flag[0] > 0
        if request_sum is not None:
            must_skip |= request_sum > 0
        self._device_step += ~must_skip
        return torch.where(must_skip, torch.nan, norm)

    def read_step(self) -> int:
        """Return the step that the optimizer's state has reached. Waits for the device."""
        return int(self._device_step.item())
