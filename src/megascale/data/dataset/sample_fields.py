"""Samples as arrays: their tokens, and the optional fields that token files provide (core/batch.py). No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.core.batch import SampleFields
from megascale.data.dataset.token_file import TokenFile
from megascale.errors import DataError


@dataclass(frozen=True, slots=True)
class Samples:
    """Consecutive samples, a column each.

    Attributes:
        tokens: integers [sequence_length + 1, samples]: inputs are `[:-1]`, targets `[1:]`.
        loss_weights: float32 [sequence_length, samples], of the targets.
        positions: int32 [sequence_length, samples], of the inputs.
        document_boundaries: int32 [max_documents + 1, samples], cumulative lengths of the documents of the inputs.
    """

    tokens: NDArray[Any]
    loss_weights: NDArray[np.float32] | None = None
    positions: NDArray[np.int32] | None = None
    document_boundaries: NDArray[np.int32] | None = None


class FieldReader:
    """Reads the optional fields of parts of token files.

    Args:
        fields: the fields that every sample of the run carries; a file that lacks one gets its default values.
        length: tokens of a sample, without the last target.
    """

    def __init__(self, fields: SampleFields, length: int) -> None:
        self.fields = fields
        self.length = length

    def weights(self, file: TokenFile | None, start: int, count: int) -> NDArray[np.float32]:
        """Return the weights of tokens `start : start + count` as targets.

        Args:
            file: None stands for text, whose tokens all count the same.

        Raises DataError for a weight that is negative, infinite or NaN.
        """
        stored = None if file is None else file.loss_weights
        if file is None or stored is None:
            return np.ones(count, np.float32)
        weights = np.asarray(stored[start : start + count], np.float32)
        is_valid = np.isfinite(weights) & (weights >= 0)
        if not is_valid.all():
            offset = int(np.flatnonzero(~is_valid)[0])
            raise DataError(
                f"{file.prefix}: the loss weight of token {start + offset:,} is {weights[offset]}; weights must be "
                "finite and at least 0"
            )
        return weights

    def positions(self, file: TokenFile | None, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the positions of the tokens `numbers` of a file, which are the inputs of one sample.

        Raises DataError for a position outside the sequence.
        """
        stored = None if file is None else file.positions
        if file is None or stored is None:
            return np.arange(len(numbers), dtype=np.int32)
        positions = np.asarray(stored[numbers])
        if positions.min(initial=0) < 0 or positions.max(initial=0) >= self.length:
            offset = int(np.flatnonzero((positions < 0) | (positions >= self.length))[0])
            raise DataError(
                f"{file.prefix}: token {numbers[offset]:,} has position {positions[offset]}; positions must be 0 to "
                f"model.sequence_length - 1 = {self.length - 1}"
            )
        return positions.astype(np.int32)

    def boundaries(self, file: TokenFile | None, start: int) -> NDArray[np.int32]:
        """Return the cumulative document lengths of the sample whose inputs begin at token `start`.

        Raises DataError for more documents than `fields.max_documents`.
        """
        boundaries = np.full(self.fields.max_documents + 1, self.length, np.int32)
        boundaries[0] = 0
        starts = None if file is None else file.document_starts
        if file is None or starts is None:
            return boundaries
        first, stop = np.searchsorted(starts, (start + 1, start + self.length))
        inner = np.asarray(starts[first:stop]) - start
        if len(inner) >= self.fields.max_documents:
            raise DataError(
                f"{file.prefix}: the sample at token {start:,} has {len(inner) + 1} documents and its format announces "
                f"at most {self.fields.max_documents}; use a shorter model.sequence_length, or build the data again"
            )
        boundaries[1 : 1 + len(inner)] = inner
        return boundaries
