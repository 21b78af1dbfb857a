"""Pure functions of the sample number: a pseudo-random order without a table, and weighted blends of files.

**Permutation.** A Feistel network permutes the numbers below the next power of four. Applying the network again until
the result is below n turns this into a permutation of 0..n-1 (Black and Rogaway 2002, "Ciphers with arbitrary finite
domains", method 2). A number needs fewer than four applications on average. The order is well mixed and the same on all
machines, but not cryptographically secure.

**Blend.** Weights add up to 1. Among the first k samples, a file of weight w has k x w samples, to within less than
one. That is the fairness of P-fair scheduling (Baruah, Cohen, Plaxton, Varvel 1996): the j-th sample of a file must lie
in its window, samples floor((j - 1) / w) + 1 .. ceil(j / w). Scheduling the earliest deadline first meets all windows.

To find sample k without scheduling all samples before it, the sequence is cut into blocks, whose first states are pure
functions of the block's number. At a block's start after k samples, each file has floor(k x w) samples or one more. The
files with one more are *ahead*. A block's first state is found in two steps:

1. Assume that at the start T of the previous block the files with the earliest deadlines are ahead, and schedule that
   block. No deadline is missed, because for every y at most y - T samples have their windows within T + 1 .. y. The
   files that are ahead at its end are ahead at the start of the block.
2. Schedule the previous block again from its own first state, with the constraint to end with these files ahead.

A block is longer than the longest window, so that a window crosses at most one boundary.

Arithmetic is in integers, exact for the weights as given.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import lcm

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS = 8  # of the Feistel network
_MASK = (1 << 64) - 1
_MIN_BLOCK_SIZE = 1024
# Smallest share of a file in a blend. A block of samples grows with the inverse of the smallest share, and scheduling
# 2^18 samples takes about a second.
MIN_WEIGHT_SHARE = 1e-5


def mix(value: int) -> int:
    """Return SplitMix64's finaliser of a 64-bit number."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """Return a 64-bit key of several integers; their order matters."""
    state = 0
    for part in parts:
        state = mix(state ^ (part & _MASK))
    return state


def permute(positions: ArrayLike, n: int, seed: int) -> NDArray[np.int64]:
    """Return `positions` under the pseudo-random permutation of 0..n-1 that `seed` selects.

    Args:
        positions: integers in 0..n-1, of any shape.
        n: number of permuted positions.

    Raises ValueError for a position outside 0..n-1.
    """
    x = np.array(positions, dtype=np.int64)
    if x.size and (x.min() < 0 or x.max() >= n):
        raise ValueError(f"positions {x.min()}..{x.max()} are not all in 0..{n - 1}")
    half_bits = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    keys = [np.uint64(mix(seed ^ mix(index))) for index in range(_ROUNDS + 1)]
    flat = x.reshape(-1).view(np.uint64)
    outside = np.arange(flat.size)
    while outside.size:
        images = _apply_network(flat[outside], half_bits, keys)
        flat[outside] = images
        outside = outside[images >= n]
    return x


def _apply_network(x: NDArray[np.uint64], half_bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """Permute numbers of 2 x half_bits bits: add the first key, then apply a balanced Feistel network.

    The addition is needed because a Feistel network with halves of two or more bits makes only even permutations, which
    would show in short orders.
    """
    width, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    x = (x + keys[0]) & np.uint64((1 << 2 * half_bits) - 1)
    high, low = x >> width, x & mask
    for k in keys[1:]:
        f = (low ^ k) * np.uint64(0xBF58476D1CE4E5B9)
        f = (f ^ (f >> np.uint64(29)) ^ k) * np.uint64(0x94D049BB133111EB)
        high, low = low, high ^ ((f ^ (f >> np.uint64(32))) & mask)
    return (high << width) | low


class Blend:
    """The order in which files take turns.

    Args:
        weights: positive numbers, one per file, each at least MIN_WEIGHT_SHARE of their sum. Only their proportions
            matter.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        fractions = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(fraction.denominator for fraction in fractions))
        self._weights = [int(fraction * scale) for fraction in fractions]
        self._total = sum(self._weights)
        longest_window = -(-self._total // min(self._weights)) + 1
        self._block_size = max(_MIN_BLOCK_SIZE, 1 << longest_window.bit_length())
        self._get_block = lru_cache(maxsize=8)(self._make_block)
        self._get_files_ahead = lru_cache(maxsize=16)(self._find_ahead)

    def assign_files(self, first: int, count: int) -> NDArray[np.int64]:
        """Return file and number within the file of each of `count` samples from `first` on, int64 [count, 2]."""
        rows = np.empty((count, 2), dtype=np.int64)
        sample = first
        while sample < first + count:
            block, offset = divmod(sample, self._block_size)
            stop = min(self._block_size, offset + first + count - sample)
            rows[sample - first : sample - first + stop - offset] = self._get_block(block)[offset:stop]
            sample += stop - offset
        return rows

    def _make_block(self, block: int) -> NDArray[np.int64]:
        """Return file and number within the file of one block's samples: int64 [block size, 2]."""
        start = block * self._block_size
        counts = self._count_samples(start, self._get_files_ahead(block))
        rows = np.empty((self._block_size, 2), dtype=np.int64)
        files = self._schedule(start, self._get_files_ahead(block), self._get_files_ahead(block + 1))
        for row, file in enumerate(files):
            rows[row] = file, counts[file]
            counts[file] += 1
        return rows

    def _find_ahead(self, block: int) -> frozenset[int]:
        """Return the files that are ahead when a block begins: with one sample more than their share rounded down."""
        end = block * self._block_size
        if end == 0:
            return frozenset()
        start = end - self._block_size
        ahead = self._find_earliest_deadlines(start)
        counts_in_block = np.bincount(self._schedule(start, ahead, None), minlength=len(self._weights)).tolist()
        counts = self._count_samples(start, ahead)
        files_ahead = []
        for file, count_in_block in enumerate(counts_in_block):
            if counts[file] + count_in_block > self._floor_share(file, end):
                files_ahead.append(file)
        return frozenset(files_ahead)

    def _count_samples(self, samples: int, ahead: frozenset[int]) -> list[int]:
        """Return each file's samples among the first `samples` samples, where the files in `ahead` are ahead."""
        return [self._floor_share(file, samples) + int(file in ahead) for file in range(len(self._weights))]

    def _floor_share(self, file: int, samples: int) -> int:
        """Return a file's share of the first `samples` samples, rounded down."""
        return samples * self._weights[file] // self._total

    def _find_earliest_deadlines(self, samples: int) -> frozenset[int]:
        """Return the files that are ahead after `samples` samples if the earliest deadlines come first.

        Only a file whose share has a fraction can be ahead. The number of files ahead is the sum of the fractions.
        """
        fractional = [file for file, weight in enumerate(self._weights) if samples * weight % self._total]
        by_deadline = sorted(
            fractional, key=lambda file: (self._find_deadline(file, self._floor_share(file, samples) + 1), file)
        )
        remainders = sum(samples * self._weights[file] % self._total for file in fractional)
        return frozenset(by_deadline[: remainders // self._total])

    def _find_deadline(self, file: int, j: int) -> int:
        """Return the last sample, counted from 1, that may be the file's j-th sample."""
        return -(-j * self._total // self._weights[file])

    def _find_window(
        self, file: int, j: int, stop: int, end_ahead: frozenset[int] | None
    ) -> tuple[int, int, int] | None:
        """Return (first sample, last sample, file) of the window of a file's j-th sample.

        Args:
            stop: last sample of the block.
            end_ahead: files that must be ahead at the end of the block; None: no constraint.

        Returns None if the j-th sample must come after the block.
        """
        begin = (j - 1) * self._total // self._weights[file] + 1
        deadline = self._find_deadline(file, j)
        if end_ahead is None or deadline <= stop:
            return begin, deadline, file
        # The window crosses the end of the block. The sample is in the block if and only if the file must end ahead.
        crosses_end = j == self._floor_share(file, stop) + 1
        if crosses_end and file in end_ahead:
            return begin, stop, file
        return None

    def _schedule(self, start: int, ahead: frozenset[int], end_ahead: frozenset[int] | None) -> list[int]:
        """Return the file of each sample of a block, scheduled by earliest deadline.

        Args:
            start: samples before the block.
            ahead: files that are ahead at its beginning.
            end_ahead: files that must be ahead at its end; None: no constraint.
        """
        stop = start + self._block_size
        next_numbers = [count + 1 for count in self._count_samples(start, ahead)]
        windows = [self._find_window(file, j, stop, end_ahead) for file, j in enumerate(next_numbers)]
        waiting = [window for window in windows if window is not None]  # heap by first sample
        heapify(waiting)
        ready: list[tuple[int, int]] = []  # heap of (deadline, file), whose windows have begun
        files = []
        for sample in range(start + 1, stop + 1):
            while waiting and waiting[0][0] <= sample:
                _, deadline, file = heappop(waiting)
                heappush(ready, (deadline, file))
            _, file = heappop(ready)
            files.append(file)
            next_numbers[file] += 1
            window = self._find_window(file, next_numbers[file], stop, end_ahead)
            if window is not None:
                heappush(waiting, window)
        return files
