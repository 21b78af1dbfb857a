"""Commits: damage is found, half-written saves never count, old ones go, the disk may be full."""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megascale.checkpoint import TensorShard, inspect, latest, load, save, steps
from megascale.checkpoint.chunk_source import LoadReport
from megascale.checkpoint.complete_checkpoint import open_checkpoint
from megascale.checkpoint.format.index import is_tensor_name
from megascale.checkpoint.format.step_folders import COMMIT, METADATA, list_commits, prune, read_index
from megascale.checkpoint.format.verify import verify
from megascale.checkpoint.storage.local_disk import LocalStorage
from megascale.checkpoint.storage.opening import open_storage
from megascale.core.tensors import Box
from megascale.errors import DataError, TrainingError
from tests.checkpoint.conftest import assert_same, blank, cut, full_shards, logical_state, run_group
from tests.forked import context


def _load(folder: Path, **kwargs: object) -> tuple[dict[str, torch.Tensor], dict]:
    got = blank(logical_state())
    return got, load(folder, full_shards(got), **kwargs)


def test_keeps_newest_and_goes_by_commit_order(folder: Path) -> None:
    assert latest(folder) is None
    for step in (10, 20, 30):
        save(folder, step, full_shards(logical_state(step)), {"step": step}, keep=2)
    assert steps(folder) == [20, 30]
    # A run that went back to 20 and saves 25 continues from 25, regardless of step 30.
    save(folder, 25, full_shards(logical_state(25)), {"step": 25}, keep=2)
    assert latest(folder) == 25
    assert _load(folder)[1] == {"step": 25}
    got, _ = _load(folder, step=30)
    assert_same(got, logical_state(30))
    assert {p.name for p in folder.iterdir()} == {"step-25", "step-30"}


@pytest.mark.parametrize("scheme", ["", "file://", "local://"])
def test_a_linked_step_is_never_emptied(folder: Path, tmp_path: Path, scheme: str) -> None:
    """A checkpoint that was moved to another disk, and linked, survives what saving and pruning remove."""
    location = f"{scheme}{folder}"
    for step in (1, 2):
        save(location, step, full_shards(logical_state(step)), {"step": step}, keep=2)
    (folder / "step-2" / "00000001-abcdabcd-00000.distcp").write_bytes(b"of a save that died")
    archived = {}
    for step in (1, 2):
        (folder / f"step-{step}").rename(tmp_path / f"moved-{step}")
        (folder / f"step-{step}").symlink_to(tmp_path / f"moved-{step}")
        archived[step] = _contents(tmp_path / f"moved-{step}")
    for step, keep in ((3, 2), (4, 1), (5, 1)):
        save(location, step, full_shards(logical_state(step)), {"step": step}, keep=keep)
    assert steps(location) == [1, 2, 5]
    assert {step: _contents(tmp_path / f"moved-{step}") for step in (1, 2)} == archived
    assert prune(location, keep=1, remove_links=True) == [1, 2]
    assert steps(location) == [5]
    assert {step: _contents(tmp_path / f"moved-{step}") for step in (1, 2)} == archived


def test_a_linked_step_may_be_saved_again(folder: Path, tmp_path: Path) -> None:
    save(folder, 1, full_shards(logical_state(1)), {}, keep=2)
    (folder / "step-1").rename(tmp_path / "moved")
    (folder / "step-1").symlink_to(tmp_path / "moved")
    earlier = {name for name in _contents(tmp_path / "moved") if name[:8].isdecimal()}
    save(folder, 1, full_shards(logical_state(7)), {"step": 1}, keep=1)
    assert earlier < _contents(tmp_path / "moved").keys()
    got, _ = _load(folder)
    assert_same(got, logical_state(7))


def _contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_saved_again_replaces(folder: Path) -> None:
    save(folder, 5, full_shards(logical_state(1)), {}, keep=1)
    files = {p.name for p in (folder / "step-5").iterdir()}
    save(folder, 5, full_shards(logical_state(2)), {}, keep=1)
    got, _ = _load(folder)
    assert_same(got, logical_state(2))
    assert len(files) == len(list((folder / "step-5").iterdir()))


def test_what_an_earlier_save_left_in_a_kept_step_goes(folder: Path) -> None:
    """Files of saves up to the newest commit that no commit names, also of a save with just its number."""
    save(folder, 5, full_shards(logical_state(1)), {}, keep=1)
    [commit] = list_commits(open_storage(folder))[0]
    names = {p.name for p in (folder / "step-5").iterdir()}
    leftover, begun = (f"{number:08d}-abcdef01-00000.distcp" for number in (commit.sequence, commit.sequence + 1))
    assert leftover not in names
    for name in (leftover, begun):
        (folder / "step-5" / name).write_bytes(b"x")
    prune(folder, 1)
    assert {p.name for p in (folder / "step-5").iterdir()} == names | {begun}


def test_damage_is_described_by_what_reads_the_file(folder: Path) -> None:
    location = save(folder, 1, full_shards(logical_state()), {}, keep=1)
    for name in (METADATA, next(p.name for p in location.iterdir() if p.name.endswith(".distcp"))):
        file = location / name
        sound = file.read_bytes()
        file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        problems = verify(open_storage(folder), 1).problems
        file.write_bytes(sound)
        text = next(problem for problem in problems if problem.startswith(name))
        assert ("torch's copy of the index" in text) == (name == METADATA)
        assert ("its contents are not what was written" in text) == (name != METADATA)


def test_chunks_that_share_elements_with_a_box(folder: Path) -> None:
    """Four quarters of a matrix: only those that a box reaches into."""
    tensor = torch.arange(64.0).view(8, 8)
    shards = [TensorShard("model.a", (8, 8), (r, c), tensor[r : r + 4, c : c + 4]) for r in (0, 4) for c in (0, 4)]
    save(folder, 1, shards, {}, keep=1)
    index = read_index(open_storage(folder), list_commits(open_storage(folder))[0][0])

    def quarters(offsets: tuple[int, int], sizes: tuple[int, int]) -> set[tuple[int, ...]]:
        return {
            tuple(index.box(row).offsets) for row in index.find_overlapping("model.a", Box(offsets, sizes)).tolist()
        }

    assert quarters((0, 0), (4, 4)) == {(0, 0)}
    assert quarters((3, 4), (2, 4)) == {(0, 4), (4, 4)}
    assert quarters((4, 3), (1, 2)) == {(4, 0), (4, 4)}
    assert quarters((0, 0), (8, 8)) == {(0, 0), (0, 4), (4, 0), (4, 4)}
    assert quarters((2, 2), (0, 5)) == set()


@pytest.mark.parametrize(
    ("name", "allowed"), [("a", True), ("", False), ("a" * 512, True), ("a" * 513, False), ("a\x1b", False)]
)
def test_names_of_tensors(name: str, allowed: bool) -> None:
    assert is_tensor_name(name) == allowed


def test_plain_torch_reads_it(folder: Path, tmp_path: Path) -> None:
    tensors = logical_state()
    shards = [s for rank in range(3) for s in cut(tensors, "flat", rank, 3) if s.shape or rank == 0]
    location = save(folder, 1, shards, {}, keep=1)
    got = blank(tensors)
    dcp.load(got, checkpoint_id=str(location), no_dist=True)
    assert_same(got, tensors)
    dcp_to_torch_save(location, tmp_path / "whole.pt")
    assert_same(torch.load(tmp_path / "whole.pt"), tensors)


def _damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "gone":
        path.unlink()
    else:
        # Flip a bit inside the first chunk's elements: beyond the archive's headers, at an aligned offset.
        data[data.index(b"FB") + 64] ^= 4
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["cut", "gone", "flip"])
def test_damaged_shard_falls_back(folder: Path, how: str) -> None:
    save(folder, 1, full_shards(logical_state(1)), {"step": 1}, keep=2)
    location = save(folder, 2, full_shards(logical_state(2)), {"step": 2}, keep=2)
    _damage(next(location.glob("*.distcp")), how)
    with pytest.warns(UserWarning, match=r"step-2.*damaged.*Went back to the checkpoint of step 1"):
        got, state = _load(folder)
    assert state == {"step": 1}
    assert_same(got, logical_state(1))
    with pytest.raises(DataError, match=r"step-2.*damaged.*No other"):
        _load(folder, step=2)


@pytest.mark.parametrize("name", ["index", COMMIT])
def test_damaged_index_or_commit_falls_back(folder: Path, name: str) -> None:
    save(folder, 1, full_shards(logical_state(1)), {"step": 1}, keep=2)
    location = save(folder, 2, full_shards(logical_state(2)), {"step": 2}, keep=2)
    path = next(location.glob(f"*{name}*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.warns(UserWarning, match=r"step-2.*(Went back|passed over: COMMIT)"):
        got, state = _load(folder)
    assert state == {"step": 1}
    assert_same(got, logical_state(1))


def test_going_back_to_imported_weights_clears_the_moments(folder: Path) -> None:
    tensors = logical_state()
    weights = {name: t for name, t in tensors.items() if name.startswith("model.")}
    save(folder, 0, full_shards(weights), {"step": 0}, keep=2)
    location = save(folder, 5, full_shards(logical_state(5)), {"step": 5}, keep=2)
    # A weight is damaged: by the time that it is found the moments have been read into place.
    (commit,) = (c for c in list_commits(open_storage(folder))[0] if c.step == 5)
    index = read_index(open_storage(folder), commit)
    (row,) = index.find_overlapping("model.embedding.weight", Box((0, 0), (37, 12))).tolist()
    (file,) = location.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[int(index.columns["data"][row])] ^= 0xFF
    file.write_bytes(bytes(data))
    got = {name: torch.zeros_like(t) for name, t in tensors.items()}
    shards = full_shards(got)
    initial = [s for s in shards if s.name.startswith("model.")]
    with pytest.warns(UserWarning, match="Went back to the checkpoint of step 0"):
        assert load(folder, shards, initial=initial) == {"step": 0}
    assert_same({name: got[name] for name in weights}, weights)
    assert all(not got[name].any() for name in got if name not in weights)


def test_what_another_optimizer_keeps_begins_at_zero(folder: Path) -> None:
    saved = logical_state()
    save(folder, 5, full_shards(saved), {"step": 5}, keep=1)
    got = {name: torch.ones_like(t) for name, t in saved.items()}
    weight = next(name for name in saved if name.startswith("model."))
    momentum = {f"optimizer.momentum.{weight}": torch.ones(3, 4)}
    expected_shards, report = full_shards(got | momentum), LoadReport()
    with pytest.raises(DataError, match=r"optimizer\.name likely differs"):
        load(folder, expected_shards, accept=lambda state, name: False)
    assert load(folder, expected_shards, accept=lambda state, name: True, report=report) == {"step": 5}
    assert_same(got, saved)
    assert not any(tensor.any() for tensor in momentum.values())
    assert report.zeroed_states == {"optimizer.momentum"}


def test_a_part_of_another_model_is_refused(folder: Path) -> None:
    """All that is wanted is there, but the checkpoint has more of the model."""
    save(folder, 1, full_shards(logical_state()), {}, keep=1)
    got = blank(logical_state())
    part = [s for s in full_shards(got) if s.name != next(n for n in got if n.startswith("model."))]
    load(folder, part)
    with pytest.raises(DataError, match=r"\(1 tensors\) are not in this model"):
        load(folder, part, covers_model=True)


def _damaged_group(rank: int, size: int, folder: Path) -> dict:
    import warnings

    got = blank(logical_state())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = load(folder, cut(got, "rows", rank, size))
    for a, b in zip(cut(got, "rows", rank, size), cut(logical_state(1), "rows", rank, size), strict=True):
        assert torch.equal(a.tensor, b.tensor)
    return state


def test_damage_seen_by_one_process_turns_all_back(folder: Path) -> None:
    save(folder, 1, full_shards(logical_state(1)), {"step": 1}, keep=2)
    tensors = logical_state(2)
    location = save(folder, 2, [s for r in range(2) for s in cut(tensors, "rows", r, 2) if s.shape or r], {}, keep=2)
    _damage(next(location.glob("*.distcp")), "flip")
    assert run_group(2, _damaged_group, folder) == [{"step": 1}] * 2


class Overtaken:
    """Training next to a reader: when the reader has chosen a step, saves the next one and removes that (keep=1).

    Attributes:
        calls: how many times it does so; the reader then has its way.
    """

    def __init__(self, folder: Path, calls: int = 1) -> None:
        self.folder, self.calls = folder, calls

    def __call__(self, state: dict, name: str) -> None:
        if self.calls:
            self.calls -= 1
            step = int(name.rpartition("-")[2]) + 1
            save(self.folder, step, full_shards(logical_state(step)), {"step": step}, keep=1)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_step_that_is_pruned_while_it_is_read_is_not_damaged(
    folder: Path, calls: int, recwarn: pytest.WarningsRecorder
) -> None:
    save(folder, 1, full_shards(logical_state(1)), {"step": 1}, keep=1)
    got, state = _load(folder, accept=Overtaken(folder, calls))
    assert state == {"step": 1 + calls}
    assert_same(got, logical_state(1 + calls))
    assert not recwarn
    with pytest.raises(DataError, match=r"step-\d' was removed while it was read.*checkpoint\.keep"):
        _load(folder, step=1 + calls, accept=Overtaken(folder))


class Overtaking(LocalStorage):
    """A folder whose one step is replaced by the next right after it is listed."""

    def list(self, path: str = "") -> list[str]:
        names = super().list(path)
        if names == ["step-1"]:
            save(self.root, 2, full_shards(logical_state(2)), {}, keep=1)
        return names


def test_a_look_finds_the_step_that_has_replaced_all_that_were_there(folder: Path) -> None:
    save(folder, 1, full_shards(logical_state(1)), {}, keep=1)
    assert [commit.step for commit in list_commits(Overtaking(folder))[0]] == [2]


def _overtaken_group(rank: int, size: int, folder: Path, newer: Path) -> tuple[dict, list[bool]]:
    def accept(state: dict, name: str) -> None:
        if rank == 0 and (newer / "step-2").exists():
            (newer / "step-2").rename(folder / "step-2")
            shutil.rmtree(folder / "step-1")

    got = blank(logical_state())
    state = load(folder, cut(got, "rows", rank, size), accept=accept)
    pairs = zip(cut(got, "rows", rank, size), cut(logical_state(2), "rows", rank, size), strict=True)
    return state, [torch.equal(a.tensor, b.tensor) for a, b in pairs]


def test_a_step_that_is_pruned_is_passed_over_by_all_processes(folder: Path, tmp_path: Path) -> None:
    save(folder, 1, full_shards(logical_state(1)), {"step": 1}, keep=1)
    save(tmp_path / "newer", 2, full_shards(logical_state(2)), {"step": 2}, keep=1)
    for state, is_same in run_group(2, _overtaken_group, folder, tmp_path / "newer"):
        assert state == {"step": 2}
        assert all(is_same)


def test_tools_do_not_call_a_pruned_step_damaged(folder: Path) -> None:
    storage = open_storage(folder)
    save(folder, 1, full_shards(logical_state(1)), {}, keep=1)
    opened = open_checkpoint(folder)

    def prune(done: int, total: int) -> None:
        if steps(folder) == [1]:
            save(folder, 2, full_shards(logical_state(2)), {}, keep=1)

    assert verify(storage, 1, prune, threads=1).removed
    assert not verify(storage, 2).problems
    with pytest.raises(DataError, match="was removed while it was read"):
        opened.read_tensor(next(iter(opened.tensors)))


def test_nothing_and_half_written_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match="there is no checkpoint"):
        _load(folder)
    location = save(folder, 4, full_shards(logical_state()), {}, keep=1)
    (location / COMMIT).unlink()
    assert steps(folder) == []
    assert not inspect(folder).committed
    with pytest.raises(DataError, match=r"step-4.*half-written"):
        _load(folder)
    with pytest.raises(DataError, match=r"step-4.*half-written"):
        _load(folder, step=4)
    with pytest.raises(DataError, match=r"no checkpoint .*step-9.*committed steps: none"):
        _load(folder, step=9)
    save(folder, 5, full_shards(logical_state()), {}, keep=3)
    assert [p.name for p in folder.iterdir()] == ["step-5"], "the dead attempt is swept once a good one stands"


def test_other_model_is_refused(folder: Path) -> None:
    saved = {"config": {"model": {"hidden": 12, "layers": 1, "vocab_size": 37, "ffn_hidden": None}}}
    save(folder, 1, full_shards(logical_state()), saved, keep=1)
    mismatched = TensorShard("model.embedding.weight", (40, 12), (0, 0), torch.zeros(40, 12))
    with pytest.raises(DataError, match=r"embedding.weight is \[37, 12\] there and \[40, 12\].*model.vocab_size"):
        load(folder, [mismatched])
    deeper = [TensorShard(f"model.layers.{i}.attention.query.bias", (12,), (0,), torch.zeros(12)) for i in range(2)]
    with pytest.raises(DataError, match=r"no model.layers.1.*model.layers is likely 1 there and 2 here"):
        load(folder, deeper)
    with pytest.raises(DataError, match=r"optimizer.name likely differs"):
        load(
            folder,
            full_shards(
                {k: t for k, t in logical_state().items() if "cube" not in k}
                | {"optimizer.m": torch.ones(1), "model.layers.0.cube": torch.zeros(5, 4, 6)}
            ),
        )


def test_full_disk_keeps_the_previous(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_disk / "checkpoints"
    save(folder, 1, full_shards(logical_state(1)), {"step": 1}, keep=2)
    big = full_shards({"w": torch.zeros(1 << 20)})
    with pytest.raises(TrainingError, match=r"checkpoints' is full: .* needs 4,198,400 bytes and [\d,]+ are free"):
        save(folder, 2, big, {}, keep=2)
    assert [p.name for p in folder.iterdir()] == ["step-1"]
    # The disk may also fill while writing, when the look beforehand was too hopeful.
    monkeypatch.setattr("megascale.checkpoint.storage.local_disk.LocalStorage.free", lambda _: 1 << 40)
    with pytest.raises(TrainingError, match="is full"):
        save(folder, 2, big, {}, keep=2)
    assert [p.name for p in folder.iterdir()] == ["step-1"]
    got, state = _load(folder)
    assert state == {"step": 1}
    assert_same(got, logical_state(1))


def _save_on_and_on(folder: Path, reports: Connection) -> None:
    torch.set_num_threads(1)
    step = latest(folder) or 0
    while True:
        step += 1
        w = torch.full((64, 4096), float(step))
        b = torch.arange(1000) + step
        shards = [TensorShard("w", (64, 4096), (0, 0), w), TensorShard("b", (1000,), (0,), b)]
        save(folder, step, shards, {"step": step}, keep=2)
        reports.send(step)


def test_killed_at_random_points_of_saving(folder: Path) -> None:
    """SIGKILL five times: what was reported as saved is there, whole, and nothing else is in the way."""
    random.seed(11)
    for _ in range(5):
        reports, sender = context.Pipe(duplex=False)
        child = context.Process(target=_save_on_and_on, args=(folder, sender))
        child.start()
        sender.close()
        reported = reports.recv()
        time.sleep(random.uniform(0, 0.06))  # not a wait for something: the random point of death
        child.kill()
        child.join()
        with contextlib.suppress(EOFError):
            while True:
                reported = reports.recv()
        newest = latest(folder)
        assert newest is not None
        assert newest >= reported
        w, b = torch.zeros(64, 4096), torch.zeros(1000, dtype=torch.int64)
        state = load(folder, [TensorShard("w", (64, 4096), (0, 0), w), TensorShard("b", (1000,), (0,), b)])
        assert state == {"step": newest}
        assert (w == newest).all()
        assert torch.equal(b, torch.arange(1000) + newest)
    assert len(list(folder.iterdir())) <= 4
