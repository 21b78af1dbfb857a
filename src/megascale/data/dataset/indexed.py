"""Reader and writer of Megatron-LM's `.bin/.idx` pair of token files, byte for byte.

`PREFIX.bin` holds all tokens one after the other. `PREFIX.idx` is little-endian and has these fields:

1. magic `MMIDIDX\\0\\0`, version 1 (u64), type code (u8), number of sequences (u64), number of document indices (u64);
2. length of each sequence in tokens (i32);
3. byte offset of each sequence in the .bin (i64);
4. document indices (i64): document i holds the sequences `indices[i]:indices[i + 1]`;
5. for multimodal data only, one mode per sequence (i8).

The format comes from megatron/core/datasets/indexed_dataset.py.

Opening takes constant time: it compares sizes and both ends of the tables, which suffices to read the stream of
tokens. Each access to a sequence is checked against the file; `verify` checks the complete index.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megascale.core.atomic_files import name_temporary
from megascale.core.batch import SampleFields
from megascale.data.dataset.packing import sort_distinct
from megascale.data.dataset.token_file import TokenFile
from megascale.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
_HEADER = struct.Struct("<9sQBQQ")
_COPIED_TOKENS = 1 << 23  # tokens copied at a time
_REMEDY = "build the data set again with `megascale data build`, or copy both files again"


def choose_token_dtype(vocab_size: int) -> np.dtype:
    """Return Megatron-LM's type for ids of a vocabulary: uint16 below 65,500 entries, else int32."""
    if vocab_size < 65500:
        return np.dtype("<u2")
    return np.dtype("<i4")


def pair_paths(prefix: str | Path) -> tuple[Path, Path]:
    """Return the paths of the `.bin` and the `.idx` file of a prefix, which may itself have one of the suffixes."""
    text = os.fspath(prefix)
    if text.lower().endswith((".bin", ".idx")):
        text = text[: -len(".bin")]
    return Path(text + ".bin"), Path(text + ".idx")


def get_weights_path(prefix: str | Path) -> Path:
    """Return the path of a prefix's loss weights, one byte per token. The file exists for conversations only."""
    return pair_paths(prefix)[0].with_suffix(".weights")


class IndexedDataset(TokenFile):
    """A read-only, memory-mapped token file.

    Attributes:
        prefix: path without suffix.
        dtype: type of a stored token.
        lengths: int32 [sequences], tokens in each sequence.
        document_indices: int64 [documents + 1], first sequence of each document, then the number of sequences.
        modes: int8 [sequences] or None.
        tokens: number of tokens in all.
        documents: number of documents.

    Raises DataError if a file is missing, truncated or of another kind, or if the two files contradict each other.
    Pickling keeps the prefix only.
    """

    def __init__(self, prefix: str | Path) -> None:
        self._bin_path, self._idx_path = pair_paths(prefix)
        self.prefix = str(self._bin_path)[: -len(".bin")]
        index = _map_bytes(self._idx_path)
        self._parse(index)
        self._check_table_ends()
        self._weights = self._open_weights()

    def _parse(self, index: NDArray[np.uint8]) -> None:
        """Split the index into its arrays. Every size is checked against the file before an array is made."""
        path = self._idx_path
        size = len(index)
        if size < _HEADER.size:
            raise DataError(
                f"{path} has {size} bytes and an index has at least {_HEADER.size}: it is cut off; {_REMEDY}"
            )
        magic, version, code, sequence_count, index_count = _HEADER.unpack(index[: _HEADER.size].tobytes())
        if magic != MAGIC:
            raise DataError(
                f"{path} begins with {magic!r} where a Megatron-LM index has {MAGIC!r}: it is another kind of file; "
                "give the path of a .bin/.idx pair without the suffix"
            )
        if version != VERSION:
            raise DataError(f"{path} has index version {version} and only version {VERSION} is known; {_REMEDY}")
        if code not in DTYPES or DTYPES[code].kind not in "iu":
            supported = ", ".join(f"{number} ({dtype.name})" for number, dtype in DTYPES.items() if dtype.kind in "iu")
            raise DataError(f"{path} has token type code {code}; integer types are {supported}; {_REMEDY}")
        # Bytes without modes: i32 and i64 per sequence, i64 per document index.
        expected = _HEADER.size + 12 * sequence_count + 8 * index_count
        if size not in (expected, expected + sequence_count):
            raise DataError(
                f"{path} declares {sequence_count} sequences and {index_count} document indices, which take {expected} "
                f"bytes (or {expected + sequence_count} with modes), and the file has {size}: it is cut off or "
                f"damaged; {_REMEDY}"
            )
        self.dtype = DTYPES[code]
        stops = np.cumsum([_HEADER.size, 4 * sequence_count, 8 * sequence_count, 8 * index_count])
        lengths, pointers, document_indices, modes = np.split(index, stops)[1:]
        self.lengths = lengths.view("<i4")
        self._pointers = pointers.view("<i8")
        self.document_indices = document_indices.view("<i8")
        self.modes = modes.view("i1") if len(modes) else None

    def _check_table_ends(self) -> None:
        """Check in constant time that both ends of every table agree with each other and with the .bin."""
        path, document_indices = self._idx_path, self.document_indices
        token_bytes = self.dtype.itemsize
        if not len(document_indices) or document_indices[0] != 0 or document_indices[-1] != len(self.lengths):
            if len(document_indices):
                ends = f"document indices from {document_indices[0]} to {document_indices[-1]}"
            else:
                ends = "no document indices"
            raise DataError(
                f"{path} has {ends} where 0 to {len(self.lengths)} (its number of sequences) "
                f"is expected: it is damaged; {_REMEDY}"
            )
        size = 0
        if len(self.lengths):
            size = int(self._pointers[-1]) + int(self.lengths[-1]) * token_bytes
        data = _map_bytes(self._bin_path)
        if len(data) != size:
            raise DataError(
                f"{self._bin_path} has {len(data)} bytes and its index describes {size / token_bytes:,.10g} tokens of "
                f"{token_bytes} bytes = {size} bytes: one of the two is cut off or belongs to another data set; "
                f"{_REMEDY}"
            )
        if size % token_bytes:
            raise DataError(
                f"{self._bin_path} has {size} bytes, not a multiple of {token_bytes}, the bytes of a token; {_REMEDY}"
            )
        self._data = data.view(self.dtype)
        self.tokens = len(self._data)

    def _open_weights(self) -> NDArray[np.uint8] | None:
        path = get_weights_path(self.prefix)
        if not path.exists():
            return None
        weights = _map_bytes(path)
        if len(weights) != self.tokens:
            raise DataError(
                f"{path} has {len(weights)} loss weights for {self.tokens} tokens: it is cut off or belongs to another "
                f"data set; {_REMEDY}"
            )
        return weights

    @classmethod
    def fields(cls, entry: str | Path) -> SampleFields:
        """Return the optional fields of an entry's samples: loss weights if the entry has a .weights file."""
        return SampleFields(loss_weights=get_weights_path(entry).exists())

    @property
    def loss_weights(self) -> NDArray[np.uint8] | None:
        """Weight of each token's loss, 0 or 1; None for plain text."""
        return self._weights

    def verify(self) -> None:
        """Read and check the complete index. Raises DataError naming the first wrong value."""
        path, indices = self._idx_path, self.document_indices
        if indices.min() < 0 or indices.max() > len(self.lengths) or (indices[1:] < indices[:-1]).any():
            raise DataError(f"{path} has document indices that are not ascending: it is damaged; {_REMEDY}")
        if len(self.lengths) and self.lengths.min() < 0:
            raise DataError(f"{path} has a sequence of {self.lengths.min()} tokens: it is damaged; {_REMEDY}")
        expected_pointers = np.zeros(len(self.lengths), dtype=np.int64)
        np.cumsum(self.lengths[:-1], dtype=np.int64, out=expected_pointers[1:])
        expected_pointers *= self.dtype.itemsize
        wrong = np.flatnonzero(expected_pointers != self._pointers)
        if len(wrong):
            first = int(wrong[0])
            raise DataError(
                f"{path} puts sequence {first} at byte {self._pointers[first]} of the .bin where the lengths before it "
                f"give {expected_pointers[first]}: it is damaged; {_REMEDY}"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    def read_sequence(self, i: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Return a view of tokens `offset : offset + length` of sequence i; without `length`, of tokens `offset:`.

        Raises IndexError outside the sequence, DataError if the index puts the sequence outside the file.
        """
        if not 0 <= i < len(self.lengths):
            raise IndexError(f"sequence {i} is outside 0..{len(self.lengths) - 1}")
        size = int(self.lengths[i])
        start = self.find_start(i)
        if not 0 <= size <= self.tokens - start:
            raise self._outside_error(i)
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"tokens {offset}..{offset + length} are outside sequence {i} of {size} tokens")
        return self._data[start + offset : start + offset + length]

    def read_document(self, i: int) -> NDArray:
        """Return a view of all tokens of document i.

        Raises IndexError if there is no such document, DataError if the index is damaged.
        """
        if not 0 <= i < self.documents:
            raise IndexError(f"document {i} is outside 0..{self.documents - 1}")
        first, stop = int(self.document_indices[i]), int(self.document_indices[i + 1])
        if not 0 <= first <= stop <= len(self.lengths):
            raise DataError(
                f"{self._idx_path} gives document {i} the sequences {first}..{stop}: it is damaged; {_REMEDY}"
            )
        start, end = self.find_start(first), self.find_start(stop)
        if end < start:
            raise self._outside_error(first)
        return self._data[start:end]

    def find_start(self, i: int) -> int:
        """Return the position in the stream of sequence i's first token; for i = len(self), the number of tokens."""
        if i == len(self.lengths):
            return self.tokens
        start, remainder = divmod(int(self._pointers[i]), self.dtype.itemsize)
        if remainder or not 0 <= start <= self.tokens:
            raise self._outside_error(i)
        return start

    def _outside_error(self, i: int) -> DataError:
        return DataError(
            f"{self._idx_path} puts sequence {i} of {self.lengths[i]} tokens at byte {self._pointers[i]} of a .bin of "
            f"{self.tokens * self.dtype.itemsize} bytes: it is damaged; {_REMEDY}"
        )

    def read_document_starts(self) -> NDArray[np.int64]:
        """Return the first token of each document that is not empty, int64. Raises DataError for a damaged index."""
        self.verify()
        sequence_starts = np.append(self._pointers // self.dtype.itemsize, self.tokens)
        starts = sort_distinct(sequence_starts[self.document_indices[:-1]])
        return starts[starts < self.tokens]

    @property
    def stream(self) -> NDArray:
        """All tokens, a memory-mapped view."""
        return self._data

    @classmethod
    def files(cls, entry: str | Path) -> list[Path]:
        """Return the paths of an entry: .bin, .idx, and .weights if that file exists."""
        paths = list(pair_paths(entry))
        weights = get_weights_path(entry)
        if weights.exists():
            paths.append(weights)
        return paths


class IndexedWriter:
    """Writes a `.bin/.idx` pair document by document, with 4 bytes of memory per sequence.

    Use as a context manager: the pair appears under its name when the context ends. An exception inside removes the
    temporary files and leaves an older pair untouched.

    Attributes:
        tokens: tokens written so far.
        digest: SHA-256 of the tokens as they are stored, if the writer was made with `hashed`; else None.

    Raises DataError for tokens that do not fit `dtype`.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, *, hashed: bool = False) -> None:
        self.digest = hashlib.sha256() if hashed else None
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _DTYPE_CODES or self.dtype.kind not in "iu":
            raise DataError(f"{prefix}: tokens of type {np.dtype(dtype).name} cannot be stored; use uint16 or int32")
        self._bin_path, self._idx_path = pair_paths(prefix)
        self._bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary_bin, self._temporary_idx = map(name_temporary, pair_paths(prefix))
        self._bin = open(self._temporary_bin, "wb")  # noqa: SIM115 - closed in close() or abort()
        self._limits = np.iinfo(self.dtype)
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._modes = array("b")
        self.tokens = 0

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self._document_indices) - 1

    def add(self, tokens: Iterable[int] | NDArray, mode: int | None = None) -> None:
        """Append a document of one sequence."""
        self.add_document([tokens], None if mode is None else [mode])

    def add_document(self, sequences: Iterable[Iterable[int] | NDArray], modes: Iterable[int] | None = None) -> None:
        """Append a document of several sequences, with one mode per sequence for multimodal data."""
        first_sequence = len(self._lengths)
        for sequence in sequences:
            tokens = _make_array(sequence)
            self._write(tokens)
            self._add_lengths(np.array([tokens.size]))
        self._document_indices.append(len(self._lengths))
        if modes is not None:
            self._modes.extend(modes)
        if modes is not None and len(self._modes) != len(self._lengths):
            raise DataError(
                f"{self._bin_path}: {len(self._lengths) - first_sequence} sequences with another number of modes; give "
                "one mode per sequence, and give modes either for all documents or for none"
            )

    def add_documents(self, tokens: NDArray, lengths: Iterable[int]) -> None:
        """Append many documents of one sequence each. One array holds all tokens, which is faster than `add`."""
        sizes = _make_array(lengths).astype(np.int64)
        if sizes.sum() != tokens.size or (sizes < 0).any():
            raise ValueError(f"lengths add up to {sizes.sum()}, not to the {tokens.size} tokens given")
        first_index = len(self._lengths) + 1
        self._write(tokens)
        self._add_lengths(sizes)
        self._document_indices.frombytes(np.arange(first_index, first_index + sizes.size, dtype=np.int64).tobytes())

    def append(self, file: IndexedDataset) -> None:
        """Append all documents of a token file. Raises DataError if its tokens have another type."""
        if file.dtype != self.dtype:
            raise DataError(
                f"{file.prefix} holds tokens of type {file.dtype.name}, and {self._bin_path} of type "
                f"{self.dtype.name}; use one type for both"
            )
        first_sequence = len(self._lengths)
        for start in range(0, file.tokens, _COPIED_TOKENS):
            self._write_bytes(file.stream[start : start + _COPIED_TOKENS].data)
        self.tokens += file.tokens
        self._add_lengths(file.lengths)
        self._document_indices.frombytes((file.document_indices[1:] + first_sequence).astype(np.int64).tobytes())
        if file.modes is not None:
            self._modes.frombytes(file.modes.tobytes())

    def _add_lengths(self, lengths: NDArray) -> None:
        """Append lengths of sequences. Raises DataError for a length of more than the 32 bits of the format."""
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(f"{self._bin_path}: a document of {lengths.max()} tokens is longer than the format allows")
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())

    def _write(self, tokens: NDArray) -> None:
        if tokens.size and (tokens.min() < self._limits.min or tokens.max() > self._limits.max):
            raise DataError(
                f"{self._bin_path}: token ids {tokens.min()}..{tokens.max()} do not fit {self.dtype.name} "
                f"({self._limits.min}..{self._limits.max}); store a wider type"
            )
        self._write_bytes(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self.tokens += tokens.size

    def _write_bytes(self, data: memoryview) -> None:
        self._bin.write(data)
        if self.digest is not None:
            self.digest.update(data)

    def close(self) -> None:
        """Write the index, and give both files their names."""
        _sync_and_close(self._bin)
        lengths = np.array(self._lengths, dtype=np.intc)
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        with open(self._temporary_idx, "wb") as idx:
            idx.write(_HEADER.pack(MAGIC, VERSION, _DTYPE_CODES[self.dtype], len(lengths), len(self._document_indices)))
            idx.write(lengths.astype("<i4").tobytes())
            idx.write(pointers.tobytes())
            idx.write(np.frombuffer(self._document_indices, dtype=np.int64).astype("<i8").tobytes())
            idx.write(self._modes.tobytes())
            _sync_and_close(idx)
        # Remove the old index first and rename the new one last: after a crash in between, no pair looks complete.
        self._idx_path.unlink(missing_ok=True)
        os.replace(self._temporary_bin, self._bin_path)
        os.replace(self._temporary_idx, self._idx_path)

    def abort(self) -> None:
        """Remove the temporary files."""
        self._bin.close()
        self._temporary_bin.unlink(missing_ok=True)
        self._temporary_idx.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error_type is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise


def _make_array(values: Iterable[int] | NDArray) -> NDArray:
    if isinstance(values, np.ndarray):
        return values
    return np.array(list(values))


def _sync_and_close(file: BinaryIO) -> None:
    """Write a file to the disk and close it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _map_bytes(path: Path) -> NDArray[np.uint8]:
    """Return the bytes of a file, memory-mapped. Raises DataError if the file cannot be read."""
    try:
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return np.zeros(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise DataError(
                f"token file {path} does not exist, because its folder {path.parent} does not exist; check the path, "
                "or make a data set with `megascale data build`"
            ) from None
        partner = path.with_suffix(".idx" if path.suffix == ".bin" else ".bin")
        if partner.exists():
            state = f"{partner.name} exists without it"
        else:
            state = "neither file of the pair exists"
        raise DataError(
            f"token file {path} does not exist ({state}); give the path of a .bin/.idx pair without the suffix, or "
            "make one with `megascale data build`"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"token file {path} cannot be read: {error}; check the path and its permissions") from None
