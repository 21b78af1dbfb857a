"""The tokens of sample number k of a run: a pure function of (seed, k), whatever the layout.

All training files are cut into windows of sequence_length + 1 tokens. Neighbouring windows share one token, so that
each token (except a file's first and its last few) is predicted once per epoch. An epoch is a pseudo-random order of
windows that needs no table (sample_order.py). Without data.weights it orders the windows of all files together. With
weights it orders each file's windows separately, and the files take turns by weight. Documents are joined; their end
tokens stay. Under data.document_mask the windows are those of a plan (packing.py), which keeps documents apart. Nothing
is kept between calls, so resuming at any sample with any number of ranks is exact.
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
from megascale.core.batch import NO_FIELDS, Batch, SampleFields
from megascale.data.dataset.file_hash import fingerprint_file
from megascale.data.dataset.formats import is_text, open_tokens, sample_fields, token_files
from megascale.data.dataset.metered_files import Meter
from megascale.data.dataset.packing import PackingReport, load_plan
from megascale.data.dataset.sample_fields import (
    DocumentReader,
    FieldReader,
    Samples,
    combine_documents,
    read_documents,
    restart_positions,
)
from megascale.data.dataset.sample_order import SMALLEST, Blend, derive_key, permute
from megascale.data.dataset.token_file import TokenFile, too_short_error
from megascale.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megascale.data.dataset.text_stream import TextStream

IGNORE = -100
_SCAN = 1 << 23  # tokens checked at a time


def hash_ids(ids: NDArray[np.int64]) -> int:
    """Return the ledger's hash of sample ids: 64 bits of BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "big")


def check_ids(setting: str, file: str, tokens: NDArray, first: int, vocab_size: int | None) -> None:
    """Raise DataError naming the first token id outside the vocabulary, and its position.

    Args:
        setting: the key or option that named the file.
        tokens: tokens of the file, from number `first` on.
    """
    if vocab_size is None or not len(tokens) or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return
    position = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    raise DataError(
        f"{setting}: {file} holds token id {tokens[position]} and model.vocab_size={vocab_size} (token "
        f"{first + position:,} of the file; ids are 0 to {vocab_size - 1}); it was made with another tokenizer, or is "
        "damaged: set model.vocab_size to that tokenizer's, or build the data again"
    )


def find_fields(data: DataConfig, sequence_length: int) -> SampleFields:
    """Return the optional fields that the samples of data.train carry; no file is opened.

    Raises ConfigError under data.document_mask for text that is tokenised on the fly and for fields that exclude it.
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
        entry_fields = sample_fields(entry)
        if data.document_mask:
            count = data.count_max_documents(sequence_length)
            entry_fields = combine_documents(entry_fields, count, "data.train", entry)
        fields |= entry_fields
    return fields


class SampleSource:
    """Training samples by number.

    It is cheap to make (files are memory-mapped, text is read on demand) and pickles as its arguments.

    Args:
        data: the section; `train`, `weights`, `shuffle` and, for text, the keys of tokenising on the fly are used.
        vocab_size: ids must be below it; None accepts all.
        index: folder for the token counts of text that is tokenised on the fly; None keeps them in memory.

    Attributes:
        fields: optional fields that every sample carries.
        windows: windows of all files; an epoch's samples if there are no weights.
        tokens: tokens in all files.

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
        self._documents = self._plan_documents()
        self._counts = [self._count_windows(i) for i in range(len(self.files))]
        weights = data.weights
        if weights is not None and min(weights) < SMALLEST * sum(weights):
            raise ConfigError(
                f"data.weights={weights}: {min(weights)} is less than {SMALLEST:g} of their sum; leave that file out"
            )
        self._blend = Blend(weights) if weights is not None else None
        self._stops = np.cumsum(self._counts, dtype=np.int64)
        self.windows = int(self._stops[-1])
        self.tokens = sum(file.tokens for file in self.files)

    def _open_files(self) -> list[TokenFile | TextStream]:
        """Open the entries of data.train. Without weights all text is one stream, as all token files have one order."""
        entries = self.data.train
        texts = [entry for entry in entries if is_text(entry)]
        if not texts:
            return [open_tokens(entry) for entry in entries]
        if self.data.weights is None:
            if len(texts) < len(entries):
                raise ConfigError(
                    f"data.train mixes token files and text to be tokenised on the fly ({texts[0]}), whose number of "
                    "samples is not known beforehand; give data.weights, one per entry"
                )
            return [self._open_text(texts, 0)]
        return [
            self._open_text([entry], number) if is_text(entry) else open_tokens(entry)
            for number, entry in enumerate(entries)
        ]

    def _open_text(self, entries: list[str], number: int) -> TextStream:
        from megascale.data.dataset.text_stream import TextStream

        inputs = [Path(entry) for entry in entries]
        return TextStream(
            inputs,
            self.data,
            self.sequence_length,
            seed=derive_key(self._seed, number) if self.data.shuffle else None,
            index=self._index,
            meter=self.meter,
        )

    def _plan_documents(self) -> dict[int, DocumentReader]:
        """Return the readers of files whose documents are kept apart, by their number: none, or all files."""
        readers: dict[int, DocumentReader] = {}
        if not self.data.document_mask:
            return readers
        for number, (file, entry) in enumerate(zip(self.files, self.data.train, strict=True)):
            assert isinstance(file, TokenFile)
            starts = read_documents(file, "data.train")
            identity = " ".join(map(fingerprint_file, token_files(entry)))
            plan = load_plan(
                self._index,
                identity,
                self.data.packing,
                starts,
                file.tokens,
                sequence_length=self.sequence_length,
                max_documents=self.data.count_max_documents(self.sequence_length),
            )
            readers[number] = DocumentReader(file, starts, plan, self._fields_reader)
        return readers

    def report_packing(self) -> list[PackingReport]:
        """Return how full the samples of each file are; empty without data.document_mask."""
        return [
            reader.plan.report(reader.starts, reader.file.tokens, self.sequence_length)
            for reader in self._documents.values()
        ]

    def token_ranges(self, file: int, window: int) -> list[tuple[int, int]]:
        """Return the (first, past-last) tokens of `file` that a window holds, targets included."""
        if file in self._documents:
            intervals = self._documents[file].plan.intervals(window)
            return [(start, min(start + length + 1, self.files[file].tokens)) for start, length in intervals]
        return [(window * self.sequence_length, (window + 1) * self.sequence_length + 1)]

    def _count_windows(self, number: int) -> int:
        """Return the samples of a file in an epoch; 0 for text, whose number is not known beforehand."""
        file = self.files[number]
        if not isinstance(file, TokenFile):
            return 0
        if number in self._documents:
            count = self._documents[number].plan.samples
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
        make = partial(SampleSource, vocab_size=self._vocab_size, seed=self._seed, index=self._index)
        return make, (self.data, self.sequence_length)

    def close(self) -> None:
        """Save the token counts of text tokenised on the fly, and end its threads."""
        for file in self.files:
            if not isinstance(file, TokenFile):
                file.close()

    def count_epochs(self, samples: int) -> float:
        """Return the passes of `samples` samples over the data; of a blend, over the file that is read most often."""
        return max(self.count_passes(samples))

    def count_passes(self, samples: int) -> list[float]:
        """Return the passes of `samples` samples over each file, estimated for text that was not read completely."""
        sizes = [
            count if isinstance(file, TokenFile) else file.windows_expected
            for file, count in zip(self.files, self._counts, strict=True)
        ]
        weights = self.data.weights
        if weights is None:
            return [samples / sum(sizes)] * len(sizes)
        return [samples * weight / sum(weights) / size for weight, size in zip(weights, sizes, strict=True)]

    def ids(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """Return epoch, file and window within the file of samples first_sample and following: int64 [count, 3]."""
        if self._blend is not None:
            return self._blended_ids(self._blend.assign(first_sample, count))
        numbers = np.arange(first_sample, first_sample + count, dtype=np.int64)
        if not isinstance(self.files[0], TokenFile):
            epochs, windows = self.files[0].locate(numbers)
            return np.stack([epochs, np.zeros_like(epochs), windows], axis=1)
        epochs, windows = np.divmod(numbers, self.windows)
        if self.data.shuffle:
            for epoch in np.unique(epochs):
                selected = epochs == epoch
                windows[selected] = permute(windows[selected], self.windows, derive_key(self._seed, int(epoch)))
        files = np.searchsorted(self._stops, windows, side="right")
        starts = self._stops - np.diff(self._stops, prepend=0)
        return np.stack([epochs, files, windows - starts[files]], axis=1)

    def _blended_ids(self, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return epoch, file and window of (file, number within the file) rows."""
        files, numbers = turns.T
        epochs, windows = np.divmod(numbers, np.maximum(np.array(self._counts)[files], 1))
        for i, stream in enumerate(self.files):
            selected = files == i
            if not isinstance(stream, TokenFile) and selected.any():
                epochs[selected], windows[selected] = stream.locate(numbers[selected])
        if self.data.shuffle:
            for file, epoch in np.unique(np.stack([files, epochs], axis=1), axis=0).tolist():
                count = self._counts[file]
                if count:  # text has an order of its own
                    selected = (files == file) & (epochs == epoch)
                    # A file's order depends on its position in data.train and on nothing else of the blend.
                    windows[selected] = permute(windows[selected], count, derive_key(self._seed, file, epoch))
        return np.stack([epochs, files, windows], axis=1)

    def batch(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """Return tokens, int64 [count, sequence_length + 1]: inputs are `[:, :-1]`, targets `[:, 1:]`.

        Raises DataError for a token outside the vocabulary.
        """
        batch = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        ids = self.ids(first_sample, count).tolist()
        for row, (epoch, number, window) in zip(batch, ids, strict=True):
            file = self.files[number]
            if not isinstance(file, TokenFile):
                row[:] = file.window(epoch, window)
                continue
            # Copying from a memory map reads it, so waiting for the disk and copying are one measurement.
            started = time.perf_counter()
            if self._documents:
                row[:] = self._documents[number].tokens(window)
                self.meter.read_seconds += time.perf_counter() - started
                self.meter.bytes_read += row.size * file.stream.itemsize
                continue
            start = window * self.sequence_length
            view = file.stream[start : start + self.sequence_length + 1]
            row[:] = view
            self.meter.read_seconds += time.perf_counter() - started
            self.meter.bytes_read += view.nbytes
        if self._vocab_size is not None and count and (batch.min() < 0 or batch.max() >= self._vocab_size):
            for tokens, (epoch, number, window) in zip(batch, ids, strict=True):
                name = self.files[number].prefix
                if not isinstance(self.files[number], TokenFile):
                    name = f"{name} (epoch {epoch})"
                first = self.token_ranges(number, window)[0][0]
                check_ids("data.train", name, tokens, first, self._vocab_size)
        return batch

    def read(self, first_sample: int, count: int) -> Samples:
        """Return samples first_sample and following with their optional fields.

        Raises DataError for a token outside the vocabulary, and for values that a field may not have.
        """
        tokens = self.batch(first_sample, count).T
        if not self._has_fields:
            return Samples(tokens)
        if self._documents:
            return self._read_documents(tokens, first_sample, count)
        fields, reader = self.fields, self._fields_reader
        weights, positions, boundaries = [], [], []
        for file, start in self._locate(first_sample, count):
            if fields.loss_weights:
                weights.append(reader.weights(file, start + 1, self.sequence_length))
            if fields.positions:
                positions.append(reader.positions(file, np.arange(start, start + self.sequence_length)))
            if fields.max_documents:
                boundaries.append(reader.boundaries(file, start))
        return Samples(
            tokens,
            loss_weights=np.stack(weights, axis=1) if weights else None,
            positions=np.stack(positions, axis=1) if positions else None,
            document_boundaries=np.stack(boundaries, axis=1) if boundaries else None,
        )

    def _read_documents(self, tokens: NDArray[np.int64], first_sample: int, count: int) -> Samples:
        """Return the samples with their weights, positions and document boundaries."""
        weights, boundaries = [], []
        for _, number, window in self.ids(first_sample, count).tolist():
            weights.append(self._documents[number].weights(window))
            boundaries.append(self._documents[number].boundaries(window))
        return Samples(
            tokens,
            loss_weights=np.stack(weights, axis=1),
            positions=np.stack([restart_positions(edges) for edges in boundaries], axis=1),
            document_boundaries=np.stack(boundaries, axis=1),
        )

    def sum_weights(self, first_sample: int, count: int) -> float:
        """Return the sum of the loss weights of samples first_sample and following, without reading their tokens."""
        total = 0.0
        if self._documents:
            for _, number, window in self.ids(first_sample, count).tolist():
                total += float(self._documents[number].weights(window).sum(dtype=np.float64))
            return total
        for file, start in self._locate(first_sample, count):
            weights = self._fields_reader.weights(file, start + 1, self.sequence_length)
            total += float(weights.sum(dtype=np.float64))
        return total

    def _locate(self, first_sample: int, count: int) -> list[tuple[TokenFile | None, int]]:
        """Return the file of each sample (None for text) and the offset of its first token."""
        located: list[tuple[TokenFile | None, int]] = []
        for _, number, window in self.ids(first_sample, count).tolist():
            file = self.files[number]
            located.append((file if isinstance(file, TokenFile) else None, window * self.sequence_length))
        return located


class HeldOut:
    """A token file read in order, each token exactly once as a target.

    Window i predicts tokens `[i x stride, (i + 1) x stride)` from the tokens before them in a window of sequence_length
    tokens. By default the stride is the sequence length; a shorter one gives each token more context, for more work.
    The first token is predicted from the file's last one, which in files built here is an end of document. The last
    window is padded; padding has target IGNORE.

    Args:
        max_documents: largest number of documents in a sample of training, which are kept apart here too; 0: they are
            joined.

    Attributes:
        fields: optional fields that its batches carry.
        windows: number of windows.
        document_starts: first token of each document if documents are kept apart, else None.
        tokens: number of targets, and of tokens.
        setting: the key or option that named the file.
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
        self.fields = sample_fields(prefix)
        self._file = open_tokens(prefix)
        self.document_starts: NDArray[np.int64] | None = None
        if max_documents:
            self.document_starts = read_documents(self._file, setting)
            # With the number of training, evaluation runs the kernels that were chosen for training.
            count = max(max_documents, self._count_max_documents(self.document_starts))
            self.fields = combine_documents(self.fields, count, setting, prefix)
        self._fields_reader = FieldReader(self.fields, sequence_length)
        self.tokens = self._file.tokens
        if not self.tokens:
            raise DataError(f"held-out file {prefix} has no tokens; build it with more text")
        self.windows = -(-self.tokens // self.stride)

    def __reduce__(self) -> tuple[Any, ...]:
        limit = 0 if self.document_starts is None else self.fields.max_documents - 1
        return HeldOut, (self.prefix, self.sequence_length, self.vocab_size, self.stride, self.setting, limit)

    def _count_max_documents(self, document_starts: NDArray[np.int64]) -> int:
        """Return the largest number of documents in a window."""
        begins = np.arange(0, self._file.tokens, self.stride) + self.stride - self.sequence_length
        inputs = np.maximum(begins, 0) - 1  # number of the first input token
        first = np.searchsorted(document_starts, inputs, side="right")
        stop = np.searchsorted(document_starts, inputs + self.sequence_length)
        return 1 + int((stop - first).max(initial=0))

    def __len__(self) -> int:
        return self.windows

    def check(self, limit: int = 1 << 27) -> None:
        """Raise DataError for an id outside the vocabulary among the first `limit` tokens, at a start of a run."""
        for start in range(0, min(self.tokens, limit), _SCAN):
            check_ids(self.setting, self.prefix, self._file.stream[start : start + _SCAN], start, self.vocab_size)

    def batch(self, first_window: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets, int64 [windows, sequence_length]; fewer rows than `count` at the file's end."""
        return self.read_windows(range(first_window, min(first_window + count, self.windows)))

    def spread_windows(self, samples: int | None) -> list[int]:
        """Return at most `samples` windows, evenly over the file; None: all windows."""
        count = self.windows if samples is None else min(samples, self.windows)
        return [i * self.windows // count for i in range(count)]

    def count_targets(self, windows: Sequence[int]) -> int:
        """Return the number of targets of the given windows."""
        return sum(min(self.stride, self.tokens - window * self.stride) for window in windows)

    def read_windows(self, windows: Sequence[int], size: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets of the given windows, int64 [max(len(windows), size), sequence_length].

        Rows beyond the windows are padding, so that batches may have one shape.
        """
        length, stream = self.sequence_length, self._file.stream
        inputs = np.zeros((max(len(windows), size), length), dtype=np.int64)
        targets = np.full(inputs.shape, IGNORE, dtype=np.int64)
        for row, window in enumerate(windows):
            start = window * self.stride
            begin = max(0, start + self.stride - length)
            tokens = stream[begin : start + self.stride]
            preceding = stream[begin - 1 :][:1]  # at the start of the file, its last token
            check_ids(self.setting, self.prefix, tokens, begin, self.vocab_size)
            check_ids(self.setting, self.prefix, preceding, (begin - 1) % self.tokens, self.vocab_size)
            targets[row, start - begin : len(tokens)] = tokens[start - begin :]
            inputs[row, 0] = preceding[0]
            inputs[row, 1 : len(tokens)] = tokens[:-1]
        return inputs, targets

    def read_batch(self, windows: Sequence[int], size: int = 0) -> Batch[NDArray[Any]]:
        """Return `read_windows` as a batch [sequence_length, max(len(windows), size)] with the optional fields.

        Padding has weight 0.
        """
        inputs, targets = self.read_windows(windows, size)
        fields, reader = self.fields, self._fields_reader
        if fields == NO_FIELDS:
            return Batch(inputs.T, targets.T)
        weights = np.zeros(inputs.shape, np.float32)
        positions = np.tile(np.arange(self.sequence_length, dtype=np.int32), (len(inputs), 1))
        boundaries = np.tile(reader.boundaries(None, 0), (len(inputs), 1))
        for row, window in enumerate(windows):
            start = window * self.stride
            begin = max(0, start + self.stride - self.sequence_length)
            stop = min(start + self.stride, self.tokens)
            if fields.loss_weights:
                weights[row, start - begin : stop - begin] = reader.weights(self._file, start, stop - start)
            if self.document_starts is not None:
                first, last = np.searchsorted(self.document_starts, (begin, stop))
                columns = self.document_starts[first:last] - begin  # of targets that begin a document
                weights[row, columns] = 0
                inner = columns[columns + 1 < self.sequence_length] + 1  # of inputs
                boundaries[row, 1 : 1 + len(inner)] = inner
                positions[row] = restart_positions(boundaries[row])
                continue
            if fields.positions:
                numbers = np.arange(begin - 1, stop - 1) % self.tokens  # the input before the first token is the last
                positions[row, : stop - begin] = reader.positions(self._file, numbers)
            if fields.max_documents:
                boundaries[row] = reader.boundaries(self._file, begin - 1)
        return Batch(
            inputs.T,
            targets.T,
            loss_weights=weights.T if fields.loss_weights else None,
            positions=positions.T if fields.positions else None,
            document_boundaries=boundaries.T if fields.max_documents else None,
        )
