"""Other users who may change a run's folder: its owner, its group, and everybody, of the folder and of its parents."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megascale.core import run_lock
from megascale.core.run_lock import describe_other_writers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "parent" / "run"
    path.mkdir(parents=True)
    path.parent.chmod(0o755)
    path.chmod(0o700)
    return path


def test_a_folder_of_this_user_alone_is_silent(folder):
    assert describe_other_writers(folder) == ""
    assert describe_other_writers(folder / "not there yet") == ""


@pytest.mark.parametrize("is_member", [False, True])
@pytest.mark.parametrize("mode", [0o770, 0o750])
def test_a_group_of_others_is_named(folder, monkeypatch, mode, is_member):
    folder.chmod(mode)
    group = folder.stat().st_gid
    monkeypatch.setattr(run_lock.os, "getegid", lambda: group if is_member else group + 1)
    if mode == 0o770 and not is_member:
        expected = f"{folder.resolve()} can be written by group {group}; run `chmod g-w {folder.resolve()}`"
    else:
        expected = ""
    assert describe_other_writers(folder) == expected
    # A parent's group is of no concern.
    folder.chmod(0o700)
    folder.parent.chmod(mode)
    assert describe_other_writers(folder) == ""


@pytest.mark.parametrize(
    ("mode", "parent_mode", "writable"),
    [(0o707, 0o755, "run"), (0o1777, 0o755, "run"), (0o700, 0o757, "parent"), (0o700, 0o1777, None)],
)
def test_what_everybody_can_write_is_named_unless_a_parent_is_sticky(folder, mode, parent_mode, writable):
    folder.chmod(mode)
    folder.parent.chmod(parent_mode)
    path = {"run": folder.resolve(), "parent": folder.parent.resolve(), None: None}[writable]
    expected = f"{path} can be written by every user of this machine; run `chmod o-w {path}`" if path else ""
    assert describe_other_writers(folder) == expected


@pytest.mark.parametrize("is_parent", [False, True])
def test_another_owner_is_named(folder, is_parent):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    path = folder.parent if is_parent else folder
    os.chown(path, 4242, -1)
    assert describe_other_writers(folder) == f"{path.resolve()} belongs to user 4242, who may change its content"
