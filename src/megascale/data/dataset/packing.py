"""Packing of documents into samples, and the fill of the samples. No torch.

A sample is a list of intervals of the token file.

- **concatenate** cuts the joined documents. A sample is the next sequence_length tokens. It ends earlier if it would
  otherwise hold tokens of more than data.max_documents documents.
- **best_fit** keeps documents whole. In descending order of length, each document goes into the fullest sample that
  still has room (best fit decreasing; Ding et al. 2024, "Fewer Truncations Improve Language Modeling",
  arXiv:2404.10830). Documents longer than a sample are cut into pieces. The first token after a cut is the last target
  of the piece before the cut. A document of one token has no target, so best_fit leaves it out.

The plan of a file depends on the lengths of its documents, the sequence length and the maximum number of documents.
The seed decides only the order in which samples are trained (samples.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megascale.core.atomic_files import name_temporary, write_atomically

PACKINGS = ("concatenate", "best_fit")
_GROUP_PIECES = 1 << 22  # pieces that best_fit packs together; bounds the memory
_PLAN_VERSION = 2  # of the format of stored plans

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class PackingReport:
    """Fill of a file's samples.

    Attributes:
        samples: number of samples.
        sequence_length: tokens of a sample, padding included.
        tokens: number of tokens in all samples without padding.
        documents: number of documents in the file.
        cut: number of documents that are divided between samples.
        lengths, counts: distinct lengths of the documents (or pieces) in samples, and how often each occurs.
    """

    samples: int
    sequence_length: int
    tokens: int
    documents: int
    cut: int
    lengths: Int64Array
    counts: Int64Array

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
        """Attention scores within documents, relative to those of full causal attention over the samples."""
        scores = float((self.counts * (self.lengths * (self.lengths + 1) / 2)).sum())
        return scores / max(1, self.samples * self.sequence_length * (self.sequence_length + 1) / 2)

    def to_json(self) -> str:
        """Return the report as JSON, with a checksum of its content."""
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
        pieces = int(self.counts.sum())
        return (
            f"{self.samples:,} samples are {self.fill:.2%} full, with {pieces / max(1, self.samples):.1f} documents of "
            f"{self.tokens / max(1, pieces):,.0f} tokens each; {self.cut:,} of {self.documents:,} documents are cut"
        )


class SamplePlan:
    """The intervals of a token file that each sample holds.

    Args:
        starts, lengths: first token and number of tokens of each interval, int64 [intervals]. No interval is longer
            than a sample.
        first_intervals: index of each sample's first interval, then the number of intervals, int64 [samples + 1].
        report_file: file that keeps the report for the next start; None: `load_report` computes it at each call.

    Attributes:
        samples: number of samples.
    """

    def __init__(
        self, starts: Int64Array, lengths: Int64Array, first_intervals: Int64Array, report_file: Path | None = None
    ) -> None:
        self.report_file = report_file
        self._starts = starts
        self._lengths = lengths
        self._first_intervals = first_intervals
        self.samples = len(first_intervals) - 1

    def list_intervals(self, sample: int) -> list[tuple[int, int]]:
        """Return the (first token, number of tokens) of each interval of a sample."""
        first, stop = int(self._first_intervals[sample]), int(self._first_intervals[sample + 1])
        return list(zip(self._starts[first:stop].tolist(), self._lengths[first:stop].tolist(), strict=True))

    def load_report(self, document_starts: Int64Array, tokens: int, sequence_length: int) -> PackingReport:
        """Return how full the samples are, from `report_file` if an earlier start has written it.

        Args:
            document_starts: first token of each document in the token file.
            tokens: number of tokens in the token file.
            sequence_length: tokens of a sample.
        """
        if self.report_file is None:
            return self._make_report(document_starts, tokens, sequence_length)
        with suppress(OSError, ValueError, TypeError, AttributeError):  # a damaged report is computed again
            return PackingReport.from_json(self.report_file.read_text())
        report = self._make_report(document_starts, tokens, sequence_length)
        with suppress(OSError):  # on a full or read-only disk, the next start computes it again
            write_atomically(self.report_file, report.to_json())
        return report

    def _make_report(self, document_starts: Int64Array, tokens: int, sequence_length: int) -> PackingReport:
        starts = np.asarray(self._starts)
        stops = starts + np.asarray(self._lengths)
        edges = sort_distinct(np.concatenate([document_starts, starts, stops]))
        edges = edges[edges < tokens]
        # The tokens between two neighbouring edges are a piece of one document. They lie in one interval, or in none if
        # packing left them out.
        order = np.argsort(starts, kind="stable")
        # Index of the last interval that begins at or before each edge; -1 without such an interval.
        last_interval = np.searchsorted(starts[order], edges, side="right") - 1
        is_covered = (last_interval >= 0) & (edges < stops[order][np.maximum(last_interval, 0)])
        sizes = np.diff(np.append(edges, tokens))[is_covered]
        lengths, counts = np.unique(sizes, return_counts=True)
        # A document is cut if an edge inside it begins a piece.
        inner_edges = np.setdiff1d(edges[is_covered], document_starts, assume_unique=True)
        cut = len(sort_distinct(np.searchsorted(document_starts, inner_edges, side="right")))
        return PackingReport(
            self.samples, sequence_length, int(sizes.sum()), len(document_starts), cut, lengths, counts
        )

    def save(self, path: Path) -> None:
        """Write the plan atomically. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = [
            np.ascontiguousarray(column, dtype="<i8") for column in (self._starts, self._lengths, self._first_intervals)
        ]
        header = np.array([len(self._starts), self.samples, _compute_checksum(columns)], dtype="<i8")
        temporary = name_temporary(path)
        try:
            with open(temporary, "xb") as file:
                for array in [header, *columns]:
                    file.write(array.data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @staticmethod
    def load(path: Path) -> SamplePlan | None:
        """Return a plan that `save` wrote, memory-mapped; None if the file is missing or damaged."""
        try:
            values = np.memmap(path, dtype="<i8", mode="r").view(np.ndarray)
        except (OSError, ValueError):
            return None
        if len(values) < 3:
            return None
        intervals, samples, checksum = values[:3].tolist()
        if len(values) != 3 + 2 * intervals + samples + 1:
            return None
        starts, lengths, first_intervals = np.split(values[3:], [intervals, 2 * intervals])
        if _compute_checksum([starts, lengths, first_intervals]) != checksum:
            return None
        return SamplePlan(starts, lengths, first_intervals)


def _compute_checksum(columns: Sequence[NDArray[np.int64]]) -> int:
    """Return the CRC-32 of the columns of a plan, since a changed bit would train other samples."""
    checksum = 0
    for column in columns:
        checksum = zlib.crc32(column.data, checksum)
    return checksum


def make_plan(
    packing: str, document_starts: Int64Array, tokens: int, *, sequence_length: int, max_documents: int
) -> SamplePlan:
    """Return the packing plan of a token file.

    Args:
        packing: value of data.packing.
        document_starts: first token of each document, ascending from 0.
        tokens: number of tokens in the file.
        sequence_length: tokens of a sample.
        max_documents: largest number of documents in a sample.
    """
    if packing == "best_fit":
        return _pack_best_fit(document_starts, tokens, sequence_length, max_documents)
    return _pack_concatenated(document_starts, tokens, sequence_length, max_documents)


def load_plan(
    folder: Path | None,
    identity: str,
    packing: str,
    document_starts: Int64Array,
    tokens: int,
    *,
    sequence_length: int,
    max_documents: int,
) -> SamplePlan:
    """Return the plan of `make_plan`, from `folder` if an earlier start has saved it there.

    Args:
        folder: folder of saved plans; None saves none. A plan's file is named by a hash of the other arguments.
        identity: fingerprint of the token file.
    """
    make_this_plan = partial(
        make_plan, packing, document_starts, tokens, sequence_length=sequence_length, max_documents=max_documents
    )
    if folder is None:
        return make_this_plan()
    text = f"{_PLAN_VERSION} {identity} {packing} {len(document_starts)} {tokens} {sequence_length} {max_documents}"
    path = folder / f"packing-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.bin"
    plan = SamplePlan.load(path)
    if plan is None:
        plan = make_this_plan()
        with suppress(OSError):  # on a full or read-only disk, the next start makes the plan again
            plan.save(path)
    plan.report_file = path.with_suffix(".json")
    return plan


def sort_distinct(values: Int64Array) -> Int64Array:
    """Return the distinct values in ascending order, ten times as fast as numpy.unique for millions of values.

    numpy.unique hashes the values. The stable sort only merges values that are sorted in parts.
    """
    ordered = np.sort(values, kind="stable")
    is_first = np.ones(len(ordered), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def _pack_concatenated(document_starts: Int64Array, tokens: int, length: int, max_documents: int) -> SamplePlan:
    """Return the plan of data.packing=concatenate, whose samples are one interval each.

    The last sample may be shorter than the others.
    """
    stop = tokens - 1  # the last token of the file is a target and never an input
    starts = np.arange(0, stop, length, dtype=np.int64)
    # A sample has to end early if max_documents consecutive documents begin after its first token. So compare the start
    # of each document with the start of the document that is max_documents - 1 later.
    later_starts = document_starts[max_documents - 1 :]
    if (later_starts - document_starts[: len(later_starts)] <= length - 2).any():
        starts = _find_limited_starts(document_starts, stop, length, max_documents)
    lengths = np.diff(np.append(starts, stop))
    return SamplePlan(starts, lengths, np.arange(len(starts) + 1, dtype=np.int64))


def _find_limited_starts(document_starts: Int64Array, stop: int, length: int, max_documents: int) -> Int64Array:
    """Return the first token of each sample, where samples end after at most `max_documents` documents."""
    starts: list[int] = []
    start = 0
    while start < stop:
        starts.append(start)
        # The sample holds the end of one document and the next max_documents - 1. It ends before the document after.
        next_document = int(np.searchsorted(document_starts, start, side="right")) + max_documents - 1
        start += length
        if next_document < len(document_starts):
            start = min(start, int(document_starts[next_document]))
    return np.array(starts, dtype=np.int64)


def _pack_best_fit(document_starts: Int64Array, tokens: int, length: int, max_documents: int) -> SamplePlan:
    """Return the plan of data.packing=best_fit."""
    starts, lengths = cut_documents(document_starts, tokens, length)
    group_samples = [np.zeros(0, np.int64)]
    sample_count = 0
    for first in range(0, len(lengths), _GROUP_PIECES):
        samples, group_count = assign_best_fit(lengths[first : first + _GROUP_PIECES], length, max_documents)
        group_samples.append(samples + sample_count)
        sample_count += group_count
    sample_of_piece = np.concatenate(group_samples)
    order = np.argsort(sample_of_piece, kind="stable")  # pieces of a sample stay in the order of the file
    first_intervals = np.searchsorted(sample_of_piece[order], np.arange(sample_count + 1))
    return SamplePlan(starts[order], lengths[order], first_intervals.astype(np.int64))


def cut_documents(document_starts: Int64Array, tokens: int, length: int) -> tuple[Int64Array, Int64Array]:
    """Return the first token and the length of each piece: documents, cut every `length` tokens if they are longer.

    The first token of a piece after a cut is the last target of the piece before. So a last piece of one token has no
    target of its own and is left out, as a document of one token is.
    """
    sizes = np.diff(np.append(document_starts, tokens))
    document_starts, sizes = document_starts[sizes > 1], sizes[sizes > 1]
    counts = (sizes - 2) // length + 1  # pieces per document
    first_pieces = np.cumsum(counts) - counts
    # Number of each piece within its document.
    numbers = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first_pieces, counts)
    starts = np.repeat(document_starts, counts) + numbers * length
    lengths = np.minimum(np.repeat(sizes, counts) - numbers * length, length)
    return starts.astype(np.int64), lengths.astype(np.int64)


def assign_best_fit(lengths: Int64Array, capacity: int, max_documents: int) -> tuple[Int64Array, int]:
    """Return the sample of each piece, int64 [pieces], and the number of samples.

    Pieces are placed in descending order of length, pieces of equal length in the order of the file. Each goes into an
    open sample with the least sufficient room, or else into a new sample. A sample is open while it has fewer than
    `max_documents` pieces. Samples are numbered by their first piece in the file.

    Args:
        lengths: tokens of each piece, from 1 to `capacity`.
        capacity: tokens of a sample.
        max_documents: largest number of pieces in a sample.
    """
    samples = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    open_samples = _OpenSamples(capacity, max_documents)
    run_starts = np.flatnonzero(np.diff(ordered, prepend=-1)).tolist()  # of pieces of equal length
    for first, stop in zip(run_starts, run_starts[1:] + [len(ordered)], strict=True):
        samples[order[first:stop]] = open_samples.assign(int(ordered[first]), stop - first)
    count = open_samples.count
    first_pieces = np.full(count, len(lengths), np.int64)
    np.minimum.at(first_pieces, samples, np.arange(len(lengths)))
    # Renumber the samples in the order of their first pieces.
    new_numbers = np.empty(count, np.int64)
    new_numbers[np.argsort(first_pieces, kind="stable")] = np.arange(count)
    return new_numbers[samples], count


class _OpenSamples:
    """Samples that may take more pieces, grouped by their remaining room in tokens.

    A bit set of the rooms finds the least sufficient room. Since equal pieces follow each other, many samples with the
    same room are filled in one step.

    Attributes:
        count: number of samples so far, open or not.
    """

    def __init__(self, capacity: int, max_documents: int) -> None:
        self.count = 0
        self._capacity = capacity
        self._max_documents = max_documents
        # Batches of open samples by room, each as (numbers of the samples, number of pieces in each sample).
        self._batches_by_room: dict[int, list[tuple[Int64Array, Int64Array]]] = {}
        self._room_bits = 0  # bit r is set if a sample with room r is open

    def assign(self, length: int, count: int) -> Int64Array:
        """Return the samples of `count` pieces of `length` tokens, int64 [count]."""
        assigned: list[Int64Array] = []
        remaining = count
        while remaining:
            sufficient_rooms = self._room_bits >> length
            if not sufficient_rooms:
                assigned.append(self._open_new(length, remaining))
                break
            lowest_bit = sufficient_rooms & -sufficient_rooms
            room = length + lowest_bit.bit_length() - 1
            samples = self._fill(room, length, remaining)
            assigned.append(samples)
            remaining -= len(samples)
        return np.concatenate(assigned)

    def _open_new(self, length: int, count: int) -> Int64Array:
        """Put `count` pieces of `length` tokens into new samples, and return the sample of each piece."""
        pieces_per_sample = min(self._capacity // length, self._max_documents)
        new_count = -(-count // pieces_per_sample)
        samples = np.arange(self.count, self.count + new_count)
        self.count += new_count
        piece_counts = np.full(new_count, pieces_per_sample)
        piece_counts[-1] = count - pieces_per_sample * (new_count - 1)
        self._add_open(samples, self._capacity - piece_counts * length, piece_counts)
        return np.repeat(samples, piece_counts)

    def _fill(self, room: int, length: int, count: int) -> Int64Array:
        """Put up to `count` pieces into a batch of samples with `room`, and return the sample of each piece.

        Each sample is filled before the next.
        """
        samples, piece_counts = self._batches_by_room[room].pop()
        if not self._batches_by_room[room]:
            del self._batches_by_room[room]
            self._room_bits &= ~(1 << room)
        added = np.minimum(room // length, self._max_documents - piece_counts)  # pieces that each sample can take
        filled = int(np.searchsorted(np.cumsum(added), count)) + 1  # number of samples that take pieces
        if filled < len(samples):
            self._add_open(samples[filled:], np.full(len(samples) - filled, room), piece_counts[filled:])
            samples, piece_counts, added = samples[:filled], piece_counts[:filled], added[:filled]
        excess = max(0, int(added.sum()) - count)
        added[-1] -= excess  # the last sample takes only the pieces that remain
        self._add_open(samples, room - added * length, piece_counts + added)
        return np.repeat(samples, added)

    def _add_open(self, samples: Int64Array, rooms: Int64Array, piece_counts: Int64Array) -> None:
        """Add those of the samples that have room and may take more pieces."""
        is_open = (rooms > 0) & (piece_counts < self._max_documents)
        for room in np.unique(rooms[is_open]).tolist():
            selected = is_open & (rooms == room)
            self._batches_by_room.setdefault(room, []).append((samples[selected], piece_counts[selected]))
            self._room_bits |= 1 << room
