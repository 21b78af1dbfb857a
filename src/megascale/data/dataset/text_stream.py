"""Text that is tokenised on the fly, with samples by number as token files have.

The files are cut into pieces without reading them (source_files.py). Each epoch has a pseudo-random order of the
pieces. Its stream is the joined tokens of the pieces in this order. The stream is cut into windows, which are shuffled
within groups of data.shuffle_tokens tokens. So sample k is a pure function of the seed, k and the files.

To find sample k, only the token counts of the pieces before it are needed. Pieces are counted when training reaches
them. An index file saves the counts, so that a resumed run tokenises only its current group again. Without the index
file all earlier pieces are counted again, with the same result. The index also has a checksum of each piece's tokens,
which shows that text has changed when it is read again.
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
from megascale.data.dataset.indexed import choose_token_dtype
from megascale.data.dataset.manifest import MANIFEST
from megascale.data.dataset.metered_files import Meter, find_compression
from megascale.data.dataset.sample_order import derive_key, permute
from megascale.data.dataset.source_files import InputPiece, cut_pieces, find_files
from megascale.data.dataset.sources import read_documents
from megascale.data.dataset.token_file import too_short_error
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import load_run_tokenizer
from megascale.errors import DataError

_MIN_PIECE_BYTES = 1 << 18  # larger if there would be more than _MAX_PIECES
_MAX_PIECES = 100_000
_MAX_PIECE_SIZE = 1 << 29  # bytes of a file that must be tokenised as one piece; also the most tokens of a piece
_BATCH_CHARACTERS = 1 << 20  # characters passed to the tokenizer at a time
_COUNT_DTYPE = np.dtype([("tokens", "<i8"), ("crc", "<u4")])
_SAVE_INTERVAL = 64  # newly counted pieces


class TextIndex:
    """Token counts and checksums of pieces.

    Args:
        pieces: number of pieces.
        path: file that keeps the counts; None keeps them in memory only.

    Attributes:
        entries: count and CRC-32 of each piece's tokens, _COUNT_DTYPE [pieces]; count -1 if not counted yet.
        uncounted: number of pieces that are not counted yet.
    """

    def __init__(self, pieces: int, path: Path | None) -> None:
        self._path = path
        self.entries = np.zeros(pieces, _COUNT_DTYPE)
        self.entries["tokens"] = -1
        self._unsaved = 0
        if path is not None:
            # If the file is missing or damaged, the pieces are counted again.
            with suppress(OSError, ValueError):
                saved = np.load(path)
                if saved.dtype == _COUNT_DTYPE and saved.shape == self.entries.shape:
                    self.entries = saved
        self.uncounted = self._count_uncounted()

    def _count_uncounted(self) -> int:
        return int((self.entries["tokens"] < 0).sum())

    def record(self, piece: int, tokens: NDArray) -> bool:
        """Record the count and checksum of a piece's tokens; return False if they differ from those recorded before."""
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
        """Write the index, merged with counts that other processes have saved meanwhile."""
        if self._path is None or not self._unsaved:
            return
        saved = TextIndex(len(self.entries), self._path).entries
        missing = self.entries["tokens"] < 0
        self.entries[missing] = saved[missing]
        self.uncounted = self._count_uncounted()
        temporary = name_temporary(self._path)
        with suppress(OSError):  # on a full disk, the next start counts the pieces again
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(temporary, "wb") as file:
                    np.save(file, self.entries)
                os.replace(temporary, self._path)
                self._unsaved = 0
            finally:
                temporary.unlink(missing_ok=True)


class _EpochOrder:
    """Order of the pieces in an epoch.

    Attributes:
        pieces: indices of the pieces in the order of the epoch, int64 [pieces].
        starts: position in the epoch's stream at which each piece begins, for the pieces counted so far and the next.
    """

    def __init__(self, pieces: NDArray[np.int64]) -> None:
        self.pieces = pieces
        self.starts = [0]


class TextStream:
    """Windows of text files, by epoch and number.

    Args:
        inputs: files and folders.
        data: the section [data].
        seed: seed of the order of pieces and windows; None keeps the order of the files.
        index: folder of index files; None keeps the counts in memory.
        meter: receives the counters of reading and tokenising.

    Attributes:
        prefix: the inputs, as messages name them.

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
        self._input_bytes = sum(file.size for file in files)
        piece_size = max(_MIN_PIECE_BYTES, self._input_bytes // _MAX_PIECES)
        self._pieces = cut_pieces(files, piece_size)
        for piece in self._pieces:
            if piece.size > _MAX_PIECE_SIZE and (piece.kind == "json" or find_compression(piece.paths[0])):
                raise DataError(
                    f"data.train: {piece.paths[0]} has {piece.size:,} bytes, compressed or in a list of JSON records, "
                    f"which can only be tokenised as a whole, and {_MAX_PIECE_SIZE:,} is the limit; split it into "
                    "smaller files, or tokenise it beforehand with `megascale data build`"
                )
        self._tokenizer: Tokenizer = load_run_tokenizer(data)
        self._dtype = choose_token_dtype(self._tokenizer.vocab_size)
        self._sequence_length = sequence_length
        self._text_key = data.text_key
        self._group_windows = max(1, data.shuffle_tokens // sequence_length)  # windows that are shuffled together
        self._seed = seed
        index_file = None if index is None else index / f"{self._hash_inputs(piece_size)}.npy"
        self._index = TextIndex(len(self._pieces), index_file)
        self._orders_by_epoch: OrderedDict[int, _EpochOrder] = OrderedDict()
        self._tokens_by_piece: OrderedDict[int, NDArray] = OrderedDict()
        self._cached_tokens = 0
        self._futures_by_piece: dict[int, Future[tuple[NDArray, Meter]]] = {}
        self._thread_count = data.loader_threads or max(1, usable_cores() // 2)
        self._executor = ThreadPoolExecutor(self._thread_count, thread_name_prefix="tokenise")
        self._prefetched_group = (-1, -1)  # epoch, and number of the group within it
        self._window_count: int | None = None
        self.meter = meter

    def _hash_inputs(self, piece_size: int) -> str:
        """Return a hash of all settings and files that decide the token counts."""
        settings = [piece_size, self._text_key, self._tokenizer.sha256, *self._tokenizer.begin_of_document]
        digest = hashlib.blake2b(" ".join(map(str, settings)).encode(), digest_size=12)
        for path in dict.fromkeys(path for piece in self._pieces for path in piece.paths):
            digest.update(fingerprint_file(Path(path)).encode())
        return digest.hexdigest()

    # sizes ------------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Number of tokens counted so far."""
        return int(self._index.entries["tokens"].clip(0).sum())

    @property
    def windows(self) -> int | None:
        """Number of windows of an epoch; None until all text is counted. Raises DataError for too little text."""
        if self._window_count is None and not self._index.uncounted:
            windows = (self.tokens - 1) // self._sequence_length
            if windows < 1:
                raise too_short_error(self.prefix, self.tokens, self._sequence_length)
            self._window_count = windows
        return self._window_count

    @property
    def expected_windows(self) -> float:
        """Number of windows of an epoch, estimated from the counted pieces until all text is counted."""
        if self.windows is not None:
            return float(self.windows)
        return max(1.0, self._estimate_piece_tokens() * len(self._pieces) / self._sequence_length)

    def _estimate_piece_tokens(self) -> float:
        """Return the mean tokens of a counted piece, or a guess from the bytes of a piece before any is counted."""
        counts = self._index.entries["tokens"]
        counted = counts[counts >= 0]
        if not counted.sum():
            return max(1.0, self._input_bytes / 4 / len(self._pieces))  # about four bytes per token
        return float(counted.mean())

    # order ------------------------------------------------------------------------------------------------------

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return epoch and window of this stream's samples `numbers`, which ascend, as int64 arrays."""
        epochs, windows = np.empty_like(numbers), np.empty_like(numbers)
        start = 0
        while start < len(numbers):  # each pass handles the samples of one group
            number = int(numbers[start])
            epoch, unshuffled_window = self._locate_number(number)
            group, offset = divmod(unshuffled_window, self._group_windows)
            first_sample = number - offset  # of the group
            first_window = unshuffled_window - offset
            group_size = self._group_windows
            if self.windows is not None:  # the last group of an epoch may be smaller
                group_size = min(group_size, self.windows - first_window)
            stop = int(np.searchsorted(numbers, first_sample + group_size))
            offsets = numbers[start:stop] - first_sample
            if self._seed is not None:
                offsets = permute(offsets, group_size, derive_key(self._seed, epoch, 1 + group))
            epochs[start:stop] = epoch
            windows[start:stop] = first_window + offsets
            start = stop
            self._prefetch(epoch, group)
        return epochs, windows

    def _locate_number(self, number: int) -> tuple[int, int]:
        """Return epoch and unshuffled window of a sample, after counting tokens up to the end of its group."""
        if self.windows is None:
            group = number // self._group_windows
            group_end = (group + 1) * self._group_windows * self._sequence_length + 1
            is_in_first_epoch = self._count_tokens_until(0, group_end)
            if is_in_first_epoch and self.windows is None:
                return 0, number
        assert self.windows is not None
        return divmod(number, self.windows)

    def _get_epoch_order(self, epoch: int) -> _EpochOrder:
        if epoch not in self._orders_by_epoch:
            pieces = np.arange(len(self._pieces))
            if self._seed is not None:
                pieces = permute(pieces, len(pieces), derive_key(self._seed, epoch, 0))
            self._orders_by_epoch[epoch] = _EpochOrder(pieces)
            while len(self._orders_by_epoch) > 2:  # prefetching needs the present epoch and the next
                self._orders_by_epoch.popitem(last=False)
        return self._orders_by_epoch[epoch]

    def _count_tokens_until(self, epoch: int, tokens: int) -> bool:
        """Count the first `tokens` tokens of the epoch's stream; return False if the stream is shorter."""
        epoch_order = self._get_epoch_order(epoch)
        while epoch_order.starts[-1] < tokens:
            position = len(epoch_order.starts) - 1
            if position == len(epoch_order.pieces):
                return False
            piece = int(epoch_order.pieces[position])
            count = int(self._index.entries["tokens"][piece])
            if count < 0:
                # Keep all threads busy with the pieces that are counted next.
                for next_piece in epoch_order.pieces[position : position + 2 * self._thread_count].tolist():
                    self._start_encoding(next_piece)
                count = len(self._get_piece_tokens(piece))
            epoch_order.starts.append(epoch_order.starts[-1] + count)
        return True

    # text -------------------------------------------------------------------------------------------------------

    def read_window(self, epoch: int, window: int) -> NDArray:
        """Return the tokens of a window, [sequence_length + 1]. Raises IndexError for a window outside the epoch."""
        start, stop = window * self._sequence_length, (window + 1) * self._sequence_length + 1
        if not self._count_tokens_until(epoch, stop):
            raise IndexError(f"window {window} is outside an epoch of {self.windows}")
        epoch_order = self._get_epoch_order(epoch)
        position = bisect_right(epoch_order.starts, start) - 1
        chunks = []
        while start < stop:
            tokens = self._get_piece_tokens(int(epoch_order.pieces[position]))
            offset = start - epoch_order.starts[position]
            chunks.append(tokens[offset : offset + stop - start])
            start += len(chunks[-1])
            position += 1
        return np.concatenate(chunks)

    def _prefetch(self, epoch: int, group: int) -> None:
        """Start to tokenise the pieces of this group and the next, which may be the first of the next epoch."""
        if self._prefetched_group == (epoch, group):
            return
        self._prefetched_group = (epoch, group)
        epoch_order = self._get_epoch_order(epoch)
        estimated_tokens = self._estimate_piece_tokens()
        group_tokens = self._group_windows * self._sequence_length
        token, stop = group * group_tokens, (group + 2) * group_tokens + 1
        position = bisect_right(epoch_order.starts, token) - 1
        next_epoch = epoch + 1
        while token < stop:  # `token` is where the piece at `position` begins, known or estimated
            if position == len(epoch_order.pieces):
                if epoch == next_epoch:
                    return
                # Continue in the next epoch, with at most its first group.
                epoch = next_epoch
                epoch_order = self._get_epoch_order(epoch)
                stop = min(group_tokens, stop - token)
                position = token = 0
            self._start_encoding(int(epoch_order.pieces[position]))
            position += 1
            if position < len(epoch_order.starts):
                token = epoch_order.starts[position]
            else:
                token = round(token + estimated_tokens)

    def _start_encoding(self, piece: int) -> None:
        if piece not in self._tokens_by_piece and piece not in self._futures_by_piece:
            self._futures_by_piece[piece] = self._executor.submit(self._encode_piece, self._pieces[piece])

    def _get_piece_tokens(self, piece: int) -> NDArray:
        """Return the tokens of a piece, from memory or from the thread that tokenises it.

        Raises DataError if the text has changed since it was counted.
        """
        if piece in self._tokens_by_piece:
            self._tokens_by_piece.move_to_end(piece)
            return self._tokens_by_piece[piece]
        self._start_encoding(piece)
        tokens, meter = self._futures_by_piece.pop(piece).result()
        self.meter.add(meter)
        if not self._index.record(piece, tokens):
            raise DataError(
                f"data.train: {self._pieces[piece].paths[0]} has changed since this run first read it; restore "
                "the file, or start a new run with another --train.name"
            )
        self._tokens_by_piece[piece] = tokens
        self._cached_tokens += len(tokens)
        # Keep the present group and the next, and as much again for pieces that lie only partly in these groups.
        limit = 3 * self._group_windows * self._sequence_length + 2 * len(tokens)
        while self._cached_tokens > limit and len(self._tokens_by_piece) > 1:
            _, evicted = self._tokens_by_piece.popitem(last=False)
            self._cached_tokens -= len(evicted)
        return tokens

    def _encode_piece(self, piece: InputPiece) -> tuple[NDArray, Meter]:
        """Read and tokenise a piece in a thread; return its tokens and the counters of the work."""
        meter = Meter()
        encoded: list[NDArray] = []
        with meter.encoding():
            texts: list[str] = []
            characters = token_count = 0
            for record in read_documents(piece, self._text_key, meter):
                if record.text:
                    texts.append(record.text)
                    characters += len(record.text)
                if characters > _BATCH_CHARACTERS:
                    encoded.append(self._tokenizer.encode_documents(texts)[0])
                    token_count += len(encoded[-1])
                    texts = []
                    characters = 0
                if token_count > _MAX_PIECE_SIZE:
                    raise DataError(
                        f"data.train: {piece.paths[0]} holds more than {_MAX_PIECE_SIZE:,} tokens that must be in "
                        "memory together; split it into smaller files, or tokenise it beforehand with `megascale data "
                        "build`"
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
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._index.save()
