"""Samples of a run by number: sample k is a pure function of the seed and k, for every layout of ranks.

The training files are cut into windows of sequence_length + 1 tokens. Neighbouring windows share one token, so that
each token, except a file's first and last few, is predicted once per epoch. Documents are joined, with their end
tokens. Under data.document_mask a packing plan (packing.py) defines the windows instead.

An epoch is a pseudo-random order of the windows, which needs no table (sample_order.py). Without data.weights one order
covers the windows of all files. With data.weights each file has its own order, and the files take turns by weight.

A sample's id is (epoch, file, window of the file). Reading keeps no state between calls, so a run can resume at any
sample with any number of ranks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megascale.config import DataConfig
from megascale.core.batch import NO_FIELDS, SampleFields
from megascale.data.dataset.file_hash import fingerprint_file
from megascale.data.dataset.formats import find_sample_fields, is_text, list_token_files, open_tokens
from megascale.data.dataset.metered_files import Meter
from megascale.data.dataset.packing import PackingReport, load_plan
from megascale.data.dataset.sample_fields import (
    DocumentReader,
    FieldReader,
    Samples,
    add_document_fields,
    require_document_starts,
    restart_positions,
)
from megascale.data.dataset.sample_order import MIN_WEIGHT_SHARE, Blend, derive_key, permute
from megascale.data.dataset.token_file import TokenFile, check_token_ids, too_short_error
from megascale.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megascale.data.dataset.text_stream import TextStream


def hash_sample_ids(ids: NDArray[np.int64]) -> int:
    """Return the hash of sample ids that the ledger records: 64 bits of BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "big")


def _compute_shares(weights: Sequence[float]) -> list[float]:
    """Return each weight's share of their sum. The sum itself may be infinite, so divide by the largest one first."""
    largest = max(weights)
    total = sum(weight / largest for weight in weights)
    return [weight / largest / total for weight in weights]


def _stack_columns(columns: Sequence[NDArray]) -> NDArray | None:
    """Return the arrays as columns of one array, or None without arrays."""
    if not columns:
        return None
    return np.stack(columns, axis=1)


def find_fields(data: DataConfig, sequence_length: int) -> SampleFields:
    """Return the optional fields that the samples of data.train carry, without opening a file.

    Raises ConfigError if data.document_mask is set and an entry is text or has positions of its own.
    """
    fields = NO_FIELDS
    for entry in data.train:
        if is_text(entry):
            if data.document_mask:
                raise ConfigError(
                    f"data.document_mask=true needs token files, and data.train={entry} is text that is tokenised on "
                    "the fly; build it with `megascale data build`, or set --data.document_mask=false"
                )
            continue
        entry_fields = find_sample_fields(entry)
        if data.document_mask:
            count = data.count_max_documents(sequence_length)
            entry_fields = add_document_fields(entry_fields, count, "data.train", entry)
        fields |= entry_fields
    return fields


class SampleSource:
    """Training samples by number.

    The constructor is cheap: token files are memory-mapped, and text is read on demand. Pickling keeps the arguments
    only.

    Args:
        data: the section [data].
        vocab_size: token ids must be below this; None accepts all ids.
        index: folder for the token counts of text that is tokenised on the fly; None keeps the counts in memory.

    Attributes:
        fields: optional fields that every sample carries.
        files: opened entries of data.train. Without data.weights, all text together is one TextStream.
        windows: number of windows of all token files; without data.weights, the samples of an epoch.
        tokens: number of tokens in all files.
        meter: counters of reading, for the loader's metrics.

    Raises:
        ConfigError: data.train is empty, or its entries and weights do not fit together.
        DataError: a file is unusable.
    """

    def __init__(
        self, data: DataConfig, sequence_length: int, *, vocab_size: int | None, seed: int, index: Path | None = None
    ) -> None:
        if not data.train:
            raise ConfigError(
                "data.train is empty; set it to a token file without suffix, such as --data.train=datasets/mine/train "
                "(make one with `megascale data build`), or to a file or folder of text"
            )
        self.data = data
        self.sequence_length = sequence_length
        self.fields = find_fields(data, sequence_length)
        self.meter = Meter()
        self._has_fields = self.fields != NO_FIELDS
        self._fields_reader = FieldReader(self.fields, sequence_length)
        self._vocab_size = vocab_size
        self._seed = seed
        self._index = index
        self.files: list[TokenFile | TextStream] = self._open_files()
        self._document_readers = self._plan_documents()
        self._window_counts = [self._count_windows(file_index) for file_index in range(len(self.files))]
        weights = data.weights
        if weights is not None and min(_compute_shares(weights)) < MIN_WEIGHT_SHARE:
            raise ConfigError(
                f"data.weights={weights}: {min(weights)} is less than {MIN_WEIGHT_SHARE:g} of their sum; leave that "
                "file out"
            )
        self._blend: Blend | None = None
        if weights is not None:
            self._blend = Blend(weights)
        self._window_stops = np.cumsum(self._window_counts, dtype=np.int64)
        self.windows = int(self._window_stops[-1])
        self.tokens = sum(file.tokens for file in self.files)

    def _open_files(self) -> list[TokenFile | TextStream]:
        """Open the entries of data.train; without data.weights, all text together is one stream."""
        entries = self.data.train
        texts = [entry for entry in entries if is_text(entry)]
        if not texts:
            return [open_tokens(entry) for entry in entries]
        if self.data.weights is None:
            if len(texts) < len(entries):
                raise ConfigError(
                    f"data.train mixes token files and text to be tokenised on the fly ({texts[0]}), whose number of "
                    "samples is not known in advance; set data.weights, with one weight per entry"
                )
            return [self._open_text(texts, 0)]
        files: list[TokenFile | TextStream] = []
        for file_index, entry in enumerate(entries):
            if is_text(entry):
                files.append(self._open_text([entry], file_index))
            else:
                files.append(open_tokens(entry))
        return files

    def _open_text(self, entries: list[str], file_index: int) -> TextStream:
        from megascale.data.dataset.text_stream import TextStream

        inputs = [Path(entry) for entry in entries]
        seed: int | None = None  # text is read in the order of the files
        if self.data.shuffle:
            seed = derive_key(self._seed, file_index)
        return TextStream(
            inputs,
            self.data,
            self.sequence_length,
            seed=seed,
            index=self._index,
            meter=self.meter,
        )

    def _plan_documents(self) -> dict[int, DocumentReader]:
        """Return a DocumentReader per file by its index, or no readers without data.document_mask."""
        readers: dict[int, DocumentReader] = {}
        if not self.data.document_mask:
            return readers
        for file_index, (file, entry) in enumerate(zip(self.files, self.data.train, strict=True)):
            assert isinstance(file, TokenFile)
            starts = require_document_starts(file, "data.train")
            identity = " ".join(map(fingerprint_file, list_token_files(entry)))
            plan = load_plan(
                self._index,
                identity,
                self.data.packing,
                starts,
                file.tokens,
                sequence_length=self.sequence_length,
                max_documents=self.data.count_max_documents(self.sequence_length),
            )
            readers[file_index] = DocumentReader(file, starts, plan, self._fields_reader)
        return readers

    def report_packing(self) -> list[PackingReport]:
        """Return a report per file on how full its samples are; no reports without data.document_mask."""
        return [
            reader.plan.load_report(reader.starts, reader.file.tokens, self.sequence_length)
            for reader in self._document_readers.values()
        ]

    def find_token_ranges(self, file_index: int, window: int) -> list[tuple[int, int]]:
        """Return the token ranges [start, stop) of a file that a window holds, including the last target of each."""
        if file_index in self._document_readers:
            intervals = self._document_readers[file_index].plan.list_intervals(window)
            return [(start, min(start + length + 1, self.files[file_index].tokens)) for start, length in intervals]
        return [(window * self.sequence_length, (window + 1) * self.sequence_length + 1)]

    def _count_windows(self, file_index: int) -> int:
        """Return the windows of a file; 0 for text, whose number of tokens is not known in advance.

        Raises DataError for a file without a window.
        """
        file = self.files[file_index]
        if not isinstance(file, TokenFile):
            return 0
        if file_index in self._document_readers:
            count = self._document_readers[file_index].plan.samples
            if not count:
                raise DataError(
                    f"data.train: {file.prefix} has no document of two tokens or more, and data.document_mask=true "
                    "predicts no document's first token; set --data.document_mask=false, or use longer documents"
                )
        else:
            count = max(0, (file.tokens - 1) // self.sequence_length)
        if not count:
            raise too_short_error(file.prefix, file.tokens, self.sequence_length)
        return count

    def __reduce__(self) -> tuple[Any, ...]:
        constructor = partial(SampleSource, vocab_size=self._vocab_size, seed=self._seed, index=self._index)
        return constructor, (self.data, self.sequence_length)

    def close(self) -> None:
        """Save the token counts of text tokenised on the fly, and end its threads."""
        for file in self.files:
            if not isinstance(file, TokenFile):
                file.close()

    def count_epochs(self, samples: int) -> float:
        """Return the passes of `samples` samples over the data: with data.weights, over the file with most passes."""
        return max(self.count_passes(samples))

    def count_passes(self, samples: int) -> list[float]:
        """Return the passes of `samples` samples over each file; estimates for text that was not read completely."""
        sizes = [
            count if isinstance(file, TokenFile) else file.expected_windows
            for file, count in zip(self.files, self._window_counts, strict=True)
        ]
        weights = self.data.weights
        if weights is None:
            return [samples / sum(sizes)] * len(sizes)
        return [samples * share / size for share, size in zip(_compute_shares(weights), sizes, strict=True)]

    def find_sample_ids(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """Return the ids of `count` samples from `first_sample` on, int64 [count, 3].

        The columns are epoch, index of the file, and window within the file.
        """
        if self._blend is not None:
            return self._find_blended_ids(self._blend.assign_files(first_sample, count))
        numbers = np.arange(first_sample, first_sample + count, dtype=np.int64)
        if not isinstance(self.files[0], TokenFile):
            epochs, windows = self.files[0].locate(numbers)
            return np.stack([epochs, np.zeros_like(epochs), windows], axis=1)
        epochs, windows = np.divmod(numbers, self.windows)
        if self.data.shuffle:
            for epoch in np.unique(epochs):
                selected = epochs == epoch
                windows[selected] = permute(windows[selected], self.windows, derive_key(self._seed, int(epoch)))
        file_indices = np.searchsorted(self._window_stops, windows, side="right")
        first_windows = self._window_stops - self._window_counts
        return np.stack([epochs, file_indices, windows - first_windows[file_indices]], axis=1)

    def _find_blended_ids(self, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ids of samples of a blend, int64 [count, 3].

        Args:
            turns: index of the file and number of the sample among those of the file, int64 [count, 2].
        """
        file_indices, numbers = turns.T
        # Text has window count 0; the loop below replaces its epochs and windows.
        epochs, windows = np.divmod(numbers, np.maximum(np.array(self._window_counts)[file_indices], 1))
        for file_index, file in enumerate(self.files):
            selected = file_indices == file_index
            if not isinstance(file, TokenFile) and selected.any():
                epochs[selected], windows[selected] = file.locate(numbers[selected])
        if self.data.shuffle:
            for file_index, epoch in np.unique(np.stack([file_indices, epochs], axis=1), axis=0).tolist():
                window_count = self._window_counts[file_index]
                if window_count:  # TextStream.locate has shuffled text already
                    selected = (file_indices == file_index) & (epochs == epoch)
                    # A file's order depends on its position in data.train and on nothing else of the blend.
                    key = derive_key(self._seed, file_index, epoch)
                    windows[selected] = permute(windows[selected], window_count, key)
        return np.stack([epochs, file_indices, windows], axis=1)

    def read_tokens(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """Return the tokens of samples as int64 [count, sequence_length + 1]: inputs `[:, :-1]`, targets `[:, 1:]`.

        Raises DataError for a token outside the vocabulary.
        """
        batch = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        ids = self.find_sample_ids(first_sample, count).tolist()
        for row, (epoch, file_index, window) in zip(batch, ids, strict=True):
            file = self.files[file_index]
            if not isinstance(file, TokenFile):
                row[:] = file.read_window(epoch, window)
                continue
            # Copying from a memory map reads the file, so the measured time is that of disk and copy together.
            started = time.perf_counter()
            if self._document_readers:
                row[:] = self._document_readers[file_index].read_tokens(window)
                self.meter.read_seconds += time.perf_counter() - started
                self.meter.bytes_read += row.size * file.stream.itemsize
                continue
            view = file.read_range(window * self.sequence_length, self.sequence_length + 1)
            row[:] = view
            self.meter.read_seconds += time.perf_counter() - started
            self.meter.bytes_read += view.nbytes
        if self._vocab_size is not None and count and (batch.min() < 0 or batch.max() >= self._vocab_size):
            for tokens, (epoch, file_index, window) in zip(batch, ids, strict=True):
                name = self.files[file_index].prefix
                if not isinstance(self.files[file_index], TokenFile):
                    name = f"{name} (epoch {epoch})"
                first = self.find_token_ranges(file_index, window)[0][0]
                check_token_ids("data.train", name, tokens, first, self._vocab_size)
        return batch

    def read_samples(self, first_sample: int, count: int) -> Samples:
        """Return `count` samples from `first_sample` on, with their optional fields.

        Raises DataError for a token outside the vocabulary, and for an invalid value of a field.
        """
        tokens = self.read_tokens(first_sample, count).T
        if not self._has_fields:
            return Samples(tokens)
        if self._document_readers:
            return self._read_documents(tokens, first_sample, count)
        fields = self.fields
        reader = self._fields_reader
        weights = []
        positions = []
        boundaries = []
        for file, start in self._find_samples(first_sample, count):
            if fields.loss_weights:
                weights.append(reader.read_weights(file, start + 1, self.sequence_length))
            if fields.positions:
                positions.append(reader.read_positions(file, np.arange(start, start + self.sequence_length)))
            if fields.max_documents:
                boundaries.append(reader.read_boundaries(file, start))
        return Samples(
            tokens,
            loss_weights=_stack_columns(weights),
            positions=_stack_columns(positions),
            document_boundaries=_stack_columns(boundaries),
        )

    def _read_documents(self, tokens: NDArray[np.int64], first_sample: int, count: int) -> Samples:
        """Return samples with document boundaries, positions that restart at each document, and loss weights."""
        weights = []
        boundaries = []
        for _, file_index, window in self.find_sample_ids(first_sample, count).tolist():
            weights.append(self._document_readers[file_index].read_weights(window))
            boundaries.append(self._document_readers[file_index].read_boundaries(window))
        return Samples(
            tokens,
            loss_weights=np.stack(weights, axis=1),
            positions=np.stack([restart_positions(starts) for starts in boundaries], axis=1),
            document_boundaries=np.stack(boundaries, axis=1),
        )

    def sum_weights(self, first_sample: int, count: int) -> float:
        """Return the sum of the loss weights of `count` samples from `first_sample` on, without reading tokens."""
        total = 0.0
        if self._document_readers:
            for _, file_index, window in self.find_sample_ids(first_sample, count).tolist():
                total += float(self._document_readers[file_index].read_weights(window).sum(dtype=np.float64))
            return total
        for file, start in self._find_samples(first_sample, count):
            weights = self._fields_reader.read_weights(file, start + 1, self.sequence_length)
            total += float(weights.sum(dtype=np.float64))
        return total

    def _find_samples(self, first_sample: int, count: int) -> list[tuple[TokenFile | None, int]]:
        """Return the file of each sample, or None for text, and the offset of the sample's first token."""
        samples: list[tuple[TokenFile | None, int]] = []
        for _, file_index, window in self.find_sample_ids(first_sample, count).tolist():
            file = self.files[file_index]
            token_file = file if isinstance(file, TokenFile) else None
            samples.append((token_file, window * self.sequence_length))
        return samples
