"""Checksums of the samples that ranks have read: what was trained, as against what was meant to be. No torch.

A rank adds up two 64-bit hashes of each sample that its loader hands to the engine: one of the sample's number, one of
its number and tokens. Sums do not depend on the order or on which rank reads what, so the whole world's sums are the
same for every layout. They travel with the loss (train/engine.py), and the ledger keeps their running totals: those of
any two lines prove what was read between them, also where the lines between were lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.data.dataset.permutation import derive_key

MASK = (1 << 64) - 1
_HALF = (1 << 32) - 1
_ROWS = 256  # samples that are read at a time to be checked
_NUMBERS = 1 << 20  # sample numbers that are hashed at a time
_OF_NUMBER, _OF_TOKENS, _OF_SAMPLE = (derive_key(0x5A3B1E5, i) for i in range(3))


@dataclass(frozen=True)
class ReadSums:
    """Sums over samples, modulo 2^64. numbers: of hashes of their numbers; tokens: of their numbers and tokens."""

    numbers: int = 0
    tokens: int = 0

    def __add__(self, other: ReadSums) -> ReadSums:
        return ReadSums((self.numbers + other.numbers) & MASK, (self.tokens + other.tokens) & MASK)

    def __sub__(self, other: ReadSums) -> ReadSums:
        return ReadSums((self.numbers - other.numbers) & MASK, (self.tokens - other.tokens) & MASK)


def sums_of(first: int, tokens_SB: NDArray[Any]) -> ReadSums:
    """Return the sums of samples number `first` and following, whose tokens are the columns of `tokens_SB`."""
    numbers = np.arange(first, first + tokens_SB.shape[1], dtype=np.uint64)
    contents = _multipliers(len(tokens_SB)) @ tokens_SB.astype(np.uint64)
    samples = _mix(contents ^ _mix(numbers ^ np.uint64(_OF_SAMPLE)))
    return ReadSums(_hash_numbers(numbers), int(samples.sum()))


def sum_of_numbers(first: int, stop: int) -> int:
    """Return ReadSums.numbers of samples first .. stop - 1, whose tokens need not be known."""
    total = 0
    for start in range(first, stop, _NUMBERS):
        total += _hash_numbers(np.arange(start, min(start + _NUMBERS, stop), dtype=np.uint64))
    return total & MASK


def parts_of(first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Return samples first .. stop - 1 as (first, count) of parts that are small enough to be read at once."""
    return ((start, min(_ROWS, stop - start)) for start in range(first, stop, _ROWS))


class ReadChecksum:
    """What one rank has read since the last `take`."""

    def __init__(self) -> None:
        self._sums, self._count = ReadSums(), 0

    def add(self, first: int, tokens_SB: NDArray[Any]) -> None:
        """Count samples `first` and following, whose tokens are the columns of `tokens_SB`."""
        self._sums += sums_of(first, tokens_SB)
        self._count += tokens_SB.shape[1]

    def take(self) -> list[float]:
        """Return what was read as numbers whose sum over ranks float64 holds exactly, and begin anew: the count of
        samples, then the lower and upper half of each sum."""
        sums, count = self._sums, self._count
        self._sums, self._count = ReadSums(), 0
        halves = [half for value in (sums.numbers, sums.tokens) for half in (value & _HALF, value >> 32)]
        return [float(count), *map(float, halves)]


def sums_of_step(totals: Sequence[float], count: int) -> ReadSums:
    """Return the sums of a step's `count` samples, from what `take` gave, summed over all ranks.

    Several ranks read each sample (tensor-parallel ranks, first and last stage). Their sums agree, so the totals are
    multiples of how many they are; if they do not agree, no sample's hash comes out.
    """
    read, *halves = (int(total) for total in totals)
    readers = max(1, round(read / count))
    numbers, tokens = (halves[i] + (halves[i + 1] << 32) for i in (0, 2))
    return ReadSums(numbers // readers & MASK, tokens // readers & MASK)


@dataclass
class ReadTotals:
    """Running totals of all samples from number `since` on, which checkpoints and the ledger keep."""

    first: int = 0
    sums: ReadSums = ReadSums()

    def to_record(self) -> dict[str, Any]:
        """Return the totals as JSON holds them."""
        return {"since": self.first, "numbers": f"{self.sums.numbers:016x}", "tokens": f"{self.sums.tokens:016x}"}

    @staticmethod
    def from_record(record: Any) -> ReadTotals | None:
        """Return what `to_record` gave; None for anything else, as in a checkpoint of an older version."""
        if not isinstance(record, Mapping):
            return None
        since, numbers, tokens = (record.get(name) for name in ("since", "numbers", "tokens"))
        if not isinstance(since, int) or since < 0:
            return None
        try:
            return ReadTotals(since, ReadSums(int(numbers, 16) & MASK, int(tokens, 16) & MASK))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return None


@lru_cache(maxsize=8)
def _multipliers(length: int) -> NDArray[np.uint64]:
    return _mix(np.arange(length, dtype=np.uint64) ^ np.uint64(_OF_TOKENS))


def _hash_numbers(numbers: NDArray[np.uint64]) -> int:
    return int(_mix(numbers ^ np.uint64(_OF_NUMBER)).sum())


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's finaliser of each number."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
