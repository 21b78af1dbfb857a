"""Samples of documents that are kept apart: each token is counted once, and nothing that fits is cut."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale import config
from megascale.data.dataset.held_out import HeldOut
from megascale.data.dataset.indexed import IndexedDataset, IndexedWriter
from megascale.data.dataset.packing import SamplePlan, assign_best_fit, make_plan, sort_distinct
from megascale.data.dataset.samples import SampleSource
from megascale.data.loader.host_plan import HostPlan
from megascale.errors import ConfigError, DataError
from tests.data.dataset.test_sample_fields import FieldFile
from tests.data.sample_sources import open_samples, plan_host_of, write_documents

FAST = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
PACKINGS = st.sampled_from(["concatenate", "best_fit"])
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40).filter(lambda lengths: sum(lengths) > 8)


def configured(prefix: str, length: int, packing: str, limit: int | None = None, **tree: dict) -> config.Config:
    data = {"train": [prefix], "document_mask": True, "packing": packing, "max_documents": limit}
    model = {"sequence_length": length, "vocab_size": 4096, "positions": "rotary", "hidden": 16, "heads": 2}
    return config.from_tree({"model": model, "data": data, **tree})


def read_epoch(source: SampleSource) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Return tokens, weights, positions and boundaries of each sample of an epoch."""
    samples = source.read_samples(0, source.windows)
    arrays = (samples.tokens, samples.loss_weights, samples.positions, samples.document_boundaries)
    assert all(array is not None for array in arrays)
    return list(zip(*(array.T for array in arrays if array is not None), strict=True))


@given(
    lengths=LENGTHS,
    length=st.integers(2, 8),
    limit=st.integers(1, 4),
    packing=st.sampled_from(["concatenate", "best_fit"]),
)
@FAST
def test_each_token_but_a_documents_first_is_predicted_once(
    tmp_path: Path, lengths: list[int], length: int, limit: int, packing: str
) -> None:
    source = open_samples(configured(write_documents(tmp_path / "t", lengths), length, packing, limit))
    starts = np.cumsum([0, *lengths])
    document_of = np.searchsorted(starts, np.arange(sum(lengths)), side="right")
    targets: Counter[int] = Counter()
    inputs: Counter[int] = Counter()
    for tokens, weights, positions, boundaries in read_epoch(source):
        assert len(boundaries) == min(limit, length) + 2
        assert (np.diff(boundaries) >= 0).all()
        assert (boundaries[0], boundaries[-1]) == (0, length)
        for start, stop in pairwise(boundaries):
            assert positions[start:stop].tolist() == list(range(stop - start))
            counted = weights[start:stop] == 1
            part = tokens[start:stop][counted]
            assert (tokens[start + 1 : stop + 1][counted] == part + 1).all()
            assert len(set(document_of[part])) <= 1
            targets.update((part + 1).tolist())
            inputs.update(part.tolist())
        assert set(np.unique(weights)) <= {0, 1}
    firsts = set(starts[:-1].tolist())
    assert targets == Counter(token for token in range(sum(lengths)) if token not in firsts)
    assert max(inputs.values(), default=1) == 1
    assert source.sum_weights(0, source.windows) == targets.total()


@given(lengths=LENGTHS, length=st.integers(2, 8), limit=st.integers(1, 4))
@FAST
def test_no_document_that_fits_is_cut(tmp_path: Path, lengths: list[int], length: int, limit: int) -> None:
    starts = np.cumsum([0, *lengths])[:-1]
    plan = make_plan("best_fit", starts, sum(lengths), sequence_length=length, max_documents=limit)
    pieces = [piece for sample in range(plan.samples) for piece in plan.list_intervals(sample)]
    for start, size in zip(starts.tolist(), lengths, strict=True):
        parts = sorted(piece for piece in pieces if start <= piece[0] < start + size)
        if size <= length + 1:
            assert parts == ([(start, min(size, length))] if size > 1 else [])
        else:
            assert [part[0] for part in parts] == list(range(start, start + size - 1, length))
            assert {part[1] for part in parts[:-1]} == {length}
    for sample in range(plan.samples):
        sizes = [size for _, size in plan.list_intervals(sample)]
        assert 0 < len(sizes) <= limit
        assert sum(sizes) <= length
    report = plan.load_report(starts, sum(lengths), length)
    assert report.tokens == sum(size for _, size in pieces)
    assert report.cut == sum(size > length + 1 for size in lengths)
    assert report.documents == len(lengths)
    assert dict(zip(report.lengths.tolist(), report.counts.tolist(), strict=True)) == Counter(s for _, s in pieces)


def test_best_fit_takes_the_fullest_sample_that_has_room() -> None:
    numbers, count = assign_best_fit(np.array([6, 3, 7, 4, 1, 2, 5]), 10, 8)
    samples = [sorted(np.array([6, 3, 7, 4, 1, 2, 5])[numbers == sample].tolist()) for sample in range(count)]
    assert samples == [[4, 6], [3, 7], [1, 2, 5]]
    one_each, count = assign_best_fit(np.array([6, 3, 7, 4, 1, 2, 5]), 10, 1)
    assert (one_each.tolist(), count) == (list(range(7)), 7)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=200))
@FAST
def test_best_fit_is_at_most_a_few_samples_above_the_minimum(lengths: list[int]) -> None:
    _, count = assign_best_fit(np.array(lengths), 50, 200)
    minimum = -(-sum(lengths) // 50)
    assert minimum <= count <= 11 / 9 * minimum + 1 + sum(length > 25 for length in lengths)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_samples_are_the_same_at_any_start_and_layout(tmp_path: Path, packing: str) -> None:
    """Sample k is a function of the seed and k, whichever rank reads it, also with a stored plan and over epochs."""
    draw = np.random.default_rng(0)
    prefix = write_documents(tmp_path / "t", draw.integers(1, 40, 60).tolist())
    train = {"global_batch": 4, "micro_batch": 1, "seed": 5}
    source = open_samples(configured(prefix, 16, packing, train=train))
    count = source.windows + 8
    expected = source.read_samples(0, count)
    assert {tuple(row) for row in source.find_sample_ids(0, source.windows).tolist()} == {
        (0, 0, i) for i in range(source.windows)
    }
    for data_ranks in (1, 2, 4):
        layout = configured(prefix, 16, packing, train=train, parallel={"data": data_ranks})
        plan = HostPlan.from_json(plan_host_of(layout, data_ranks, 0, data_ranks).to_json())
        assert plan.shape.fields == source.fields
        resumed = open_samples(layout, index=tmp_path / "index")
        for base in (0, 3, source.windows - 1):
            part = resumed.read_samples(base, 5)
            for name in ("tokens", "loss_weights", "positions", "document_boundaries"):
                assert np.array_equal(getattr(part, name), getattr(expected, name)[:, base : base + 5]), name
    assert len(list((tmp_path / "index").iterdir())) == 1
    other = open_samples(configured(prefix, 16, packing, train={**train, "seed": 6}))
    assert not np.array_equal(other.find_sample_ids(0, 20), source.find_sample_ids(0, 20))


def test_a_damaged_plan_is_made_again(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "t", [5, 3, 9, 2])
    index = tmp_path / "index"
    expected = open_samples(configured(prefix, 8, "best_fit"), index).read_tokens(0, 4)
    [stored] = index.iterdir()
    content = stored.read_bytes()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    for damaged in (content[:-8], bytes(changed), b""):
        stored.write_bytes(damaged)
        assert SamplePlan.load(stored) is None
        assert np.array_equal(open_samples(configured(prefix, 8, "best_fit"), index).read_tokens(0, 4), expected)
        assert SamplePlan.load(stored) is not None


def test_a_plan_that_cannot_be_stored_is_made_at_each_start(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "t", [5, 3, 9, 2])
    index = tmp_path / "index"
    index.write_text("a file in the place of the folder")
    expected = open_samples(configured(prefix, 8, "best_fit")).read_tokens(0, 4)
    assert np.array_equal(open_samples(configured(prefix, 8, "best_fit"), index).read_tokens(0, 4), expected)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_the_report_is_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str) -> None:
    settings = configured(write_documents(tmp_path / "t", [5, 30, 9, 2, 1, 8]), 8, packing)
    index = tmp_path / "index"
    [expected] = open_samples(settings).report_packing()
    [made] = open_samples(settings, index).report_packing()
    [stored] = index.glob("*.json")
    text = stored.read_text()

    def refuse(*_: object) -> None:
        raise AssertionError("the report was made again")

    with monkeypatch.context() as patch:
        patch.setattr(SamplePlan, "_make_report", refuse)
        [kept] = open_samples(settings, index).report_packing()
    for report in (made, kept):
        assert str(report) == str(expected)
        assert report.attention_share == expected.attention_share
        assert report.padding == expected.padding
    damaged = text.replace(f"[{expected.samples},", f"[{expected.samples + 1},")
    assert damaged != text
    for content in (damaged, text[:-9], "[1, 2]", "7", "{}", ""):
        stored.write_text(content)
        [repaired] = open_samples(settings, index).report_packing()
        assert str(repaired) == str(expected)
        assert stored.read_text() == text


def test_hosts_store_the_same_plan_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of two containers may have the same number."""
    path = tmp_path / "plan.bin"
    plan = make_plan("best_fit", np.array([0, 5]), 12, sequence_length=8, max_documents=4)
    replace = os.replace

    def replace_second(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        plan.save(path)  # of the other host
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_second)
    plan.save(path)
    assert list(tmp_path.iterdir()) == [path]
    stored = SamplePlan.load(path)
    assert stored is not None
    assert [stored.list_intervals(i) for i in range(stored.samples)] == [
        plan.list_intervals(i) for i in range(plan.samples)
    ]


@given(st.lists(st.integers(-9, 9)))
def test_distinct_values(values: list[int]) -> None:
    assert sort_distinct(np.array(values, np.int64)).tolist() == sorted(set(values))


def test_documents_of_one_token_cannot_be_packed(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "t", [1] * 20)
    with pytest.raises(DataError, match=r"no document of two tokens or more.*--data.document_mask=false"):
        open_samples(configured(prefix, 8, "best_fit"))


def test_documents_of_the_indexed_format(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "t", "uint16") as writer:
        writer.add_document([[1, 2], [3]])
        writer.add([])
        writer.add([4, 5])
        writer.add([])
    assert IndexedDataset(tmp_path / "t").read_document_starts().tolist() == [0, 3]


def test_stored_weights_hold_within_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format's loss weights are multiplied in: chat data counts the answers of each conversation."""
    weights = np.arange(9, dtype=np.float32)
    monkeypatch.setattr(IndexedDataset, "loss_weights", property(lambda file: weights))
    source = open_samples(configured(write_documents(tmp_path / "t", [4, 5]), 9, "best_fit"))
    [(tokens, read, _, _)] = read_epoch(source)
    assert tokens[:9].tolist() == list(range(9))
    assert read.tolist() == [1, 2, 3, 0, 5, 6, 7, 8, 0]


@given(lengths=LENGTHS, length=st.integers(2, 8), stride=st.none() | st.integers(1, 8))
@FAST
def test_held_out_windows_restart_at_documents(
    tmp_path: Path, lengths: list[int], length: int, stride: int | None
) -> None:
    """Without a stride, a document that fits into a window is read as a whole."""
    if stride is not None:
        stride = min(stride, length)
    prefix = write_documents(tmp_path / "v", lengths)
    held_out = HeldOut(prefix, length, stride=stride, max_documents=2)
    starts = np.cumsum([0, *lengths])[:-1]
    batch = held_out.read_batch(range(held_out.windows), held_out.windows + 1)
    arrays = (batch.tokens, batch.targets, batch.loss_weights, batch.positions, batch.document_boundaries)
    columns = zip(*(array.T for array in arrays if array is not None), strict=True)
    counted: list[int] = []
    for tokens, targets, weights, positions, boundaries in columns:
        assert (boundaries[0], boundaries[-1]) == (0, length)
        for start, stop in pairwise(boundaries):
            assert positions[start:stop].tolist() == list(range(stop - start))
        for target, token, weight, position in zip(targets, tokens, weights, positions, strict=True):
            if weight:
                assert target == token + 1
                document = np.searchsorted(starts, token, side="right") - 1
                assert position <= token - starts[document]
                if stride is None and lengths[document] <= length:
                    assert position == token - starts[document]
                counted.append(int(target))
    assert sorted(counted) == sorted(set(range(sum(lengths))) - set(starts.tolist()))
    assert held_out.count_targets(range(held_out.windows)) == sum(lengths)
    assert held_out.fields.max_documents >= 3
    copy = pickle.loads(pickle.dumps(held_out))
    assert (copy.fields, copy.windows) == (held_out.fields, held_out.windows)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"packing": "best_fit"}, "data.packing=best_fit needs attention within documents.*--data.document_mask=true"),
        ({"max_documents": 4}, "data.max_documents=4 has no effect"),
    ],
)
def test_a_setting_without_documents_is_refused(data: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.from_tree({"data": data})


def test_data_without_documents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"data.document_mask=true needs token files.*t.txt.*megascale data build"):
        open_samples(configured(str(tmp_path / "t.txt"), 8, "concatenate"))
    prefix = write_documents(tmp_path / "t", [20])
    monkeypatch.setattr(IndexedDataset, "read_document_starts", lambda file: None)
    with pytest.raises(ConfigError, match=r"data.train=.*t has none.*--data.document_mask=false"):
        open_samples(configured(prefix, 8, "concatenate"))
    monkeypatch.setattr(IndexedDataset, "fields", FieldFile.fields)
    with pytest.raises(ConfigError, match="has positions for its tokens"):
        open_samples(configured(prefix, 8, "concatenate"))
