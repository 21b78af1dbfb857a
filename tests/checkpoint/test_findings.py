"""Reports of loads, saves and inspections of checkpoints: bytes, damage, candidates, contents, and failures."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from megascale.checkpoint import TensorShard, inspect, load, save
from megascale.checkpoint.chunk_source import LoadReport
from megascale.checkpoint.format import verify as verify_module
from megascale.checkpoint.format.commit import COMMIT, METADATA
from megascale.checkpoint.format.step_folders import list_commits, mark_damaged, read_index
from megascale.checkpoint.format.verify import summarise_step, verify
from megascale.checkpoint.loader import find_candidates, load_commit
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.saver import SaveFailure, cut_chunks, get_dtype_name
from megascale.checkpoint.storage.base import Storage, explain_save_error
from megascale.checkpoint.storage.opening import open_storage
from megascale.core.exit_record import ExitKind, find_exit_record
from megascale.core.tensors import Box
from megascale.errors import DataError, TrainingError
from tests.checkpoint.conftest import blank, full_shards, logical_state

DATA_BYTES = sum(tensor.nbytes for tensor in logical_state().values())


def save_steps(folder: Path, *steps: int) -> Storage:
    for step in steps:
        save(folder, step, full_shards(logical_state(step)), {"step": step}, keep=len(steps))
    return open_storage(folder)


def find_data_file(folder: Path, step: int) -> Path:
    (file,) = (folder / f"step-{step}").glob("*.distcp")
    return file


def change_last_byte(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


# loading --------------------------------------------------------------------------------------------------------------


def test_a_load_reports_what_it_read(folder: Path) -> None:
    save_steps(folder, 1)
    report = LoadReport()
    values = blank(logical_state())
    load(folder, full_shards(values), report=report)
    # Small neighbours are read together with the frames between them.
    assert DATA_BYTES <= report.read_bytes <= find_data_file(folder, 1).stat().st_size
    assert (report.sent_bytes, report.damage, report.zeroed_states, report.skipped_commits) == (0, [], set(), [])
    part = LoadReport()
    name = "model.layers.0.cube"
    load(folder, full_shards({name: values[name]}), report=part)
    assert values[name].nbytes <= part.read_bytes < report.read_bytes


def test_reports_add_up() -> None:
    total = LoadReport(read_bytes=1, sent_bytes=2, damage=["a"])
    total.add(LoadReport(read_bytes=10, sent_bytes=20, damage=["b"]))
    assert (total.read_bytes, total.sent_bytes, total.damage) == (11, 22, ["a", "b"])


def test_damage_is_told_and_never_remains(folder: Path) -> None:
    """Each damaged checkpoint is named, in the order in which they were tried."""
    save_steps(folder, 1, 2, 3)
    for step in (2, 3):
        find_data_file(folder, step).write_bytes(bytes(find_data_file(folder, step).stat().st_size))
    report = LoadReport()
    values = blank(logical_state())
    with pytest.warns(UserWarning, match=r"step-3' is damaged: .*; .*step-2' is damaged: .*Went back .* of step 1"):
        assert load(folder, full_shards(values), report=report) == {"step": 1}
    assert [commit.step for commit in report.skipped_commits] == [3, 2]
    assert report.damage == []
    assert torch.equal(values["model.embedding.weight"], logical_state(1)["model.embedding.weight"])
    find_data_file(folder, 1).unlink()
    with pytest.raises(DataError, match=r"step-1' is damaged: .* is missing\. No other committed checkpoint is left"):
        load(folder, full_shards(values))


def test_a_commit_that_cannot_be_opened_is_damaged(folder: Path) -> None:
    storage = save_steps(folder, 1)
    [commit] = list_commits(storage)[0]
    shards = full_shards(blank(logical_state()))
    assert load_commit(storage, commit, shards, Peers()) is None
    change_last_byte(folder / "step-1" / commit.index_file)
    damage = load_commit(storage, commit, shards, Peers())
    assert damage is not None
    assert "is not what was written" in damage


def test_a_state_that_is_refused_names_the_damage_before_it(folder: Path) -> None:
    save_steps(folder, 1, 2)
    find_data_file(folder, 2).write_bytes(bytes(find_data_file(folder, 2).stat().st_size))

    def accept(state: dict, name: str) -> bool:
        if state["step"] == 1:
            raise DataError(f"{name} is of another run")
        return False

    with pytest.raises(DataError, match=r"step-2' is damaged: .*; .*step-1 is of another run"):
        load(folder, full_shards(blank(logical_state())), accept=accept)


def test_states_of_a_new_optimizer_begin_at_zero(folder: Path) -> None:
    save_steps(folder, 1)
    names = [
        "optimizer.momentum.embedding.weight",
        "optimizer.momentum.norm.weight",
        "optimizer.exp_avg.embedding.weight",
    ]
    tensors = {name: torch.ones(37, 12) for name in names}
    report = LoadReport()
    load(folder, full_shards(tensors), report=report, accept=lambda state, name: True)
    assert report.zeroed_states == {"optimizer.momentum"}
    assert not any(tensors[name].any() for name in names[:2])
    assert torch.equal(tensors[names[2]], logical_state(1)[names[2]])
    with pytest.raises(DataError, match=r"optimizer\.momentum"):
        load(folder, full_shards(tensors), accept=lambda state, name: False)


@pytest.mark.parametrize("step", [0, 1])
def test_imported_weights_fill_their_own_shards_alone(folder: Path, step: int) -> None:
    save_steps(folder, step)
    tensors = logical_state(9)
    initial = full_shards({name: tensor for name, tensor in tensors.items() if name.startswith("model.")})
    load(folder, full_shards(tensors), initial=initial)
    for name, tensor in tensors.items():
        is_filled = step == 1 or name.startswith("model.")
        assert torch.equal(tensor, logical_state(step)[name] if is_filled else torch.zeros_like(tensor)), name


def test_candidates_are_the_newest_first_and_marked_ones_last(folder: Path) -> None:
    storage = save_steps(folder, 1, 2, 3)
    commits = {commit.step: commit for commit in list_commits(storage)[0]}
    mark_damaged(storage, commits[3])
    candidates = find_candidates(storage, None)
    assert [commit.step for commit in candidates] == [2, 1, 3]  # type: ignore[union-attr]
    assert [commit.step for commit in find_candidates(storage, 3)] == [3]  # type: ignore[union-attr]
    assert find_candidates(storage, 4) == f"there is no checkpoint '{folder}/step-4'; committed steps: [1, 2, 3]"
    (folder / "step-2" / COMMIT).write_bytes(b"damaged")
    expected = f"'{folder}/step-2' is half-written or damaged (no readable COMMIT) and cannot be loaded"
    assert find_candidates(storage, 2) == f"{expected}; committed steps: [1, 3]"
    with pytest.warns(UserWarning, match=rf"the checkpoint '{folder}/step-2' is passed over: COMMIT does not match"):
        assert len(find_candidates(storage, None)) == 2
    for step in (1, 3):
        (folder / f"step-{step}" / COMMIT).unlink()
    text = find_candidates(storage, None)
    assert str(text).startswith(f"no checkpoint in '{folder}' is complete: {folder}/step-1, {folder}/step-2, ")
    empty = open_storage(folder / "empty")
    assert str(find_candidates(empty, None)).startswith(f"there is no checkpoint in '{folder}/empty'; train first")
    assert str(find_candidates(empty, 3)).endswith("committed steps: none")


# inspecting -----------------------------------------------------------------------------------------------------------


def test_a_step_is_summarised(folder: Path) -> None:
    storage = save_steps(folder, 1, 2)
    summary = summarise_step(storage, 2)
    commit = list_commits(storage)[0][0]
    assert (summary.path, summary.step, summary.committed, summary.problem) == (f"{folder}/step-2", 2, True, None)
    assert (summary.sequence, summary.bytes, summary.state) == (2, commit.size, {"step": 2})
    tensors = {tensor.name: tensor for tensor in summary.tensors}
    assert tensors.keys() == logical_state().keys()
    for name, value in logical_state().items():
        assert (tensors[name].shape, tensors[name].bytes, tensors[name].chunks) == (tuple(value.shape), value.nbytes, 1)
    assert inspect(folder).step == 2
    assert inspect(folder / "step-1").step == 1
    (folder / "step-3").mkdir()
    (folder / "step-3" / "file").write_text("")
    assert summarise_step(storage, 3).problem == "no COMMIT: the save did not finish"
    assert inspect(folder).step == 2  # a complete one comes first
    find_data_file(folder, 2).unlink()
    assert "is missing" in str(summarise_step(storage, 2).problem)
    assert inspect(folder).step == 1
    (folder / "step-1" / COMMIT).unlink()
    assert (inspect(folder).step, inspect(folder).committed) == (3, False)


@pytest.mark.parametrize("piece", [1 << 30, 1000])
def test_a_verification_reads_every_byte(folder: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(verify_module, "_READ_BYTES", piece)
    storage = save_steps(folder, 1)
    [commit] = list_commits(storage)[0]
    progress: list[tuple[int, int]] = []
    result = verify(storage, 1, lambda done, total: progress.append((done, total)), threads=1)
    assert (result.problems, result.tensors, result.removed, result.step) == ([], set(), False, 1)
    assert result.bytes == commit.size - commit.files[commit.index_file][0]
    assert progress[-1] == (result.bytes, commit.size)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_a_damaged_byte_is_named_with_its_tensor(folder: Path) -> None:
    storage = save_steps(folder, 1)
    [commit] = list_commits(storage)[0]
    index = read_index(storage, commit)
    file = find_data_file(folder, 1)
    sound = file.read_bytes()
    for row in range(len(index)):
        offset = int(index.columns["data"][row])
        for position in (offset, offset + index.nbytes(row) - 1):
            data = bytearray(sound)
            data[position] ^= 1
            file.write_bytes(data)
            result = verify(storage, 1)
            assert result.tensors == {index.name(row)}
            assert result.problems == [f"{file.name}: its contents are not what was written"]
    file.write_bytes(sound[:-1])
    assert verify(storage, 1).problems == [f"{file.name} is {len(sound) - 1} bytes long, {len(sound)} were written"]
    file.write_bytes(sound + b"x")
    assert verify(storage, 1).problems == [f"{file.name} is {len(sound) + 1} bytes long, {len(sound)} were written"]
    file.write_bytes(sound)
    change_last_byte(folder / "step-1" / METADATA)
    result = verify(storage, 1)
    assert "torch's copy of the index" in result.problems[0]
    assert (len(result.problems), result.tensors) == (1, set())
    file.unlink()
    assert len(verify(storage, 1).problems) == 2
    (folder / "step-1" / COMMIT).write_bytes(b"damaged")
    assert verify(storage, 1).problems == ["COMMIT does not match its own checksum"]
    (folder / "step-1" / COMMIT).unlink()
    unfinished, absent = verify(storage, 1), verify(storage, 7)
    assert unfinished.problems == absent.problems == ["no COMMIT: the save did not finish"]
    assert (unfinished.removed, absent.removed) == (False, True)


# saving ---------------------------------------------------------------------------------------------------------------


def test_a_type_that_the_format_lacks_is_refused(folder: Path) -> None:
    assert get_dtype_name(torch.zeros(1, dtype=torch.bfloat16)) == "bfloat16"
    with pytest.raises(TrainingError, match="cannot hold complex64 tensors"):
        save(folder, 1, full_shards({"model.a": torch.zeros(1, dtype=torch.complex64)}), {}, keep=1)
    assert not folder.exists()


def test_empty_parts_have_a_chunk_only_for_an_empty_tensor() -> None:
    empty_tensor = TensorShard("a", (0, 3), (0, 0), torch.zeros(0, 3))
    empty_part = TensorShard("b", (4, 3), (4, 0), torch.zeros(0, 3))
    full = TensorShard("c", (4, 3), (1, 0), torch.ones(2, 3))
    chunks = cut_chunks([empty_tensor, empty_part, full])
    assert [(chunk.shard.name, chunk.box) for chunk in chunks] == [
        ("a", Box((0, 0), (0, 3))),
        ("c", Box((1, 0), (2, 3))),
    ]
    assert chunks[1].view().shape == (2, 3)


class Disk:
    """Storage whose free bytes are given."""

    url = "/a"

    def __init__(self, free: int | None) -> None:
        self._free = free

    def free(self) -> int | None:
        return self._free


@pytest.mark.parametrize(
    ("free", "room"),
    [
        (5, "needs 1,000 bytes and 5 are free;"),
        (None, "and less is free;"),
        (1000, "and its index, and 1,000 are free;"),
    ],
)
def test_a_full_disk_is_named_with_its_room(free: int | None, room: str) -> None:
    disk: Storage = Disk(free)  # type: ignore[assignment]
    error = explain_save_error(OSError(errno.ENOSPC, "x"), disk, 1000)
    assert room in str(error)
    assert (find_exit_record(error).kind, find_exit_record(error).subject, error.errno) == (
        ExitKind.DISK_FULL,
        "/a",
        errno.ENOSPC,
    )
    failure = SaveFailure.from_error(OSError(errno.ENOSPC, "x"), disk, 1000)
    assert (failure.to_error().errno, str(failure.to_error())) == (errno.ENOSPC, str(error))
    training_error = TrainingError("as it is")
    assert SaveFailure.from_error(training_error, disk, 1000).text == "as it is"
    io_failure = SaveFailure.from_error(OSError(errno.EIO, "Input/output error"), disk, 1000)
    assert "could not be written to '/a': Input/output error; the previous checkpoint stays" in io_failure.text
    assert "ValueError('y')" in SaveFailure.from_error(ValueError("y"), disk, 1000).text


def test_a_save_needs_the_room_of_its_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with just that room is tried; one byte less is refused before a file is made."""
    storage = save_steps(folder, 1)
    size = find_data_file(folder, 1).stat().st_size
    for free, is_refused in ((size, False), (size - 1, True)):
        monkeypatch.setattr(type(storage), "free", lambda self, free=free: free)
        if is_refused:
            with pytest.raises(TrainingError, match=rf"needs {size:,} bytes and {free:,} are free"):
                save(folder, 2, full_shards(logical_state()), {}, keep=1)
        else:
            save(folder, 2, full_shards(logical_state()), {}, keep=2)
            (folder / "step-2" / COMMIT).unlink()


def test_a_save_that_fails_leaves_the_one_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = save_steps(folder, 1)
    before = sorted(path.name for path in folder.rglob("*"))

    def fail(self: object, path: str, data: bytes) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(type(storage), "write", fail)
        with pytest.raises(TrainingError, match="could not be written"):
            save(folder, 2, full_shards(logical_state()), {}, keep=1)
    assert sorted(path.name for path in folder.rglob("*")) == before
    assert load(folder, full_shards(blank(logical_state()))) == {"step": 1}
