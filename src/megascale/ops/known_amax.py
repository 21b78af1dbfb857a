"""Largest magnitudes that a tensor's maker collects on the way, for whoever casts it to float8.

A cast with the tensor's own scale needs its largest magnitude first: a pass over all of it. The kernel that made the
tensor has had every number in registers. Where an engine wants them (`Kernels.amaxes`), operators collect the largest
magnitude of what they store, as it is stored, and leave it on the tensor; `known` gives it as long as nothing
has been written into the tensor since.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.dispatch import CURRENT, jit, tl

SLOTS = 1024  # of one allocation, which is made zero in one launch


class AmaxSlots:
    """Zeros to collect into, one a tensor, each aligned as cuBLASLt wants a scale to be."""

    def __init__(self) -> None:
        self._pool: Tensor | None = None
        self._next = 0

    def renew(self) -> None:
        """From now on take zeros that are made now: a CUDA graph makes its own at each replay."""
        self._pool = None

    def take(self, device: torch.device) -> Tensor:
        """One more, float32 []."""
        if self._pool is None or self._next == SLOTS or self._pool.device != device:
            self._pool, self._next = torch.zeros((SLOTS, 4), dtype=torch.float32, device=device), 0
        self._next += 1
        return self._pool[self._next - 1, 0]


def slot_for(x: Tensor) -> Tensor | None:
    """Where an operator collects what it makes on x's device; None if nobody wants it."""
    slots = CURRENT.get().amaxes
    return None if slots is None else slots.take(x.device)


def tell(x: Tensor, amax: Tensor | None) -> Tensor:
    """x, known to have this largest magnitude."""
    if amax is not None:
        x.known_amax = amax, x._version  # type: ignore[attr-defined]
    return x


def attached_amax(x: Tensor) -> Tensor | None:
    """The largest magnitude of x, float32 [], NaN if x has one; None where its maker did not collect it."""
    amax, version = getattr(x, "known_amax", (None, 0))
    return amax if amax is not None and version == x._version else None


@jit
def magnitudes(x, inside, like: tl.constexpr):
    """|x| as it is stored in the type `like`, zero outside, as int32: it orders as the numbers do, NaN above all."""
    stored = tl.where(inside, tl.abs(x.to(like).to(tl.float32)), 0.0)
    return stored.to(tl.int32, bitcast=True)


@jit
def collect(amax_ptr, most):
    """The largest of `most` into amax_ptr (as int32), where it is larger than what is there."""
    found = tl.max(most)
    # What was there may be old, but it only grows: few programs have anything to add.
    tl.atomic_max(amax_ptr, found, mask=found > tl.load(amax_ptr), sem="relaxed")


def as_integers(amax: Tensor | None) -> Tensor | None:
    """For `collect`: float32 maxima would lose NaN."""
    return None if amax is None else amax.view(torch.int32)
