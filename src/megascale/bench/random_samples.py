"""Random tokens on which a benchmark trains, and an even selection of experts for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megascale.core.batch import NO_FIELDS, Batch, SampleFields
from megascale.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from megascale.config import Config
    from megascale.config.experts_section import ExpertsConfig

SEED = 7  # arbitrary; each data rank adds its number, so that replicas train on different tokens


def draw_tokens(config: Config, data_rank: int, device: torch.device) -> torch.Tensor:
    """Return random tokens of one micro-batch, int64 [sequence + 1, micro_batch].

    Inputs are the rows [:-1], targets the rows [1:].
    """
    import torch

    shape = (config.model.sequence_length + 1, config.train.micro_batch)
    generator = torch.Generator().manual_seed(SEED + data_rank)
    return torch.randint(0, config.model.vocab, shape, generator=generator).to(device)


@dataclass(frozen=True)
class RandomSamples:
    """The random micro-batch that a rank trains on in every step, again and again.

    Attributes:
        batch: the micro-batch, on the device.
        fields: the optional fields of `batch`.
        weight_sum: sum of the loss weights of all micro-batches of the rank in a step.
        document_lengths: tokens of each document of `batch`; empty without data.document_mask.
    """

    batch: Batch[torch.Tensor]
    fields: SampleFields = NO_FIELDS
    weight_sum: float = 0.0
    document_lengths: tuple[int, ...] = ()

    def read_batch(self, i: int) -> Batch[torch.Tensor]:
        """Return the micro-batch, which is the same for every index `i` within a step."""
        return self.batch

    def sum_weights(self) -> float:
        """Return the sum of the loss weights of a step."""
        return self.weight_sum


def make_samples(
    config: Config, data_rank: int, microbatches: int, mean_document: int, device: torch.device
) -> RandomSamples:
    """Return random tokens; under data.document_mask they form documents of random lengths.

    Lengths are exponentially distributed with mean `mean_document`, at least 1. The end of a sample cuts its last
    document. Raises ConfigError if a sample has more documents than data.max_documents.

    Args:
        microbatches: micro-batches of the rank per step.
    """
    import numpy as np
    import torch

    from megascale.data.dataset.sample_fields import restart_positions

    tokens = draw_tokens(config, data_rank, device)
    if not config.data.document_mask:
        return RandomSamples(Batch(tokens[:-1], tokens[1:]))
    length, sample_count = config.model.sequence_length, config.train.micro_batch
    max_documents = config.data.count_max_documents(length)
    generator = np.random.default_rng(SEED + data_rank)
    # As in training, column i holds the index of the first token of each document in sample i. The rows after the last
    # document hold the sample's length.
    boundaries = np.full((max_documents + 2, sample_count), length, np.int32)
    for sample in range(sample_count):
        # As many documents as tokens fill the sample in any case. Keep the ends before the sample's end.
        ends = np.cumsum(np.maximum(1, generator.exponential(mean_document, length).round()))
        ends = ends[ends < length]
        if len(ends) >= max_documents:
            raise ConfigError(
                f"--mean-document={mean_document}: a sample has {len(ends) + 1} documents and data.max_documents="
                f"{max_documents} allows fewer; set --data.max_documents={2 * len(ends)}"
            )
        boundaries[0, sample] = 0
        boundaries[1 : len(ends) + 1, sample] = ends
    weights = np.ones((length, sample_count), np.float32)
    for sample, sample_boundaries in enumerate(boundaries.T):
        weights[sample_boundaries[1:] - 1, sample] = 0  # the last token of a document has no target
    positions = np.stack([restart_positions(sample_boundaries) for sample_boundaries in boundaries.T], axis=1)
    batch = Batch(
        tokens[:-1],
        tokens[1:],
        loss_weights=torch.from_numpy(weights).to(device),
        positions=torch.from_numpy(positions).long().to(device),
        document_boundaries=torch.from_numpy(boundaries).to(device),
    )
    # Rows after the last document have length 0.
    lengths = np.diff(boundaries, axis=0)
    document_lengths = tuple(lengths[lengths > 0].tolist())
    fields = SampleFields(loss_weights=True, positions=True, max_documents=len(boundaries) - 1)
    return RandomSamples(batch, fields, float(weights.sum()) * microbatches, document_lengths)


def select_evenly(scores: torch.Tensor, settings: ExpertsConfig, _: torch.Tensor | None) -> torch.Tensor:
    """Return expert numbers in turn [..., top_k], whatever the scores are.

    Layers call it in place of `ops.routing.select_experts`, which returns the experts with the highest scores.
    """
    import torch

    choices = torch.arange(scores.shape[:-1].numel() * settings.top_k, device=scores.device)
    return (choices % settings.number).view(*scores.shape[:-1], settings.top_k)
