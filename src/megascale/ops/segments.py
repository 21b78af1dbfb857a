"""The table that says which tensor each range of a flat shard belongs to, and sums over it.

Optimizers work on flat shards (ops/adamw.py, ops/lamb.py); decay masks and LAMB's norms need the tensors back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Elements start .. stop of a flat shard, part of tensor `tensor`; weight decay applies if `decay`."""

    start: int
    stop: int
    decay: bool
    tensor: int


class Segments:
    """Segments of one flat shard, ascending and disjoint; elements in no segment are padding and never touched.

    tensors: how many logical tensor ids there are in all (an id may have no element here). Raises ValueError on
    overlapping or descending ranges.
    """

    def __init__(self, rows: Iterable[Segment | tuple[int, int, bool, int]], tensors: int, device: torch.device | str):
        self.rows = [row if isinstance(row, Segment) else Segment(*row) for row in rows]
        self.tensors = tensors
        self.device = torch.device(device)
        last = 0
        for row in self.rows:
            if row.start < last or row.stop <= row.start or not 0 <= row.tensor < tensors:
                raise ValueError(f"segment {row} overlaps the one before it, is empty or names no tensor of {tensors}")
            last = row.stop
        self.stop = last

    def per_element(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """values [tensors] laid over the flat range 0 .. stop; `fill` in the gaps. For references, not for speed."""
        out = torch.full((self.stop,), fill, dtype=values.dtype, device=values.device)
        for row in self.rows:
            out[row.start : row.stop] = values[row.tensor]
        return out


def square_sums(flat: Tensor, segments: Segments) -> Tensor:
    """Sum of squares of each tensor's elements in `flat`, float64 [tensors]; ids without an element give 0."""
    sums = torch.zeros(segments.tensors, dtype=torch.float64, device=flat.device)
    for row in segments.rows:
        sums[row.tensor] += flat[row.start : row.stop].double().square().sum()
    return sums
