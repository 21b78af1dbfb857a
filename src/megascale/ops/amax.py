"""Largest magnitudes (amax) that operators collect of their outputs, for a later cast to float8.

A cast with the tensor's own scale needs its amax first, which is a pass over the whole tensor. The kernel that wrote
the tensor had every number in registers. If an engine enables it (`Kernels.amaxes`), operators collect the amax of
their outputs, as stored, and attach it to the tensor. `attached_amax` returns it while the tensor is unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.dispatch import CURRENT, jit, tl

SLOTS = 1024  # per allocation, which one launch zeroes


class AmaxSlots:
    """Zeroed amaxes, one per tensor, each at an address that cuBLASLt accepts for a scale."""

    def __init__(self) -> None:
        self._pool: Tensor | None = None
        self._next = 0

    def renew(self) -> None:
        """Take amaxes from a new allocation from now on: a CUDA graph zeroes its own at each replay."""
        self._pool = None

    def take(self, device: torch.device) -> Tensor:
        """Return the next amax, float32 []."""
        if self._pool is None or self._next == SLOTS or self._pool.device != device:
            self._pool = torch.zeros((SLOTS, 4), dtype=torch.float32, device=device)
            self._next = 0
        self._next += 1
        return self._pool[self._next - 1, 0]


def new_amax_slot(x: Tensor) -> Tensor | None:
    """Return a zeroed amax on x's device for an operator's output, or None if amaxes are not collected."""
    slots = CURRENT.get().amaxes
    return None if slots is None else slots.take(x.device)


def attach_amax(x: Tensor, amax: Tensor | None) -> Tensor:
    """Return x with its amax attached."""
    if amax is not None:
        x.collected_amax = amax, x._version  # type: ignore[attr-defined]
    return x


def attached_amax(x: Tensor) -> Tensor | None:
    """Return the amax of x, float32 [], NaN if x has a NaN; None if no operator collected it."""
    amax, version = getattr(x, "collected_amax", (None, 0))
    return amax if amax is not None and version == x._version else None


@jit
def magnitudes(x, inside, like: tl.constexpr):
    """Return |x| as stored in the type `like`, zero outside, as int32, which orders as the floats do, NaN above all."""
    stored = tl.where(inside, tl.abs(x.to(like).to(tl.float32)), 0.0)
    return stored.to(tl.int32, bitcast=True)


@jit
def update_amax(amax_ptr, magnitude):
    """Raise amax_ptr (as int32) to the largest of `magnitude`."""
    largest = tl.max(magnitude)
    # The loaded value may be stale, but it only grows, and most programs skip the atomic.
    tl.atomic_max(amax_ptr, largest, mask=largest > tl.load(amax_ptr), sem="relaxed")


def as_int32(amax: Tensor | None) -> Tensor | None:
    """Return the integer view for `update_amax`: float32 maxima would lose NaN."""
    return None if amax is None else amax.view(torch.int32)
