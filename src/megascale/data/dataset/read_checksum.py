"""Checksums of the samples that ranks have read, which prove the samples that were trained. No torch.

A rank adds up two 64-bit hashes of each sample that its loader passes to the engine: one of the sample's number, one
of its number and tokens. Sums depend neither on the order nor on the rank that reads a sample, so the sums of the
world are the same for every layout. They travel with the loss (train/engine.py), and the ledger has their running
totals. The totals of any two lines prove the samples read between them, also where the lines between were lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.data.dataset.sample_order import derive_key

MASK = (1 << 64) - 1
_HALF = (1 << 32) - 1
_ROWS = 256  # samples that are read at a time to be checked
_NUMBERS = 1 << 20  # sample numbers that are hashed at a time
_NUMBER_KEY = derive_key(0x5A3B1E5, 0)
_TOKEN_KEY = derive_key(0x5A3B1E5, 1)
_SAMPLE_KEY = derive_key(0x5A3B1E5, 2)


@dataclass(frozen=True)
class ReadSums:
    """Sums over samples, modulo 2^64.

    Attributes:
        numbers: sum of hashes of the samples' numbers.
        tokens: sum of hashes of the samples' numbers and tokens.
    """

    numbers: int = 0
    tokens: int = 0

    def __add__(self, sums: ReadSums) -> ReadSums:
        return ReadSums((self.numbers + sums.numbers) & MASK, (self.tokens + sums.tokens) & MASK)

    def __sub__(self, sums: ReadSums) -> ReadSums:
        return ReadSums((self.numbers - sums.numbers) & MASK, (self.tokens - sums.tokens) & MASK)


def sum_samples(first: int, tokens_SB: NDArray[Any]) -> ReadSums:
    """Return the sums of samples number `first` and following, whose tokens are the columns of `tokens_SB`."""
    numbers = np.arange(first, first + tokens_SB.shape[1], dtype=np.uint64)
    contents = _multipliers(len(tokens_SB)) @ tokens_SB.astype(np.uint64)
    samples = _mix(contents ^ _mix(numbers ^ np.uint64(_SAMPLE_KEY)))
    return ReadSums(_hash_numbers(numbers), int(samples.sum()))


def sum_numbers(first: int, stop: int) -> int:
    """Return ReadSums.numbers of samples first .. stop - 1, without reading their tokens."""
    total = 0
    for start in range(first, stop, _NUMBERS):
        total += _hash_numbers(np.arange(start, min(start + _NUMBERS, stop), dtype=np.uint64))
    return total & MASK


def split_range(first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield samples first .. stop - 1 as (first, count) of parts small enough to be read at once."""
    for start in range(first, stop, _ROWS):
        yield start, min(_ROWS, stop - start)


class ReadChecksum:
    """Sums of the samples that one rank has read since the last `take`."""

    def __init__(self) -> None:
        self._sums = ReadSums()
        self._count = 0

    def add(self, first: int, tokens_SB: NDArray[Any]) -> None:
        """Add samples `first` and following, whose tokens are the columns of `tokens_SB`."""
        self._sums += sum_samples(first, tokens_SB)
        self._count += tokens_SB.shape[1]

    def take(self) -> list[float]:
        """Return the sums and reset them: the count of samples, then the lower and upper half of each sum.

        float64 holds the sum of these numbers over all ranks exactly.
        """
        sums, count = self._sums, self._count
        self._sums = ReadSums()
        self._count = 0
        halves = [half for value in (sums.numbers, sums.tokens) for half in (value & _HALF, value >> 32)]
        return [float(value) for value in (count, *halves)]


def sum_step(totals: Sequence[float], count: int) -> ReadSums:
    """Return the sums of a step's `count` samples from the results of `take`, summed over all ranks.

    Several ranks read each sample (tensor-parallel ranks, first and last stage). Their sums agree, so the totals are
    multiples of the number of readers; if they do not agree, the result is no sample's hash.
    """
    read, *halves = map(int, totals)
    readers = max(1, round(read / count))
    numbers = halves[0] + (halves[1] << 32)
    tokens = halves[2] + (halves[3] << 32)
    return ReadSums(numbers // readers & MASK, tokens // readers & MASK)


@dataclass
class ReadTotals:
    """Running totals of all samples from number `first` on, part of checkpoints and the ledger."""

    first: int = 0
    sums: ReadSums = ReadSums()

    def to_record(self) -> dict[str, Any]:
        """Return the totals as JSON holds them."""
        return {"since": self.first, "numbers": f"{self.sums.numbers:016x}", "tokens": f"{self.sums.tokens:016x}"}

    @staticmethod
    def from_record(record: Any) -> ReadTotals | None:
        """Parse a record of `to_record`; None for anything else."""
        if not isinstance(record, Mapping):
            return None
        first, numbers, tokens = (record.get(name) for name in ("since", "numbers", "tokens"))
        if not isinstance(first, int) or first < 0:
            return None
        try:
            return ReadTotals(first, ReadSums(int(numbers, 16) & MASK, int(tokens, 16) & MASK))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return None


@lru_cache(maxsize=8)
def _multipliers(length: int) -> NDArray[np.uint64]:
    return _mix(np.arange(length, dtype=np.uint64) ^ np.uint64(_TOKEN_KEY))


def _hash_numbers(numbers: NDArray[np.uint64]) -> int:
    return int(_mix(numbers ^ np.uint64(_NUMBER_KEY)).sum())


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's finaliser of each number."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
