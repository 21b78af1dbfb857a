"""Which tokens sample number k of a run consists of: a pure function of (seed, k), whatever the layout.

All training files are cut into windows of sequence_length + 1 tokens; neighbours share one token, so that each token
(but a file's first and its last few) is predicted once an epoch. An epoch is a pseudo-random order of windows that
needs no table (see permutation.py): of the windows of all files together, or, with data.weights, of each file's by
itself, while the files take turns by weight (see blend.py). Documents are joined; their end tokens stay. A rank that
needs samples 100..107 asks for them; nothing is kept between calls, so resuming at any number and any number of ranks
is exact.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megascale.config import Config
from megascale.data.dataset.blend import SMALLEST, Blend
from megascale.data.dataset.formats import is_text, open_tokens
from megascale.data.dataset.meter import Meter
from megascale.data.dataset.permutation import derive_key, permute
from megascale.data.dataset.token_file import TokenFile
from megascale.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megascale.data.dataset.text_stream import TextStream

IGNORE = -100
_SCAN = 1 << 23  # tokens looked at at a time


def hash_ids(ids: NDArray[np.int64]) -> int:
    """What the ledger keeps of sample ids: 64 bits of BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "big")


def check_ids(what: str, file: str, tokens: NDArray, first: int, vocab_size: int | None) -> None:
    """DataError naming the first token id outside the vocabulary, and its place.

    Args:
        what: the key or option that named the file.
        tokens: some of the file's tokens, from number `first` on.
    """
    if vocab_size is None or not len(tokens) or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return
    at = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    raise DataError(
        f"{what}: {file} holds token id {tokens[at]} and model.vocab_size={vocab_size} (token {first + at:,} of the "
        f"file; ids are 0 to {vocab_size - 1}); it was made with another tokenizer, or is damaged: set "
        "model.vocab_size to that tokenizer's, or build the data again"
    )


class SampleSource:
    """Training samples by number.

    Attributes:
        windows: windows of all files; an epoch's samples where there are no weights.
        tokens: tokens in all files.

    Cheap to make (files are memory-mapped, text is read when asked for) and picklable: it travels as its arguments.
    Raises ConfigError without data.train, DataError for files that cannot be used.

    Args:
        config: data, model.sequence_length, model.vocab_size and train.seed count.
        index: folder for what is learnt of text that is tokenised on the fly; None keeps it in memory.
    """

    def __init__(self, config: Config, index: Path | None = None) -> None:
        if not config.data.train:
            raise ConfigError(
                "data.train is empty; set it to a token file without suffix, such as --data.train=datasets/mine/train "
                "(make one with `megascale data build`), or to a file or folder of text"
            )
        self.config, self._index = config, index
        self.sequence_length = config.model.sequence_length
        self.meter = Meter()
        weights = config.data.weights
        self.files: list[TokenFile | TextStream] = _open(config, index, self.meter)
        counts = [self._count(file) if isinstance(file, TokenFile) else 0 for file in self.files]
        if weights is not None and min(weights) < SMALLEST * sum(weights):
            raise ConfigError(
                f"data.weights={weights}: {min(weights)} is less than {SMALLEST:g} of their sum; leave that file out"
            )
        self._blend = Blend(weights) if weights is not None else None
        self._counts = counts
        self._stops = np.cumsum(counts, dtype=np.int64)
        self.windows = int(self._stops[-1])
        self.tokens = sum(file.tokens for file in self.files)

    def _count(self, file: TokenFile) -> int:
        count = max(0, (file.tokens - 1) // self.sequence_length)
        if not count:
            raise DataError(
                f"data.train: {file.prefix} has {file.tokens} tokens and one sample needs "
                f"model.sequence_length + 1 = {self.sequence_length + 1}; use a shorter sequence or more text"
            )
        return count

    def __reduce__(self) -> tuple[type[SampleSource], tuple[Config, Path | None]]:
        return SampleSource, (self.config, self._index)

    def close(self) -> None:
        """Keep what was learnt of text tokenised on the fly, and end its threads."""
        for file in self.files:
            if not isinstance(file, TokenFile):
                file.close()

    def epochs(self, samples: int) -> float:
        """How often `samples` samples pass over the data; of a blend, over the file that is read most often."""
        return max(self.count_passes(samples))

    def count_passes(self, samples: int) -> list[float]:
        """How often `samples` samples pass over each file; an estimate for text that was not read to its end yet."""
        sizes = [
            count if isinstance(file, TokenFile) else file.windows_expected
            for file, count in zip(self.files, self._counts, strict=True)
        ]
        weights = self.config.data.weights
        if weights is None:
            return [samples / sum(sizes)] * len(sizes)
        return [samples * w / sum(weights) / size for w, size in zip(weights, sizes, strict=True)]

    def ids(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """int64 [count, 3]: epoch, file and window within the file of samples first_sample and following."""
        if self._blend is not None:
            return self._blended(self._blend.places(first_sample, count))
        numbers = np.arange(first_sample, first_sample + count, dtype=np.int64)
        if not isinstance(self.files[0], TokenFile):
            epochs, places = self.files[0].places(numbers)
            return np.stack([epochs, np.zeros_like(epochs), places], axis=1)
        epochs, places = np.divmod(numbers, self.windows)
        if self.config.data.shuffle:
            for epoch in np.unique(epochs):
                now = epochs == epoch
                places[now] = permute(places[now], self.windows, derive_key(self.config.train.seed, int(epoch)))
        files = np.searchsorted(self._stops, places, side="right")
        starts = self._stops - np.diff(self._stops, prepend=0)
        return np.stack([epochs, files, places - starts[files]], axis=1)

    def _blended(self, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Epoch, file and window of (file, number among the file's samples) rows."""
        files, numbers = turns.T
        epochs, places = np.divmod(numbers, np.maximum(np.array(self._counts)[files], 1))
        for i, stream in enumerate(self.files):
            if not isinstance(stream, TokenFile) and (files == i).any():
                epochs[files == i], places[files == i] = stream.places(numbers[files == i])
        if self.config.data.shuffle:
            for file, epoch in np.unique(np.stack([files, epochs], axis=1), axis=0).tolist():
                if not self._counts[file]:
                    continue  # text has its own order
                now = (files == file) & (epochs == epoch)
                # A file's own order depends on its place in data.train and on nothing else of the blend.
                places[now] = permute(places[now], self._counts[file], derive_key(self.config.train.seed, file, epoch))
        return np.stack([epochs, files, places], axis=1)

    def batch(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """int64 [count, sequence_length + 1]: inputs are `[:, :-1]`, targets `[:, 1:]`.

        DataError for a token that the vocabulary does not have.
        """
        out = np.empty((count, self.sequence_length + 1), dtype=np.int64)
        rows = self.ids(first_sample, count)
        for row, (epoch, number, window) in zip(out, rows.tolist(), strict=True):
            file = self.files[number]
            if not isinstance(file, TokenFile):
                row[:] = file.window(epoch, window)
                continue
            # A memory map is read by copying from it, so that waiting for the disk and copying are one.
            started = time.perf_counter()
            view = file.read(window * self.sequence_length, self.sequence_length + 1)
            row[:] = view
            self.meter.read_seconds += time.perf_counter() - started
            self.meter.bytes_read += view.nbytes
        vocabulary = self.config.model.vocab_size
        if vocabulary is not None and count and (out.min() < 0 or out.max() >= vocabulary):
            for tokens, (epoch, number, window) in zip(out, rows.tolist(), strict=True):
                text = not isinstance(self.files[number], TokenFile)
                file = f"{self.files[number].prefix}{f' (epoch {epoch})' if text else ''}"
                check_ids("data.train", file, tokens, window * self.sequence_length, vocabulary)
        return out


def _open(config: Config, index: Path | None, meter: Meter) -> list[TokenFile | TextStream]:
    """The files of data.train; without weights all text is one stream, as all token files are one order."""
    entries, weights = config.data.train, config.data.weights
    texts = [entry for entry in entries if is_text(entry)]
    if not texts:
        return [open_tokens(entry) for entry in entries]
    from megascale.data.dataset.text_stream import TextStream

    if weights is None and len(texts) < len(entries):
        raise ConfigError(
            f"data.train mixes token files and text to be tokenised on the fly ({texts[0]}), whose number of samples "
            "is not known beforehand; give data.weights, one an entry"
        )
    if weights is None:
        return [TextStream([Path(text) for text in texts], config, 0, index, meter)]
    return [
        TextStream([Path(entry)], config, i, index, meter) if is_text(entry) else open_tokens(entry)
        for i, entry in enumerate(entries)
    ]


class HeldOut:
    """A token file read in order, each token exactly once as a target.

    Window i predicts tokens `[i x stride, (i + 1) x stride)` from those before them in a window of sequence_length
    tokens; by default the stride is the sequence length. A shorter one gives each token more to go by, for more work.
    The very first token is predicted from the file's last one, which in files built here is an end of document. The
    last window is filled up; filled places have target IGNORE.

    Attributes:
        windows: number of windows.
        tokens: number of targets, and of tokens.
    """

    def __init__(
        self,
        prefix: str,
        sequence_length: int,
        vocab_size: int | None = None,
        stride: int | None = None,
        named: str = "data.valid",
    ) -> None:
        self.named = named  # the key or option that the file is from
        self.prefix, self.sequence_length, self.vocab_size = prefix, sequence_length, vocab_size
        self.stride = sequence_length if stride is None else stride
        if not 0 < self.stride <= sequence_length:
            raise ConfigError(
                f"--stride={stride} must be between 1 and model.sequence_length={sequence_length}: tokens beyond a "
                "window would never be predicted"
            )
        self._file = open_tokens(prefix)
        self.tokens = self._file.tokens
        if not self.tokens:
            raise DataError(f"held-out file {prefix} has no tokens; build it with more text")
        self.windows = -(-self.tokens // self.stride)

    def __reduce__(self) -> tuple[type[HeldOut], tuple[str, int, int | None, int, str]]:
        return HeldOut, (self.prefix, self.sequence_length, self.vocab_size, self.stride, self.named)

    def __len__(self) -> int:
        return self.windows

    def check(self, most: int = 1 << 27) -> None:
        """DataError for an id outside the vocabulary among the first tokens: at a start, not after hours."""
        for start in range(0, min(self.tokens, most), _SCAN):
            check_ids(self.named, self.prefix, self._file.stream[start : start + _SCAN], start, self.vocab_size)

    def batch(self, first_window: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets, int64 [windows, sequence_length]; fewer rows than `count` at the end of the file."""
        return self.read_windows(range(first_window, min(first_window + count, self.windows)))

    def spread_windows(self, samples: int | None) -> list[int]:
        """At most so many windows, evenly over the file; None: all."""
        count = self.windows if samples is None else min(samples, self.windows)
        return [i * self.windows // count for i in range(count)]

    def count_targets(self, windows: Sequence[int]) -> int:
        """Number of targets of chosen windows."""
        return sum(min(self.stride, self.tokens - window * self.stride) for window in windows)

    def read_windows(self, windows: Sequence[int], size: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets of chosen windows, int64 [len(windows), sequence_length]; so that shapes need not change,
        filled up to `size` rows with what counts nothing."""
        length, stream = self.sequence_length, self._file.stream
        inputs = np.zeros((max(len(windows), size), length), dtype=np.int64)
        targets = np.full(inputs.shape, IGNORE, dtype=np.int64)
        for row, window in enumerate(windows):
            start = window * self.stride
            begin = max(0, start + self.stride - length)
            piece = stream[begin : start + self.stride]
            before = stream[begin - 1]  # -1 at the start of the file: its last token
            check_ids(self.named, self.prefix, piece, begin, self.vocab_size)
            check_ids(self.named, self.prefix, stream[begin - 1 :][:1], (begin - 1) % self.tokens, self.vocab_size)
            targets[row, start - begin : len(piece)] = piece[start - begin :]
            inputs[row, 0] = before
            inputs[row, 1 : len(piece)] = piece[:-1]
        return inputs, targets
