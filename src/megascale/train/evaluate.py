"""Held-out loss, and bits per byte where the data set says how many bytes its tokens stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale.config import Config
from megascale.data.baselines import Compressed, bits_per_byte
from megascale.data.manifest import part_of
from megascale.data.samples import IGNORE, HeldOut
from megascale.train.engine import Engine


@dataclass(frozen=True)
class Evaluation:
    """Of one token file.

    Attributes:
        loss: mean over targets, nats a token.
        tokens: targets that were read.
        bits_per_byte: of the whole file's text; None for a part of it or an unknown size.
        compressed: what zlib and xz make of the same text, if known.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None
    compressed: Compressed | None


def evaluate_file(engine: Engine, config: Config, prefix: str, samples: int | None = None) -> Evaluation:
    """Run the model over a token file, every token a target once; `samples` bounds the windows read (evenly spread)."""
    held_out = HeldOut(prefix, config.model.sequence_length, config.model.vocab_size)
    count = held_out.windows if samples is None else min(samples, held_out.windows)
    chosen = [i * held_out.windows // count for i in range(count)]
    size = config.train.micro_batch
    total, tokens = 0.0, 0
    for start in range(0, count, size):
        inputs, targets = held_out.rows(chosen[start : start + size])
        columns = [torch.from_numpy(x).t().contiguous().to(engine.device) for x in (inputs, targets)]
        total += float(engine.losses(columns[0], columns[1]).sum(dtype=torch.float64))
        tokens += int((targets != IGNORE).sum())
    part = part_of(prefix)
    whole = count == held_out.windows and part is not None
    loss = total / max(tokens, 1)
    bits = bits_per_byte(loss, tokens, part.bytes) if whole and part is not None else None
    return Evaluation(loss, tokens, bits, part.compressed if whole and part is not None else None)
