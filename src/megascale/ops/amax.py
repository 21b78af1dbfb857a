"""The largest magnitude (amax) of an operator's output, which the operator collects for a later cast to float8.

A cast with one scale per tensor needs the tensor's amax, for which it would read the whole tensor. The kernel that
writes the tensor has all its numbers in registers. If an engine sets `Kernels.amaxes`, operators therefore compute the
amax of their stored outputs and attach it to the tensor. `get_attached_amax` returns it while the tensor is unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.dispatch import CURRENT, jit, tl

POOL_SIZE = 1024  # amaxes per allocation


class AmaxPool:
    """Memory for amaxes, zeroed by one launch per POOL_SIZE amaxes. cuBLASLt accepts their addresses for scales."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        # Unused amaxes. To cut an allocation at once takes the host a quarter of the time of single indexing.
        self._amaxes: list[Tensor] = []

    def renew(self) -> None:
        """Drop the allocation, before a CUDA graph is captured. The graph then captures the zeroing of a new one."""
        self._amaxes = []

    def allocate(self, device: torch.device) -> Tensor:
        """Return the next amax, float32 []."""
        if not self._amaxes or self._device != device:
            pool = torch.zeros((POOL_SIZE, 4), dtype=torch.float32, device=device)
            self._device = device
            self._amaxes = list(pool[:, 0].unbind())
        return self._amaxes.pop()


def allocate_amax(x: Tensor) -> Tensor | None:
    """Return a zeroed amax on x's device for an operator's output, or None if amaxes are not collected."""
    pool = CURRENT.get().amaxes
    return None if pool is None else pool.allocate(x.device)


def attach_amax(x: Tensor, amax: Tensor | None) -> Tensor:
    if amax is not None:
        x.collected_amax = amax, x._version  # type: ignore[attr-defined]
    return x


def get_attached_amax(x: Tensor) -> Tensor | None:
    """Return the amax of x, float32 [], NaN if x has a NaN; None if no operator collected it."""
    amax, version = getattr(x, "collected_amax", (None, 0))
    if amax is None or version != x._version:
        return None
    return amax


@jit
def compute_magnitude_bits(x, inside, like: tl.constexpr):
    """Return the bits of |x| as int32, 0 outside. As integers they have the floats' order, with NaN above all.

    `like` is the type in which x is stored, to which x is rounded first.
    """
    stored = tl.where(inside, tl.abs(x.to(like).to(tl.float32)), 0.0)
    return stored.to(tl.int32, bitcast=True)


@jit
def update_amax(amax_ptr, magnitude_bits):
    """Raise the amax at amax_ptr (bits as int32) to the maximum of `magnitude_bits`."""
    largest_bits = tl.max(magnitude_bits)
    # Skip the atomic if the stored amax is larger. A stale value is safe to compare with, because the amax only grows.
    tl.atomic_max(amax_ptr, largest_bits, mask=largest_bits > tl.load(amax_ptr), sem="relaxed")


def view_as_int32(amax: Tensor | None) -> Tensor | None:
    """Return the amax as int32 for `update_amax`, because maxima of floats would lose NaN."""
    return None if amax is None else amax.view(torch.int32)
