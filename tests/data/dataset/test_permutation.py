"""The table-free order: a bijection for every size, the same everywhere, and well mixed."""

from __future__ import annotations

import hashlib
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.data.dataset.sample_order import derive_key, permute

FIRST_TEN = [4, 5, 0, 1, 7, 2, 9, 8, 6, 3]
KEY_1234_0 = 11391823781456656621


@given(n=st.integers(1, 3000), seed=st.integers(0, (1 << 64) - 1))
@settings(max_examples=150, deadline=None)
def test_is_a_bijection(n: int, seed: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed)), np.arange(n))


@given(n=st.integers(1, 1 << 62), seed=st.integers(0, (1 << 64) - 1), data=st.data())
@settings(max_examples=100, deadline=None)
def test_huge_sizes_stay_inside_and_distinct(n: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=50))
    out = permute(positions, n, seed)
    assert len(set(out.tolist())) == len(positions)
    assert all(0 <= x < n for x in out)


def test_positions_in_parts_equal_the_whole() -> None:
    full = permute(np.arange(1000), 1000, 5)
    assert [int(permute([i], 1000, 5)[0]) for i in range(1000)] == full.tolist()
    assert permute(np.arange(1000).reshape(10, 100), 1000, 5).ravel().tolist() == full.tolist()


def test_values_are_the_same_on_every_machine() -> None:
    """A changed order would make old runs train samples twice after a resume: never change these."""
    assert permute(np.arange(10), 10, 1234).tolist() == FIRST_TEN
    assert derive_key(1, 2) != derive_key(2, 1)
    assert derive_key(1234, 0) == KEY_1234_0


def test_orders_at_the_edges_of_the_domain_never_change() -> None:
    """The network permutes the next power of four, so that the sizes around one tell how it is chosen."""
    digest = hashlib.blake2b(digest_size=8)
    for n in list(range(1, 20)) + [63, 64, 65, 66, 255, 256, 257, 1023, 1024, 1025]:
        digest.update(permute(np.arange(n), n, 7).tobytes())
    assert digest.hexdigest() == "114e542a29a53d41"


def test_positions_outside_are_refused() -> None:
    for bad in ([10], [-1]):
        with pytest.raises(ValueError, match=r"0\.\.9"):
            permute(bad, 10, 0)


def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("n", [3, 4, 5])
def test_small_orders_come_about_equally_often(n: int) -> None:
    """All n! orders over many keys; the bound is ten standard deviations above a fair draw's mean."""
    orders = {order: i for i, order in enumerate(permutations(range(n)))}
    trials = (60 if n < 5 else 20) * len(orders)
    counts = np.zeros(len(orders))
    for seed in range(trials):
        counts[orders[tuple(permute(np.arange(n), n, derive_key(seed, 0)).tolist())]] += 1
    freedom = len(orders) - 1
    assert chi_square(counts, trials / len(orders)) < freedom + 10 * (2 * freedom) ** 0.5


def test_every_place_gets_every_value_and_neighbours_part() -> None:
    n, trials = 50, 2000
    rows = np.stack([permute(np.arange(n), n, derive_key(seed, 3)) for seed in range(trials)])
    counts = np.stack([np.bincount(rows[:, location], minlength=n) for location in range(n)])
    freedom = (n - 1) ** 2
    assert chi_square(counts, trials / n) < freedom + 6 * (2 * freedom) ** 0.5
    steps = np.bincount((rows[:, 1:] - rows[:, :-1]).ravel() % n, minlength=n)[1:]
    assert chi_square(steps, steps.sum() / (n - 1)) < (n - 2) + 6 * (2 * (n - 2)) ** 0.5
