"""Samples as arrays: tokens, and the optional fields of token files (loss weights, positions, documents). No torch.

`SampleFields` (core/batch.py) describes the optional fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.core.batch import SampleFields
from megascale.data.dataset.packing import SamplePlan, sort_distinct
from megascale.data.dataset.token_file import TokenFile
from megascale.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Samples:
    """Consecutive samples, one column per sample.

    Attributes:
        tokens: integers [sequence_length + 1, samples]: inputs are `[:-1]`, targets `[1:]`.
        loss_weights: weights of the targets, float32 [sequence_length, samples].
        positions: positions of the inputs, int32 [sequence_length, samples].
        document_boundaries: cumulative lengths of the documents among the inputs, int32 [max_documents + 1, samples].
    """

    tokens: NDArray[Any]
    loss_weights: NDArray[np.float32] | None = None
    positions: NDArray[np.int32] | None = None
    document_boundaries: NDArray[np.int32] | None = None


def add_document_fields(fields: SampleFields, max_documents: int, setting: str, entry: str) -> SampleFields:
    """Return a format's fields with those that keep documents apart (data.document_mask).

    Args:
        fields: fields that the format of `entry` provides.
        max_documents: largest number of documents in a sample, without padding.
        setting: the key that named the file.
        entry: the file.

    Raises ConfigError for a format with positions of its own.
    """
    if fields.positions:
        raise ConfigError(
            f"{setting}={entry} has positions for its tokens, and data.document_mask=true restarts positions at each "
            "document; set --data.document_mask=false, or use a format without `positions`"
        )
    # Padding is a document of its own.
    return SampleFields(loss_weights=True, positions=True, max_documents=max_documents + 1)


def require_document_starts(file: TokenFile, setting: str) -> NDArray[np.int64]:
    """Return the first token of each document, ascending from 0. Raises ConfigError for a format without documents."""
    starts = file.read_document_starts()
    if starts is None:
        raise ConfigError(
            f"data.document_mask=true needs documents, and {setting}={file.prefix} has none: its format has no "
            "`document_starts`; set --data.document_mask=false, or build it with `megascale data build`"
        )
    return sort_distinct(np.append(0, np.asarray(starts, np.int64)))


def restart_positions(boundaries: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return positions that restart at each document, int32 [sequence_length].

    Args:
        boundaries: cumulative document lengths of one sample, int32 [max_documents + 1].
    """
    indices = np.arange(boundaries[-1], dtype=np.int32)
    return indices - np.repeat(boundaries[:-1], np.diff(boundaries))


class DocumentReader:
    """Reads the samples of a token file whose documents are kept apart (data.document_mask).

    Args:
        file: the token file.
        starts: first token of each document, ascending from 0.
        plan: intervals of the file that each sample holds.
        fields: reader of the optional fields that samples of the run carry.
    """

    def __init__(self, file: TokenFile, starts: NDArray[np.int64], plan: SamplePlan, fields: FieldReader) -> None:
        self.file = file
        self.starts = starts
        self.plan = plan
        self._fields = fields

    def read_tokens(self, sample: int) -> NDArray[np.int64]:
        """Return the tokens of a sample, int64 [sequence_length + 1], padded with 0."""
        row = np.zeros(self._fields.length + 1, np.int64)
        offset = 0
        for start, length in self.plan.list_intervals(sample):
            # The token after an interval is the target of its last token; the next interval overwrites it.
            view = self.file.read_range(start, min(length + 1, self.file.tokens - start))
            row[offset : offset + len(view)] = view
            offset += length
        return row

    def read_weights(self, sample: int) -> NDArray[np.float32]:
        """Return the weights of a sample's targets, float32 [sequence_length].

        The first token of each document and padding have weight 0.
        """
        weights = np.zeros(self._fields.length, np.float32)
        offset = 0
        for start, length in self.plan.list_intervals(sample):
            count = min(length, self.file.tokens - start - 1)
            interval_weights = weights[offset : offset + count]  # a view; its targets begin at token start + 1
            interval_weights[:] = self._fields.read_weights(self.file, start + 1, count)
            interval_weights[self._starts_between(start + 1, start + 1 + count) - (start + 1)] = 0
            offset += length
        return weights

    def read_boundaries(self, sample: int) -> NDArray[np.int32]:
        """Return the cumulative document lengths of a sample, int32 [max_documents + 1]."""
        used_boundaries: list[int] = []
        offset = 0
        for start, length in self.plan.list_intervals(sample):
            later_starts = self._starts_between(start + 1, start + length) - start + offset
            used_boundaries += [offset, *later_starts.tolist()]
            offset += length
        used_boundaries.append(offset)
        boundaries = np.full(self._fields.fields.max_documents + 1, self._fields.length, np.int32)
        boundaries[: len(used_boundaries)] = used_boundaries
        return boundaries

    def _starts_between(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the starts of the documents that begin in tokens first .. stop - 1."""
        first_document, stop_document = np.searchsorted(self.starts, (first, stop))
        return self.starts[first_document:stop_document]


class FieldReader:
    """Reads the optional fields of samples from token files.

    Args:
        fields: fields that every sample of the run carries. A file without one of the fields gets its default values.
        length: number of inputs of a sample (sequence_length).
    """

    def __init__(self, fields: SampleFields, length: int) -> None:
        self.fields = fields
        self.length = length

    def read_weights(self, file: TokenFile | None, start: int, count: int) -> NDArray[np.float32]:
        """Return the loss weights of tokens `start : start + count` as targets, float32 [count].

        Args:
            file: the token file; None for text that is tokenised on the fly, whose weights are 1.

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

    def read_positions(self, file: TokenFile | None, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the positions of one sample's inputs, which are the tokens `numbers` of a file, int32.

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

    def read_boundaries(self, file: TokenFile | None, start: int) -> NDArray[np.int32]:
        """Return the cumulative document lengths of the sample whose inputs begin at token `start` of a file.

        Returns int32 [max_documents + 1]. Unused boundaries at the end equal `length`.

        Raises DataError for more documents than `fields.max_documents`.
        """
        boundaries = np.full(self.fields.max_documents + 1, self.length, np.int32)
        boundaries[0] = 0
        starts = None if file is None else file.document_starts
        if file is None or starts is None:
            return boundaries
        first, stop = np.searchsorted(starts, (start + 1, start + self.length))
        later_starts = np.asarray(starts[first:stop]) - start  # of documents after the sample's first
        if len(later_starts) >= self.fields.max_documents:
            raise DataError(
                f"{file.prefix}: the sample at token {start:,} has {len(later_starts) + 1} documents, and its format "
                f"declares at most {self.fields.max_documents}; use a shorter model.sequence_length, or build the data "
                "again"
            )
        boundaries[1 : 1 + len(later_starts)] = later_starts
        return boundaries
