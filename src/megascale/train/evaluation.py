"""Held-out loss, and bits per byte where the data set records how many bytes its tokens represent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale.config import Config
from megascale.data.dataset.manifest import Compressed, bits_per_byte, find_part
from megascale.data.dataset.samples import HeldOut
from megascale.train.engine import Engine


@dataclass(frozen=True)
class Evaluation:
    """Result on one token file.

    Attributes:
        loss: mean over targets, in nats per token.
        tokens: targets that were evaluated.
        bits_per_byte: bits per byte of the complete file's text; None for a part of it or an unknown size.
        compressed: sizes of the same text under zlib and xz, if known.
        complete: whether every window of the file was evaluated.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None
    compressed: Compressed | None
    complete: bool = True


def evaluate_file(
    engine: Engine,
    config: Config,
    prefix: str,
    samples: int | None = None,
    stride: int | None = None,
    option: str = "data.valid",
) -> Evaluation:
    """Return the loss of the model on a token file, in which every token is a target once.

    Collective: every rank of the engine's world calls it, and data-parallel ranks share the windows.

    Args:
        samples: evaluate at most so many windows, evenly spread; default: all.
        stride: tokens that each window predicts; default: all its tokens.
        option: key or option that named the file, for messages.

    Raises DataError for a token outside the vocabulary.
    """
    length, size = config.model.sequence_length, config.train.micro_batch
    held_out = HeldOut(prefix, length, config.model.vocab_size, stride, option)
    windows = held_out.spread_windows(samples)
    count = len(windows)
    engine.gather_parameters()
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    first = engine.data_rank * size
    # All data-parallel ranks run equally many rounds; `rows` fills up the last ones.
    for start in range(first, count + first, size * engine.layout.grid.replicas):
        rows = held_out.read_windows(windows[start : start + size], size)
        inputs_SB, targets_SB = (torch.from_numpy(x).t().contiguous().to(engine.device) for x in rows)
        total += engine.sum_losses(inputs_SB, targets_SB)
    tokens = held_out.count_targets(windows)
    loss = float(total) / tokens
    is_complete = count == held_out.windows
    part = None
    if is_complete:
        part = find_part(prefix)
    if part is None:
        return Evaluation(loss, tokens, None, None, is_complete)
    return Evaluation(loss, tokens, bits_per_byte(loss, tokens, part.bytes, part.lost_bytes), part.compressed)
