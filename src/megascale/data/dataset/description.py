"""Description of a token file: counts, lengths, and text decoded from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale.config import DataConfig
from megascale.data.dataset.file_hash import sha256_file
from megascale.data.dataset.indexed import IndexedDataset
from megascale.data.dataset.manifest import check_all_bytes, check_sample, find_part, read_manifest
from megascale.data.dataset.tokenizer_agreement import check_unchanged_tokenizer
from megascale.data.tokenizer.tokenizer import TOKENIZER, load_tokenizer
from megascale.errors import DataError

_READ = 1 << 24  # tokens read at a time


@dataclass(frozen=True)
class DataSetDescription:
    """Facts of one token file.

    Attributes:
        lengths: tokens in a document: smallest, median, mean, largest.
        histogram: (lower bound, exclusive upper bound, documents) with bounds at powers of two.
        tokenizer: the tokenizer.json in its folder, None without one.
        samples: (document, decoded beginning), or ids where there is no tokenizer.
        compared: `all` tokens or a `sample` agree with the checksum recorded at the build; `none` without a checksum.
        longest_run: length, first token and id of the longest run of one id; None unless all tokens were read.
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
    """Return the token files of a path: itself without suffix, or all in a folder; DataError if there are none."""
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
    """Read, check and describe a token file; `full` compares all tokens with their checksum.

    Raises DataError if the pair is damaged, differs from its manifest, or holds ids that its tokenizer does not have.
    """
    file = IndexedDataset(prefix)
    file.verify()
    _check_manifest(file)
    compared = "none"
    if check_sample("inspect", file.prefix):
        compared = "sample"
    if full and check_all_bytes("inspect", file.prefix):
        compared = "all"
    if tokenizer is None:
        check_unchanged_tokenizer(DataConfig(train=[file.prefix]))
    ends = np.concatenate([[0], np.cumsum(file.lengths, dtype=np.int64)])[file.document_indices]
    lengths = np.diff(ends)
    parts = [file.stream[i : i + _READ] for i in range(0, file.tokens, _READ)]
    largest = max((int(part.max()) for part in parts), default=-1)
    smallest = min((int(part.min()) for part in parts), default=0)
    if smallest < 0:
        raise DataError(f"{file.prefix}.bin holds token id {smallest}; ids start at 0: it is damaged, build it again")
    path = tokenizer or Path(file.prefix).parent / TOKENIZER
    if tokenizer or path.exists():
        decoder = load_tokenizer(path)
    else:
        decoder = None
    if decoder is not None and largest >= decoder.vocab_size:
        raise DataError(
            f"{file.prefix}.bin holds token id {largest} and {path} has {decoder.vocab_size}: they do not belong "
            "together; name the right one with --tokenizer"
        )
    decoded = []
    if file.documents:
        for document in np.unique(np.linspace(0, file.documents - 1, samples).astype(int)).tolist():
            ids = file.document(document)[:tokens_shown]
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
        histogram=_histogram(lengths),
        largest_id=largest,
        tokenizer=str(path) if decoder else None,
        samples=decoded,
        compared=compared,
        longest_run=_longest_run(file) if full else None,
    )


def _longest_run(file: IndexedDataset) -> tuple[int, int, int]:
    """Return length, first token and id of the longest run of one id: a partly zeroed file has a long one."""
    best = (0, 0, 0)
    start = 0  # of the current run
    for first in range(0, file.tokens, _READ):
        part = file.stream[first : first + _READ]
        before = file.stream[first - 1] if first else part[0]
        changes = np.flatnonzero(part != np.concatenate([[before], part[:-1]])) + first
        starts = np.concatenate([[start], changes])
        stops = np.append(changes, first + len(part))
        longest = int(np.argmax(stops - starts))
        length = int(stops[longest] - starts[longest])
        begin = int(starts[longest])
        if length > best[0]:
            best = (length, begin, int(file.stream[begin]))
        start = int(starts[-1])
    return best


def _check_manifest(file: IndexedDataset) -> None:
    """Raise DataError if the counts or the index differ from the manifest."""
    part = find_part(file.prefix)
    if part is None:
        return
    if (part.documents, part.tokens) != (file.documents, file.tokens) or part.idx_sha256 != sha256_file(
        Path(file.prefix + ".idx")
    ):
        raise DataError(
            f"{file.prefix} has {file.documents} documents and {file.tokens} tokens and the folder's "
            f"dataset.json has {part.documents} and {part.tokens} in an index with another hash; build the folder again"
        )


def _histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Count lengths between powers of two."""
    if not len(lengths):
        return []
    exponents = np.frexp(np.maximum(lengths, 1))[1] - 1
    counts = np.bincount(exponents)
    first = int(np.flatnonzero(counts)[0])
    return [(1 << e, 2 << e, int(counts[e])) for e in range(first, len(counts))]


def manifest_sources(prefix: str | Path) -> list[str]:
    """Return the inputs of the data set that a token file belongs to, empty if unknown."""
    manifest = read_manifest(Path(prefix).parent)
    if manifest is None:
        return []
    return manifest.sources
