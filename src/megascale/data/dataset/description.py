"""What a token file holds: counts, lengths, and text decoded from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megascale.config import DataConfig
from megascale.data.dataset.indexed import IndexedDataset
from megascale.data.dataset.integrity import check_sample, check_whole
from megascale.data.dataset.manifest import part_of, read_manifest, sha256_file
from megascale.data.dataset.tokenizer_agreement import check_replaced
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import DataError

_READ = 1 << 24  # tokens looked at at a time


@dataclass(frozen=True)
class DataSetDescription:
    """Facts of one token file.

    Attributes:
        lengths: tokens in a document: smallest, median, mean, largest.
        histogram: (from, up to and without, documents) with bounds at powers of two.
        tokenizer: the tokenizer.json beside it, None without one.
        samples: (document, decoded beginning), or ids where there is no tokenizer.
        compared: `all` or a `sample` of the tokens with the checksum recorded when they were built, `none` without one.
        longest_run: length, first token and id of the longest run of one id; None unless all was to be read.
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


def prefixes(path: str | Path) -> list[str]:
    """The token files that a path means: itself without suffix, or all in a folder; DataError if there are none."""
    path = Path(path)
    if not path.is_dir():
        return [str(path)]
    found = sorted(str(p)[: -len(".idx")] for p in path.glob("*.idx"))
    if not found:
        raise DataError(f"folder {path} holds no token files (.bin/.idx); make some with `megascale data build`")
    return found


def describe_token_file(
    prefix: str | Path,
    samples: int = 3,
    tokens_shown: int = 64,
    tokenizer: Path | None = None,
    *,
    full: bool = False,
) -> DataSetDescription:
    """Read and check a token file; with `full` its tokens are compared with their checksum as a whole.

    Raises DataError if the pair is damaged, differs from its manifest, or holds ids its tokenizer does not have.
    """
    file = IndexedDataset(prefix)
    file.verify()
    _check_manifest(file)
    compared = "none"
    if check_sample("inspect", file.prefix):
        compared = "sample"
    if full and check_whole("inspect", file.prefix):
        compared = "all"
    if tokenizer is None:
        check_replaced(DataConfig(train=[file.prefix]))
    ends = np.concatenate([[0], np.cumsum(file.lengths, dtype=np.int64)])[file.document_indices]
    lengths = np.diff(ends)
    largest = max((int(file.stream[i : i + _READ].max()) for i in range(0, file.tokens, _READ)), default=-1)
    smallest = min((int(file.stream[i : i + _READ].min()) for i in range(0, file.tokens, _READ)), default=0)
    if smallest < 0:
        raise DataError(
            f"{file.prefix}.bin holds token id {smallest}; ids are from 0 on: it is damaged, build it again"
        )
    path = tokenizer or Path(file.prefix).parent / "tokenizer.json"
    words = load_tokenizer(path) if tokenizer or path.exists() else None
    if words is not None and largest >= words.vocab_size:
        raise DataError(
            f"{file.prefix}.bin holds token id {largest} and {path} has {words.vocab_size}: they do not belong "
            "together; name the right one with --tokenizer"
        )
    shown = []
    for d in np.unique(np.linspace(0, max(file.documents - 1, 0), samples).astype(int)) if file.documents else ():
        ids = file.document(int(d))[:tokens_shown]
        shown.append((int(d), words.decode(ids) if words else " ".join(map(str, ids))))
    return DataSetDescription(
        prefix=file.prefix,
        dtype=file.dtype.name,
        documents=file.documents,
        sequences=len(file),
        tokens=file.tokens,
        bytes=file.tokens * file.dtype.itemsize,
        lengths=(int(lengths.min()), int(np.median(lengths)), float(lengths.mean()), int(lengths.max()))
        if len(lengths)
        else (0, 0, 0.0, 0),
        histogram=_histogram(lengths),
        largest_id=largest,
        tokenizer=str(path) if words else None,
        samples=shown,
        compared=compared,
        longest_run=_longest_run(file) if full else None,
    )


def _longest_run(file: IndexedDataset) -> tuple[int, int, int]:
    """Return length, first token and id of the longest run of one id: a file zeroed in part has a long one."""
    best = (0, 0, 0)
    start = 0  # of the run that goes on
    for first in range(0, file.tokens, _READ):
        part = file.stream[first : first + _READ]
        before = file.stream[first - 1] if first else part[0]
        changes = np.flatnonzero(part != np.concatenate([[before], part[:-1]])) + first
        starts = np.concatenate([[start], changes])
        stops = np.append(changes, first + len(part))
        longest = int(np.argmax(stops - starts))
        length, at = int(stops[longest] - starts[longest]), int(starts[longest])
        best = max(best, (length, at, int(file.stream[at])), key=lambda run: run[0])
        start = int(starts[-1])
    return best


def _check_manifest(file: IndexedDataset) -> None:
    part = part_of(file.prefix)
    if part is None:
        return
    if (part.documents, part.tokens) != (file.documents, file.tokens) or part.idx_sha256 != sha256_file(
        Path(file.prefix + ".idx")
    ):
        raise DataError(
            f"{file.prefix} has {file.documents} documents and {file.tokens} tokens and the dataset.json beside it "
            f"speaks of {part.documents} and {part.tokens} in an index with another hash; build the folder again"
        )


def _histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Counts between powers of two."""
    if not len(lengths):
        return []
    exponents = np.frexp(np.maximum(lengths, 1))[1] - 1
    counts = np.bincount(exponents)
    first = int(np.flatnonzero(counts)[0])
    return [(1 << e, 2 << e, int(counts[e])) for e in range(first, len(counts))]


def manifest_sources(prefix: str | Path) -> list[str]:
    """What the data set around a token file was made of, empty if unknown."""
    manifest = read_manifest(Path(prefix).parent)
    return manifest.sources if manifest else []
