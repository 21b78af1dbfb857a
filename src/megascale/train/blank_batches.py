"""Blank micro-batches, with which replicas with fewer samples run as many micro-batches as all others.

Every rank then takes part in the same collectives of a step, for any schedule and sharding. The targets of a blank
micro-batch have the loss weight 0, so that it adds zeros to loss and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megascale.core.batch import Batch, SampleFields
from megascale.core.layout import Layout

# Micro-batch number -> the micro-batch on the device.
ReadBatch = Callable[[int], Batch[torch.Tensor]]


def make_blank_batch(
    fields: SampleFields, length: int, width: int, sequence_length: int, device: torch.device
) -> Batch[torch.Tensor]:
    """Return a micro-batch of zeros with the fields of a run. Its tensors have the shape [length, width].

    Args:
        length: number of tokens of each sample on this rank.
        width: number of samples.
        sequence_length: number of tokens of each sample on all context ranks: the end of its only document.
    """
    tokens = torch.zeros(length, width, dtype=torch.int64, device=device)
    batch = Batch(tokens, tokens)
    if fields.loss_weights:
        batch = replace(batch, loss_weights=torch.zeros(tokens.shape, device=device))
    if fields.positions:
        batch = replace(batch, positions=tokens)
    if fields.max_documents:
        shape = fields.max_documents + 1, width
        boundaries = torch.full(shape, sequence_length, dtype=torch.int32, device=device)
        boundaries[0] = 0
        batch = replace(batch, document_boundaries=boundaries)
    return batch


def make_blank_batches(layout: Layout, fields: SampleFields, replica: int, device: torch.device) -> BlankBatches | None:
    """Return the blank micro-batches that complete a replica's steps.

    Return None if all replicas read equally many micro-batches.

    Args:
        fields: optional fields of the data.
    """
    if layout.shares.is_even:
        return None
    # A blank micro-batch is as long as those that the feed returns, before the engine cuts it for context ranks.
    sequence_length = layout.config.model.sequence_length
    blank = make_blank_batch(
        replace(fields, loss_weights=True),
        length=sequence_length,
        width=layout.config.train.micro_batch,
        sequence_length=sequence_length,
        device=device,
    )
    return BlankBatches(layout.shares.count(replica), has_weights=fields.loss_weights, blank=blank)


def describe_shares(layout: Layout) -> str:
    """Return a start-up line with the number of micro-batches per replica, of which some are blank."""
    counts = ", ".join(str(layout.shares.count(replica)) for replica in range(layout.grid.replicas))
    return f"{counts} on the replicas, filled up to {layout.microbatches} with blank ones"


class BlankBatches:
    """Appends blank micro-batches to those that a replica reads in a step.

    Blank targets have the loss weight 0, so all other targets need weights too: 1 if the data has no weights.

    Args:
        read_count: number of micro-batches that the replica reads in a step.
        has_weights: whether the data has loss weights.
    """

    def __init__(self, read_count: int, has_weights: bool, blank: Batch[torch.Tensor]) -> None:
        assert blank.tokens is not None
        self.read_count = read_count
        self.has_weights = has_weights
        self._blank = blank
        self._weights = torch.ones(blank.tokens.shape, device=blank.tokens.device)

    def append_blanks(self, read_batch: ReadBatch) -> ReadBatch:
        """Return a function that reads a step's micro-batches with `read_batch`, and returns blank ones after them."""

        def read(i: int) -> Batch[torch.Tensor]:
            if i >= self.read_count:
                return self._blank
            batch = read_batch(i)
            if not self.has_weights:
                batch = replace(batch, loss_weights=self._weights)
            return batch

        return read

    def sum_weights(self, sum_weights: Callable[[], float] | None) -> float:
        """Return the sum of the loss weights of the replica's samples in a step.

        Args:
            sum_weights: returns the sum of the data's weights; needed if the data has weights.
        """
        if not self.has_weights:
            return float(self.read_count * self._weights.numel())
        assert sum_weights is not None, "micro-batches carry loss weights"
        return sum_weights()
