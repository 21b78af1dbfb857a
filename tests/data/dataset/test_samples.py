"""Sample order: every token once an epoch, pure in (seed, number), the same however it is asked for."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale import config
from megascale.config import Config
from megascale.data.dataset import held_out
from megascale.data.dataset.held_out import IGNORE, HeldOut
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.dataset.manifest import compute_bits_per_byte
from megascale.errors import ConfigError, DataError
from tests.data.sample_sources import open_samples


def write(prefix: Path, tokens: list[int], documents: int = 3) -> str:
    with IndexedWriter(prefix, "uint16") as writer:
        for part in np.array_split(np.array(tokens, dtype=np.int64), documents):
            writer.add(part)
    return str(prefix)


def configured(train: list[str], length: int = 8, seed: int = 1, **data) -> Config:
    tree = {"model": {"sequence_length": length}, "data": {"train": train, **data}, "train": {"seed": seed}}
    return config.from_tree(tree)


@given(tokens=st.integers(9, 400), length=st.integers(2, 8), epoch=st.integers(0, 3), shuffle=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_each_token_is_a_target_once_an_epoch(
    tmp_path: Path, tokens: int, length: int, epoch: int, shuffle: bool
) -> None:
    source = open_samples(configured([write(tmp_path / "t", list(range(tokens)))], length, shuffle=shuffle))
    batch = source.read_tokens(epoch * source.windows, source.windows)
    assert batch.dtype == np.int64
    assert batch.shape == ((tokens - 1) // length, length + 1)
    assert (np.diff(batch, axis=1) == 1).all()
    assert np.sort(batch[:, 1:].ravel()).tolist() == list(range(1, source.windows * length + 1))
    if not shuffle:
        assert (np.diff(batch[:, 0]) == length).all()


def test_files_share_an_epoch_and_ids_name_the_windows(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", list(range(100))), write(tmp_path / "b", list(range(1000, 1050)))
    source = open_samples(configured([a, b]))
    assert source.windows == 12 + 6
    assert source.count_epochs(27) == 1.5
    batch, ids = source.read_tokens(0, 40), source.find_sample_ids(0, 40)
    assert ids[:, 0].tolist() == [0] * 18 + [1] * 18 + [2] * 4
    assert (batch[:, 0] == np.where(ids[:, 1] == 1, 1000, 0) + 8 * ids[:, 2]).all()
    for epoch in (0, 1):
        rows = ids[18 * epoch : 18 * epoch + 18, 1:].tolist()
        assert sorted(rows) == [[0, w] for w in range(12)] + [[1, w] for w in range(6)]


@given(cuts=st.lists(st.integers(1, 30), min_size=1, max_size=10), first=st.integers(0, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
def test_any_cutting_into_batches_gives_the_same_samples(tmp_path: Path, cuts: list[int], first: int) -> None:
    source = open_samples(configured([write(tmp_path / "t", list(range(200)))]))
    full = source.read_tokens(first, sum(cuts))
    repeated = pickle.loads(pickle.dumps(source))
    at = first
    for count in cuts:
        assert np.array_equal(repeated.read_tokens(at, count), full[at - first : at - first + count])
        at += count


def test_epochs_and_seeds_differ(tmp_path: Path) -> None:
    path = write(tmp_path / "t", list(range(2000)))
    first, second = open_samples(configured([path], seed=1)), open_samples(configured([path], seed=2))
    n = first.windows
    assert not np.array_equal(first.read_tokens(0, n), first.read_tokens(n, n))
    assert not np.array_equal(first.read_tokens(0, n), second.read_tokens(0, n))
    assert np.array_equal(first.read_tokens(0, n), open_samples(configured([path], seed=1)).read_tokens(0, n))


def test_bad_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train is empty"):
        open_samples(configured([]))
    short = write(tmp_path / "short", list(range(8)))
    with pytest.raises(DataError, match=r"8 tokens and one sample needs.* 9"):
        open_samples(configured([short]))
    tree = {"model": {"sequence_length": 4, "vocab_size": 4}, "data": {"train": [short]}}
    with pytest.raises(DataError, match=r"token id 4 and model\.vocab_size=4"):
        open_samples(config.from_tree(tree)).read_tokens(0, 1)


@given(tokens=st.integers(1, 100), length=st.integers(2, 9), step=st.integers(1, 5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_held_out_targets_are_every_token_once(tmp_path: Path, tokens: int, length: int, step: int) -> None:
    stored = HeldOut(write(tmp_path / "v", list(range(tokens))), length)
    parts = [stored.read_window_range(i, step) for i in range(0, len(stored), step)]
    inputs, targets = (np.concatenate(x) for x in zip(*parts, strict=True))
    assert inputs.shape == targets.shape == (stored.windows, length)
    real = targets != IGNORE
    assert targets[real].tolist() == list(range(tokens))
    assert (inputs[real][1:] == targets[real][1:] - 1).all()
    assert inputs[0, 0] == tokens - 1  # the file's last token, an end of document in files built here
    sample = stored.read_windows([len(stored) - 1, 0])
    assert np.array_equal(sample[1], targets[[-1, 0]])


@given(tokens=st.integers(1, 60), length=st.integers(2, 9), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_a_stride_gives_more_context_and_still_every_token_once(
    tmp_path: Path, tokens: int, length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length))
    inputs, targets = HeldOut(write(tmp_path / "v", list(range(tokens))), length, stride=stride).read_window_range(
        0, 1000
    )
    real = targets != IGNORE
    assert targets[real].tolist() == list(range(tokens))
    for row_inputs, row_targets, row in zip(inputs, targets, real, strict=True):
        for location in np.flatnonzero(row):
            observed = row_inputs[: location + 1].tolist()
            target = int(row_targets[location])
            # All that went before in the file, as far as the window reaches, and never less than length - stride.
            assert observed == [(target - location - 1 + i) % tokens for i in range(location + 1)]
            assert len(observed) > min(target, length - stride)
    with pytest.raises(ConfigError, match=f"stride={length + 1}"):
        HeldOut(str(tmp_path / "v"), length, stride=length + 1)


def test_held_out_without_tokens_or_of_another_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokens"):
        HeldOut(write(tmp_path / "e", []), 4)
    stored = HeldOut(write(tmp_path / "v", list(range(9)) + [0]), 4, vocab_size=8)
    assert stored.read_window_range(0, 2)[1].max() == 7
    with pytest.raises(DataError, match=r"token id 8 and model\.vocab_size=8"):
        stored.read_window_range(2, 1)


def test_a_check_at_the_start_finds_a_bad_id_in_any_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "_CHECKED_TOKENS", 3)
    HeldOut(write(tmp_path / "v", list(range(8))), 4, vocab_size=8).check_vocabulary()
    for location in range(8):
        tokens = [8 if i == location else i for i in range(8)]
        stored = HeldOut(write(tmp_path / f"v{location}", tokens), 4, vocab_size=8)
        with pytest.raises(DataError, match=rf"token id 8 and model\.vocab_size=8 \(token {location} of"):
            stored.check_vocabulary()


@pytest.mark.parametrize(("location", "window"), [(3, 1), (7, 0)])
def test_a_bad_id_before_a_window_is_named_with_its_place(tmp_path: Path, location: int, window: int) -> None:
    """The first token is predicted from the last one of the file."""
    stored = HeldOut(write(tmp_path / "v", [8 if i == location else i for i in range(8)]), 4, vocab_size=8)
    with pytest.raises(DataError, match=rf"token id 8 and model\.vocab_size=8 \(token {location} of"):
        stored.read_windows([window])


def test_bits_per_byte() -> None:
    assert compute_bits_per_byte(np.log(256), 100, 100) == pytest.approx(8)
    assert compute_bits_per_byte(np.log(2), 100, 400) == pytest.approx(0.25)
