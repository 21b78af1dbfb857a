"""Text tokenised on the fly, with samples by number as exact as those of token files.

The files are cut into pieces (byte ranges of jsonl, row groups of parquet, runs of text files, a compressed file
whole), known without reading them. In each epoch the pieces come in a pseudo-random order; their tokens, joined, are
the epoch's stream, cut into windows that are then shuffled within groups of data.shuffle_tokens. So sample k is a
pure function of (seed, k) and the files: to find it, only the token counts of the pieces before it are needed. They
are counted as training goes on and kept in an index, so that a resumed run reads no more than its own group again.
Without the index (it was deleted) they are counted again, with the same result.

The index also keeps a checksum of each piece's tokens: text that changed under a run is found when it is read again.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megascale.config import Config
from megascale.core.capacity import usable_cores
from megascale.data.dataset import manifest
from megascale.data.dataset.compressed_files import compression_of
from megascale.data.dataset.file_hash import fingerprint
from megascale.data.dataset.indexed import token_dtype
from megascale.data.dataset.meter import Meter
from megascale.data.dataset.permutation import derive_key, permute
from megascale.data.dataset.sources import InputPiece, cut_pieces, find_files, read_documents
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import tokenizer_for
from megascale.errors import DataError

_PIECE = 1 << 18  # bytes; larger where there would be more than _PIECES
_PIECES = 100_000
_WHOLE = 1 << 29  # bytes of a file that must be tokenised as one piece, and the most tokens of a piece
_BATCH = 1 << 20  # characters handed to the tokenizer at a time
_ENTRY = np.dtype([("tokens", "<i8"), ("crc", "<u4")])
_SAVE_EVERY = 64  # pieces counted anew


class TextIndex:
    """Token counts and checksums of pieces, -1 where not yet counted; `path` is where they are kept."""

    def __init__(self, pieces: int, path: Path | None) -> None:
        self._path = path
        self.entries = np.zeros(pieces, _ENTRY)
        self.entries["tokens"] = -1
        self._new = 0
        if path is not None:
            # A file that is damaged costs counting again, nothing else.
            with suppress(OSError, ValueError):
                there = np.load(path)
                if there.dtype == _ENTRY and there.shape == self.entries.shape:
                    self.entries = there
        self.unknown = int((self.entries["tokens"] < 0).sum())

    def note(self, piece: int, tokens: NDArray) -> bool:
        """Remember a piece's tokens; False if they are not what they were."""
        entry, crc = self.entries[piece], zlib.crc32(np.ascontiguousarray(tokens).data)
        if entry["tokens"] >= 0:
            return bool(entry["tokens"] == len(tokens) and entry["crc"] == crc)
        entry["tokens"], entry["crc"] = len(tokens), crc
        self.unknown -= 1
        self._new += 1
        if self._new % _SAVE_EVERY == 0:
            self.save()
        return True

    def save(self) -> None:
        """Write it, with what others have counted meanwhile."""
        if self._path is None or not self._new:
            return
        other = TextIndex(len(self.entries), self._path).entries
        missing = self.entries["tokens"] < 0
        self.entries[missing] = other[missing]
        self.unknown = int((self.entries["tokens"] < 0).sum())
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        with suppress(OSError):  # a full disk costs counting again
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(new, "wb") as file:
                np.save(file, self.entries)
            os.replace(new, self._path)
            self._new = 0


class _Epoch:
    """The order of pieces in an epoch, and where the tokens of the first few of them begin."""

    def __init__(self, order: NDArray[np.int64]) -> None:
        self.order = order
        self.starts = [0]


class TextStream:
    """Windows of text files by epoch and number.

    Args:
        inputs: files and folders.
        config: sequence length, tokenizer, seed and the keys of [data] that concern text.
        number: of this stream among the entries of data.train; its order depends on it.
        index: folder of indexes; None keeps what is counted in memory.
        meter: told of all reading.

    Attributes:
        prefix: the inputs, for messages.

    Raises DataError for inputs that cannot be used.
    """

    def __init__(self, inputs: Sequence[Path], config: Config, number: int, index: Path | None, meter: Meter) -> None:
        self.prefix = ", ".join(map(str, inputs))
        for path in inputs:
            if (path / manifest.NAME).exists():
                raise DataError(f"data.train: {path} is a built data set; name its token file, {path}/train")
        files = find_files(inputs)
        self._bytes = sum(file.size for file in files)
        size = max(_PIECE, self._bytes // _PIECES)
        self._pieces = cut_pieces(files, size)
        for piece in self._pieces:
            if piece.size > _WHOLE and (piece.kind == "json" or compression_of(piece.paths[0])):
                raise DataError(
                    f"data.train: {piece.paths[0]} has {piece.size:,} bytes, compressed or in a list of JSON records, "
                    f"which can only be tokenised as a whole, and {_WHOLE:,} is the limit; cut it into smaller files, "
                    "or tokenise it beforehand with `megascale data build`"
                )
        self._words: Tokenizer = tokenizer_for(config.data)
        self._dtype = token_dtype(self._words.vocab_size)
        self._length, self._key = config.model.sequence_length, config.data.text_key
        self._group = max(1, config.data.shuffle_tokens // self._length)  # windows
        self._seed = derive_key(config.train.seed, number) if config.data.shuffle else None
        self._index = TextIndex(len(self._pieces), index / f"{self._recipe(size)}.npy" if index else None)
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._cache: OrderedDict[int, NDArray] = OrderedDict()
        self._cached = 0
        self._coming: dict[int, Future[tuple[NDArray, Meter]]] = {}
        self._threads = config.data.loader_threads or max(1, usable_cores() // 2)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tokenise")
        self._seen = (-1, -1)
        self._windows: int | None = None
        self.meter = meter

    def _recipe(self, size: int) -> str:
        """Return a hash of all that decides token counts."""
        words = [self._words.sha256, *self._words.begin_of_document]
        digest = hashlib.blake2b(" ".join(map(str, [size, self._key, *words])).encode(), digest_size=12)
        done: set[str] = set()
        for piece in self._pieces:
            for path in piece.paths:
                if path not in done:
                    done.add(path)
                    digest.update(fingerprint(Path(path)).encode())
        return digest.hexdigest()

    # sizes ------------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens counted so far."""
        return int(self._index.entries["tokens"].clip(0).sum())

    @property
    def windows(self) -> int | None:
        """Windows of an epoch; None until all text was counted."""
        if self._index.unknown or self._windows is not None:
            return self._windows
        windows = (self.tokens - 1) // self._length
        if windows < 1:
            raise DataError(
                f"data.train: {self.prefix} has {self.tokens} tokens and one sample needs model.sequence_length + 1 = "
                f"{self._length + 1}; use a shorter sequence or more text"
            )
        self._windows = windows
        return windows

    @property
    def windows_expected(self) -> float:
        """The same, estimated from what was counted."""
        if self.windows is not None:
            return float(self.windows)
        return max(1.0, self._expected_tokens() * len(self._pieces) / self._length)

    def _expected_tokens(self) -> float:
        """Of a piece."""
        counts = self._index.entries["tokens"]
        known = counts[counts >= 0]
        return float(known.mean()) if known.sum() else max(1.0, self._bytes / 4 / len(self._pieces))

    # order ------------------------------------------------------------------------------------------------------

    def places(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epoch and window of samples `numbers` (ascending) of this stream, int64 each."""
        epochs, windows = np.empty_like(numbers), np.empty_like(numbers)
        at = 0
        while at < len(numbers):
            number = int(numbers[at])
            epoch, window = self._epoch_of(number)
            group = window // self._group
            first = number - (window - group * self._group)
            whole = self.windows
            size = self._group if whole is None else min(self._group, whole - group * self._group)
            stop = int(np.searchsorted(numbers, first + size))
            inside = numbers[at:stop] - first
            if self._seed is not None:
                inside = permute(inside, size, derive_key(self._seed, epoch, 1 + group))
            epochs[at:stop], windows[at:stop] = epoch, group * self._group + inside
            at = stop
            self._look_ahead(epoch, group)
        return epochs, windows

    def _epoch_of(self, number: int) -> tuple[int, int]:
        """Epoch and place in it of a sample; counts as far as the end of its group if that is not yet known."""
        if self.windows is None:
            group = number // self._group
            if self._reach(0, (group + 1) * self._group * self._length + 1) and self.windows is None:
                return 0, number
        assert self.windows is not None
        return divmod(number, self.windows)

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            order = np.arange(len(self._pieces))
            if self._seed is not None:
                order = permute(order, len(order), derive_key(self._seed, epoch, 0))
            self._epochs[epoch] = _Epoch(order)
            while len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _reach(self, epoch: int, tokens: int) -> bool:
        """Know where pieces begin up to `tokens` of the epoch's stream; False if it ends before."""
        known = self._epoch(epoch)
        while known.starts[-1] < tokens:
            place = len(known.starts) - 1
            if place == len(known.order):
                return False
            piece = int(known.order[place])
            count = int(self._index.entries["tokens"][piece])
            if count < 0:
                for other in known.order[place : place + 2 * self._threads].tolist():
                    self._submit(other)
                count = len(self._tokens(piece))
            known.starts.append(known.starts[-1] + count)
        return True

    # text -------------------------------------------------------------------------------------------------------

    def window(self, epoch: int, window: int) -> NDArray:
        """Tokens [sequence_length + 1] of a window."""
        start, stop = window * self._length, (window + 1) * self._length + 1
        if not self._reach(epoch, stop):
            raise IndexError(f"window {window} is outside an epoch of {self.windows}")
        known = self._epoch(epoch)
        place = bisect_right(known.starts, start) - 1
        parts = []
        while start < stop:
            tokens = self._tokens(int(known.order[place]))
            offset = start - known.starts[place]
            parts.append(tokens[offset : offset + stop - start])
            start += len(parts[-1])
            place += 1
        return np.concatenate(parts)

    def _look_ahead(self, epoch: int, group: int) -> None:
        """Have the pieces of this group and the next tokenised by the threads."""
        if self._seen == (epoch, group):
            return
        self._seen = (epoch, group)
        known, expected = self._epoch(epoch), self._expected_tokens()
        size = self._group * self._length
        at, stop, last = group * size, (group + 2) * size + 1, epoch + 1
        place = bisect_right(known.starts, at) - 1
        while at < stop:
            if place == len(known.order):
                if epoch == last:
                    return
                epoch, place, at, stop = last, 0, 0, min(size, stop - at)
                known = self._epoch(epoch)
            self._submit(int(known.order[place]))
            place += 1
            at = known.starts[place] if place < len(known.starts) else round(at + expected)

    def _submit(self, piece: int) -> None:
        if piece not in self._cache and piece not in self._coming:
            self._coming[piece] = self._pool.submit(self._encode, self._pieces[piece])

    def _tokens(self, piece: int) -> NDArray:
        """Tokens of a piece: from memory, or as soon as a thread has made them."""
        if piece in self._cache:
            self._cache.move_to_end(piece)
            return self._cache[piece]
        self._submit(piece)
        tokens, meter = self._coming.pop(piece).result()
        self.meter.add(meter)
        if not self._index.note(piece, tokens):
            raise DataError(
                f"data.train: {self._pieces[piece].paths[0]} is not what it was when this run read it before; put the "
                "file back, or begin anew with another --train.name"
            )
        self._cache[piece] = tokens
        self._cached += len(tokens)
        room = 3 * self._group * self._length + 2 * len(tokens)
        while self._cached > room and len(self._cache) > 1:
            _, old = self._cache.popitem(last=False)
            self._cached -= len(old)
        return tokens

    def _encode(self, piece: InputPiece) -> tuple[NDArray, Meter]:
        """Read and tokenise a piece; runs in a thread."""
        meter = Meter()
        made: list[NDArray] = []
        with meter.encoding():
            texts: list[str] = []
            size = count = 0
            for item in read_documents(piece, self._key, meter):
                if item.text:
                    texts.append(item.text)
                    size += len(item.text)
                if size > _BATCH:
                    made.append(self._words.encode_documents(texts)[0])
                    count += len(made[-1])
                    texts, size = [], 0
                if count > _WHOLE:
                    raise DataError(
                        f"data.train: {piece.paths[0]} holds more than {_WHOLE:,} tokens that can only be held as a "
                        "whole; cut it into smaller files, or tokenise it beforehand with `megascale data build`"
                    )
            if texts:
                made.append(self._words.encode_documents(texts)[0])
            tokens = np.concatenate(made) if made else np.empty(0, np.uint32)
        return tokens.astype(self._dtype), meter

    def close(self) -> None:
        """Keep the index, end the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._index.save()
