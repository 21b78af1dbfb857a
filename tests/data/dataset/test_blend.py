"""Weighted blends: each file within one sample of its share at every prefix, exactly, and pure in the number."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale import config
from megascale.data.dataset import sample_order as blend
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.dataset.sample_order import Blend
from megascale.data.dataset.samples import SampleSource
from megascale.errors import ConfigError
from tests.data.sample_sources import open_samples

# No weight below 1/500 of the whole: blocks, and so the tests, stay short.
WEIGHTS = st.lists(st.floats(0.001, 1000, allow_subnormal=False), min_size=1, max_size=8).map(
    lambda ws: [max(w, sum(ws) / 500) for w in ws]
)


def worst_error(weights: list[float], locations: np.ndarray, first: int = 0) -> Fraction:
    """Largest distance of any file from its share over all prefixes, in exact arithmetic.

    A file that is not drawn in `places` has no number to count from when these do not begin at 0; it is left out.
    """
    exact = [Fraction(str(w)) for w in weights]
    worst = Fraction(0)
    for file, w in enumerate(exact):
        local = locations[:, 0] == file
        if first and not local.any():
            continue
        before = int(locations[local, 1][0]) if local.any() else 0
        share = w / sum(exact)
        counts = local.cumsum()
        worst = max(worst, *(abs(before + int(c) - (first + k) * share) for k, c in enumerate(counts, 1)))
    return worst


@given(weights=WEIGHTS, data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_prefix_is_within_one_sample(weights: list[float], data: st.DataObject, monkeypatch) -> None:
    monkeypatch.setattr(blend, "_MIN_BLOCK_SIZE", data.draw(st.sampled_from([1, 64])))
    order = Blend(weights)
    locations = order.assign_files(0, 3 * order._block_size + 5)
    assert worst_error(weights, locations) < 1
    for file in range(len(weights)):
        numbers = locations[locations[:, 0] == file, 1]
        assert np.array_equal(numbers, np.arange(len(numbers)))


@given(weights=WEIGHTS, start=st.integers(0, 10**15))
@settings(max_examples=15, deadline=None)
def test_far_into_a_run_it_is_as_exact(weights: list[float], start: int) -> None:
    assert worst_error(weights, Blend(weights).assign_files(start, 600), start) < 1


@given(weights=WEIGHTS, cuts=st.lists(st.integers(1, 900), min_size=1, max_size=6), first=st.integers(0, 5000))
@settings(max_examples=20, deadline=None)
def test_any_cutting_gives_the_same_turns(weights: list[float], cuts: list[int], first: int) -> None:
    full = Blend(weights).assign_files(first, sum(cuts))
    repeated = Blend(weights)
    at = first
    for count in cuts:
        assert np.array_equal(repeated.assign_files(at, count), full[at - first : at - first + count])
        at += count


def test_values_are_the_same_on_every_machine() -> None:
    """A changed order would make old runs train samples twice after a resume: never change these."""
    assert Blend([0.5, 0.3, 0.2]).assign_files(0, 10)[:, 0].tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
    assert np.array_equal(Blend([5, 3, 2]).assign_files(0, 3000), Blend([0.5, 0.3, 0.2]).assign_files(0, 3000))


@pytest.mark.parametrize("total", [2, 1000, 1022, 1024, 1025, 2048, 5000])
def test_a_block_is_longer_than_the_longest_wait(total: int) -> None:
    """Else a file could be one sample ahead at a boundary and not at the next."""
    order = Blend([1, total - 1])
    longest_window = total + 1
    assert longest_window < order._block_size <= max(1024, 2 * longest_window)
    assert worst_error([1, total - 1], order.assign_files(0, order._block_size + 700)) < 1


def source(tmp_path: Path, weights: list[float], sizes: list[int], seed: int = 3) -> SampleSource:
    for i, size in enumerate(sizes):
        with IndexedWriter(tmp_path / f"f{i}", "uint16") as writer:
            writer.add(np.arange(size * 4 + 1) + 1000 * i)
    tree = {
        "model": {"sequence_length": 4},
        "data": {"train": [str(tmp_path / f"f{i}") for i in range(len(sizes))], "weights": weights},
        "train": {"seed": seed},
    }
    return open_samples(config.from_tree(tree))


def test_blended_samples_read_each_file_epoch_by_epoch(tmp_path: Path) -> None:
    samples = source(tmp_path, [3, 1], [20, 7])
    ids, batch = samples.find_sample_ids(0, 400), samples.read_tokens(0, 400)
    assert (batch[:, 0] == ids[:, 2] * 4 + 1000 * ids[:, 1]).all()
    assert np.bincount(ids[:, 1]).tolist() == [300, 100]
    for file, windows in ((0, 20), (1, 7)):
        local = ids[ids[:, 1] == file]
        for epoch in range(100 // windows):
            assert sorted(local[local[:, 0] == epoch][:, 2].tolist()) == list(range(windows))
    assert samples.count_passes(400) == [15, 100 / 7]
    assert samples.count_epochs(400) == 15
    assert np.array_equal(samples.find_sample_ids(123, 50), ids[123:173])


def test_a_files_own_order_does_not_depend_on_the_weights(tmp_path: Path) -> None:
    a = source(tmp_path, [3, 1], [20, 7]).find_sample_ids(0, 400)
    b = source(tmp_path, [1, 2], [20, 7]).find_sample_ids(0, 400)
    for file in (0, 1):
        x, y = a[a[:, 1] == file], b[b[:, 1] == file]
        n = min(len(x), len(y))
        assert np.array_equal(x[:n], y[:n])


def test_each_epoch_of_each_file_has_an_order_of_its_own(tmp_path: Path) -> None:
    """A model that meets its data in one order each epoch learns the order; files of one size share none either."""
    ids = source(tmp_path, [1, 1], [40, 40]).find_sample_ids(0, 320)
    orders = [
        tuple(ids[(ids[:, 0] == epoch) & (ids[:, 1] == file), 2].tolist()) for file in (0, 1) for epoch in range(4)
    ]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len(set(orders)) == 8
    second = source(tmp_path, [1, 1], [40, 40], seed=4).find_sample_ids(0, 320)
    assert not np.array_equal(second[:, 2], ids[:, 2])


@pytest.mark.parametrize(
    ("weights", "output"), [([1, 0], "positive"), ([1, float("nan")], "finite"), ([1], "one weight")]
)
def test_bad_weights(tmp_path: Path, weights: list[float], output: str) -> None:
    with pytest.raises(ConfigError, match=output):
        source(tmp_path, weights, [5, 5])
    with pytest.raises(ConfigError, match="less than 1e-05"):
        source(tmp_path, [1, 1e-6], [5, 5])
    assert source(tmp_path, [99999, 1], [5, 5]).windows == 10  # just large enough


@pytest.mark.parametrize(
    ("weights", "digest"), [([0.3, 0.6, 0.1], "1716639774296db9"), ([1, 2, 4, 9.5], "b504a776bc0f7a2a")]
)
def test_the_turns_of_files_never_change(weights: list[float], digest: str) -> None:
    """A run that goes on under a later version must read the samples that are due, so that this order is fixed."""
    locations = Blend(weights).assign_files(0, 5000)
    assert hashlib.blake2b(locations.tobytes(), digest_size=8).hexdigest() == digest
