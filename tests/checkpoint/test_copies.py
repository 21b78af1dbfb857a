"""Copies between chunks and shards, in pieces and by several threads."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.checkpoint import TensorShard, copies, load, loader, save
from megascale.checkpoint.chunk_source import LoadReport, StorageChunks
from megascale.checkpoint.copies import FileRange, PinnedBuffer, PriorityPool, ShardCopier
from megascale.checkpoint.format import step_folders
from megascale.checkpoint.format.chunks import box_slices, intersect_boxes
from megascale.checkpoint.loader import fill_shards
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.storage.opening import open_storage
from megascale.core.tensors import Box
from tests.checkpoint.conftest import assert_same, blank, full_shards, logical_state, run_group

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


class DeviceCopier(ShardCopier):
    """Copies all tensors as those on a GPU: one thread makes the copies of a round."""

    @staticmethod
    def _is_on_device(tensor: torch.Tensor) -> bool:
        return True


COPIERS = st.sampled_from([ShardCopier, DeviceCopier])


@given(st.lists(st.tuples(cuts(), st.sampled_from(TYPES), st.booleans()), max_size=4), COPIERS)
def test_pieces_are_joined_byte_by_byte_whatever_their_types_and_strides(cases: list, copier: type) -> None:
    pieces = []
    for (shape, boxes), dtype, turned in cases:
        tensor = numbered(shape, dtype)
        pieces += [view(tensor, box).mT if turned and len(shape) > 1 else view(tensor, box) for box in boxes]
    with copier([]) as several:
        got = several.join(pieces, HOST)[0]
    plain = [piece.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for piece in pieces]
    assert got.tolist() == [byte for piece in plain for byte in piece.tolist()]


@given(cuts(), st.sampled_from(TYPES), st.sampled_from(TYPES), COPIERS, st.booleans())
def test_a_shard_gets_what_it_shares_with_each_chunk_and_no_more(
    cut: tuple, stored: torch.dtype, live: torch.dtype, copier: type, waits: bool
) -> None:
    shape, (of_shard, *chunks) = cut
    tensor, target = numbered(shape, stored), torch.full(of_shard.sizes, 252).to(live)
    expected, shard = target.clone(), TensorShard("w", shape, of_shard.offsets, target)
    with copier([shard]) as several:
        for box in chunks:
            several.copy_to_shard(box, view(tensor, box), shard)
            if waits:
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


def test_a_copy_within_a_device_that_fails_fails_the_context() -> None:
    target = torch.zeros(4)
    with pytest.raises(RuntimeError, match="size"), DeviceCopier([]) as copier:
        copier._device_pairs.append((target, torch.zeros(3)))


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


class OpenedChunks(StorageChunks):
    """Chunks whose bytes threads read themselves, as from snapshots in memory.

    Attributes:
        read_rows: rows that were read in another way.
    """

    has_ranges = True

    def __init__(self, folder: Path) -> None:
        storage = open_storage(folder)
        (commit,), _ = step_folders.list_commits(storage)
        super().__init__(storage, commit, step_folders.read_index(storage, commit))
        self.path = folder / step_folders.step_name(commit.step)
        self.read_rows: list[int] = []

    def find_range(self, file: str, start: int, stop: int) -> FileRange:
        return FileRange(os.open(self.path / file, os.O_RDONLY), start, stop - start)

    def read_chunks(self, rows: np.ndarray, report: LoadReport) -> dict[int, torch.Tensor]:
        self.read_rows += rows.tolist()
        return super().read_chunks(rows, report)


@pytest.fixture
def source(tmp_path: Path) -> OpenedChunks:
    save(tmp_path, 1, full_shards(logical_state()), {}, keep=1)
    return OpenedChunks(tmp_path)


def test_whole_chunks_are_copied_from_the_file_and_others_are_read(source: OpenedChunks) -> None:
    expected = logical_state()
    tensors = blank(expected)
    report = LoadReport()
    assert fill_shards(source, full_shards(tensors), Peers(None), report) is None
    assert_same(tensors, expected)
    assert source.read_rows == []
    assert report.read_bytes == sum(tensor.nbytes for tensor in expected.values())
    name, tensor = next((name, tensor) for name, tensor in expected.items() if tensor.dim() == 2)
    columns = torch.zeros_like(tensor[:, 1:])  # a part of the chunk
    converted = torch.zeros_like(tensor, dtype=torch.float64)
    strided = torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).mT
    parts = [(columns, (0, 1)), (converted, (0, 0)), (strided, (0, 0))]
    for target, offsets in parts:
        shard = TensorShard(name, tuple(tensor.shape), offsets, target)
        source.read_rows = []
        assert fill_shards(source, [shard], Peers(None)) is None
        assert len(source.read_rows) == 1
        assert torch.equal(target.to(tensor.dtype), tensor[:, offsets[1] :])


def test_a_damaged_or_short_file_is_reported_and_its_bytes_do_not_stay(source: OpenedChunks) -> None:
    (file,) = source.index.files
    path = source.path / file
    content = bytearray(path.read_bytes())
    name = "model.embedding.weight"
    row = next(row for row in range(len(source.index)) if source.index.name(row) == name)
    content[int(source.index.columns["data"][row]) + 40] ^= 1  # in the second piece
    path.write_bytes(content)
    tensors = blank(logical_state())
    assert (
        fill_shards(source, full_shards(tensors), Peers(None))
        == f"{file} holds other bytes for {name} than were written"
    )
    assert not tensors[name].any()
    os.truncate(path, int(source.index.columns["data"].min()) + 8)
    damage = fill_shards(source, full_shards(tensors), Peers(None))
    assert damage is not None
    assert "cannot be read: the file ends" in damage


def _fill_from_first(rank: int, size: int, folder: Path) -> tuple[str | None, bool, list[int], int]:
    """Fill shards that only the other process needs from a file that only the first process reads."""
    source = OpenedChunks(folder)
    source.holders = {file: [0] for file in source.index.files}
    tensors = blank(logical_state())
    report = LoadReport()
    damage = fill_shards(source, full_shards(tensors) if rank else [], Peers(), report)
    is_equal = all(torch.equal(tensors[name], tensor) for name, tensor in logical_state().items())
    return damage, is_equal, source.read_rows, report.sent_bytes


@pytest.mark.parametrize("damaged", [False, True])
def test_whole_chunks_are_sent_from_the_file(source: OpenedChunks, tmp_path: Path, damaged: bool) -> None:
    (file,) = source.index.files
    if damaged:
        content = bytearray((source.path / file).read_bytes())
        content[int(source.index.columns["data"][0]) + 4] ^= 1
        (source.path / file).write_bytes(content)
    first, second = run_group(2, _fill_from_first, tmp_path)
    expected = f"{file} holds other bytes for {source.index.name(0)} than were written" if damaged else None
    assert (first[0], second[0]) == (expected, expected)
    assert second[1] is not damaged
    assert first[2] == []
    assert first[3] == sum(tensor.nbytes for tensor in logical_state().values())


def _exchange_beside_own_chunks(rank: int, size: int, folder: Path) -> tuple[list[bool], list[str]]:
    """Read one tensor for the first process and all others for the second one, in the first process.

    Return for each piece of the first process's tensor whether its copy began after the first exchange, and the names
    of the tensors that this process has received.
    """
    copies._COPY_BYTES = 64
    copies.count_threads = lambda cores: 2  # type: ignore[assignment]
    own_name = "model.embedding.weight"
    source = OpenedChunks(folder)
    source.round_bytes = 1  # one chunk per round
    source.holders = {file: [0] for file in source.index.files}
    (own_row,) = [row for row in range(len(source.index)) if source.index.name(row) == own_name]
    own_start = int(source.index.columns["data"][own_row])
    own_stop = own_start + source.index.nbytes(own_row)
    has_exchanged = threading.Event()
    begun_after_exchange: list[bool] = []

    class ObservedPeers(Peers):
        def all_to_all(self, *arguments: Any) -> list[torch.Tensor]:
            received = super().all_to_all(*arguments)
            has_exchanged.set()
            return received

    class ObservedCopier(ShardCopier):
        def _copy_piece(self, piece: FileRange, target: torch.Tensor) -> copies.CopiedPiece:
            if own_start <= piece.start < own_stop:
                begun_after_exchange.append(has_exchanged.is_set())
                has_exchanged.wait(1)  # the first two pieces may begin before any piece that is to be sent
            return super()._copy_piece(piece, target)

    loader.ShardCopier = ObservedCopier  # type: ignore[misc]
    expected = logical_state()
    names = [name for name in expected if (name == own_name) == (rank == 0)]
    tensors = blank({name: expected[name] for name in names})
    assert fill_shards(source, full_shards(tensors), ObservedPeers()) is None
    return begun_after_exchange, [name for name in names if torch.equal(tensors[name], expected[name])]


def test_chunks_for_other_processes_are_exchanged_before_own_chunks_are_complete(
    source: OpenedChunks, tmp_path: Path
) -> None:
    first, second = run_group(2, _exchange_beside_own_chunks, tmp_path)
    assert any(first[0])
    assert len(first[0]) == 28  # pieces
    assert len(first[1]) + len(second[1]) == len(logical_state())


def test_urgent_tasks_run_before_others() -> None:
    pool = PriorityPool(1)
    may_begin = threading.Event()
    names: list[str] = []
    tasks = [pool.submit(may_begin.wait, 30)]
    tasks += [pool.submit(names.append, name, is_urgent=False) for name in ("own 1", "own 2")]
    tasks += [pool.submit(names.append, name) for name in ("sent 1", "sent 2")]
    may_begin.set()
    for task in tasks:
        task.result(30)
    assert names == ["sent 1", "sent 2", "own 1", "own 2"]
    pool.shutdown(cancel=False)


def test_tasks_that_have_not_begun_are_cancelled() -> None:
    pool = PriorityPool(1)
    has_begun, may_end = threading.Event(), threading.Event()

    def wait() -> bool:
        has_begun.set()
        return may_end.wait(30)

    running = pool.submit(wait)
    assert has_begun.wait(30)
    waiting = [pool.submit(wait, is_urgent=is_urgent) for is_urgent in (True, False)]
    ending = threading.Thread(target=pool.shutdown, args=(True,))
    ending.start()
    for task in waiting:
        with pytest.raises(CancelledError):
            task.result(30)
    may_end.set()
    ending.join(30)
    assert running.result(30)


def test_a_task_after_the_end_is_refused_and_never_runs() -> None:
    """The call of an earlier task would otherwise run the refused task, or no call the accepted one."""
    pool = PriorityPool(1)
    has_begun, may_end = threading.Event(), threading.Event()
    names: list[str] = []

    def wait() -> None:
        has_begun.set()
        may_end.wait(30)

    running = pool.submit(wait)
    assert has_begun.wait(30)
    waiting = pool.submit(names.append, "accepted", is_urgent=False)
    pool._pool.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(names.append, "refused")
    may_end.set()
    pool.shutdown(cancel=False)
    running.result(30)
    waiting.result(30)
    assert names == ["accepted"]


@pytest.mark.parametrize("read_bytes", [40, 1 << 20])
def test_checksums_of_parts_are_joined_and_threads_report_their_seconds(
    source: OpenedChunks, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(copies, "_READ_BYTES", read_bytes)
    tensors = blank(logical_state())
    report = LoadReport()
    assert fill_shards(source, full_shards(tensors), Peers(None), report) is None
    assert_same(tensors, logical_state())
    assert re.search(r"; of each of \d+ copying threads: read \d+\.\d\d, checksum \d", report.describe_seconds())


@pytest.mark.parametrize(("cores", "local_ranks", "threads"), [(2, "", 2), (64, "", 32), (64, "2", 32), (128, "8", 16)])
def test_ranks_of_a_host_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, local_ranks: str, threads: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
    assert copies.count_threads(cores) == threads


def test_copies_from_files_of_later_rounds_do_not_wait_for_those_of_earlier_ones(
    source: OpenedChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise only the threads for which two rounds have work would copy."""
    monkeypatch.setattr(copies, "count_threads", lambda cores: 1)
    monkeypatch.setattr(OpenedChunks, "round_bytes", 1)  # one chunk per round
    started: list[FileRange] = []
    are_all_submitted = threading.Event()
    copy_piece = ShardCopier._copy_piece
    copy_from_file = ShardCopier.copy_from_file

    def copy_once_submitted(copier: ShardCopier, piece: FileRange, target: torch.Tensor) -> copies.CopiedPiece:
        assert are_all_submitted.wait(30)
        return copy_piece(copier, piece, target)

    def submit(
        copier: ShardCopier, chunk: FileRange, target: torch.Tensor, *, is_urgent: bool
    ) -> list[Future[copies.CopiedPiece]]:
        started.append(chunk)
        if len(started) == len(source.index):
            are_all_submitted.set()
        return copy_from_file(copier, chunk, target, is_urgent=is_urgent)

    monkeypatch.setattr(ShardCopier, "_copy_piece", copy_once_submitted)
    monkeypatch.setattr(ShardCopier, "copy_from_file", submit)
    tensors = blank(logical_state())
    assert fill_shards(source, full_shards(tensors), Peers(None)) is None
    assert len(started) > 2
    assert_same(tensors, logical_state())
