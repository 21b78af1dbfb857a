"""A sample of the chaos bench: power cuts, failing disks, killed processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megascale.checkpoint import steps
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.saver import save_to_storage
from megascale.checkpoint.storage.local_disk import Disk, LocalStorage
from megascale.errors import DataError, TrainingError
from tests.chaos.checkpoint.chaos import KINDS, check, shards_of, state_of, strike
from tests.chaos.checkpoint.crash import FaultyDisk, JournalDisk, after_power_cut


def _save(storage: LocalStorage, step: int) -> None:
    save_to_storage(storage, step, shards_of(state_of(step)), {"step": step}, 2, Peers())


def test_blows_to_the_disk(tmp_path: Path) -> None:
    blows = strike(40, tmp_path, 5, lambda blow: None, ("power cut", "full disk", "disk error", "short write"))
    assert [blow.note for blow in blows if not blow.held] == []
    assert len(blows) == 40


def test_blows_to_processes(tmp_path: Path) -> None:
    blows = strike(4, tmp_path, 7, lambda blow: None, ("trainer", "service", "both", "hang"))
    assert [(blow.kind, blow.note) for blow in blows if not blow.held] == []
    assert [blow.kind for blow in blows] == ["trainer", "service", "both", "hang", "leaks"]
    assert set(KINDS) >= {blow.kind for blow in blows[:-1]}


@pytest.mark.parametrize("kind", ["full", "error"])
def test_a_disk_that_fails_at_any_change(tmp_path: Path, kind: str) -> None:
    """Not a sample: each change that a save makes fails once, the save before stays and the next succeeds."""
    failures = 0
    for when in range(1, 60):
        root = tmp_path / f"{kind}-{when}"
        root.mkdir()
        _save(LocalStorage(root), 1)
        disk = FaultyDisk(kind, when)
        try:
            _save(LocalStorage(root, disk), 2)
            least = 2
        except TrainingError:
            failures += 1
            least = 1
        assert check(root, least) in (1, 2)
        _save(LocalStorage(root), 3)
        assert check(root, 3) == 3
        if disk.count < when:
            break
    else:
        pytest.fail("the save makes more changes than were tried")
    assert failures > 5


def test_the_power_cut_would_find_a_writer_that_does_not_sync(tmp_path: Path) -> None:
    """The adversary is effective: without its syncs the same writer loses committed steps."""

    def losses(forget: tuple[str, ...]) -> int:
        lost = 0
        for seed in range(30):
            root = tmp_path / f"{'-'.join(forget)}-{seed}"
            disk = JournalDisk(root / "disk")
            (root / "disk").mkdir(parents=True)
            for step in (1, 2):
                _save(LocalStorage(root / "disk", disk), step)
            journal = [change for change in disk.journal if change[0] not in forget]
            after_power_cut(journal, root / "disk", root / "after", random.Random(seed))
            try:
                check(root / "after", 2)
            except (DataError, ValueError):
                lost += 1
        return lost

    assert losses(()) == 0
    assert losses(("sync",)) > 10
    assert losses(("sync_folder",)) > 10


def test_steps_survive_every_prefix_of_changes(tmp_path: Path) -> None:
    """All changes last at once (a killed process, not a power cut). The test cuts at every point of three saves."""
    root = tmp_path / "disk"
    root.mkdir()
    disk = JournalDisk(root)
    returned = [0]
    for step in (1, 2, 3):
        _save(LocalStorage(root, disk), step)
        returned.append(len(disk.journal))

    class Everything(random.Random):
        """Everything pending happened."""

        def randint(self, low: int, high: int) -> int:
            return high

        def random(self) -> float:
            return 0.0

    for cut in range(returned[1], len(disk.journal) + 1):
        target = tmp_path / f"cut-{cut}"
        after_power_cut(disk.journal[:cut], root, target, Everything())
        least = sum(changes <= cut for changes in returned) - 1
        assert check(target, least) >= least
        assert steps(target)


class _Meanwhile(Disk):
    """Before its n-th change, something else happens."""

    def __init__(self, when: int, action: Callable[[], object]) -> None:
        self.when = when
        self.action = action
        self.count = 0

    def __getattribute__(self, name: str) -> object:
        if name in vars(Disk) and not name.startswith("_"):
            self.count += 1
            if self.count == self.when:
                self.action()
        return super().__getattribute__(name)


def _old_steps(root: Path, leftover: bool) -> None:
    """Two checkpoints of which one goes at the next pruning, and what a save of step 3 left when it was killed."""
    if leftover:
        LocalStorage(root).write("step-3/00000001-abcdabcd-00000.distcp", b"half")
    for step in (1, 2):
        save_to_storage(LocalStorage(root), step, shards_of(state_of(step)), {"step": step}, 3, Peers())


@pytest.mark.parametrize("leftover", [False, True])
def test_older_ones_are_removed_while_a_save_is_under_way(tmp_path: Path, leftover: bool) -> None:
    """The removal runs at each single change of the save, which does not notice it."""
    for when in range(1, 80):
        root = tmp_path / str(when)
        _old_steps(root, leftover)
        disk = _Meanwhile(when, lambda root=root: folders.prune(root, 1))
        _save(LocalStorage(root, disk), 3)
        assert check(root, 3) == 3
        if disk.count < when:
            break
    else:
        pytest.fail("the save makes more changes than were tried")
    assert when > 20


@pytest.mark.parametrize("leftover", [False, True])
def test_a_save_begins_while_older_ones_are_removed(tmp_path: Path, leftover: bool) -> None:
    """The save starts at each single change of the removal. The data written by then stays."""
    name = "step-3/00000009-abcdabcd-00000.distcp"
    for when in range(1, 30):
        root = tmp_path / str(when)
        _old_steps(root, leftover)
        disk = _Meanwhile(when, lambda root=root: LocalStorage(root).write(name, b"new"))
        folders.prune(LocalStorage(root, disk), 1)
        assert steps(root) == [2]
        if disk.count < when:
            break
        assert bytes(LocalStorage(root).read(name)) == b"new"
    else:
        pytest.fail("removing makes more changes than were tried")
    assert when > 5
