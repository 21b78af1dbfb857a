"""Other users who may change a run's folder: its owner, its group, and everybody, of the folder and of its parents."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from megascale.core import run_lock
from megascale.core.exit_record import ExitKind, find_exit_record
from megascale.core.run_lock import (
    DRIVER_LOCK,
    TRAINER_LOCK,
    Holder,
    RunBusyError,
    acquire_driver_lock,
    acquire_trainer_lock,
    check_available,
    describe_other_writers,
)
from megascale.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, TrainingError


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


# the locks of one process on two descriptors exclude each other, as those of two processes do ----------------------


@pytest.fixture(autouse=True)
def without_driver(monkeypatch):
    monkeypatch.delenv("MEGASCALE_NODE", raising=False)


def write_holder(path: Path, **changes: object) -> None:
    record = {"what": "megascale train", "host": "elsewhere", "pid": 7, "since": "noon", "driver": False}
    path.write_text(json.dumps(record | changes))


def test_a_lock_names_its_holder_until_it_is_released(folder):
    lock = acquire_trainer_lock(folder, "megascale train", 0.0)
    holder = json.loads((folder / TRAINER_LOCK).read_text())
    assert (holder["what"], holder["host"], holder["pid"]) == ("megascale train", socket.gethostname(), os.getpid())
    assert (holder["driver"], lock.warning) == (False, "")
    assert str(Holder(**holder)) == (
        f"process {os.getpid()} on {socket.gethostname()} (megascale train, since {holder['since']})"
    )
    expected = rf"{folder} is in use by process {os.getpid()} on .*: wait for it, or end it \(it saves on SIGTERM\)"
    for acquire in (acquire_trainer_lock, lambda *arguments: check_available(folder, 0.0)):
        with pytest.raises(RunBusyError, match=expected):
            acquire(folder, "another", 0.0)
    lock.release()
    assert (folder / TRAINER_LOCK).read_text() == ""
    lock.release()
    check_available(folder, 0.0)
    with acquire_trainer_lock(folder, "another", 0.0) as second_lock:
        second_lock.drop()  # as in a child: the text is the holder's
        assert json.loads((folder / TRAINER_LOCK).read_text())["what"] == "another"
    assert str(Holder()) == "another process"


def test_a_look_changes_nothing(folder):
    check_available(folder, 0.0)
    assert list(folder.iterdir()) == []
    write_holder(folder / TRAINER_LOCK)
    before = (folder / TRAINER_LOCK).read_text()
    check_available(folder, 0.0)
    assert (folder / TRAINER_LOCK).read_text() == before


@pytest.mark.parametrize(
    ("changes", "node", "is_warned"),
    [({}, None, True), ({"host": socket.gethostname()}, None, False), ({"host": ""}, None, False), ({}, "n1", False)],
)
def test_a_holder_of_another_host_that_left_its_text_is_warned_of(folder, monkeypatch, changes, node, is_warned):
    """A driver knows that its nodes have ended."""
    if node is not None:
        monkeypatch.setenv("MEGASCALE_NODE", node)
    write_holder(folder / TRAINER_LOCK, **changes)
    with acquire_trainer_lock(folder, "megascale train", 0.0) as lock:
        expected = (
            f"process 7 on elsewhere (megascale train, since noon) did not release {folder}: if it still runs, the "
            "hosts' file system does not share locks; end that process"
        )
        assert lock.warning == (expected if is_warned else "")
        assert json.loads((folder / TRAINER_LOCK).read_text())["driver"] == (node is not None)


def test_warnings_are_joined(folder):
    write_holder(folder / TRAINER_LOCK)
    folder.chmod(0o707)
    with acquire_trainer_lock(folder, "megascale train", 0.0) as lock:
        first, second = lock.warning.split("; end that process; ")
    assert first.startswith("process 7 on elsewhere")
    assert second.startswith(f"{folder.resolve()} can be written by every user")


def test_an_older_attempt_of_a_job_is_waited_for_and_named(folder, monkeypatch):
    monkeypatch.setenv("MEGASCALE_NODE", "n1")
    with acquire_trainer_lock(folder, "megascale train", 0.0):
        with pytest.raises(
            TrainingError, match=r"of an older attempt of this job that did not end within 0\.1 seconds"
        ):
            acquire_trainer_lock(folder, "megascale train", 0.1)
        monkeypatch.delenv("MEGASCALE_NODE")
        with pytest.raises(RunBusyError, match=rf"`megascale events {folder}` shows the state of its job"):
            acquire_trainer_lock(folder, "megascale train", 0.0)
    with acquire_trainer_lock(folder, "megascale train", 0.0):
        monkeypatch.setenv("MEGASCALE_NODE", "n1")
        with pytest.raises(RunBusyError, match="wait for it, or end it"):
            acquire_trainer_lock(folder, "megascale train", 0.0)


def test_drivers_share_a_run_and_keep_other_trainings_out(folder, monkeypatch):
    with acquire_driver_lock(folder, "first", 0.0) as first, acquire_driver_lock(folder, "second", 0.0) as second:
        assert (first.warning, second.warning) == ("", "")
        holder = json.loads((folder / DRIVER_LOCK).read_text())
        assert (holder["what"], holder["driver"]) == ("second", True)
        for check in (check_available, lambda *arguments: acquire_trainer_lock(folder, "a", 0.0)):
            with pytest.raises(RunBusyError, match=r"\(second, since .*`megascale events"):
                check(folder, 0.0)
        monkeypatch.setenv("MEGASCALE_NODE", "n1")
        acquire_trainer_lock(folder, "of the job", 0.0).release()
        monkeypatch.delenv("MEGASCALE_NODE")
        second.release()
        with pytest.raises(RunBusyError):
            check_available(folder, 0.0)
    acquire_trainer_lock(folder, "another", 0.0).release()


def test_a_driver_starts_only_where_no_other_trains(folder, monkeypatch):
    with acquire_trainer_lock(folder, "alone", 0.0), pytest.raises(RunBusyError, match=r"\(alone, since"):
        acquire_driver_lock(folder, "megascale launch", 0.1)
    monkeypatch.setenv("MEGASCALE_NODE", "n1")
    with acquire_trainer_lock(folder, "of a job", 0.0):
        acquire_driver_lock(folder, "megascale launch", 0.0).release()
    # Its own lock was released each time.
    monkeypatch.delenv("MEGASCALE_NODE")
    check_available(folder, 0.0)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_from_a_held_lock(folder, monkeypatch, number):
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    if number in (errno.EAGAIN, errno.EACCES):
        with pytest.raises(RunBusyError, match="is in use by another process"):
            acquire_trainer_lock(folder, "megascale train", 0.0)
        return
    lock = acquire_trainer_lock(folder, "megascale train", 0.0)
    assert (
        f"this file system has no locks ({os.strerror(number)}); a second training would not be refused" in lock.warning
    )
    lock.release()


def test_a_folder_that_cannot_hold_a_lock_is_named(folder):
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/trainer\.lock cannot be created: .*; a part of this path is a file"):
        acquire_trainer_lock(folder / "file", "megascale train", 0.0)


def test_a_folder_of_another_user_is_refused_with_the_exit_code_of_a_wrong_setting(folder, as_other_user):
    folder.chmod(0o555)
    with as_other_user(), pytest.raises(ConfigError) as refused:
        acquire_trainer_lock(folder, "megascale train", 0.0)
    assert refused.value.exit_code == EXIT_USAGE
    expected = f"the lock file {folder}/trainer.lock cannot be created: Permission denied; make its folder writable for"
    assert str(refused.value).startswith(expected)


def test_a_file_system_that_fails_may_be_tried_again(folder, monkeypatch):
    def fail(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(TrainingError, match="No space left on device") as failed:
        acquire_trainer_lock(folder, "megascale train", 0.0)
    assert failed.value.exit_code == EXIT_FAILED
    assert find_exit_record(failed.value).kind is ExitKind.DISK_FULL


@pytest.fixture
def as_other_user() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which this process is a user other than root."""

    @contextmanager
    def become() -> Iterator[None]:
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(user)

    return become


def test_a_damaged_holder_is_another_process(folder):
    for text in ("", "[]", '{"what": 1, "other": 2}', "[" * 5000, "x"):
        (folder / TRAINER_LOCK).write_text(text)
        assert run_lock._read_holder(folder / TRAINER_LOCK) == Holder()
    assert run_lock._read_holder(folder / "nothing") == Holder()


def test_a_child_does_not_keep_a_lock(folder):
    lock = acquire_trainer_lock(folder, "megascale train", 0.0)
    run_lock._drop_all()  # as a forked child does
    check_available(folder, 0.0)
    assert lock._descriptor == -1


def test_others_may_read_who_holds_a_lock(folder):
    umask = os.umask(0)
    try:
        acquire_trainer_lock(folder, "megascale train", 0.0).release()
    finally:
        os.umask(umask)
    assert (folder / TRAINER_LOCK).stat().st_mode & 0o777 == 0o644
