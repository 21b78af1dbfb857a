"""Any cut of the tensors loads any other, in one process and over several."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.checkpoint import Shard, load, save
from megascale.checkpoint.layout import Chunk, assign, overlap, split
from megascale.core.tensors import Box
from megascale.errors import TrainingError

from .conftest import assert_same, blank, cut, logical_state, run_group, whole

CUTS = ["rows", "columns", "flat", "replicas"]


def _save_group(rank: int, size: int, folder: Path, how: str) -> str:
    return str(save(folder, 3, cut(logical_state(), how, rank, size), {"consumed": 12}, keep=2))


def _load_group(rank: int, size: int, folder: Path, how: str) -> dict:
    expected, got = logical_state(), blank(logical_state())
    state = load(folder, cut(got, how, rank, size))
    mine, theirs = cut(got, how, rank, size), cut(expected, how, rank, size)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.tensor, b.tensor), a
    return state


@pytest.mark.parametrize(("save_as", "load_as"), [("rows", "columns"), ("flat", "rows"), ("replicas", "flat")])
def test_saved_by_four_loads_on_three(folder: Path, save_as: str, load_as: str) -> None:
    assert len(set(run_group(4, _save_group, folder, save_as))) == 1
    assert run_group(3, _load_group, folder, load_as) == [{"consumed": 12}] * 3
    got = blank(logical_state())
    load(folder, whole(got))
    assert_same(got, logical_state())


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
    assert sum(files) < total + 6 * 800
    assert len(files) >= 3


def test_subset_and_other_dtype(folder: Path) -> None:
    tensors = logical_state()
    save(folder, 1, whole(tensors), {}, keep=1)
    name = "model.embedding.weight"
    got = torch.zeros(37, 12, dtype=torch.float64)
    load(folder, [Shard(name, (37, 12), (0, 0), got)])
    assert torch.equal(got, tensors[name].double())


def test_hole_is_refused(folder: Path) -> None:
    t = torch.zeros(4, 4)
    with pytest.raises(TrainingError, match=r"w: the boxes handed in hold 8 of 16"):
        save(folder, 1, [Shard("w", (4, 4), (0, 0), t[:2])], {}, keep=1)
    with pytest.raises(TrainingError, match="overlap"):
        save(folder, 1, [Shard("w", (4, 4), (0, 0), t[:2]), Shard("w", (4, 4), (1, 0), t[:2])], {}, keep=1)
    with pytest.raises(TrainingError, match="complex64"):
        save(folder, 1, whole({"w": torch.zeros(2, dtype=torch.complex64)}), {}, keep=1)


boxes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=4).map(
    lambda dims: Box(tuple(d[0] for d in dims), tuple(d[1] for d in dims))
)


@given(boxes, st.sampled_from([1, 2, 4, 8]), st.integers(8, 400))
def test_split_covers_the_box_once(box: Box, item: int, limit: int) -> None:
    parts = list(split(box, item, limit))
    assert sum(p.count for p in parts) == box.count
    assert all(p.count * item <= limit for p in parts)
    assert all(overlap(a, b) is None for a, b in itertools.combinations(parts, 2))
    assert all(overlap(box, p) == p for p in parts)


@settings(max_examples=50)
@given(st.integers(1, 6), st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_assign_balances_replicas(ranks: int, rows: list[int]) -> None:
    chunks = [Chunk(f"t{i}", (n,), "float32", Box((0,), (n,))) for i, n in enumerate(rows)]
    written = assign([chunks] * ranks)
    assert sorted(i for indices in written for i in indices) == list(range(len(chunks)))
    loads = [sum(chunks[i].nbytes for i in indices) for indices in written]
    assert max(loads) - min(loads) <= max(c.nbytes for c in chunks)
