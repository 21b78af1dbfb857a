"""Checksums of the samples that ranks have read, which prove which samples were trained. No torch.

For each sample that its loader passes to the engine, a rank adds two 64-bit hashes to its sums: a hash of the sample's
number, and a hash of number and tokens. The order of samples and the rank that reads a sample do not change the sum
over all ranks, so the sum is the same for every layout.

The engine reduces the sums together with the loss (train/engine.py), and the ledger records their running totals. The
difference of two lines' totals proves the samples read between the lines, even if lines between them were lost.
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
_LOWER_HALF = (1 << 32) - 1
_SAMPLES_PER_READ = 256  # samples that a check of the ledger reads at a time
_NUMBERS_PER_HASH = 1 << 20  # sample numbers that are hashed at a time
# Independent keys of the three hashes; the constant is arbitrary.
_NUMBER_KEY = derive_key(0x5A3B1E5, 0)
_TOKEN_KEY = derive_key(0x5A3B1E5, 1)
_SAMPLE_KEY = derive_key(0x5A3B1E5, 2)


@dataclass(frozen=True)
class ReadSums:
    """Sums of hashes over samples, modulo 2^64.

    Attributes:
        numbers: sum of the hashes of the samples' numbers.
        tokens: sum of the hashes of the samples' numbers and tokens.
    """

    numbers: int = 0
    tokens: int = 0

    def __add__(self, sums: ReadSums) -> ReadSums:
        return ReadSums((self.numbers + sums.numbers) & MASK, (self.tokens + sums.tokens) & MASK)

    def __sub__(self, sums: ReadSums) -> ReadSums:
        return ReadSums((self.numbers - sums.numbers) & MASK, (self.tokens - sums.tokens) & MASK)


def sum_samples(first: int, tokens_SB: NDArray[Any]) -> ReadSums:
    """Return the sums of consecutive samples from number `first` on, whose tokens are the columns of `tokens_SB`."""
    numbers = np.arange(first, first + tokens_SB.shape[1], dtype=np.uint64)
    contents = _make_multipliers(len(tokens_SB)) @ tokens_SB.astype(np.uint64)
    sample_hashes = _mix(contents ^ _mix(numbers ^ np.uint64(_SAMPLE_KEY)))
    return ReadSums(_hash_numbers(numbers), int(sample_hashes.sum()))


def sum_numbers(first: int, stop: int) -> int:
    """Return ReadSums.numbers of samples first .. stop - 1, without reading their tokens."""
    total = 0
    for start in range(first, stop, _NUMBERS_PER_HASH):
        total += _hash_numbers(np.arange(start, min(start + _NUMBERS_PER_HASH, stop), dtype=np.uint64))
    return total & MASK


def split_range(first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield samples first .. stop - 1 as (first sample, count), with counts small enough to read at once."""
    for start in range(first, stop, _SAMPLES_PER_READ):
        yield start, min(_SAMPLES_PER_READ, stop - start)


class ReadChecksum:
    """Sums of the samples that one rank has read since the last `take_sums`."""

    def __init__(self) -> None:
        self._sums = ReadSums()
        self._count = 0

    def add(self, first: int, tokens_SB: NDArray[Any]) -> None:
        """Add consecutive samples from number `first` on, whose tokens are the columns of `tokens_SB`."""
        self._sums += sum_samples(first, tokens_SB)
        self._count += tokens_SB.shape[1]

    def take_sums(self) -> list[float]:
        """Return five numbers and reset them: the count of samples, then lower and upper half of each of the two sums.

        The sum of halves over all ranks is exact in float64, while a sum of 64-bit hashes would be rounded.
        """
        sums, count = self._sums, self._count
        self._sums = ReadSums()
        self._count = 0
        values = [count]
        for hash_sum in (sums.numbers, sums.tokens):
            values += [hash_sum & _LOWER_HALF, hash_sum >> 32]
        return [float(value) for value in values]


def sum_step(totals: Sequence[float], count: int) -> ReadSums:
    """Return the sums of a step's samples.

    Several ranks read each sample (tensor-parallel ranks, first and last stage), so the totals are the sums times the
    number of readers. If readers read different tokens, the quotient does not match the files.

    Args:
        totals: results of `take_sums`, summed over all ranks.
        count: samples of the step.
    """
    read_count, *halves = map(int, totals)
    readers = max(1, round(read_count / count))
    numbers = halves[0] + (halves[1] << 32)
    tokens = halves[2] + (halves[3] << 32)
    return ReadSums(numbers // readers & MASK, tokens // readers & MASK)


@dataclass
class ReadTotals:
    """Running totals of all samples from number `first` on. Checkpoints and the ledger hold them."""

    first: int = 0
    sums: ReadSums = ReadSums()

    def to_record(self) -> dict[str, Any]:
        """Return the totals as a dictionary for JSON."""
        return {"since": self.first, "numbers": f"{self.sums.numbers:016x}", "tokens": f"{self.sums.tokens:016x}"}

    @staticmethod
    def from_record(record: Any) -> ReadTotals | None:
        """Return the totals of a dictionary from `to_record`, or None for any other value."""
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
def _make_multipliers(length: int) -> NDArray[np.uint64]:
    """Return a pseudo-random factor per position in a sample, so that the order of tokens changes their hash."""
    return _mix(np.arange(length, dtype=np.uint64) ^ np.uint64(_TOKEN_KEY))


def _hash_numbers(numbers: NDArray[np.uint64]) -> int:
    return int(_mix(numbers ^ np.uint64(_NUMBER_KEY)).sum())


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's finaliser of each number."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
