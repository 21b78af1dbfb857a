"""Evaluation on held-out data: loss per token, and bits per byte if the data set records its size in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from numpy.typing import NDArray

from megascale.config import Config
from megascale.core.batch import Batch, check_fields
from megascale.data.dataset.held_out import HeldOut
from megascale.data.dataset.manifest import CompressedSizes, compute_bits_per_byte, find_part
from megascale.errors import DataError
from megascale.train.engine import Engine


@dataclass(frozen=True)
class Evaluation:
    """Result on one token file.

    Attributes:
        loss: mean over targets, weighted if the file provides loss weights, in nats per token.
        tokens: targets that were evaluated.
        bits_per_byte: bits per byte of the complete file's text; None if only some windows were evaluated, if the size
            is unknown, or for a weighted loss.
        compressed: sizes of the same text under zlib and xz, if known.
        weight_sum: sum of the loss weights of the targets; None if the file has no loss weights. For conversations it
            is the number of tokens that have a loss.
        within_documents: whether attention stayed within documents, as data.document_mask of the run says.
        step: step of the weights, if the caller knows it.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None
    compressed: CompressedSizes | None
    complete: bool = True
    weight_sum: float | None = None
    within_documents: bool = False
    step: int | None = None


def evaluate_file(
    engine: Engine,
    config: Config,
    prefix: str,
    samples: int | None = None,
    stride: int | None = None,
    option: str = "data.valid",
    on_progress: Callable[[int, int], object] | None = None,
) -> Evaluation:
    """Return the loss of the model on a token file, in whose windows every token is a target once.

    With data.document_mask, attention stays within documents, and a document's first token is not a target.

    Collective: every rank of the engine's world calls it, and data-parallel ranks divide the windows.

    Args:
        prefix: path of the token file without its suffix.
        samples: largest number of windows to evaluate, evenly spread over the file; default: all.
        stride: targets per window, at its end; default: all its tokens.
        option: configuration key or option that named the file, for messages.
        on_progress: called before each batch with the number of windows that are evaluated and of all.

    Raises DataError for a token outside the vocabulary and if all loss weights are 0, ConfigError for fields that the
    model would ignore.
    """
    length, size = config.model.sequence_length, config.train.micro_batch
    limit = config.data.count_max_documents(length)
    held_out = HeldOut(prefix, length, config.model.vocab_size, stride, option, max_documents=limit)
    check_fields(held_out.fields, config.model, option, prefix)
    windows = held_out.spread_windows(samples)
    window_count = len(windows)
    engine.gather_parameters()
    total_count = 2 if held_out.fields.loss_weights else 1
    totals = torch.zeros(total_count, dtype=torch.float64, device=engine.device)
    first = engine.data_rank * size
    # All data-parallel ranks call `sum_losses` equally often. `read_batch` pads the last batches.
    for start in range(first, window_count + first, size * engine.layout.grid.replicas):
        if on_progress is not None:
            on_progress(start - first, window_count)
        batch = held_out.read_batch(windows[start : start + size], size)
        totals += engine.sum_losses(_copy_to_device(batch, engine.device))
    tokens = held_out.count_targets(windows)
    is_complete = window_count == held_out.windows
    if held_out.fields.loss_weights:
        weighted_sum, weight_sum = totals.tolist()
        if not weight_sum:
            raise DataError(f"{option}: the loss weights of the {tokens:,} targets evaluated in {prefix} sum to 0")
        loss = weighted_sum / weight_sum
        within_documents = held_out.document_starts is not None
        return Evaluation(loss, tokens, None, None, is_complete, weight_sum, within_documents)
    loss = float(totals) / tokens
    part = None
    if is_complete:
        part = find_part(prefix)
    if part is None:
        return Evaluation(loss, tokens, None, None, is_complete)
    return Evaluation(loss, tokens, compute_bits_per_byte(loss, tokens, part.bytes, part.lost_bytes), part.compressed)


def _copy_to_device(batch: Batch[NDArray[Any]], device: torch.device) -> Batch[torch.Tensor]:
    """Return a batch of NumPy arrays on the device."""
    copies: dict[str, torch.Tensor] = {}
    for field in fields(batch):
        array = getattr(batch, field.name)
        if array is not None:
            copies[field.name] = torch.from_numpy(array).contiguous().to(device)
    return Batch(**copies)
