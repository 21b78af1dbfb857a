"""Token files for evaluation, cut into windows in which each token is a target exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.core.batch import NO_FIELDS, Batch
from megascale.data.dataset.formats import find_sample_fields, open_tokens
from megascale.data.dataset.sample_fields import (
    FieldReader,
    add_document_fields,
    require_document_starts,
    restart_positions,
)
from megascale.data.dataset.token_file import check_token_ids
from megascale.errors import ConfigError, DataError

IGNORE = -100  # target that the loss leaves out
_CHECKED_TOKENS = 1 << 23  # tokens checked at a time


class HeldOut:
    """A token file for evaluation, in which each token is a target exactly once.

    Window i predicts tokens `[i x stride, (i + 1) x stride)` from up to sequence_length tokens before them. A stride
    below sequence_length gives each token more context, for more work. The first token of the file is predicted from
    the last one, which is an end of document in files that `megascale data build` made. The last window is padded;
    padding has target IGNORE.

    If documents are kept apart and no stride is given, a window ends before a document that it would cut, unless the
    document is longer than sequence_length. So each token has all earlier tokens of its document as context, or as many
    as a window holds. All windows are then padded.

    Args:
        prefix: the file, as an entry of data.valid.
        vocab_size: token ids must be below this; None accepts all ids.
        stride: targets per window; None: sequence_length.
        setting: the key or option that named the file, for messages.
        max_documents: largest number of documents in a training sample under data.document_mask. Evaluation then keeps
            documents apart too. 0: documents are joined.

    Attributes:
        fields: optional fields of the batches.
        windows: number of windows.
        document_starts: first token of each document if documents are kept apart, else None.
        tokens: number of tokens, which is the number of targets.
    """

    def __init__(
        self,
        prefix: str,
        sequence_length: int,
        vocab_size: int | None = None,
        stride: int | None = None,
        setting: str = "data.valid",
        max_documents: int = 0,
    ) -> None:
        self.prefix = prefix
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.stride = sequence_length if stride is None else stride
        self.setting = setting
        if not 0 < self.stride <= sequence_length:
            raise ConfigError(
                f"--stride={stride} must be between 1 and model.sequence_length={sequence_length}: tokens beyond a "
                "window would never be predicted"
            )
        self.fields = find_sample_fields(prefix)
        self._file = open_tokens(prefix)
        self.document_starts: NDArray[np.int64] | None = None
        # First target of each window and the number of tokens, [windows + 1], if windows end with documents.
        self._window_edges: NDArray[np.int64] | None = None
        if max_documents:
            self.document_starts = require_document_starts(self._file, setting)
            if stride is None:
                self._window_edges = _cut_between_documents(self.document_starts, self._file.tokens, sequence_length)
            # At least the maximum of training, so that evaluation has array shapes for which kernels were chosen.
            count = max(max_documents, self._count_max_documents(self.document_starts))
            self.fields = add_document_fields(self.fields, count, setting, prefix)
        self._fields_reader = FieldReader(self.fields, sequence_length)
        self.tokens = self._file.tokens
        if not self.tokens:
            raise DataError(f"held-out file {prefix} has no tokens; build it with more text")
        if self._window_edges is None:
            self.windows = -(-self.tokens // self.stride)  # rounded up
        else:
            self.windows = len(self._window_edges) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        # add_document_fields has added one document for padding.
        max_documents = 0 if self.document_starts is None else self.fields.max_documents - 1
        stride = self.stride if self._window_edges is None else None
        arguments = (self.prefix, self.sequence_length, self.vocab_size, stride, self.setting, max_documents)
        return HeldOut, arguments

    def _count_max_documents(self, document_starts: NDArray[np.int64]) -> int:
        """Return the largest number of documents in a window."""
        if self._window_edges is not None:
            windows = [self._locate_window(window) for window in range(len(self._window_edges) - 1)]
            first = np.searchsorted(document_starts, [first_predicted for first_predicted, _, _ in windows])
            last = np.searchsorted(document_starts, [stop for _, _, stop in windows])
            return 1 + int((last - first).max(initial=0))
        first_targets = np.maximum(0, np.arange(0, self._file.tokens, self.stride) + self.stride - self.sequence_length)
        first_inputs = first_targets - 1
        # A window holds one document that began at or before its first input, and those that begin within it.
        next_document = np.searchsorted(document_starts, first_inputs, side="right")
        stop = np.searchsorted(document_starts, first_inputs + self.sequence_length)
        return 1 + int((stop - next_document).max(initial=0))

    def __len__(self) -> int:
        return self.windows

    def check_vocabulary(self, limit: int = 1 << 27) -> None:
        """Raise DataError for a token id outside the vocabulary among the first `limit` tokens."""
        for start in range(0, min(self.tokens, limit), _CHECKED_TOKENS):
            check_token_ids(
                self.setting, self.prefix, self._file.stream[start : start + _CHECKED_TOKENS], start, self.vocab_size
            )

    def read_window_range(self, first_window: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets of up to `count` windows, int64 [windows, sequence_length] each."""
        return self.read_windows(range(first_window, min(first_window + count, self.windows)))

    def spread_windows(self, samples: int | None) -> list[int]:
        """Return the numbers of at most `samples` windows that are spread evenly over the file; None: all windows."""
        count = self.windows if samples is None else min(samples, self.windows)
        return [index * self.windows // count for index in range(count)]

    def count_targets(self, windows: Sequence[int]) -> int:
        """Return the number of targets of the given windows."""
        if self._window_edges is not None:
            return int(np.diff(self._window_edges)[list(windows)].sum())
        return sum(min(self.stride, self.tokens - window * self.stride) for window in windows)

    def _locate_window(self, window: int) -> tuple[int, int, int]:
        """Return (first predicted token, first target, stop) of a window.

        The window's columns predict the tokens from the first predicted token to stop - 1. Tokens before the first
        target only give context, since an earlier window has them as targets.
        """
        if self._window_edges is not None and self.document_starts is not None:
            first_target, stop = self._window_edges[window : window + 2].tolist()
            document = np.searchsorted(self.document_starts, first_target, side="right") - 1
            document_start = int(self.document_starts[document])
            # The end of a long document gets earlier tokens of the document as context.
            return max(document_start, stop - self.sequence_length), first_target, stop
        first_target = window * self.stride
        first_predicted = max(0, first_target + self.stride - self.sequence_length)
        return first_predicted, first_target, min(first_target + self.stride, self.tokens)

    def read_windows(self, windows: Sequence[int], size: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets of the given windows, int64 [max(len(windows), size), sequence_length] each.

        Rows beyond the windows are padding, so that all batches can have the same shape.
        """
        stream = self._file.stream
        inputs = np.zeros((max(len(windows), size), self.sequence_length), dtype=np.int64)
        targets = np.full(inputs.shape, IGNORE, dtype=np.int64)
        for row, window in enumerate(windows):
            first_predicted, first_target, stop = self._locate_window(window)
            context = first_target - first_predicted  # columns without a target
            tokens = stream[first_predicted:stop]
            preceding = stream[first_predicted - 1 :][:1]  # for first_predicted = 0, the last token of the file
            check_token_ids(self.setting, self.prefix, tokens, first_predicted, self.vocab_size)
            check_token_ids(self.setting, self.prefix, preceding, (first_predicted - 1) % self.tokens, self.vocab_size)
            targets[row, context : len(tokens)] = tokens[context:]
            inputs[row, 0] = preceding[0]
            inputs[row, 1 : len(tokens)] = tokens[:-1]
        return inputs, targets

    def read_batch(self, windows: Sequence[int], size: int = 0) -> Batch[NDArray[Any]]:
        """Return the given windows as a batch with its optional fields.

        Arrays are [sequence_length, max(len(windows), size)]; boundaries have max_documents + 1 rows.
        Columns beyond the windows are padding, which has loss weight 0.
        """
        inputs, targets = self.read_windows(windows, size)
        fields = self.fields
        reader = self._fields_reader
        if fields == NO_FIELDS:
            return Batch(inputs.T, targets.T)
        weights = np.zeros(inputs.shape, np.float32)
        positions = np.tile(np.arange(self.sequence_length, dtype=np.int32), (len(inputs), 1))
        boundaries = np.tile(reader.read_boundaries(None, 0), (len(inputs), 1))
        for row, window in enumerate(windows):
            first_predicted, first_target, stop = self._locate_window(window)
            if fields.loss_weights:
                target_columns = slice(first_target - first_predicted, stop - first_predicted)
                weights[row, target_columns] = reader.read_weights(self._file, first_target, stop - first_target)
            if self.document_starts is not None:
                first, last = np.searchsorted(self.document_starts, (first_predicted, stop))
                # The first token of a document is not a target. As an input, it is one column later.
                columns = self.document_starts[first:last] - first_predicted
                weights[row, columns] = 0
                input_columns = columns[columns + 1 < self.sequence_length] + 1
                boundaries[row, 1 : 1 + len(input_columns)] = input_columns
                positions[row] = restart_positions(boundaries[row])
                continue
            if fields.positions:
                # The input that predicts the file's first token is the file's last token.
                inputs_in_file = np.arange(first_predicted - 1, stop - 1) % self.tokens
                positions[row, : stop - first_predicted] = reader.read_positions(self._file, inputs_in_file)
            if fields.max_documents:
                boundaries[row] = reader.read_boundaries(self._file, first_predicted - 1)
        return Batch(
            inputs.T,
            targets.T,
            loss_weights=weights.T if fields.loss_weights else None,
            positions=positions.T if fields.positions else None,
            document_boundaries=boundaries.T if fields.max_documents else None,
        )


def _cut_between_documents(document_starts: NDArray[np.int64], tokens: int, length: int) -> NDArray[np.int64]:
    """Return the first token of each window of at most `length` tokens, and `tokens`.

    A window ends with a document. Only a document of more than `length` tokens is cut.
    """
    edges = [0]
    while edges[-1] < tokens:
        stop = edges[-1] + length
        if stop < tokens:
            # The last document that begins in the window, or at its end, begins the next window.
            next_document = int(document_starts[np.searchsorted(document_starts, stop, side="right") - 1])
            if next_document > edges[-1]:
                stop = next_document
        edges.append(min(stop, tokens))
    return np.array(edges, dtype=np.int64)
