"""A pseudo-random order of n things that needs no table: position -> index in O(1) memory.

A Feistel network permutes the numbers below the next power of four; walking its cycles until a number falls below
n turns that into a permutation of 0..n-1 (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", method 2).
Less than four tries a number on average. Not cryptography: only a well-mixed order that is the same everywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS = 8
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """SplitMix64's finaliser: a well-mixed 64-bit number of a 64-bit number."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """One 64-bit key of several whole numbers; their order matters."""
    state = 0
    for part in parts:
        state = mix(state ^ (part & _MASK))
    return state


def permute(positions: ArrayLike, n: int, seed: int) -> NDArray[np.int64]:
    """Where each of `positions` (all in 0..n-1) goes in the order that `seed` gives of n things.

    For fixed n and seed a bijection of 0..n-1. Any shape; int64 out. ValueError for a position outside.
    """
    x = np.array(positions, dtype=np.int64)
    if x.size and (x.min() < 0 or x.max() >= n):
        raise ValueError(f"positions {x.min()}..{x.max()} are not all in 0..{n - 1}")
    half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    keys = [np.uint64(mix(seed ^ mix(r))) for r in range(_ROUNDS + 1)]
    flat = x.reshape(-1).view(np.uint64)
    todo = np.arange(flat.size)
    while todo.size:
        walked = _network(flat[todo], half, keys)
        flat[todo] = walked
        todo = todo[walked >= n]
    return x


def _network(x: NDArray[np.uint64], half: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """Addition modulo the domain, then a balanced Feistel network, on 2 x half bits.

    Feistel networks alone make even permutations only (from two-bit halves on), which shows in small orders.
    """
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    x = (x + keys[0]) & np.uint64((1 << 2 * half) - 1)
    left, right = x >> width, x & mask
    for k in keys[1:]:
        f = (right ^ k) * np.uint64(0xBF58476D1CE4E5B9)
        f = (f ^ (f >> np.uint64(29)) ^ k) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((f ^ (f >> np.uint64(32))) & mask)
    return (left << width) | right
