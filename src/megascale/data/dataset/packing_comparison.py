"""Comparison of packings by the fill of their samples, for token files and for synthetic document lengths. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megascale.data.dataset.formats import open_tokens
from megascale.data.dataset.packing import PACKINGS, PackingReport, make_plan
from megascale.data.dataset.sample_fields import require_document_starts


@dataclass(frozen=True)
class PackingRow:
    """Result of one packing of one set of documents.

    Attributes:
        name: token file, or distribution of synthetic lengths.
        packing: value of data.packing.
        report: fill of the samples.
        seconds: time of packing.
    """

    name: str
    packing: str
    report: PackingReport
    seconds: float


def draw_lengths(count: int) -> dict[str, NDArray[np.int64]]:
    """Return `count` synthetic document lengths in tokens, at least 2, by the name of each of three distributions."""
    generator = np.random.default_rng(0)
    exponential = generator.exponential(512, count)
    log_normal = generator.lognormal(np.log(400), 1.2, count)  # similar to web pages
    mostly_short = np.where(generator.random(count) < 0.01, 16_384, generator.integers(8, 257, count))
    lengths = {
        "exponential, mean 512": exponential,
        "log-normal, median 400, sigma 1.2": log_normal,
        "8 to 256, 1% of 16,384": mostly_short,
    }
    return {name: np.maximum(2, values.round()).astype(np.int64) for name, values in lengths.items()}


def compare_packings(
    name: str, document_starts: NDArray[np.int64], tokens: int, *, sequence_length: int, max_documents: int
) -> list[PackingRow]:
    """Return a row per packing of the documents that begin at `document_starts` in a file of `tokens` tokens."""
    rows = []
    for packing in PACKINGS:
        started = time.perf_counter()
        plan = make_plan(packing, document_starts, tokens, sequence_length=sequence_length, max_documents=max_documents)
        seconds = time.perf_counter() - started
        rows.append(PackingRow(name, packing, plan.load_report(document_starts, tokens, sequence_length), seconds))
    return rows


def compare_file(prefix: str, *, sequence_length: int, max_documents: int) -> list[PackingRow]:
    """Return a row per packing of a token file. Raises DataError or ConfigError if the file is unusable."""
    file = open_tokens(prefix)
    starts = require_document_starts(file, "path")
    return compare_packings(prefix, starts, file.tokens, sequence_length=sequence_length, max_documents=max_documents)


def compare_drawn(count: int, *, sequence_length: int, max_documents: int) -> list[PackingRow]:
    """Return a row per packing of each distribution of `draw_lengths`."""
    rows = []
    for name, lengths in draw_lengths(count).items():
        stops = np.cumsum(lengths)
        rows += compare_packings(
            name,
            stops - lengths,
            int(stops[-1]),
            sequence_length=sequence_length,
            max_documents=max_documents,
        )
    return rows
