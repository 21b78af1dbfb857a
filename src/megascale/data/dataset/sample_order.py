"""Pure functions of the sample number: a pseudo-random order without a table, and weighted blends of files.

**Permutation.** A Feistel network permutes the numbers below the next power of four; walking its cycles until a number
falls below n turns that into a permutation of 0..n-1 (Black and Rogaway 2002, "Ciphers with arbitrary finite domains",
method 2). It takes fewer than four tries per number on average. It is not cryptography, only a well-mixed order that is
the same everywhere.

**Blend.** After any number k of samples, a file of weight w has given k x w samples to within less than one. That is
the fairness of P-fair scheduling (Baruah, Cohen, Plaxton, Varvel 1996): the j-th sample of a file must lie among the
samples floor((j - 1) / w) + 1 .. ceil(j / w), and taking the earliest deadline first meets all of these windows.

So that sample k does not need all before it, the sequence is cut into blocks, and the counts at a block's end are a
pure function of the block's number. At a boundary each file stands at floor(k x w) or one more. The files that are one
ahead are the result of a run of one block up to the boundary, begun with the earliest deadlines ahead. With that
beginning no deadline is missed: the samples due by y that begin after the boundary T number at most y - T. Because a
run reached the boundary's state, a run of the block before can end in it too. A block must be longer than the longest
window, or a file could be one ahead at a boundary and not at the next. Arithmetic is in whole numbers, exact for the
weights as given.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import lcm

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS = 8
_MASK = (1 << 64) - 1
_BLOCK = 1024
# For smaller weights, blocks (and the wait for one) would grow long: 2^18 samples take about a second.
SMALLEST = 1e-5


def mix(value: int) -> int:
    """Return SplitMix64's finaliser of a 64-bit number."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """Return one 64-bit key of several whole numbers; their order matters."""
    state = 0
    for part in parts:
        state = mix(state ^ (part & _MASK))
    return state


def permute(positions: ArrayLike, n: int, seed: int) -> NDArray[np.int64]:
    """Return the images of `positions` (all in 0..n-1, any shape) under the permutation that `seed` selects.

    For fixed n and seed this is a bijection of 0..n-1. Raises ValueError for a position outside.
    """
    x = np.array(positions, dtype=np.int64)
    if x.size and (x.min() < 0 or x.max() >= n):
        raise ValueError(f"positions {x.min()}..{x.max()} are not all in 0..{n - 1}")
    half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    keys = [np.uint64(mix(seed ^ mix(r))) for r in range(_ROUNDS + 1)]
    flat = x.reshape(-1).view(np.uint64)
    outside = np.arange(flat.size)
    while outside.size:
        images = _network(flat[outside], half, keys)
        flat[outside] = images
        outside = outside[images >= n]
    return x


def _network(x: NDArray[np.uint64], half: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """Apply an addition modulo the domain and a balanced Feistel network to numbers of 2 x half bits.

    Feistel networks alone make even permutations only (from two-bit halves on), which is visible in small orders.
    """
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    x = (x + keys[0]) & np.uint64((1 << 2 * half) - 1)
    high, low = x >> width, x & mask
    for k in keys[1:]:
        f = (low ^ k) * np.uint64(0xBF58476D1CE4E5B9)
        f = (f ^ (f >> np.uint64(29)) ^ k) * np.uint64(0x94D049BB133111EB)
        high, low = low, high ^ ((f ^ (f >> np.uint64(32))) & mask)
    return (high << width) | low


class Blend:
    """The order in which files take turns.

    Args:
        weights: positive numbers, one per file; only their proportions matter. None below SMALLEST of their sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        fractions = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(fraction.denominator for fraction in fractions))
        self._shares = [int(fraction * scale) for fraction in fractions]
        self._total = sum(self._shares)
        longest_window = -(-self._total // min(self._shares)) + 1
        self._size = max(_BLOCK, 1 << longest_window.bit_length())
        self._block = lru_cache(maxsize=8)(self._make_block)
        self._ahead = lru_cache(maxsize=16)(self._find_ahead)

    def assign(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the file of samples `first` and following, and the number within the file: int64 [count, 2]."""
        rows = np.empty((count, 2), dtype=np.int64)
        sample = first
        while sample < first + count:
            block, offset = divmod(sample, self._size)
            stop = min(self._size, offset + first + count - sample)
            rows[sample - first : sample - first + stop - offset] = self._block(block)[offset:stop]
            sample += stop - offset
        return rows

    def _make_block(self, block: int) -> NDArray[np.int64]:
        """Return file and number within the file of one block's samples: int64 [block size, 2]."""
        start = block * self._size
        ahead = self._ahead(block)
        counts = [self._whole_share(file, start) + (file in ahead) for file in range(len(self._shares))]
        rows = np.empty((self._size, 2), dtype=np.int64)
        for row, file in enumerate(self._schedule(start, ahead, self._ahead(block + 1))):
            rows[row] = file, counts[file]
            counts[file] += 1
        return rows

    def _find_ahead(self, block: int) -> frozenset[int]:
        """Return the files that stand one above the whole part of their share when a block begins."""
        end = block * self._size
        if end == 0:
            return frozenset()
        start = end - self._size
        ahead = self._earliest(start)
        counts = np.bincount(self._schedule(start, ahead, None), minlength=len(self._shares)).tolist()
        return frozenset(
            file
            for file, count in enumerate(counts)
            if self._whole_share(file, start) + (file in ahead) + count > self._whole_share(file, end)
        )

    def _whole_share(self, file: int, samples: int) -> int:
        """Return the whole part of a file's share of the first `samples` samples."""
        return samples * self._shares[file] // self._total

    def _earliest(self, samples: int) -> frozenset[int]:
        """Return the files with the earliest deadlines among those with a fractional share of `samples` samples.

        They are as many as the fractions add up to.
        """
        fractional = [file for file, share in enumerate(self._shares) if samples * share % self._total]
        by_deadline = sorted(
            fractional, key=lambda file: (self._deadline(file, self._whole_share(file, samples) + 1), file)
        )
        remainders = sum(samples * self._shares[file] % self._total for file in fractional)
        return frozenset(by_deadline[: remainders // self._total])

    def _deadline(self, file: int, j: int) -> int:
        """Return the last sample (from 1) that may be the file's j-th."""
        return -(-j * self._total // self._shares[file])

    def _window(self, file: int, j: int, stop: int, end: frozenset[int] | None) -> tuple[int, int, int] | None:
        """Return (first sample that the file's j-th may be, last, file); None if it is not before `stop`."""
        begin = (j - 1) * self._total // self._shares[file] + 1
        deadline = self._deadline(file, j)
        if end is None or deadline <= stop:
            return begin, deadline, file
        # The sample may come in this block or after it; `end` decides.
        crosses = j == self._whole_share(file, stop) + 1
        if crosses and file in end:
            return (begin, stop, file)
        return None

    def _schedule(self, start: int, ahead: frozenset[int], end: frozenset[int] | None) -> list[int]:
        """Return the files of a block's samples by earliest deadline; with `end`, exactly these files end ahead."""
        stop = start + self._size
        numbers = [self._whole_share(file, start) + 1 + (file in ahead) for file in range(len(self._shares))]
        windows = [self._window(file, j, stop, end) for file, j in enumerate(numbers)]
        waiting = [window for window in windows if window is not None]
        heapify(waiting)
        ready: list[tuple[int, int]] = []
        files = []
        for sample in range(start + 1, stop + 1):
            while waiting and waiting[0][0] <= sample:
                _, deadline, file = heappop(waiting)
                heappush(ready, (deadline, file))
            _, file = heappop(ready)
            files.append(file)
            numbers[file] += 1
            window = self._window(file, numbers[file], stop, end)
            if window is not None:
                heappush(waiting, window)
        return files
