"""Folders of checkpoints by their names and small files: listing, owners, generations, and what removing leaves."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megascale.checkpoint.format import step_folders
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.commit import COMMIT, METADATA, Commit, DamagedCheckpoint
from megascale.checkpoint.format.index import CheckpointIndex, TensorInfo, join_indexes
from megascale.checkpoint.storage.base import OwnerChangedError, Storage
from megascale.checkpoint.storage.opening import open_storage
from megascale.core.tensors import Box
from megascale.errors import DataError


def make_index(rows: int = 2) -> CheckpointIndex:
    """Return an index of one tensor [rows, 3] of float32, one row per chunk in one file."""
    columns = {
        "tensor": np.zeros(rows, np.int32),
        "in_file": np.zeros(rows, np.int32),
        "start": np.arange(rows, dtype=np.int64) * 64,
        "length": np.full(rows, 64, np.int64),
        "data": np.arange(rows, dtype=np.int64) * 64 + 32,
        "crc": np.arange(rows, dtype=np.int64),
        "box": np.array([[[row, 0], [1, 3]] for row in range(rows)], np.int64).reshape(rows, 2, 2),
    }
    return CheckpointIndex({"model.w": TensorInfo((rows, 3), "float32")}, ["data"], columns)


def commit(storage: Storage, step: int, number: int, state: dict | None = None) -> Commit:
    """Commit a save with one data file, number `number` of its folder."""
    generation = f"{number:08d}-0000000a"
    name = f"{generation}-data"
    storage.write(f"step-{step}/{name}", bytes(128))
    index = make_index().with_generation(generation, np.zeros(2, np.int64))
    return step_folders.commit_save(
        storage,
        step,
        generation,
        index,
        files={name: (128, crc32(bytes(128)))},
        metadata=b"metadata",
        state=state or {},
    )


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "checkpoints")


def test_steps_are_folders_of_that_name_in_order_of_their_numbers(storage: Storage) -> None:
    for name in ("step-10", "step-9", "step-007", "step-", "step-x", "step-1.part", "astep-1", "step-" + "9" * 20):
        storage.write(f"{name}/file", b"")
    assert step_folders.list_steps(storage) == [7, 9, 10]


def test_a_commit_is_read_back(storage: Storage) -> None:
    saved = commit(storage, 4, 7, {"samples": 3})
    assert step_folders.read_commit(storage, 4) == saved
    assert (saved.sequence, saved.step, saved.state, len(saved.files)) == (7, 4, {"samples": 3}, 3)
    assert saved.size == sum(size for size, _ in saved.files.values()) > 128
    assert step_folders.read_commit(storage, 5) is None
    index = step_folders.read_index(storage, saved)
    assert index.files == ["00000007-0000000a-data"]
    assert index.columns["box"].tolist() == make_index().columns["box"].tolist()
    step_folders.check_sizes(storage, saved)
    storage.write(f"step-5/{COMMIT}", saved.to_bytes())
    with pytest.raises(DamagedCheckpoint, match="of step 4, not of this folder's"):
        step_folders.read_commit(storage, 5)


def test_files_of_another_size_are_named_but_for_torchs_own(storage: Storage) -> None:
    saved = commit(storage, 4, 7)
    storage.write(f"step-4/{METADATA}", b"another size")
    step_folders.check_sizes(storage, saved)
    data = "00000007-0000000a-data"
    storage.write(f"step-4/{data}", bytes(127))
    with pytest.raises(DamagedCheckpoint, match=f"{data} is 127 bytes long, 128 were written"):
        step_folders.check_sizes(storage, saved)
    storage.remove(f"step-4/{data}")
    with pytest.raises(DamagedCheckpoint, match=f"{data} is missing"):
        step_folders.check_sizes(storage, saved)


def test_an_index_has_the_written_length_and_checksum(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = commit(storage, 4, 7)
    data = bytes(storage.read(f"step-4/{saved.index_file}"))
    monkeypatch.setattr(step_folders, "_MAX_INDEX_BYTES", len(data))
    step_folders.read_index(storage, saved)
    monkeypatch.setattr(step_folders, "_MAX_INDEX_BYTES", len(data) - 1)
    with pytest.raises(DamagedCheckpoint, match=f"is {len(data):,} bytes long; an index has at most {len(data) - 1:,}"):
        step_folders.read_index(storage, saved)
    monkeypatch.undo()
    for changed in (data[:-1], data + b"x", data[:-1] + bytes([data[-1] ^ 1])):
        storage.write(f"step-4/{saved.index_file}", changed)
        with pytest.raises(DamagedCheckpoint, match=rf"is not what was written \({len(changed)} bytes\)"):
            step_folders.read_index(storage, saved)


def test_the_newest_commit_has_the_highest_number(storage: Storage) -> None:
    for step, number in ((10, 3), (20, 1), (15, 2)):
        commit(storage, step, number)
    storage.write(f"step-30/{COMMIT}", b"damaged")
    storage.write("step-40/data", b"no commit")
    commits, unreadable = step_folders.list_commits(storage)
    assert [saved.step for saved in commits] == [10, 15, 20]
    assert unreadable.keys() == {30}
    assert step_folders.latest(storage) == 10
    assert step_folders.steps(storage) == [10, 15, 20]


def test_a_commit_is_removed_if_it_is_gone_or_replaced(storage: Storage) -> None:
    saved = commit(storage, 4, 7)
    assert not step_folders.is_removed(storage, saved)
    storage.write(f"step-4/{COMMIT}", b"damaged")
    assert not step_folders.is_removed(storage, saved)
    commit(storage, 4, 8)
    assert step_folders.is_removed(storage, saved)
    storage.remove("step-4")
    assert step_folders.is_removed(storage, saved)


def test_checkpoints_are_found_by_a_run_a_folder_or_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    folder = run / "checkpoints"
    for step in (4, 5):
        commit(open_storage(folder), step, step)
    for path, expected in (
        (run, [4, 5]),
        (f"{run}/", [4, 5]),
        (folder, [4, 5]),
        (folder / "step-4", [4]),
        (f"{folder}/step-5/", [5]),
        (open_storage(folder), [4, 5]),
    ):
        listed_storage, listed = step_folders.find_steps(path)
        assert (Path(listed_storage.url), listed) == (folder, expected)
    monkeypatch.chdir(folder)
    assert step_folders.find_steps("step-4")[1] == [4]
    for path in (folder / "step-6", tmp_path / "nothing"):
        with pytest.raises(DataError, match="there is no checkpoint in"):
            step_folders.find_steps(path)


def test_a_configured_location_is_looked_at_first(tmp_path: Path) -> None:
    run, location = tmp_path / "run", tmp_path / "elsewhere"
    commit(open_storage(location), 9, 1)
    commit(open_storage(run / "checkpoints"), 4, 1)
    (run / "config.toml").write_text(f'[checkpoint]\nlocation = "{location}"\n')
    assert step_folders.find_steps(run)[1] == [9]
    for text in ("[checkpoint]\n", "checkpoint = 1\n", "not toml", "[checkpoint]\nlocation = 'nothing'\n"):
        (run / "config.toml").write_text(text)
        assert step_folders.find_steps(run)[1] == [4]


def test_a_generation_counts_above_all_saves(storage: Storage) -> None:
    assert step_folders.make_generation(storage).startswith("00000001-")
    assert step_folders.make_generation(storage, above=6).startswith("00000007-")
    commit(storage, 4, 7)
    storage.write("step-9/00000012-0000000b-data", b"")
    storage.write("step-9/other-00000099-0000000b-data", b"")
    first, second = step_folders.make_generation(storage), step_folders.make_generation(storage, above=20)
    assert re.fullmatch(r"00000013-[0-9a-f]{8}", first)
    assert second.startswith("00000021-")
    assert step_folders.make_next_generation(first) == "00000014-" + first[-8:]


def test_an_identity_is_made_once_and_renewed_only_if_there_is_one(storage: Storage) -> None:
    assert step_folders.read_identity(storage) == ""
    step_folders.renew_identity(storage)
    assert step_folders.read_identity(storage) == ""
    identity = step_folders.read_identity(storage, create=True)
    assert re.fullmatch(r"[0-9a-f]{16}", identity)
    assert step_folders.read_identity(storage, create=True) == step_folders.read_identity(storage) == identity
    step_folders.renew_identity(storage)
    assert re.fullmatch(r"[0-9a-f]{16}", step_folders.read_identity(storage))
    assert step_folders.read_identity(storage) != identity


def test_a_small_file_with_anything_else_is_named(storage: Storage) -> None:
    storage.write("RUN", b"a" * 1024)
    assert step_folders.read_owner(storage) == "a" * 1024
    for data in (b"a" * 1025, b"\xff"):
        storage.write("RUN", data)
        with pytest.raises(DataError, match="RUN' holds no name"):
            step_folders.read_owner(storage)


def test_a_folder_belongs_to_the_run_that_claims_it(storage: Storage) -> None:
    assert step_folders.read_owner(storage) == ""
    assert step_folders.claim_folder(storage, "first", "")
    assert step_folders.read_owner(storage) == "first"
    assert step_folders.claim_folder(storage, "first", "")
    assert not step_folders.claim_folder(storage, "second", "")
    assert step_folders.read_owner(storage) == "first"
    assert step_folders.claim_folder(storage, "second", "first")
    assert step_folders.read_owner(storage) == "second"


@pytest.mark.parametrize(
    ("state", "is_refused"),
    [({"run": {"id": "second"}}, True), ({"run": {"id": "first"}}, False), ({"run": None}, False), ({}, False)],
)
def test_a_save_is_refused_where_another_run_owns_the_folder(storage: Storage, state: dict, is_refused: bool) -> None:
    step_folders.check_owner(storage, state)
    step_folders.claim_folder(storage, "first", "")
    if not is_refused:
        step_folders.check_owner(storage, state)
        return
    with pytest.raises(OwnerChangedError, match=r"identity first, this run's is second"):
        step_folders.check_owner(storage, state)


def test_a_mark_of_damage_is_for_one_commit(storage: Storage) -> None:
    saved = commit(storage, 4, 7)
    assert not step_folders.is_marked_damaged(storage, saved)
    step_folders.mark_damaged(storage, saved)
    assert step_folders.is_marked_damaged(storage, saved)
    assert not step_folders.is_marked_damaged(storage, commit(storage, 4, 8))
    storage.write("step-4/DAMAGED", b"\xff")
    assert not step_folders.is_marked_damaged(storage, saved)


@pytest.mark.parametrize("is_repeated", [False, True])
def test_an_unfinished_save_is_withdrawn(storage: Storage, is_repeated: bool) -> None:
    """Torch's copy of the index goes with the last save in a folder, unless another save may be under way."""
    generation = "00000008-0000000b"
    for name in (f"{generation}-data", METADATA):
        storage.write(f"step-4/{name}", b"x")
    step_folders.withdraw_save(storage, 4, generation, is_repeated=is_repeated)
    assert storage.list("step-4") == ([METADATA] if is_repeated else [])
    saved = commit(storage, 4, 7)
    before = sorted(storage.list("step-4"))
    storage.write(f"step-4/{generation}-data", b"x")
    step_folders.withdraw_save(storage, 4, generation)
    assert sorted(storage.list("step-4")) == before
    step_folders.withdraw_save(storage, 4, saved.generation)  # another process has committed it
    assert sorted(storage.list("step-4")) == before
    storage.write(f"step-4/{COMMIT}", b"damaged")
    storage.write(f"step-4/{generation}-data", b"x")
    step_folders.withdraw_save(storage, 4, generation)
    assert sorted(storage.list("step-4")) == before


def test_pruning_keeps_the_newest_sound_commits_and_what_is_under_way(storage: Storage) -> None:
    for step in range(1, 7):
        commit(storage, step, step)
    storage.write("step-6/00000005-0000000b-data", b"left by an earlier save")
    storage.write("step-6/00000007-0000000b-data", b"of a save under way")
    storage.write("step-8/00000006-0000000b-data", b"left by an earlier save")
    storage.write("step-9/00000007-0000000b-data", b"of a save under way")
    storage.write(f"step-2/{COMMIT}", b"damaged")  # for a person to examine
    storage.remove("step-5/00000005-0000000a-data")  # it does not count
    commits = {saved.step: saved for saved in step_folders.list_commits(storage)[0]}
    step_folders.mark_damaged(storage, commits[4])
    assert step_folders.prune(storage, 2, is_sound=lambda saved: saved.step != 3) == [3, 4, 5]
    assert step_folders.list_steps(storage) == [1, 2, 6, 9]
    assert "00000005-0000000b-data" not in storage.list("step-6")
    assert "00000007-0000000b-data" in storage.list("step-6")
    assert step_folders.prune(storage, 0) == [1]  # at least one is kept
    assert step_folders.steps(storage) == [6]


def test_nothing_is_pruned_without_a_sound_commit(storage: Storage) -> None:
    commit(storage, 1, 1)
    commit(storage, 2, 2)
    assert step_folders.prune(storage, 1, is_sound=lambda saved: False) == []
    assert step_folders.steps(storage) == [1, 2]


# the index ------------------------------------------------------------------------------------------------------------


def test_every_chunk_has_its_facts() -> None:
    index = make_index(3)
    assert len(index) == 3
    assert index.rows("model.w").tolist() == [0, 1, 2]
    assert index.box(1) == Box((1, 0), (1, 3))
    assert (index.name(2), index.nbytes(2), index.file(2)) == ("model.w", 12, "data")
    assert index.info(0).nbytes == 36
    assert CheckpointIndex.from_bytes(index.to_bytes()).columns["data"].tolist() == [32, 96, 160]


def test_chunks_lie_in_their_file_and_apart() -> None:
    def check(size: int = 128, **changes: list[int]) -> None:
        index = make_index()
        for name, values in changes.items():
            index.columns[name] = np.array(values, np.int64)
        index.check_bounds({"data": size})

    check()
    check(data=[52, 116])  # the elements end where their part of the file ends
    check(data=[0, 64])
    with pytest.raises(ValueError, match="a chunk reaches outside its file"):
        check(127)
    with pytest.raises(ValueError, match="a chunk reaches outside its file"):
        check(start=[0, 129], length=[64, 0], data=[0, 129])
    for data in ([53, 96], [32, 63], [32, 129]):
        with pytest.raises(ValueError, match="elements reach outside its part"):
            check(data=data)
    with pytest.raises(ValueError, match="two chunks lie in the same bytes"):
        check(start=[0, 63], data=[0, 64])
    with pytest.raises(ValueError, match="names the file data, which the checkpoint does not have"):
        make_index().check_bounds({"other": 128})
    make_index(0).check_bounds({"data": 0})


def test_chunks_of_different_files_may_have_the_same_place() -> None:
    joined = join_indexes([make_index(), make_index().with_generation("b", np.array([8, 9]))])
    assert (joined.files, len(joined)) == (["data", "b-data"], 4)
    assert joined.columns["in_file"].tolist() == [0, 0, 1, 1]
    assert joined.columns["crc"].tolist() == [0, 1, 8, 9]
    joined.check_bounds({"data": 128, "b-data": 128})
    second_index = make_index()
    second_index = CheckpointIndex(
        {"a": TensorInfo((2,), "float64")}, ["more"], {**second_index.columns, "box": np.zeros((2, 2, 1), int)}
    )
    joined = join_indexes([make_index(), second_index])
    assert list(joined.tensors) == ["a", "model.w"]
    assert joined.columns["tensor"].tolist() == [1, 1, 0, 0]
    assert joined.columns["box"].shape == (4, 2, 2)


@pytest.mark.parametrize(
    ("column", "values", "output"),
    [
        ("tensor", [0, 1], "column tensor refers to number 1 of 1"),
        ("in_file", [0, 1], "column in_file refers to number 1 of 1"),
        ("start", [-1, 64], "column start holds a number below 0"),
        ("length", [[64], [64]], r"column length is of shape \[2, 1\] for 2 chunks"),
        ("crc", [0, 1 << 32], "a checksum is longer than 32 bits"),
        ("box", [[[0, 0], [1, 3]], [[1, 1], [1, 3]]], "a chunk reaches outside its tensor"),
        ("box", [[[0, 0], [1, 3]], [[3, 0], [0, 3]]], "a chunk reaches outside its tensor"),
        ("box", [[[0, 0], [1, 3]], [[-1, 0], [1, 3]]], "a chunk reaches outside its tensor"),
        ("box", [[[0], [1]], [[1], [1]]], r"boxes are of shape \[2, 2, 1\] for 2 chunks of up to 2 dimensions"),
        ("box", [[[0, 0]], [[1, 3]]], r"boxes are of shape \[2, 1, 2\]"),
    ],
)
def test_a_number_that_refers_to_nothing_is_refused(column: str, values: list, output: str) -> None:
    index = make_index()
    index.columns[column] = np.array(values, np.int64)
    with pytest.raises(ValueError, match=output):
        CheckpointIndex.from_bytes(index.to_bytes())


def test_numbers_at_their_limits_are_read() -> None:
    index = make_index()
    index.columns["crc"] = np.array([0, (1 << 32) - 1], np.int64)
    index.columns["box"] = np.array([[[0, 0], [2, 3]], [[2, 3], [0, 0]]], np.int64)
    assert CheckpointIndex.from_bytes(index.to_bytes()).columns["crc"].tolist() == [0, (1 << 32) - 1]
    wide = make_index()
    wide.columns["box"] = np.zeros((2, 2, 32), np.int64)
    assert CheckpointIndex.from_bytes(wide.to_bytes()).columns["box"].shape == (2, 2, 32)
    wide.columns["box"] = np.zeros((2, 2, 33), np.int64)
    with pytest.raises(ValueError, match="boxes are of shape"):
        CheckpointIndex.from_bytes(wide.to_bytes())


@pytest.mark.parametrize(
    ("tensors", "output"),
    [
        ({"a": TensorInfo((1,) * 33, "float32")}, "a has the invalid shape"),
        ({"a": TensorInfo((-1,), "float32")}, "a has the invalid shape"),
        ({"a": TensorInfo((1 << 62,), "uint8")}, "a has the invalid shape"),
        ({"a": TensorInfo(((1 << 60) + 1, 0), "float32")}, "larger than any storage"),
        ({"a": TensorInfo((1,), "float31")}, "a is of type 'float31'"),
        ({"": TensorInfo((1,), "float32")}, "'' is not a valid tensor name"),
        ({"a" * 513: TensorInfo((1,), "float32")}, "is not a valid tensor name"),
    ],
)
def test_tensors_are_within_their_limits(tensors: dict[str, TensorInfo], output: str) -> None:
    empty = make_index(0).columns
    with pytest.raises(ValueError, match=output):
        CheckpointIndex.from_bytes(CheckpointIndex(tensors, [], empty).to_bytes())
    largest = {"a" * 512: TensorInfo((1 << 60, 0), "float32"), "b": TensorInfo((1,) * 32, "float32")}
    assert CheckpointIndex.from_bytes(CheckpointIndex(largest, [], empty).to_bytes()).tensors == largest


def test_names_of_files_are_plain_and_come_once() -> None:
    for files, output in ((["a", "a"], "names a file twice"), (["a/b"], "not a plain name"), ([1], "not a plain name")):
        with pytest.raises(ValueError, match=output):
            CheckpointIndex.from_bytes(CheckpointIndex({}, files, make_index(0).columns).to_bytes())  # type: ignore[arg-type]
