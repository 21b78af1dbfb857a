"""Text tokenised on the fly, with samples by number as exact as those of token files.

The files are cut into pieces (byte ranges of jsonl, row groups of parquet, runs of text files, a compressed file as
one piece), known without reading them. In each epoch the pieces come in a pseudo-random order. Their joined tokens are
the epoch's stream, cut into windows that are shuffled within groups of data.shuffle_tokens. So sample k is a pure
function of (seed, k) and the files: locating it needs only the token counts of the pieces before it. Pieces are
counted as training goes on, and the counts are saved in an index, so that a resumed run reads only its own group
again. Without the index the pieces are counted again, with the same result.

The index also has a checksum of each piece's tokens: text that changed during a run is noticed when it is read again.
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

from megascale.config import DataConfig
from megascale.core.atomic_files import name_temporary
from megascale.core.capacity import usable_cores
from megascale.data.dataset.file_hash import fingerprint_file
from megascale.data.dataset.indexed import token_dtype
from megascale.data.dataset.manifest import MANIFEST
from megascale.data.dataset.metered_files import Meter, compression_of
from megascale.data.dataset.sample_order import derive_key, permute
from megascale.data.dataset.sources import InputPiece, cut_pieces, find_files, read_documents
from megascale.data.dataset.token_file import too_short_error
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import load_run_tokenizer
from megascale.errors import DataError

_PIECE = 1 << 18  # bytes; larger where there would be more than _PIECES
_PIECES = 100_000
_MAX_PIECE = 1 << 29  # bytes of a file that must be tokenised as one piece, and the most tokens of a piece
_BATCH = 1 << 20  # characters passed to the tokenizer at a time
_ENTRY = np.dtype([("tokens", "<i8"), ("crc", "<u4")])
_SAVE_INTERVAL = 64  # newly counted pieces


class TextIndex:
    """Token counts and checksums of pieces, saved at `path`; the count is -1 for a piece that was not counted."""

    def __init__(self, pieces: int, path: Path | None) -> None:
        self._path = path
        self.entries = np.zeros(pieces, _ENTRY)
        self.entries["tokens"] = -1
        self._unsaved = 0
        if path is not None:
            # A damaged file only means that the pieces are counted again.
            with suppress(OSError, ValueError):
                saved = np.load(path)
                if saved.dtype == _ENTRY and saved.shape == self.entries.shape:
                    self.entries = saved
        self.uncounted = self._count_missing()

    def _count_missing(self) -> int:
        return int((self.entries["tokens"] < 0).sum())

    def note(self, piece: int, tokens: NDArray) -> bool:
        """Record a piece's tokens; return False if they differ from the recorded ones."""
        entry = self.entries[piece]
        crc = zlib.crc32(np.ascontiguousarray(tokens).data)
        if entry["tokens"] >= 0:
            return bool(entry["tokens"] == len(tokens) and entry["crc"] == crc)
        entry["tokens"] = len(tokens)
        entry["crc"] = crc
        self.uncounted -= 1
        self._unsaved += 1
        if self._unsaved % _SAVE_INTERVAL == 0:
            self.save()
        return True

    def save(self) -> None:
        """Write the index, merged with the pieces that other processes have counted meanwhile."""
        if self._path is None or not self._unsaved:
            return
        saved = TextIndex(len(self.entries), self._path).entries
        missing = self.entries["tokens"] < 0
        self.entries[missing] = saved[missing]
        self.uncounted = self._count_missing()
        temporary = name_temporary(self._path)
        with suppress(OSError):  # a full disk only means that the pieces are counted again
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(temporary, "wb") as file:
                    np.save(file, self.entries)
                os.replace(temporary, self._path)
                self._unsaved = 0
            finally:
                temporary.unlink(missing_ok=True)


class _Epoch:
    """The order of pieces in an epoch, and the positions at which the tokens of its first pieces begin."""

    def __init__(self, order: NDArray[np.int64]) -> None:
        self.order = order
        self.starts = [0]


class TextStream:
    """Windows of text files by epoch and number.

    Args:
        inputs: files and folders.
        data: the section; the keys that concern text are used.
        seed: of the order of pieces and windows; None keeps the order of the files.
        index: folder of indexes; None keeps the counts in memory.
        meter: counts all reading.

    Attributes:
        prefix: the inputs, for messages.

    Raises DataError for unusable inputs.
    """

    def __init__(
        self,
        inputs: Sequence[Path],
        data: DataConfig,
        sequence_length: int,
        *,
        seed: int | None,
        index: Path | None,
        meter: Meter,
    ) -> None:
        self.prefix = ", ".join(map(str, inputs))
        for path in inputs:
            if (path / MANIFEST).exists():
                raise DataError(f"data.train: {path} is a built data set; name its token file, {path}/train")
        files = find_files(inputs)
        self._bytes = sum(file.size for file in files)
        piece_size = max(_PIECE, self._bytes // _PIECES)
        self._pieces = cut_pieces(files, piece_size)
        for piece in self._pieces:
            if piece.size > _MAX_PIECE and (piece.kind == "json" or compression_of(piece.paths[0])):
                raise DataError(
                    f"data.train: {piece.paths[0]} has {piece.size:,} bytes, compressed or in a list of JSON records, "
                    f"which can only be tokenised as a whole, and {_MAX_PIECE:,} is the limit; cut it into smaller "
                    "files, or tokenise it beforehand with `megascale data build`"
                )
        self._tokenizer: Tokenizer = load_run_tokenizer(data)
        self._dtype = token_dtype(self._tokenizer.vocab_size)
        self._length = sequence_length
        self._key = data.text_key
        self._group = max(1, data.shuffle_tokens // sequence_length)  # windows
        self._seed = seed
        self._index = TextIndex(len(self._pieces), index and index / f"{self._recipe(piece_size)}.npy")
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._cache: OrderedDict[int, NDArray] = OrderedDict()
        self._cached_tokens = 0
        self._pending: dict[int, Future[tuple[NDArray, Meter]]] = {}
        self._threads = data.loader_threads or max(1, usable_cores() // 2)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tokenise")
        self._prefetched = (-1, -1)  # epoch and group
        self._windows: int | None = None
        self.meter = meter

    def _recipe(self, piece_size: int) -> str:
        """Return a hash of everything that decides token counts."""
        settings = [piece_size, self._key, self._tokenizer.sha256, *self._tokenizer.begin_of_document]
        digest = hashlib.blake2b(" ".join(map(str, settings)).encode(), digest_size=12)
        for path in dict.fromkeys(path for piece in self._pieces for path in piece.paths):
            digest.update(fingerprint_file(Path(path)).encode())
        return digest.hexdigest()

    # sizes ------------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens counted so far."""
        return int(self._index.entries["tokens"].clip(0).sum())

    @property
    def windows(self) -> int | None:
        """Windows of an epoch; None until all text was counted."""
        if self._windows is None and not self._index.uncounted:
            windows = (self.tokens - 1) // self._length
            if windows < 1:
                raise too_short_error(self.prefix, self.tokens, self._length)
            self._windows = windows
        return self._windows

    @property
    def windows_expected(self) -> float:
        """Windows of an epoch, estimated from the counted pieces."""
        if self.windows is not None:
            return float(self.windows)
        return max(1.0, self._expected_tokens() * len(self._pieces) / self._length)

    def _expected_tokens(self) -> float:
        """Return the expected tokens of a piece."""
        counts = self._index.entries["tokens"]
        counted = counts[counts >= 0]
        if not counted.sum():
            return max(1.0, self._bytes / 4 / len(self._pieces))  # about four bytes per token
        return float(counted.mean())

    # order ------------------------------------------------------------------------------------------------------

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return epoch and window of samples `numbers` (ascending) of this stream, int64 each."""
        epochs, windows = np.empty_like(numbers), np.empty_like(numbers)
        i = 0
        while i < len(numbers):
            number = int(numbers[i])
            epoch, window = self._locate_number(number)
            group = window // self._group
            first = number - (window - group * self._group)
            total = self.windows
            if total is None:
                size = self._group
            else:
                size = min(self._group, total - group * self._group)
            stop = int(np.searchsorted(numbers, first + size))
            offsets = numbers[i:stop] - first
            if self._seed is not None:
                offsets = permute(offsets, size, derive_key(self._seed, epoch, 1 + group))
            epochs[i:stop] = epoch
            windows[i:stop] = group * self._group + offsets
            i = stop
            self._prefetch(epoch, group)
        return epochs, windows

    def _locate_number(self, number: int) -> tuple[int, int]:
        """Return epoch and unshuffled window of a sample; counts up to the end of its group if necessary."""
        if self.windows is None:
            group = number // self._group
            if self._extend(0, (group + 1) * self._group * self._length + 1) and self.windows is None:
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

    def _extend(self, epoch: int, tokens: int) -> bool:
        """Count pieces up to `tokens` of the epoch's stream; return False if the stream is shorter."""
        pieces = self._epoch(epoch)
        while pieces.starts[-1] < tokens:
            position = len(pieces.starts) - 1
            if position == len(pieces.order):
                return False
            piece = int(pieces.order[position])
            count = int(self._index.entries["tokens"][piece])
            if count < 0:
                for following in pieces.order[position : position + 2 * self._threads].tolist():
                    self._submit(following)
                count = len(self._tokens(piece))
            pieces.starts.append(pieces.starts[-1] + count)
        return True

    # text -------------------------------------------------------------------------------------------------------

    def window(self, epoch: int, window: int) -> NDArray:
        """Return the tokens of a window, [sequence_length + 1]."""
        start, stop = window * self._length, (window + 1) * self._length + 1
        if not self._extend(epoch, stop):
            raise IndexError(f"window {window} is outside an epoch of {self.windows}")
        pieces = self._epoch(epoch)
        position = bisect_right(pieces.starts, start) - 1
        parts = []
        while start < stop:
            tokens = self._tokens(int(pieces.order[position]))
            offset = start - pieces.starts[position]
            parts.append(tokens[offset : offset + stop - start])
            start += len(parts[-1])
            position += 1
        return np.concatenate(parts)

    def _prefetch(self, epoch: int, group: int) -> None:
        """Let the threads tokenise the pieces of this group and the next."""
        if self._prefetched == (epoch, group):
            return
        self._prefetched = (epoch, group)
        pieces = self._epoch(epoch)
        expected = self._expected_tokens()
        size = self._group * self._length
        token, stop = group * size, (group + 2) * size + 1
        position = bisect_right(pieces.starts, token) - 1
        last_epoch = epoch + 1
        while token < stop:
            if position == len(pieces.order):
                if epoch == last_epoch:
                    return
                epoch = last_epoch
                pieces = self._epoch(epoch)
                stop = min(size, stop - token)
                position = token = 0
            self._submit(int(pieces.order[position]))
            position += 1
            if position < len(pieces.starts):
                token = pieces.starts[position]
            else:
                token = round(token + expected)

    def _submit(self, piece: int) -> None:
        if piece not in self._cache and piece not in self._pending:
            self._pending[piece] = self._pool.submit(self._encode, self._pieces[piece])

    def _tokens(self, piece: int) -> NDArray:
        """Return the tokens of a piece, from memory or from the thread that tokenises it."""
        if piece in self._cache:
            self._cache.move_to_end(piece)
            return self._cache[piece]
        self._submit(piece)
        tokens, meter = self._pending.pop(piece).result()
        self.meter.add(meter)
        if not self._index.note(piece, tokens):
            raise DataError(
                f"data.train: {self._pieces[piece].paths[0]} has changed since this run read it before; put the "
                "file back, or begin anew with another --train.name"
            )
        self._cache[piece] = tokens
        self._cached_tokens += len(tokens)
        limit = 3 * self._group * self._length + 2 * len(tokens)
        while self._cached_tokens > limit and len(self._cache) > 1:
            _, evicted = self._cache.popitem(last=False)
            self._cached_tokens -= len(evicted)
        return tokens

    def _encode(self, piece: InputPiece) -> tuple[NDArray, Meter]:
        """Read and tokenise a piece; runs in a thread."""
        meter = Meter()
        encoded: list[NDArray] = []
        with meter.encoding():
            texts: list[str] = []
            characters = count = 0
            for record in read_documents(piece, self._key, meter):
                if record.text:
                    texts.append(record.text)
                    characters += len(record.text)
                if characters > _BATCH:
                    encoded.append(self._tokenizer.encode_documents(texts)[0])
                    count += len(encoded[-1])
                    texts = []
                    characters = 0
                if count > _MAX_PIECE:
                    raise DataError(
                        f"data.train: {piece.paths[0]} holds more than {_MAX_PIECE:,} tokens that must be in memory "
                        "together; cut it into smaller files, or tokenise it beforehand with `megascale data build`"
                    )
            if texts:
                encoded.append(self._tokenizer.encode_documents(texts)[0])
            if encoded:
                tokens = np.concatenate(encoded)
            else:
                tokens = np.empty(0, np.uint32)
        return tokens.astype(self._dtype), meter

    def close(self) -> None:
        """Save the index and end the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._index.save()
