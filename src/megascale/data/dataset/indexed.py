"""Tokens on disk in Megatron-LM's `.bin/.idx` pair, byte for byte: reader and writer.

`PREFIX.bin` holds all tokens one after the other. `PREFIX.idx`, little-endian: magic `MMIDIDX\\0\\0`, version (u64) 1,
type code (u8), number of sequences (u64), number of document indices (u64), then sequence lengths in tokens (i32),
byte offsets into the .bin (i64), document indices (i64: document d is the sequences `d[i]:d[i+1]`) and, for
multimodal data only, one mode a sequence (i8). Format: megatron/core/datasets/indexed_dataset.py.

Opening takes constant time: it compares sizes and both ends of the tables, which is all that reading the stream of
tokens needs. Each access to a sequence is checked against the file; `verify` checks the whole index.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import DTypeLike, NDArray

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
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_HEADER = struct.Struct("<9sQBQQ")
_COPY = 1 << 23  # tokens copied at a time
_REMEDY = "build it again with `megascale data build`, or copy both files again"


def token_dtype(vocab_size: int) -> np.dtype:
    """The type Megatron-LM would store ids of a vocabulary in: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def paths(prefix: str | Path) -> tuple[Path, Path]:
    """Return the `.bin` and `.idx` of a prefix; a prefix that ends in either, in either case, is understood too."""
    text = os.fspath(prefix)
    if text.lower().endswith((".bin", ".idx")):
        text = text[: -len(".bin")]
    return Path(text + ".bin"), Path(text + ".idx")


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

    Raises DataError if a file is missing, truncated, foreign or contradicts the other. Pickles as its prefix.
    """

    def __init__(self, prefix: str | Path) -> None:
        self._bin_path, self._idx_path = paths(prefix)
        self.prefix = str(self._bin_path)[: -len(".bin")]
        index = _map(self._idx_path)
        self._parse(index)
        self._check_ends()

    def _parse(self, index: NDArray[np.uint8]) -> None:
        """Cut the index into its arrays; every size is compared with the file before an array is made."""
        path, size = self._idx_path, len(index)
        if size < _HEADER.size:
            raise DataError(
                f"{path} has {size} bytes and an index has at least {_HEADER.size}: it is cut off; {_REMEDY}"
            )
        magic, version, code, sequences, entries = _HEADER.unpack(index[: _HEADER.size].tobytes())
        if magic != MAGIC:
            raise DataError(
                f"{path} begins with {magic!r} where a Megatron-LM index has {MAGIC!r}: it is some other kind of file; "
                "give the path of a .bin/.idx pair without the suffix"
            )
        if version != VERSION:
            raise DataError(f"{path} has index version {version} and only version {VERSION} is known; {_REMEDY}")
        if code not in DTYPES or DTYPES[code].kind not in "iu":
            known = ", ".join(f"{c} ({d.name})" for c, d in DTYPES.items() if d.kind in "iu")
            raise DataError(f"{path} has token type code {code}; integer types are {known}; {_REMEDY}")
        need = _HEADER.size + 12 * sequences + 8 * entries
        if size not in (need, need + sequences):
            raise DataError(
                f"{path} declares {sequences} sequences and {entries} document indices, which take {need} bytes (or "
                f"{need + sequences} with modes), and the file has {size}: it is cut off or damaged; {_REMEDY}"
            )
        self.dtype = DTYPES[code]
        at = _HEADER.size
        self.lengths = index[at : at + 4 * sequences].view("<i4")
        at += 4 * sequences
        self._pointers = index[at : at + 8 * sequences].view("<i8")
        at += 8 * sequences
        self.document_indices = index[at : at + 8 * entries].view("<i8")
        at += 8 * entries
        self.modes = index[at:].view("i1") if sequences and size == need + sequences else None

    def _check_ends(self) -> None:
        """Both ends of every table must agree with each other and with the .bin: constant time."""
        path, item, documents = self._idx_path, self.dtype.itemsize, self.document_indices
        if not len(documents) or documents[0] != 0 or documents[-1] != len(self.lengths):
            found = f"{documents[0]} to {documents[-1]}" if len(documents) else "nothing"
            raise DataError(
                f"{path} has document indices from {found} where 0 to {len(self.lengths)} (its number of sequences) "
                f"is expected: it is damaged; {_REMEDY}"
            )
        size = int(self._pointers[-1]) + int(self.lengths[-1]) * item if len(self.lengths) else 0
        data = _map(self._bin_path)
        if len(data) != size:
            raise DataError(
                f"{self._bin_path} has {len(data)} bytes and its index describes {size / item:,.10g} tokens of {item} "
                f"bytes = {size} bytes: one of the two is cut off or belongs to another data set; {_REMEDY}"
            )
        if size % item:
            raise DataError(f"{self._bin_path} has {size} bytes, not a multiple of its tokens' {item}; {_REMEDY}")
        self._data = data.view(self.dtype)
        self.tokens = len(self._data)

    def verify(self) -> None:
        """Check every entry of the index; reads all of it. DataError naming the first that is wrong."""
        path, item, documents = self._idx_path, self.dtype.itemsize, self.document_indices
        if documents.min() < 0 or documents.max() > len(self.lengths) or (documents[1:] < documents[:-1]).any():
            raise DataError(f"{path} has document indices that are not ascending: it is damaged; {_REMEDY}")
        if len(self.lengths) and self.lengths.min() < 0:
            raise DataError(f"{path} has a sequence of {self.lengths.min()} tokens: it is damaged; {_REMEDY}")
        expected = np.zeros(len(self.lengths), dtype=np.int64)
        np.cumsum(self.lengths[:-1], dtype=np.int64, out=expected[1:])
        expected *= item
        wrong = np.flatnonzero(expected != self._pointers)
        if len(wrong):
            first = int(wrong[0])
            raise DataError(
                f"{path} puts sequence {first} at byte {self._pointers[first]} of the .bin where the lengths before it "
                f"give {expected[first]}: it is damaged; {_REMEDY}"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    def get(self, i: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Tokens `offset : offset + length` of sequence i (to its end without length), a view.

        IndexError outside the sequence; DataError if the index puts the sequence outside the file.
        """
        if not 0 <= i < len(self.lengths):
            raise IndexError(f"sequence {i} is outside 0..{len(self.lengths) - 1}")
        whole = int(self.lengths[i])
        start = self.start(i)
        if not 0 <= whole <= self.tokens - start:
            raise self._outside(i)
        length = whole - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > whole:
            raise IndexError(f"tokens {offset}..{offset + length} are outside sequence {i} of {whole} tokens")
        return self._data[start + offset : start + offset + length]

    def document(self, d: int) -> NDArray:
        """All tokens of document d, a view; IndexError outside, DataError if the index is damaged."""
        if not 0 <= d < self.documents:
            raise IndexError(f"document {d} is outside 0..{self.documents - 1}")
        first, stop = int(self.document_indices[d]), int(self.document_indices[d + 1])
        if not 0 <= first <= stop <= len(self.lengths):
            raise DataError(
                f"{self._idx_path} gives document {d} the sequences {first}..{stop}: it is damaged; {_REMEDY}"
            )
        start, end = self.start(first), self.start(stop)
        if end < start:
            raise self._outside(first)
        return self._data[start:end]

    def start(self, i: int) -> int:
        """Position of sequence i's first token in the stream; `len(self)` gives the number of tokens."""
        if i == len(self.lengths):
            return self.tokens
        start, rest = divmod(int(self._pointers[i]), self.dtype.itemsize)
        if rest or not 0 <= start <= self.tokens:
            raise self._outside(i)
        return start

    def _outside(self, i: int) -> DataError:
        return DataError(
            f"{self._idx_path} puts sequence {i} of {self.lengths[i]} tokens at byte {self._pointers[i]} of a .bin of "
            f"{self.tokens * self.dtype.itemsize} bytes: it is damaged; {_REMEDY}"
        )

    @property
    def stream(self) -> NDArray:
        """All tokens, a memory-mapped view."""
        return self._data

    @classmethod
    def files(cls, entry: str | Path) -> list[Path]:
        """See TokenFile."""
        return list(paths(entry))


class IndexedWriter:
    """Writes a `.bin/.idx` pair document by document; the pair appears under its name only when `close` succeeds.

    Use as a context manager: an exception inside removes the temporary files and leaves an older pair untouched.
    Tokens that do not fit `dtype` raise DataError. Memory: 4 bytes a sequence. With `hashed`, `digest` is a SHA-256
    of all tokens.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, *, hashed: bool = False) -> None:
        self.digest = hashlib.sha256() if hashed else None  # of the tokens as they are stored
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _CODES or self.dtype.kind not in "iu":
            raise DataError(f"{prefix}: tokens of type {np.dtype(dtype).name} cannot be stored; use uint16 or int32")
        self._bin_path, self._idx_path = paths(prefix)
        self._bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._bin_new, self._idx_new = (p.with_name(f"{p.name}.{os.getpid()}.tmp") for p in paths(prefix))
        self._bin = open(self._bin_new, "wb")  # noqa: SIM115 - closed in close() or abort()
        self._limits = np.iinfo(self.dtype)
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._modes = array("b")
        self.tokens = 0

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self._documents) - 1

    def add(self, tokens: Iterable[int] | NDArray, mode: int | None = None) -> None:
        """Append a document of one sequence."""
        self.add_document([tokens], None if mode is None else [mode])

    def add_document(self, sequences: Iterable[Iterable[int] | NDArray], modes: Iterable[int] | None = None) -> None:
        """Append a document of several sequences, with one mode each for multimodal data."""
        before = len(self._lengths)
        for sequence in sequences:
            items = np.asarray(sequence if isinstance(sequence, np.ndarray) else list(sequence))
            self._write(items)
            self._note(np.array([items.size]))
        self._documents.append(len(self._lengths))
        if modes is not None:
            self._modes.extend(modes)
        if modes is not None and len(self._modes) != len(self._lengths):
            raise DataError(
                f"{self._bin_path}: {len(self._lengths) - before} sequences with another number of modes; "
                "give one mode a sequence, and either all documents modes or none"
            )

    def add_documents(self, tokens: NDArray, lengths: Iterable[int]) -> None:
        """Append many documents of one sequence each, their tokens given as one array: the quick way."""
        sizes = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths), dtype=np.int64)
        if sizes.sum() != tokens.size or (sizes < 0).any():
            raise ValueError(f"lengths add up to {sizes.sum()}, not to the {tokens.size} tokens given")
        first = len(self._lengths)
        self._write(tokens)
        self._note(sizes)
        self._documents.frombytes(np.arange(first + 1, first + 1 + sizes.size, dtype=np.int64).tobytes())

    def append(self, other: IndexedDataset) -> None:
        """Append a whole token file of the same type, documents and all; DataError for another type."""
        if other.dtype != self.dtype:
            raise DataError(f"{other.prefix} holds {other.dtype.name} and {self._bin_path} {self.dtype.name}")
        first = len(self._lengths)
        for start in range(0, other.tokens, _COPY):
            self._write_bytes(other.stream[start : start + _COPY].data)
        self.tokens += other.tokens
        self._note(other.lengths)
        self._documents.frombytes((other.document_indices[1:] + first).astype(np.int64).tobytes())
        if other.modes is not None:
            self._modes.frombytes(other.modes.tobytes())

    def _note(self, lengths: NDArray) -> None:
        """Remember lengths of sequences; the format has 32 bits for each."""
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(f"{self._bin_path}: a document of {lengths.max()} tokens is longer than the format allows")
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())

    def _write(self, items: NDArray) -> None:
        if items.size and (items.min() < self._limits.min or items.max() > self._limits.max):
            raise DataError(
                f"{self._bin_path}: token ids {items.min()}..{items.max()} do not fit {self.dtype.name} "
                f"({self._limits.min}..{self._limits.max}); store a wider type"
            )
        self._write_bytes(np.ascontiguousarray(items, dtype=self.dtype).data)
        self.tokens += items.size

    def _write_bytes(self, data: memoryview) -> None:
        self._bin.write(data)
        if self.digest is not None:
            self.digest.update(data)

    def close(self) -> None:
        """Write the index and put both files under their names, the index last."""
        _sync(self._bin)
        lengths = np.frombuffer(self._lengths, dtype=np.intc) if self._lengths else np.zeros(0, np.intc)
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        with open(self._idx_new, "wb") as idx:
            idx.write(_HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], len(lengths), len(self._documents)))
            idx.write(lengths.astype("<i4").tobytes())
            idx.write(pointers.tobytes())
            idx.write(np.frombuffer(self._documents, dtype=np.int64).astype("<i8").tobytes())
            idx.write(self._modes.tobytes())
            _sync(idx)
        # Without an index there is no data set: a crash in between leaves nothing that looks whole.
        self._idx_path.unlink(missing_ok=True)
        os.replace(self._bin_new, self._bin_path)
        os.replace(self._idx_new, self._idx_path)

    def abort(self) -> None:
        """Remove what was written."""
        self._bin.close()
        self._bin_new.unlink(missing_ok=True)
        self._idx_new.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self.close()
            except BaseException:
                self.abort()
                raise
        else:
            self.abort()


def _sync(file) -> None:
    """Flush to the disk and close."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _map(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, memory-mapped; an empty file is an empty array."""
    try:
        if path.stat().st_size == 0:
            return np.zeros(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except FileNotFoundError:
        other = path.with_suffix(".idx" if path.suffix == ".bin" else ".bin")
        sibling = f"{other.name} is there without it" if other.exists() else "neither file of the pair is there"
        raise DataError(
            f"token file {path} does not exist ({sibling}); give the path of a .bin/.idx pair without the suffix, or "
            "make one with `megascale data build`"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"token file {path} cannot be read: {error}; check the path and its permissions") from None
