"""Division of a global batch: the consecutive micro-batches that each replica reads in a step. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchShares:
    """Division of a step's micro-batches over replicas, as even as possible. The remainder goes to the first replicas.

    Attributes:
        microbatches: micro-batches of a step, over all replicas.
    """

    microbatches: int
    replicas: int

    @property
    def largest(self) -> int:
        """Micro-batches of the largest share."""
        return -(-self.microbatches // self.replicas)

    @property
    def is_even(self) -> bool:
        """True if all replicas have the same number of micro-batches."""
        return self.microbatches % self.replicas == 0

    def count(self, replica: int) -> int:
        """Return the number of micro-batches of a replica."""
        quotient, remainder = divmod(self.microbatches, self.replicas)
        if replica < remainder:
            return quotient + 1
        return quotient

    def first(self, replica: int) -> int:
        """Return the index in the step of a replica's first micro-batch."""
        quotient, remainder = divmod(self.microbatches, self.replicas)
        return replica * quotient + min(replica, remainder)
