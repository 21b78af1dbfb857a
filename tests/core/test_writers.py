"""Other writers of a run's folders: reported at the start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megascale.core import run_lock
from megascale.core.run_lock import describe_other_writers


def test_folders_that_others_may_write_are_noticed(tmp_path: Path) -> None:
    run = tmp_path / "shared" / "run"
    run.mkdir(parents=True)
    assert describe_other_writers(run) == describe_other_writers(run / "not yet") == ""
    run.chmod(0o777)
    assert "every user" in describe_other_writers(run)
    assert "chmod o-w" in describe_other_writers(run)
    with run_lock.acquire_trainer_lock(run, "test", 0.0) as lock:
        assert str(run) in lock.warning
    run.chmod(0o755)
    run.parent.chmod(0o777)
    assert str(run.parent) in describe_other_writers(run)  # who may write there may put another folder in its place
    run.parent.chmod(0o1777)
    assert describe_other_writers(run) == ""
    run.chmod(0o1777)
    assert "every user" in describe_other_writers(run)  # a file of one's own is enough there
    run.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(run.parent)
    run.parent.chmod(0o777)
    assert str(run.parent) in describe_other_writers(link / "run")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_folders_of_another_user_or_group_are_noticed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    os.chown(run, 4321, -1)
    assert "user 4321" in describe_other_writers(run)
    os.chown(run, 0, 4321)
    assert describe_other_writers(run) == ""
    run.chmod(0o775)
    assert "group 4321" in describe_other_writers(run)
