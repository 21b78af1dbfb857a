"""Held-out loss, and bits per byte where the data set says how many bytes its tokens stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale.config import Config
from megascale.data.dataset.compressors import Compressed, bits_per_byte
from megascale.data.dataset.manifest import part_of
from megascale.data.dataset.samples import HeldOut
from megascale.train.engine import Engine


@dataclass(frozen=True)
class Evaluation:
    """Of one token file.

    Attributes:
        loss: mean over targets, nats a token.
        tokens: targets that were read.
        bits_per_byte: of the whole file's text; None for a part of it or an unknown size.
        compressed: what zlib and xz make of the same text, if known.
        whole: every window of the file was read.
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
    """Run the model over a token file, every token a target once.

    `samples` bounds the windows read (evenly spread); `stride` is the tokens that each window predicts, by default all
    of them; `named` is the key or option that the file is from. Collective: every rank of the engine's world calls it;
    data-parallel ranks share the windows. DataError for a token that the vocabulary does not have.
    """
    length, size = config.model.sequence_length, config.train.micro_batch
    held_out = HeldOut(prefix, length, config.model.vocab_size, stride, option)
    chosen = held_out.spread_windows(samples)
    count = len(chosen)
    engine.gather_parameters()
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for start in range(engine.data_rank * size, count + engine.data_rank * size, size * engine.layout.grid.data):
        rows = held_out.read_windows(chosen[start : start + size], size)
        columns = [torch.from_numpy(x).t().contiguous().to(engine.device) for x in rows]
        total += engine.sum_losses(columns[0], columns[1])
    tokens = held_out.count_targets(chosen)
    loss = float(total) / tokens
    whole = count == held_out.windows
    part = part_of(prefix) if whole else None
    if part is None:
        return Evaluation(loss, tokens, None, None, whole)
    return Evaluation(loss, tokens, bits_per_byte(loss, tokens, part.bytes, part.lost_bytes), part.compressed)
