"""Weighted blends: which file sample k comes from, and the how-manieth of that file it is.

After any number k of samples a file of weight w has given k x w samples to within less than one. That is the
fairness of P-fair scheduling (Baruah, Cohen, Plaxton, Varvel 1996): the j-th sample of a file must lie among the
samples floor((j - 1) / w) + 1 .. ceil(j / w), and taking the earliest deadline first meets all of these windows.

So that sample k does not need all before it, the sequence is cut into blocks, and what has been given at a block's
end is itself a pure function of the block's number. At a boundary each file stands at floor(k x w) or one more; which
files are one ahead is what a run of one block up to the boundary leaves, begun with the earliest deadlines ahead.
Beginning so, no deadline is ever missed (all that is due by y and begins after the boundary T adds up to at most
y - T samples); and because a run reached the boundary's state, a run of the block before can end in it too. A block
must be longer than the longest window, or a file could be one ahead at a boundary and not at the next. Arithmetic is
in whole numbers, exact for the weights as given.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import lcm

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1024
# Below this part of the whole, blocks (and the wait for one) would grow long: 2^18 samples take about a second.
SMALLEST = 1e-5


class Blend:
    """The order in which files take turns.

    Args:
        weights: positive numbers, one a file; only their proportions matter. None below SMALLEST of their sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        fractions = [Fraction(str(w)) for w in weights]
        scale = lcm(*(f.denominator for f in fractions))
        self._shares = [int(f * scale) for f in fractions]
        self._total = sum(self._shares)
        longest = -(-self._total // min(self._shares)) + 1
        self._size = max(_BLOCK, 1 << longest.bit_length())
        self._block = lru_cache(maxsize=8)(self._make_block)
        self._ahead = lru_cache(maxsize=16)(self._make_ahead)

    def assign(self, first: int, count: int) -> NDArray[np.int64]:
        """int64 [count, 2]: the file of samples first and following, and its number among that file's samples."""
        out = np.empty((count, 2), dtype=np.int64)
        at = first
        while at < first + count:
            block, offset = divmod(at, self._size)
            stop = min(self._size, offset + first + count - at)
            out[at - first : at - first + stop - offset] = self._block(block)[offset:stop]
            at += stop - offset
        return out

    def _make_block(self, block: int) -> NDArray[np.int64]:
        """int64 [block size, 2]: file and its sample's number, for one block."""
        start = block * self._size
        ahead = self._ahead(block)
        given = [start * share // self._total + (file in ahead) for file, share in enumerate(self._shares)]
        rows = np.empty((self._size, 2), dtype=np.int64)
        for row, file in enumerate(self._run(start, ahead, self._ahead(block + 1))):
            rows[row] = file, given[file]
            given[file] += 1
        return rows

    def _make_ahead(self, block: int) -> frozenset[int]:
        """Files that stand one above the whole part of their share when a block begins."""
        end = block * self._size
        if end == 0:
            return frozenset()
        start = end - self._size
        given = self._run(start, self._earliest(start), None)
        counts = np.bincount(given, minlength=len(self._shares)).tolist()
        ahead = self._earliest(start)
        return frozenset(
            file
            for file, share in enumerate(self._shares)
            if start * share // self._total + (file in ahead) + counts[file] > end * share // self._total
        )

    def _earliest(self, at: int) -> frozenset[int]:
        """Of the files with a broken share at `at`, as many as the parts add up to, those with the next deadlines."""
        broken = [file for file, share in enumerate(self._shares) if at * share % self._total]
        due = sorted(broken, key=lambda file: (self._due(file, at * self._shares[file] // self._total + 1), file))
        parts = sum(at * self._shares[file] % self._total for file in broken)
        return frozenset(due[: parts // self._total])

    def _due(self, file: int, j: int) -> int:
        """The last sample (from 1) that may be the file's j-th."""
        return -(-j * self._total // self._shares[file])

    def _run(self, start: int, ahead: frozenset[int], end: frozenset[int] | None) -> list[int]:
        """Files of the block's samples by earliest deadline; with `end`, so that just these files end ahead."""
        stop = start + self._size

        def window(file: int, j: int) -> tuple[int, int, int] | None:
            """(first sample that the file's j-th may be, last, file), None if it is not in this block."""
            begins, due = (j - 1) * self._total // self._shares[file] + 1, self._due(file, j)
            if end is not None and due > stop:
                # It may come in this block or after it: `end` says which.
                crosses = j == stop * self._shares[file] // self._total + 1
                return (begins, stop, file) if crosses and file in end else None
            return begins, due, file

        numbers = [start * share // self._total + 1 + (file in ahead) for file, share in enumerate(self._shares)]
        waiting = [w for file, j in enumerate(numbers) if (w := window(file, j))]
        heapify(waiting)
        ready: list[tuple[int, int]] = []
        out = []
        for sample in range(start + 1, stop + 1):
            while waiting and waiting[0][0] <= sample:
                _, due, file = heappop(waiting)
                heappush(ready, (due, file))
            _, file = heappop(ready)
            out.append(file)
            numbers[file] += 1
            following = window(file, numbers[file])
            if following:
                heappush(waiting, following)
        return out
