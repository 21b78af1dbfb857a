"""Copies between chunks and shards, in pieces and by several threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.checkpoint import TensorShard, copies, load, save
from megascale.checkpoint.copies import PinnedBuffer, ShardCopier
from megascale.checkpoint.format.chunks import box_slices, intersect_boxes
from megascale.core.tensors import Box
from tests.checkpoint.conftest import blank, full_shards, logical_state

TYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.bool]
HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_COPY_BYTES", 24)


def numbered(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).remainder(251).to(dtype).reshape(shape)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor's shape and some boxes in it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        boxes.append(Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    return shape, boxes


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[box_slices(Box((0,) * tensor.dim(), tuple(tensor.shape)), box)]


@given(st.lists(st.tuples(cuts(), st.sampled_from(TYPES), st.booleans()), max_size=4))
def test_pieces_are_joined_byte_by_byte_whatever_their_types_and_strides(cases: list) -> None:
    pieces = []
    for (shape, boxes), dtype, turned in cases:
        tensor = numbered(shape, dtype)
        pieces += [view(tensor, box).mT if turned and len(shape) > 1 else view(tensor, box) for box in boxes]
    with ShardCopier([]) as several:
        got = several.join_tensors(pieces, HOST)
    plain = [piece.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for piece in pieces]
    assert got.tolist() == [byte for piece in plain for byte in piece.tolist()]


@given(cuts(), st.sampled_from(TYPES), st.sampled_from(TYPES))
def test_a_shard_gets_what_it_shares_with_each_chunk_and_no_more(
    cut: tuple, stored: torch.dtype, live: torch.dtype
) -> None:
    shape, (of_shard, *chunks) = cut
    tensor, target = numbered(shape, stored), torch.full(of_shard.sizes, 252).to(live)
    expected, shard = target.clone(), TensorShard("w", shape, of_shard.offsets, target)
    with ShardCopier([shard]) as several:
        for box in chunks:
            several.copy_to_shard(box, view(tensor, box), shard)
            several.wait_for_previous_round()
    for box in chunks:
        common = intersect_boxes(box, of_shard)
        if common is not None:
            expected[box_slices(of_shard, common)] = view(tensor, common).to(live)
    assert torch.equal(target, expected)


@given(cuts(), st.sampled_from(TYPES + [torch.complex64, torch.complex128, torch.float8_e4m3fn]), st.booleans())
def test_staging_holds_a_copy_of_what_fits_whatever_its_strides(cut: tuple, dtype: torch.dtype, turned: bool) -> None:
    shape, boxes = cut
    tensor, staging = numbered(shape, dtype), PinnedBuffer(96, page_locked=False)
    for box in boxes:
        piece = view(tensor, box).mT if turned and len(shape) > 1 else view(tensor, box)
        copy = staging.copy_in(piece)
        if not 0 < piece.nbytes <= 96 or dtype is torch.complex128:
            assert copy is None
            continue
        assert copy is not None
        assert copy.is_contiguous()
        assert copy.dtype is dtype
        assert torch.equal(copy.double(), piece.double()) if dtype.itemsize < 8 else torch.equal(copy, piece)


def test_a_copy_that_fails_in_its_thread_fails_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, full_shards(logical_state()), {}, keep=1)
    failing = iter([False, True])
    real = ShardCopier._copy

    def copy(*arguments: object) -> None:
        if next(failing, False):
            raise RuntimeError("no memory")
        real(*arguments)

    monkeypatch.setattr(ShardCopier, "_copy", copy)
    with pytest.raises(RuntimeError, match="no memory"):
        load(tmp_path, full_shards(blank(logical_state())))
