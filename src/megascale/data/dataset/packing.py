"""Packing of documents into samples, and the fill of the samples. No torch.

A sample is a list of intervals of the file. **concatenate** walks the joined documents: a sample is the next
sequence_length tokens, or ends early at its last allowed document. **best_fit** keeps documents whole. Documents in
descending length go into the fullest sample that still has room (best fit decreasing; Ding et al. 2024, "Fewer
Truncations Improve Language Modeling", arXiv:2404.10830). Only documents longer than a sample are cut. The first token
after a cut is the last target of the piece before it. A document of one token has nothing to predict, so best_fit
leaves it out.

The plan of a file depends on its documents' lengths, the sequence length and the maximum number of documents. The
seed decides the order of samples only, as for samples without documents (samples.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megascale.core.atomic_files import name_temporary, write_atomically

PACKINGS = ("concatenate", "best_fit")
_GROUP = 1 << 22  # pieces that are packed together, which bounds the memory
_VERSION = 2  # of the stored plans

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class PackingReport:
    """Fill of a file's samples.

    Attributes:
        samples: number of samples.
        sequence_length: tokens of a sample.
        tokens: tokens of documents in all samples; the other tokens are padding.
        documents: documents of the file.
        cut: documents that are divided between samples.
        lengths, counts: the different lengths of documents as samples hold them, and how often each occurs.
    """

    samples: int
    sequence_length: int
    tokens: int
    documents: int
    cut: int
    lengths: Lengths
    counts: Lengths

    @property
    def fill(self) -> float:
        """Share of the samples' tokens that are not padding."""
        return self.tokens / max(1, self.samples * self.sequence_length)

    @property
    def padding(self) -> int:
        """Number of tokens of padding."""
        return self.samples * self.sequence_length - self.tokens

    @property
    def attention_share(self) -> float:
        """Share of the scores of full causal attention that attention within documents computes, without padding."""
        area = float((self.counts * (self.lengths * (self.lengths + 1) / 2)).sum())
        return area / max(1, self.samples * self.sequence_length * (self.sequence_length + 1) / 2)

    def to_json(self) -> str:
        """Return the report as text, with a checksum of its content."""
        totals = [self.samples, self.sequence_length, self.tokens, self.documents, self.cut]
        content = json.dumps([totals, self.lengths.tolist(), self.counts.tolist()])
        return json.dumps([zlib.crc32(content.encode()), content])

    @staticmethod
    def from_json(text: str) -> PackingReport:
        """Return the report that `to_json` wrote. Raises ValueError or TypeError for other or changed text."""
        checksum, content = json.loads(text)
        if zlib.crc32(content.encode()) != checksum:
            raise ValueError("the checksum of a packing report does not match its content")
        totals, lengths, counts = json.loads(content)
        samples, sequence_length, tokens, documents, cut = totals
        return PackingReport(
            samples,
            sequence_length,
            tokens,
            documents,
            cut,
            lengths=np.array(lengths, np.int64),
            counts=np.array(counts, np.int64),
        )

    def __str__(self) -> str:
        parts = int(self.counts.sum())
        return (
            f"{self.samples:,} samples are {self.fill:.2%} full, with {parts / max(1, self.samples):.1f} documents of "
            f"{self.tokens / max(1, parts):,.0f} tokens each; {self.cut:,} of {self.documents:,} documents are cut"
        )


class SamplePlan:
    """The intervals of a token file that each sample holds.

    Args:
        starts, lengths: intervals, int64; no interval is longer than a sample.
        firsts: number of each sample's first interval, and the number of intervals, int64 [samples + 1].
        report_file: keeps the report for the next start; None makes it at each call.

    Attributes:
        samples: number of samples.
    """

    def __init__(self, starts: Lengths, lengths: Lengths, firsts: Lengths, report_file: Path | None = None) -> None:
        self.report_file = report_file
        self._starts = starts
        self._lengths = lengths
        self._firsts = firsts
        self.samples = len(firsts) - 1

    def intervals(self, sample: int) -> list[tuple[int, int]]:
        """Return the (first token, number of tokens) of each interval of a sample."""
        first, stop = int(self._firsts[sample]), int(self._firsts[sample + 1])
        return list(zip(self._starts[first:stop].tolist(), self._lengths[first:stop].tolist(), strict=True))

    def report(self, document_starts: Lengths, tokens: int, sequence_length: int) -> PackingReport:
        """Return how full the samples are, from `report_file` if an earlier start has written it.

        Args:
            document_starts, tokens: of the token file.
        """
        if self.report_file is None:
            return self._make_report(document_starts, tokens, sequence_length)
        with suppress(OSError, ValueError, TypeError, AttributeError):  # a damaged file means that it is made again
            return PackingReport.from_json(self.report_file.read_text())
        report = self._make_report(document_starts, tokens, sequence_length)
        with suppress(OSError):  # a full or read-only disk only means that the next start makes it again
            write_atomically(self.report_file, report.to_json())
        return report

    def _make_report(self, document_starts: Lengths, tokens: int, sequence_length: int) -> PackingReport:
        begins = np.asarray(self._starts)
        stops = begins + np.asarray(self._lengths)
        edges = sort_distinct(np.concatenate([document_starts, begins, stops]))
        edges = edges[edges < tokens]
        # Every part between two edges lies in one interval, or in none if it was left out.
        order = np.argsort(begins, kind="stable")
        interval = np.searchsorted(begins[order], edges, side="right") - 1
        is_covered = (interval >= 0) & (edges < stops[order][np.maximum(interval, 0)])
        sizes = np.diff(np.append(edges, tokens))[is_covered]
        lengths, counts = np.unique(sizes, return_counts=True)
        inner_edges = np.setdiff1d(edges[is_covered], document_starts, assume_unique=True)
        cut = len(sort_distinct(np.searchsorted(document_starts, inner_edges, side="right")))
        return PackingReport(
            self.samples, sequence_length, int(sizes.sum()), len(document_starts), cut, lengths, counts
        )

    def save(self, path: Path) -> None:
        """Write the plan; readers find a complete file or none. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = [np.ascontiguousarray(part, dtype="<i8") for part in (self._starts, self._lengths, self._firsts)]
        header = np.array([len(self._starts), self.samples, _checksum(columns)], dtype="<i8")
        temporary = name_temporary(path)
        try:
            with open(temporary, "xb") as file:
                for part in [header] + columns:
                    file.write(part.data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @staticmethod
    def load(path: Path) -> SamplePlan | None:
        """Return a plan that `save` wrote, memory-mapped; None if there is none, or if its content has changed."""
        try:
            values = np.memmap(path, dtype="<i8", mode="r").view(np.ndarray)
        except (OSError, ValueError):
            return None
        if len(values) < 3 or len(values) != 4 + 2 * values[0] + values[1]:
            return None
        count = int(values[0])
        starts, lengths, firsts = np.split(values[3:], [count, 2 * count])
        if _checksum([starts, lengths, firsts]) != values[2]:
            return None
        return SamplePlan(starts, lengths, firsts)


def _checksum(columns: Sequence[NDArray[np.int64]]) -> int:
    """Return the CRC-32 of the columns of a plan: a changed bit would train other samples."""
    checksum = 0
    for column in columns:
        checksum = zlib.crc32(column.data, checksum)
    return checksum


def make_plan(
    packing: str, document_starts: Lengths, tokens: int, *, sequence_length: int, max_documents: int
) -> SamplePlan:
    """Return the samples of a file of `tokens` tokens, whose documents begin at `document_starts` (ascending, from 0).

    Args:
        packing: value of data.packing.
    """
    if packing == "best_fit":
        return _pack_best_fit(document_starts, tokens, sequence_length, max_documents)
    return _concatenate(document_starts, tokens, sequence_length, max_documents)


def load_plan(
    folder: Path | None,
    identity: str,
    packing: str,
    document_starts: Lengths,
    tokens: int,
    *,
    sequence_length: int,
    max_documents: int,
) -> SamplePlan:
    """Return `make_plan`, kept in `folder` for the next start under a name that all arguments decide.

    Args:
        identity: fingerprint of the file.
    """
    make = lambda: make_plan(
        packing, document_starts, tokens, sequence_length=sequence_length, max_documents=max_documents
    )
    if folder is None:
        return make()
    text = f"{_VERSION} {identity} {packing} {len(document_starts)} {tokens} {sequence_length} {max_documents}"
    path = folder / f"packing-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.bin"
    plan = SamplePlan.load(path)
    if plan is None:
        plan = make()
        with suppress(OSError):  # a full or read-only disk only means that the next start makes the plan again
            plan.save(path)
    plan.report_file = path.with_suffix(".json")
    return plan


def sort_distinct(values: Lengths) -> Lengths:
    """Return the distinct values, ascending. numpy.unique hashes them, which takes ten times as long for millions."""
    ordered = np.sort(values, kind="stable")  # merges values that are sorted in parts
    is_first = np.ones(len(ordered), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def _concatenate(document_starts: Lengths, tokens: int, length: int, max_documents: int) -> SamplePlan:
    """Return consecutive samples; each shares its last target with the next, and the last one may be shorter."""
    last = tokens - 1  # the last token is a target only
    begins = np.arange(0, last, length, dtype=np.int64)
    # A sample has too many documents if it begins before max_documents starts and holds them all.
    earlier = document_starts[: max(0, len(document_starts) - max_documents + 1)]
    if (document_starts[max_documents - 1 :] - earlier <= length - 2).any():
        begins = _walk(document_starts, last, length, max_documents)
    lengths = np.diff(np.append(begins, last))
    return SamplePlan(begins, lengths, np.arange(len(begins) + 1, dtype=np.int64))


def _walk(document_starts: Lengths, last: int, length: int, max_documents: int) -> Lengths:
    """Return the first tokens of samples that end after `max_documents` documents at the latest."""
    begins: list[int] = []
    begin = 0
    while begin < last:
        begins.append(begin)
        following = int(np.searchsorted(document_starts, begin, side="right")) + max_documents - 1
        stop = begin + length
        if following < len(document_starts):
            stop = min(stop, int(document_starts[following]))
        begin = stop
    return np.array(begins, dtype=np.int64)


def _pack_best_fit(document_starts: Lengths, tokens: int, length: int, max_documents: int) -> SamplePlan:
    """Return samples of whole documents; longer documents are cut into full samples and a remainder."""
    starts, lengths = cut_documents(document_starts, tokens, length)
    samples = [np.zeros(0, np.int64)]
    count = 0
    for first in range(0, len(lengths), _GROUP):
        numbers, group_count = assign_best_fit(lengths[first : first + _GROUP], length, max_documents)
        samples.append(numbers + count)
        count += group_count
    numbers = np.concatenate(samples)
    order = np.argsort(numbers, kind="stable")  # pieces of a sample stay in the order of the file
    firsts = np.searchsorted(numbers[order], np.arange(count + 1))
    return SamplePlan(starts[order], lengths[order], firsts.astype(np.int64))


def cut_documents(document_starts: Lengths, tokens: int, length: int) -> tuple[Lengths, Lengths]:
    """Return starts and lengths of the pieces: whole documents, and longer ones cut every `length` tokens.

    The first token of a remainder is the last target of the piece before. So a remainder of one token, as a document of
    one token, has nothing to predict and is left out.
    """
    sizes = np.diff(np.append(document_starts, tokens))
    document_starts, sizes = document_starts[sizes > 1], sizes[sizes > 1]
    counts = (sizes - 2) // length + 1
    begins = np.cumsum(counts) - counts
    numbers = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(begins, counts)
    starts = np.repeat(document_starts, counts) + numbers * length
    lengths = np.minimum(np.repeat(sizes, counts) - numbers * length, length)
    return starts.astype(np.int64), lengths.astype(np.int64)


def assign_best_fit(lengths: Lengths, capacity: int, max_documents: int) -> tuple[Lengths, int]:
    """Return the sample of each piece, and the number of samples.

    Pieces are taken in descending length, equal ones in the order of the file. Each goes into a sample with the least
    remaining room that fits it and has fewer than `max_documents` pieces; without one it begins a sample. Samples are
    numbered by their first piece in the file.

    Args:
        lengths: of the pieces, from 1 to `capacity`.
    """
    samples = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    room = _Rooms(capacity, max_documents)
    bounds = np.flatnonzero(np.diff(ordered, prepend=-1))
    for first, stop in zip(bounds.tolist(), [*bounds[1:].tolist(), len(ordered)], strict=True):
        samples[order[first:stop]] = room.assign(int(ordered[first]), stop - first)
    first_pieces = np.full(room.samples, len(lengths), np.int64)
    np.minimum.at(first_pieces, samples, np.arange(len(lengths)))
    numbers = np.empty(room.samples, np.int64)
    numbers[np.argsort(first_pieces, kind="stable")] = np.arange(room.samples)
    return numbers[samples], room.samples


class _Rooms:
    """Open samples by their remaining room, of which a bit set finds the least that fits.

    Many samples with the same room are filled in one step, as equal pieces follow each other.
    """

    def __init__(self, capacity: int, max_documents: int) -> None:
        self.samples = 0
        self._capacity = capacity
        self._max_documents = max_documents
        # Room -> (samples, number of their pieces), in arrays of samples that came together.
        self._open: dict[int, list[tuple[Lengths, Lengths]]] = {}
        self._rooms = 0  # bit r is set if a sample has room r

    def assign(self, length: int, count: int) -> Lengths:
        """Return the samples of `count` pieces of `length` tokens."""
        assigned: list[Lengths] = []
        remaining = count
        while remaining:
            fitting = self._rooms >> length
            if not fitting:
                assigned.append(self._begin(length, remaining))
                break
            room = length + (fitting & -fitting).bit_length() - 1
            numbers = self._fill(room, length, remaining)
            assigned.append(numbers)
            remaining -= len(numbers)
        return np.concatenate(assigned)

    def _begin(self, length: int, count: int) -> Lengths:
        """Put `count` pieces into new samples."""
        each = min(self._capacity // length, self._max_documents)
        new = -(-count // each)
        numbers = np.arange(self.samples, self.samples + new)
        self.samples += new
        pieces = np.full(new, each)
        pieces[-1] = count - each * (new - 1)
        self._keep(numbers, self._capacity - pieces * length, pieces)
        return np.repeat(numbers, pieces)

    def _fill(self, room: int, length: int, count: int) -> Lengths:
        """Put up to `count` pieces into the samples with `room`; each is filled before the next."""
        numbers, pieces = self._open[room].pop()
        if not self._open[room]:
            del self._open[room]
            self._rooms &= ~(1 << room)
        added = np.minimum(room // length, self._max_documents - pieces)
        stops = np.cumsum(added)
        used = int(np.searchsorted(stops, count)) + 1
        if used < len(numbers):
            self._keep(numbers[used:], np.full(len(numbers) - used, room), pieces[used:])
            numbers, pieces, added = numbers[:used], pieces[:used], added[:used]
        excess = max(0, int(added.sum()) - count)
        added[-1] -= excess
        self._keep(numbers, room - added * length, pieces + added)
        return np.repeat(numbers, added)

    def _keep(self, numbers: Lengths, rooms: Lengths, pieces: Lengths) -> None:
        """Note samples that may take more pieces."""
        is_open = (rooms > 0) & (pieces < self._max_documents)
        for room in np.unique(rooms[is_open]).tolist():
            selected = is_open & (rooms == room)
            self._open.setdefault(room, []).append((numbers[selected], pieces[selected]))
            self._rooms |= 1 << room
