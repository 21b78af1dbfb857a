"""Description of a token file: counts, lengths, and text decoded from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale.config import DataConfig
from megascale.data.dataset.file_hash import sha256_file
from megascale.data.dataset.indexed import IndexedDataset
from megascale.data.dataset.manifest import check_all_bytes, check_sampled_tokens, find_part, read_manifest
from megascale.data.dataset.tokenizer_agreement import check_unchanged_tokenizer
from megascale.data.tokenizer.tokenizer import TOKENIZER, load_tokenizer
from megascale.errors import DataError

_READ_TOKENS = 1 << 24  # tokens read at a time


@dataclass(frozen=True)
class DataSetDescription:
    """Facts of one token file.

    Attributes:
        prefix: path without suffix.
        dtype: type of a stored token.
        documents, sequences, tokens, bytes: sizes of the file.
        lengths: smallest, median, mean and largest number of tokens in a document.
        histogram: (lower bound, exclusive upper bound, number of documents), with bounds at powers of two.
        largest_id: largest token id; -1 without tokens.
        tokenizer: path of the tokenizer that decoded the samples; None without a tokenizer.
        samples: (document, text at its beginning); without a tokenizer, token ids instead of text.
        compared: `all` tokens or a `sample` agree with the checksum recorded at the build; `none` without a checksum.
        longest_run: (length, first token, id) of the longest run of equal ids; None unless all tokens were read.
    """

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    bytes: int
    lengths: tuple[int, int, float, int]
    histogram: list[tuple[int, int, int]]
    largest_id: int
    tokenizer: str | None
    samples: list[tuple[int, str]]
    compared: str
    longest_run: tuple[int, int, int] | None


def find_prefixes(path: str | Path) -> list[str]:
    """Return the prefixes of the token files in a folder, or the path itself if it is not a folder.

    Raises DataError for a folder without token files.
    """
    path = Path(path)
    if not path.is_dir():
        return [str(path)]
    prefixes = sorted(str(file)[: -len(".idx")] for file in path.glob("*.idx"))
    if not prefixes:
        raise DataError(f"folder {path} holds no token files (.bin/.idx); make some with `megascale data build`")
    return prefixes


def describe_token_file(
    prefix: str | Path,
    samples: int = 3,
    tokens_shown: int = 64,
    tokenizer: Path | None = None,
    *,
    full: bool = False,
) -> DataSetDescription:
    """Read, check and describe a token file.

    Args:
        prefix: path of the file without suffix.
        samples: number of documents whose beginning is decoded.
        tokens_shown: number of tokens that are decoded per document.
        tokenizer: tokenizer to decode with; None: the tokenizer.json in the file's folder, if there is one.
        full: compare all tokens with their checksum, and find the longest run of equal ids.

    Raises DataError if the pair is damaged, differs from its manifest, or holds ids that its tokenizer does not have.
    """
    file = IndexedDataset(prefix)
    file.verify()
    _check_manifest(file)
    compared = "none"
    if check_sampled_tokens("inspect", file.prefix):
        compared = "sample"
    if full and check_all_bytes("inspect", file.prefix):
        compared = "all"
    if tokenizer is None:
        check_unchanged_tokenizer(DataConfig(train=[file.prefix]))
    sequence_starts = np.concatenate([[0], np.cumsum(file.lengths, dtype=np.int64)])
    lengths = np.diff(sequence_starts[file.document_indices])
    chunks = [file.stream[i : i + _READ_TOKENS] for i in range(0, file.tokens, _READ_TOKENS)]
    largest = max((int(chunk.max()) for chunk in chunks), default=-1)
    smallest = min((int(chunk.min()) for chunk in chunks), default=0)
    if smallest < 0:
        raise DataError(
            f"{file.prefix}.bin holds token id {smallest}; ids start at 0: the file is damaged, build it again"
        )
    path = tokenizer or Path(file.prefix).parent / TOKENIZER
    if tokenizer or path.exists():
        decoder = load_tokenizer(path)
    else:
        decoder = None
    if decoder is not None and largest >= decoder.vocab_size:
        raise DataError(
            f"{file.prefix}.bin holds token id {largest}, and {path} has {decoder.vocab_size} ids: file and tokenizer "
            "do not belong together; name the right tokenizer with --tokenizer"
        )
    decoded = []
    if file.documents:
        documents = np.unique(np.linspace(0, file.documents - 1, samples).astype(int))  # spread evenly
        for document in documents.tolist():
            ids = file.read_document(document)[:tokens_shown]
            decoded.append((document, decoder.decode(ids) if decoder else " ".join(map(str, ids))))
    summary = (0, 0, 0.0, 0)
    if len(lengths):
        summary = (int(lengths.min()), int(np.median(lengths)), float(lengths.mean()), int(lengths.max()))
    return DataSetDescription(
        prefix=file.prefix,
        dtype=file.dtype.name,
        documents=file.documents,
        sequences=len(file),
        tokens=file.tokens,
        bytes=file.tokens * file.dtype.itemsize,
        lengths=summary,
        histogram=_count_lengths(lengths),
        largest_id=largest,
        tokenizer=str(path) if decoder else None,
        samples=decoded,
        compared=compared,
        longest_run=_find_longest_run(file) if full else None,
    )


def _find_longest_run(file: IndexedDataset) -> tuple[int, int, int]:
    """Return (length, first token, id) of the longest run of equal ids. A partly zeroed file has a long run."""
    longest_run = (0, 0, 0)
    run_start = 0  # of the run at the end of the previous chunk
    for first in range(0, file.tokens, _READ_TOKENS):
        chunk = file.stream[first : first + _READ_TOKENS]
        previous_id = file.stream[first - 1] if first else chunk[0]
        changes = np.flatnonzero(chunk != np.concatenate([[previous_id], chunk[:-1]])) + first
        starts = np.concatenate([[run_start], changes])
        stops = np.append(changes, first + len(chunk))
        longest = int(np.argmax(stops - starts))
        length = int(stops[longest] - starts[longest])
        start = int(starts[longest])
        if length > longest_run[0]:
            longest_run = (length, start, int(file.stream[start]))
        run_start = int(starts[-1])
    return longest_run


def _check_manifest(file: IndexedDataset) -> None:
    """Raise DataError if counts or index differ from the manifest."""
    part = find_part(file.prefix)
    if part is None:
        return
    has_same_counts = (part.documents, part.tokens) == (file.documents, file.tokens)
    if not has_same_counts or part.idx_sha256 != sha256_file(Path(file.prefix + ".idx")):
        raise DataError(
            f"{file.prefix} has {file.documents} documents and {file.tokens} tokens and the folder's "
            f"dataset.json has {part.documents} and {part.tokens} in an index with another hash; build the folder again"
        )


def _count_lengths(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (lower bound, exclusive upper bound, count) of lengths between powers of two."""
    if not len(lengths):
        return []
    exponents = np.frexp(np.maximum(lengths, 1))[1] - 1
    counts = np.bincount(exponents)
    first = int(np.flatnonzero(counts)[0])
    return [(1 << exponent, 2 << exponent, int(counts[exponent])) for exponent in range(first, len(counts))]


def list_manifest_sources(prefix: str | Path) -> list[str]:
    """Return the inputs from which a token file's data set was built; empty without a manifest."""
    manifest = read_manifest(Path(prefix).parent)
    if manifest is None:
        return []
    return manifest.sources
