"""What can go wrong with a store besides a key that does not come in time (that is torch's DistStoreError)."""

from __future__ import annotations

from torch.distributed import DistStoreError


class StoreFault(DistStoreError):
    """The store cannot do its work: unreachable for too long, out of memory, refused by its access rules."""


class StoreFenced(StoreFault):
    """This process belongs to an attempt that is over; a newer one holds the job, or the job has ended."""


class Superseded(StoreFenced):
    """The start that this process tried to join was that of a dead owner; its successor has opened the job anew."""
