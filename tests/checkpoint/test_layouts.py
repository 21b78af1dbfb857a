"""Any cut of the tensors loads any other, in one process and over several."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.checkpoint import LoadReport, TensorShard, copies, load, loader, save
from megascale.checkpoint.format.chunks import box_slices, split_box
from megascale.checkpoint.format.index import CheckpointIndex, TensorInfo
from megascale.checkpoint.format.read_plan import ChunkRequest, assign_readers, find_moved_chunks, plan_rounds
from megascale.checkpoint.format.write_plan import make_offer, make_plan
from megascale.core.tensors import Box
from megascale.errors import TrainingError
from tests.checkpoint.conftest import assert_same, blank, cut, full_shards, logical_state, run_group

CUTS = ["rows", "columns", "flat", "replicas"]


def _save_group(rank: int, size: int, folder: Path, how: str) -> str:
    return str(save(folder, 3, cut(logical_state(), how, rank, size), {"consumed": 12}, keep=2))


def _load_group(rank: int, size: int, folder: Path, how: str) -> dict:
    expected, got = logical_state(), blank(logical_state())
    state = load(folder, cut(got, how, rank, size))
    loaded, theirs = cut(got, how, rank, size), cut(expected, how, rank, size)
    for a, b in zip(loaded, theirs, strict=True):
        assert torch.equal(a.tensor, b.tensor), a
    return state


@pytest.mark.parametrize(("save_as", "load_as"), [("rows", "columns"), ("flat", "rows"), ("replicas", "flat")])
def test_saved_by_four_loads_on_three(folder: Path, save_as: str, load_as: str) -> None:
    assert len(set(run_group(4, _save_group, folder, save_as))) == 1
    assert run_group(3, _load_group, folder, load_as) == [{"consumed": 12}] * 3
    got = blank(logical_state())
    load(folder, full_shards(got))
    assert_same(got, logical_state())


def _load_in_small_rounds(rank: int, size: int, folder: Path, how: str) -> dict:
    loader.usable_cores = lambda: 16
    loader.plan_rounds = functools.partial(plan_rounds, limit=200)
    copies._COPY_BYTES = 64
    return _load_group(rank, size, folder, how)


@pytest.mark.parametrize("load_as", CUTS)
def test_many_rounds_are_read_ahead_of_each_other(folder: Path, load_as: str) -> None:
    run_group(4, _save_group, folder, "flat")
    assert run_group(3, _load_in_small_rounds, folder, load_as) == [{"consumed": 12}] * 3


def test_one_process_every_pair_of_cuts(tmp_path: Path) -> None:
    tensors = logical_state()
    for i, (save_as, load_as) in enumerate(itertools.product(CUTS[:3], CUTS)):
        shards = [s for rank in range(5) for s in cut(tensors, save_as, rank, 5) if s.shape or rank == 0]
        save(tmp_path / str(i), 1, shards, {}, keep=1)
        got = blank(tensors)
        load(tmp_path / str(i), [s for rank in range(3) for s in cut(got, load_as, rank, 3)])
        assert_same(got, tensors)


def test_replicas_are_written_once_and_evenly(folder: Path) -> None:
    run_group(4, _save_group, folder, "replicas")
    total = sum(t.numel() * t.element_size() for t in logical_state().values())
    files = [p.stat().st_size for p in (folder / "step-3").glob("*.distcp")]
    # Archive headers are some 700 bytes a chunk; were replicas written four times over, this would not hold.
    assert sum(files) < total + 6 * 800 + 4 * 4096
    assert len(files) >= 3


def _count_reads(rank: int, size: int, folder: Path, how: str) -> int:
    report = LoadReport()
    load(folder, cut(blank(_large()), how, rank, size), report=report)
    return report.read_bytes


def _large() -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.arange(250_000, dtype=torch.float32).reshape(500, 500) + i for i in range(8)}


@pytest.mark.parametrize("how", ["replicas", "columns"])
def test_storage_is_read_once_and_evenly(folder: Path, how: str) -> None:
    shards = [s for rank in range(5) for s in cut(_large(), "flat", rank, 5)]
    save(folder, 1, shards, {}, keep=1)
    for size in (1, 4):
        reads = run_group(size, _count_reads, folder, how)
        total = sum(t.numel() * t.element_size() for t in _large().values())
        assert total <= sum(reads) < 1.02 * total
        assert max(reads) < 1.3 * total / size


def test_subset_and_other_dtype(folder: Path) -> None:
    tensors = logical_state()
    save(folder, 1, full_shards(tensors), {}, keep=1)
    name = "model.embedding.weight"
    got = torch.zeros(37, 12, dtype=torch.float64)
    load(folder, [TensorShard(name, (37, 12), (0, 0), got)])
    assert torch.equal(got, tensors[name].double())


def test_hole_is_refused(folder: Path) -> None:
    t = torch.zeros(4, 4)
    with pytest.raises(TrainingError, match=r"w: the boxes handed in hold 8 of 16"):
        save(folder, 1, [TensorShard("w", (4, 4), (0, 0), t[:2])], {}, keep=1)
    with pytest.raises(TrainingError, match="overlap"):
        save(folder, 1, [TensorShard("w", (4, 4), (0, 0), t[:2]), TensorShard("w", (4, 4), (1, 0), t[:2])], {}, keep=1)
    with pytest.raises(TrainingError, match="complex64"):
        save(folder, 1, full_shards({"w": torch.zeros(2, dtype=torch.complex64)}), {}, keep=1)


boxes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=4).map(
    lambda dims: Box(tuple(d[0] for d in dims), tuple(d[1] for d in dims))
)


@settings(deadline=None)
@given(boxes, st.sampled_from([1, 2, 4, 8]), st.integers(8, 400))
def test_split_covers_the_box_once(box: Box, item: int, limit: int) -> None:
    painted = np.zeros([o + n for o, n in zip(box.offsets, box.sizes, strict=True)], int)
    for part in split_box(box, item, limit):
        assert part.count * item <= limit
        painted[box_slices(Box((0,) * painted.ndim, painted.shape), part)] += 1
    assert painted.sum() == box.count
    assert (painted[box_slices(Box((0,) * painted.ndim, painted.shape), box)] == 1).all()


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_replicas_are_shared_out_evenly(ranks: int, rows: list[int]) -> None:
    offer = make_offer((f"t{i:02}", (n,), "float32", Box((0,), (n,))) for i, n in enumerate(rows))
    plan = make_plan([offer] * ranks)
    assert sorted(i for part in plan.file_layouts for i in part.chunks.tolist()) == list(range(len(rows)))
    loads = [sum(rows[i] for i in part.chunks) for part in plan.file_layouts]
    assert max(loads) - min(loads) <= max(rows)


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@settings(deadline=None, max_examples=200)
@given(shapes, st.data())
def test_cover_check_is_exact(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Random boxes are accepted exactly when painting them fills the tensor once."""
    painted = np.zeros(shape, int)
    parts = set()
    for _ in range(data.draw(st.integers(0, 4))):
        low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        size = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, low, strict=True))
        parts.add(Box(low, size))
    # Fill the holes with single elements most of the time, so that exact covers are met.
    for box in parts:
        painted[box_slices(Box((0,) * len(shape), shape), box)] += 1
    if data.draw(st.booleans()):
        for where in np.argwhere(painted == 0).tolist():
            parts.add(Box(tuple(where), (1,) * len(shape)))
            painted[tuple(where)] += 1
    offer = make_offer([("t", shape, "float32", box) for box in parts])
    if not parts:
        return
    if (painted == 1).all():
        make_plan([offer])
    else:
        with pytest.raises(ValueError, match="t: "):
            make_plan([offer])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_each_chunk_is_read_once_by_someone_who_can(data: st.DataObject) -> None:
    """Random needs and holders: one reader each, balanced where all need all, rounds in bounds and the same rows."""
    ranks, files = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    count = data.draw(st.integers(1, 60))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    columns = {name: np.zeros(count, np.int64) for name in ("tensor", "data", "crc")}
    columns |= {
        "in_file": rng.integers(0, files, count),
        "start": np.arange(count) * 100,
        "length": rng.integers(1, 100, count),
        "box": np.zeros((count, 2, 1), np.int64),
    }
    index = CheckpointIndex({"t": TensorInfo((1,), "float32")}, [f"f{i}" for i in range(files)], columns)
    share = data.draw(st.sampled_from([0.2, 0.7, 1.0]))
    needs = [np.flatnonzero(rng.random(count) < share) for _ in range(ranks)]
    wants = [ChunkRequest(rows, np.zeros((len(rows), 2, 1), np.int64)) for rows in needs]
    holders = None
    if data.draw(st.booleans()):
        holders = {f"f{i}": sorted({int(rng.integers(ranks)) for _ in range(2)}) for i in range(files)}
    reader = assign_readers(index, wants, holders)
    for row in range(count):
        candidates = [rank for rank in range(ranks) if row in needs[rank]]
        if not candidates:
            assert reader[row] == -1
            continue
        able = candidates if holders is None else [r for r in candidates if r in holders[index.file(row)]]
        assert reader[row] in (able or holders[index.file(row)])
    if holders is None and share == 1.0:
        loads = np.bincount(reader, columns["length"], minlength=ranks)
        assert loads.max() - loads.min() <= 200
    limit = data.draw(st.integers(50, 2000))
    schedule = plan_rounds(index, reader, wants, limit)
    walked = [(rank, row) for parts in schedule for rank, rows in enumerate(parts) for row in rows.tolist()]
    assert sorted(walked) == sorted((int(reader[row]), row) for row in range(count) if reader[row] >= 0)
    fans = np.sum([np.isin(np.arange(count), rows) for rows in needs], axis=0)
    for parts in schedule:
        for rows in parts:
            costs = columns["length"][rows] * np.maximum(fans[rows] - 1, 1)
            assert costs.sum() - (costs.max() if len(rows) else 0) <= limit
    moved = find_moved_chunks(reader, wants)
    for row in range(count):
        assert moved[row] == any(row in needs[r] and reader[row] != r for r in range(ranks))


def test_a_round_takes_all_that_its_limit_allows() -> None:
    """A chunk that n processes want is sent n - 1 times; one that its reader alone wants is read once."""
    count = 6
    columns = {name: np.zeros(count, np.int64) for name in ("tensor", "data", "crc", "in_file")}
    columns |= {
        "start": np.arange(count) * 100,
        "length": np.full(count, 100),
        "box": np.zeros((count, 2, 1), np.int64),
    }
    index = CheckpointIndex({"t": TensorInfo((1,), "float32")}, ["f0"], columns)
    reader = np.zeros(count, np.int64)
    for processes, sent in ((1, 1), (2, 1), (3, 2), (4, 3)):
        wants = [ChunkRequest(np.arange(count), np.zeros((count, 2, 1), np.int64)) for _ in range(processes)]
        schedule = plan_rounds(index, reader, wants, 300 * sent)
        assert [parts[0].tolist() for parts in schedule] == [[0, 1, 2], [3, 4, 5]]
