"""Saving in the background: the service outlives trainers, memory comes before storage."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

from megascale import checkpoint
from megascale.checkpoint import Checkpointer, TensorShard, latest, load, steps
from megascale.checkpoint.background import pending_saves, service, service_protocol, snapshot
from megascale.checkpoint.background.pending_saves import finish_pending
from megascale.checkpoint.background.service_protocol import (
    ListSnapshots,
    Register,
)
from megascale.checkpoint.background.staging import StagingSlot
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.torch_index import make_torch_metadata
from megascale.checkpoint.storage.local_disk import Disk, LocalStorage
from megascale.core.failure import find_errno
from megascale.errors import DataError, FitError, TrainingError
from megascale.services.service_location import ServiceLocation
from tests.checkpoint.background.conftest import await_other, background, large_state, service_pid
from tests.checkpoint.conftest import assert_same, blank, context, cut, full_shards, logical_state, run_group
from tests.conftest import POLL_INTERVAL


def test_saves_what_was_there_when_it_began(run: Path) -> None:
    tensors = logical_state(1)
    checkpointer = Checkpointer(background(), run, full_shards(tensors))
    assert checkpointer.load() is None
    for step in (1, 2, 3):
        assert checkpointer.save(step, {"step": step}, wait=True)
        checkpointer.before_update()
        for t in tensors.values():
            t.copy_(logical_state(step + 1)[next(n for n, u in tensors.items() if u is t)])
    outcomes = checkpointer.finish()
    assert [(o.step, o.committed, o.reason) for o in outcomes] == [(1, True, ""), (2, True, ""), (3, True, "")]
    assert steps(run / "checkpoints") == [2, 3]
    got = blank(tensors)
    assert load(run / "checkpoints", full_shards(got)) == {"step": 3}
    assert_same(got, logical_state(3))
    # Nothing but what the commit names is left beside it.
    location = run / "checkpoints" / "step-3"
    assert sorted(p.name.split("-")[-1] for p in location.iterdir()) == [
        ".metadata",
        "00000.distcp",
        "COMMIT",
        "index.npz",
    ]


def _die_when_staged(run: str, step: int) -> None:
    """Save and be killed as soon as the service has the whole image, while it is still being written."""
    checkpointer = Checkpointer(background(), Path(run), full_shards(large_state(step)))
    checkpointer.load()
    torch.set_num_threads(1)
    checkpointer.shards = full_shards(large_state(step))
    checkpointer.save(step, {"step": step})
    sock = service.connect_checkpoint_service(service_protocol.private_folder(run))
    while not any(h.step == step for h in sock.request(ListSnapshots()).snapshots):
        time.sleep(POLL_INTERVAL)
    os.kill(os.getpid(), signal.SIGKILL)


def test_staged_state_is_saved_and_found_after_the_trainer_was_killed(run: Path) -> None:
    for step in (1, 2):
        trainer = context.Process(target=_die_when_staged, args=(str(run), step))
        trainer.start()
        trainer.join(60)
        assert trainer.exitcode == -signal.SIGKILL
        await_other(lambda step=step: latest(run / "checkpoints") == step)
        got = blank(large_state(0))
        assert load(run / "checkpoints", full_shards(got)) == {"step": step}
        assert_same(got, large_state(step))
    got = blank(large_state(0))
    checkpointer = Checkpointer(background(), run, full_shards(got))
    assert checkpointer.load() == {"step": 2}
    assert checkpointer.loaded_from == "memory"
    assert_same(got, large_state(2))


def _several(step: int) -> dict[str, torch.Tensor]:
    """More than a service needs to hear how far a copy is before the last chunk."""
    return {f"w{i}": torch.full((1024, 10240), float(step + i)) for i in range(4)}


def _die_while_staging(run: str) -> None:
    """Save, then be killed when the service has heard of half of the next save's chunks and begun its file."""
    tensors = _several(1)
    checkpointer = Checkpointer(background(), Path(run), full_shards(tensors))
    checkpointer.save(1, {"step": 1})
    checkpointer.before_update()
    await_other(lambda: any(o.committed for o in checkpointer.poll()))
    copy = StagingSlot.copy_chunks

    def stop_half_way(staging: StagingSlot) -> Iterator[int]:
        for rows in copy(staging):
            if rows > 2:
                await_other(lambda: list((Path(run) / "checkpoints" / "step-2").glob("*.distcp")))
                os.kill(os.getpid(), signal.SIGKILL)
            yield rows

    StagingSlot.copy_chunks = stop_half_way  # type: ignore[method-assign]
    checkpointer.save(2, {"step": 2})
    checkpointer.before_update()


def test_a_half_staged_state_leaves_nothing(run: Path) -> None:
    trainer = context.Process(target=_die_while_staging, args=(str(run),))
    trainer.start()
    trainer.join(60)
    assert trainer.exitcode == -signal.SIGKILL
    await_other(lambda: not (run / "checkpoints" / "step-2").exists())
    got = blank(_several(0))
    checkpointer = Checkpointer(background(), run, full_shards(got))
    assert checkpointer.load() == {"step": 1}
    assert_same(got, _several(1))
    assert checkpointer.save(3, {"step": 3}, wait=True)
    assert [(o.step, o.committed) for o in checkpointer.finish()] == [(3, True)]


def _save_in_memory(rank: int, size: int, run: Path, how: str) -> None:
    checkpointer = Checkpointer(background(memory_interval=1), run, cut(logical_state(5), how, rank, size))
    checkpointer.load()
    assert checkpointer.save(5, {"step": 5})
    checkpointer.before_update()
    checkpointer.finish(run_ended=False)


def _load_from_memory(rank: int, size: int, run: Path, how: str) -> tuple[str, dict]:
    got = blank(logical_state())
    checkpointer = Checkpointer(background(), run, cut(got, how, rank, size))
    state = checkpointer.load()
    for a, b in zip(cut(got, how, rank, size), cut(logical_state(5), how, rank, size), strict=True):
        assert torch.equal(a.tensor, b.tensor)
    return checkpointer.loaded_from, state


def test_memory_loads_on_another_layout(run: Path) -> None:
    run_group(3, _save_in_memory, run, "flat")
    assert run_group(2, _load_from_memory, run, "columns") == [("memory", {"step": 5})] * 2
    # The folder gone, the memory of its run is of no account.
    for path in sorted((run / "checkpoints").rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
    assert Checkpointer(background(), run, full_shards(blank(logical_state()))).load() is None


def test_a_dead_service_is_reported_and_replaced(run: Path) -> None:
    tensors = logical_state(1)
    checkpointer = Checkpointer(background(), run, full_shards(tensors))
    checkpointer.save(1, {})
    checkpointer.before_update()
    await_other(lambda: any(o.committed for o in checkpointer.poll()))
    os.kill(service_pid(run), signal.SIGKILL)
    checkpointer.save(2, {}, wait=True)
    checkpointer.before_update()
    failed = await_other(checkpointer.poll)
    assert "ended" in failed[0].reason or "pipe" in failed[0].reason
    assert checkpointer.save(3, {}, wait=True)
    assert [(o.step, o.committed) for o in checkpointer.finish()] == [(3, True)]


def test_full_disk_is_an_outcome_and_costs_nothing(run: Path, small_disk: Path) -> None:
    tensors = {"w": torch.zeros(100_000)}
    checkpointer = Checkpointer(background(location=str(small_disk / "c")), run, full_shards(tensors))
    checkpointer.save(1, {"step": 1})
    big = Checkpointer(background(location=str(small_disk / "c")), run, full_shards({"w": torch.zeros(1 << 20)}))
    assert [o.committed for o in checkpointer.finish(run_ended=False)] == [True]
    big.save(2, {})
    (outcome,) = big.finish()
    assert not outcome.committed
    assert "is full: a checkpoint needs 4,198,400 bytes" in outcome.reason
    assert sorted(p.name for p in (small_disk / "c").iterdir()) == ["ID", "step-1"]


def test_a_commit_that_finds_the_disk_full_says_so(run: Path, small_disk: Path) -> None:
    """There is room for the state, and none for the index."""
    tensors = {"w": torch.zeros(1 << 18)}
    checkpointer = Checkpointer(background(location=str(small_disk / "c")), run, full_shards(tensors))
    needed = checkpointer.shards[0].tensor.nbytes
    (small_disk / "filler").write_bytes(b"0" * ((2 << 20) - needed - (48 << 10)))
    checkpointer.save(2, {"text": "x" * 20_000})
    (outcome,) = checkpointer.finish()
    assert "c' is full: a checkpoint needs" in outcome.reason
    assert sorted(p.name for p in (small_disk / "c").iterdir()) == ["ID"]


def _save_after_the_first_failed(rank: int, size: int, run: Path, disk: Path, hosts: list[int]) -> str:
    """Save more than the disk holds; others begin to write once the first process has learnt that it failed."""
    torch.set_num_threads(1)
    host, failed = run / f"host-{hosts[rank]}", run / "failed"
    host.mkdir(exist_ok=True)
    parts = {"w": torch.zeros(1 << 18 if rank == 0 else 1 << 15)}
    shards = [TensorShard(f"w{rank}", tuple(t.shape), (0,), t) for t in parts.values()]
    checkpointer = Checkpointer(background(location=str(disk / "c")), host, shards)
    replace = snapshot.msgspec.structs.replace

    def late(message: object, **changes: object) -> object:
        if rank:
            await_other(failed.exists)
        return replace(message, **changes)

    with mock.patch.object(snapshot.msgspec.structs, "replace", late):
        checkpointer.save(2, {})
        if rank:
            checkpointer.before_update()
            checkpointer.finish(run_ended=False)
            return ""
        (outcome,) = await_other(checkpointer.poll)
        failed.touch()
    checkpointer.finish(run_ended=False)
    return outcome.reason


@pytest.mark.parametrize("hosts", [[0, 1], [0, 0], [0, 1, 1, 0]])
def test_a_full_disk_leaves_no_half_of_a_step(run: Path, small_disk: Path, hosts: list[int]) -> None:
    """Files that other processes write after the first has given up are removed, too."""
    (small_disk / "filler").write_bytes(b"0" * (1 << 20))
    why = run_group(len(hosts), _save_after_the_first_failed, run, small_disk, hosts)[0]
    assert "is full: a checkpoint needs" in why
    await_other(lambda: sorted(p.name for p in (small_disk / "c").iterdir()) == ["ID"])


def test_a_part_that_fails_is_told_once_the_disk_has_room_for_the_word(run: Path, small_disk: Path) -> None:
    filler = small_disk / "filler"
    run_group(2, _fail_on_a_full_disk, run, small_disk, filler)
    await_other(lambda: sorted(p.name for p in (small_disk / "c").iterdir()) == ["ID"])


def _fail_on_a_full_disk(rank: int, size: int, run: Path, disk: Path, filler: Path) -> None:
    """The second process finds the disk full to the last byte, which the first makes room on only then."""
    torch.set_num_threads(1)
    (run / f"host-{rank}").mkdir(exist_ok=True)
    tensor = torch.zeros(1 << 15)
    shards = [TensorShard(f"w{rank}", tuple(tensor.shape), (0,), tensor)]
    checkpointer = Checkpointer(background(location=str(disk / "c")), run / f"host-{rank}", shards)
    full, failed = run / "full", run / "failed"
    replace = snapshot.msgspec.structs.replace

    def late(message: object, **changes: object) -> object:
        if rank:
            await_other(full.exists)
        return replace(message, **changes)

    with mock.patch.object(snapshot.msgspec.structs, "replace", late):
        checkpointer.save(2, {})
        checkpointer.before_update()
        if rank == 0:
            await_other(lambda: list((disk / "c" / "step-2").glob("*-part-*")))
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as out:
                while out.write(b"0" * 4096):
                    pass
            full.touch()
            await_other(failed.exists)
            filler.unlink()
            (outcome,) = await_other(checkpointer.poll)
            assert "is full" in outcome.reason
        else:
            (outcome,) = await_other(checkpointer.poll)
            assert "is full" in outcome.reason
            failed.touch()
    checkpointer.finish(run_ended=False)


def _without_memory(rank: int, size: int, run: Path) -> tuple[str, int]:
    def lacking(*_: object) -> StagingSlot:
        raise OSError(errno.ENOMEM, "3 of 5 bytes are free")

    checkpointer = Checkpointer(background(), run, cut(logical_state(3), "rows", rank, size))
    with mock.patch.object(snapshot, "StagingSlot", lacking) if rank == 1 else contextlib.nullcontext():
        try:
            checkpointer.save(3, {})
        except FitError as error:
            return str(error), find_errno(error)
    raise AssertionError("it fits")


def test_all_say_which_rank_lacks_memory_and_its_own_error_alone_has_the_number(run: Path) -> None:
    (text, errno_0), (text_1, of_it) = run_group(2, _without_memory, run)
    assert text == text_1
    assert text.startswith(f"rank 1 on {socket.gethostname()}: staging memory for checkpoints is unavailable (")
    assert "3 of 5 bytes are free" in text
    assert (errno_0, of_it) == (0, errno.ENOMEM)


def _parts_only(rank: int, size: int, run: Path) -> None:
    """Save, with a first process whose service never looks for the others' parts."""
    checkpointer = Checkpointer(background(), run / f"host-{rank}", cut(logical_state(3), "rows", rank, size))
    (run / f"host-{rank}").mkdir(exist_ok=True)
    checkpointer.folder = run / "checkpoints"
    checkpointer.save(3, {"step": 3})
    checkpointer.finish(run_ended=False)


def test_whole_save_without_commit_is_finished_at_the_next_start(run: Path) -> None:
    run_group(2, _parts_only, run)
    storage = LocalStorage(run / "checkpoints")
    assert latest(storage) == 3
    _uncommit(storage)
    assert latest(storage) is None
    got = blank(logical_state())
    checkpointer = Checkpointer(background(background=False), run, full_shards(got))
    assert checkpointer.load() == {"step": 3}
    assert_same(got, logical_state(3))
    assert finish_pending(storage) == []


def test_a_part_that_is_being_put_in_place_does_not_count_yet(run: Path) -> None:
    storage, generation = _saved_not_committed(run)
    part, location = f"{generation}-part-00001.json", run / "checkpoints" / "step-3"
    part_bytes = (location / part).read_bytes()
    # Seen in the list, and in place under its own name before it is read.
    (location / part).unlink()
    (location / f"{part}.0123abcd.part").symlink_to("gone")
    assert pending_saves.try_commit(storage, 3, generation) is None
    (location / part).write_bytes(part_bytes)
    assert pending_saves.try_commit(storage, 3, generation) is not None


def test_two_may_commit_a_save_at_once(run: Path) -> None:
    _, generation = _saved_not_committed(run)
    barrier = threading.Barrier(2)

    class Slow(Disk):
        def replace(self, old: Path, new: Path) -> None:
            barrier.wait(timeout=20)  # both have written theirs
            super().replace(old, new)

    storages = [LocalStorage(run / "checkpoints", Slow()) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda storage: pending_saves.try_commit(storage, 3, generation), storages))
    assert done[0] == done[1] is not None
    assert done[0] is not None
    folders.withdraw_save(storages[0], 3, generation)  # one that believes it has failed takes nothing from the other
    got = blank(logical_state())
    assert load(run / "checkpoints", full_shards(got)) == {"step": 3}
    assert_same(got, logical_state(3))


def _saved_not_committed(run: Path) -> tuple[LocalStorage, str]:
    run_group(2, _parts_only, run)
    storage = LocalStorage(run / "checkpoints")
    commit = folders.read_commit(storage, 3)
    assert commit is not None
    _uncommit(storage)
    return storage, commit.generation


def test_a_first_save_that_died_is_as_none(run: Path) -> None:
    storage = LocalStorage(run / "checkpoints")
    storage.write("step-3/00000001-abcdabcd-00000.distcp", b"half")
    checkpointer = Checkpointer(background(background=False), run, full_shards(logical_state(1)))
    assert checkpointer.load() is None
    checkpointer.save(3, {})
    assert [o.committed for o in checkpointer.poll()] == [True]
    assert len(storage.list("step-3")) == 4
    # An unreadable COMMIT is another matter: there was something.
    (run / "checkpoints" / "step-3" / "COMMIT").write_bytes(b"{}")
    with pytest.raises(DataError, match="half-written"):
        checkpointer.load()


def _uncommit(storage: LocalStorage) -> None:
    """Put a committed save back to what it was just before its commit."""
    commit = folders.read_commit(storage, 3)
    index = folders.read_index(storage, commit)
    storage.remove("step-3/COMMIT")
    generation = commit.generation
    plan = type(index)(index.tensors, [f.removeprefix(f"{generation}-") for f in index.files], index.columns)
    metadata = make_torch_metadata(plan.with_generation(pending_saves.BLANK, index.columns["crc"]))
    pending_saves.begin_save(
        storage, 3, generation, 2, 2, json.loads(json.dumps(commit.state)), plan.to_bytes(), metadata
    )
    for rank, name in enumerate(plan.files):
        size, crc = commit.files[f"{generation}-{name}"]
        crcs = index.columns["crc"][index.columns["in_file"] == rank].tolist()
        pending_saves.add_part(storage, 3, generation, {rank: pending_saves.WrittenFile(size, crc, crcs)})


def test_what_killed_services_left_is_swept_and_what_runs_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of services under one parent, as those of all runs of a user."""
    monkeypatch.setattr(service.host_service, "START_TIMEOUT", 240.0)  # however busy the machine is
    dead, alive, current = (tmp_path / name for name in ("dead", "alive", "mine"))
    # A service whose visitor stays does not end, however long the rest takes.
    with contextlib.closing(service.connect_checkpoint_service(alive)) as visitor:
        with contextlib.closing(service.connect_checkpoint_service(dead)) as sock:
            os.kill(sock.request(Register()).pid, signal.SIGKILL)
            assert sock.sock.recv(1) == b""
        with open(dead / "checkpoint.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # which the kernel lets go of after its sockets, or before
        service.serve(current, linger=-1.0)  # ends at once
        assert not current.exists()
        assert not dead.exists()
        assert (alive / "checkpoint.sock").exists()
        os.kill(visitor.request(Register()).pid, signal.SIGKILL)


def test_a_start_waits_for_its_service_as_long_as_for_other_services_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.host_service, "START_TIMEOUT", 0.25)
    location = service_protocol.locate_service(tmp_path / "place")
    location.folder.mkdir(mode=0o700)
    with open(location.starting_lock_path, "ab") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)  # as while another process starts it
        with pytest.raises(TrainingError, match=r"the checkpoint service does not answer .* for 0\.2\d* s"):
            service.connect_checkpoint_service(location.folder)


def test_services_that_come_and_go_are_one_at_a_time(tmp_path: Path) -> None:
    """Many start while others end and remove the folder: never two at once."""
    location = ServiceLocation(tmp_path / "place", "checkpoint")
    inside = 0
    most = 0
    guard = threading.Lock()

    def come_and_go() -> None:
        nonlocal inside, most
        for _ in range(50):
            lock = location.acquire_lock(make_folder=True)
            if lock is None:
                continue
            with guard:
                inside += 1
                most = max(most, inside)
            with guard:
                inside -= 1
            location.release(lock)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(come_and_go) for _ in range(8)]:
            done.result()
    assert most == 1
    assert not location.folder.exists()


def test_a_service_that_is_not_to_linger_waits_for_its_first_visitor(tmp_path):
    location = service_protocol.private_folder(tmp_path / "run")
    with contextlib.closing(service.connect_checkpoint_service(location, linger=0.0)) as first:
        with contextlib.closing(service.connect_checkpoint_service(location, linger=0.0)):
            pass  # the same one: it is not alone yet
        assert first is not None


def test_a_copy_that_fails_in_any_way_holds_up_no_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of the next step waits for the copy, so a thread that ended without a word stopped the training."""
    tensors = logical_state(1)
    checkpointer = Checkpointer(background(), run, full_shards(tensors))
    copy, failures = StagingSlot.copy_chunks, iter([ValueError("of no kind that was expected")])

    def fail_once(staging: StagingSlot) -> Iterator[int]:
        error = next(failures, None)
        if error:
            raise error
        return copy(staging)

    monkeypatch.setattr(StagingSlot, "copy_chunks", fail_once)
    assert checkpointer.save(1, {"step": 1})
    checkpointer.before_update()
    outcomes: list[snapshot.SaveOutcome] = []
    await_other(lambda: outcomes.extend(checkpointer.poll()) or outcomes)
    assert "of no kind that was expected" in outcomes[0].reason
    assert checkpointer.save(2, {"step": 2}, wait=True)
    assert [(o.step, o.committed) for o in checkpointer.finish()] == [(2, True)]


def test_a_watcher_that_cannot_reach_the_service_reports_the_save(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(background(), run, full_shards(logical_state(1)))
    connect, failures = service.connect_checkpoint_service, iter([OSError("no descriptor left")])

    def fail_once(*arguments: object) -> object:
        if sys._getframe(3).f_code.co_name == "_watch_commits" and (error := next(failures, None)):
            raise error
        return connect(*arguments)

    monkeypatch.setattr(service, "connect_checkpoint_service", fail_once)
    assert checkpointer.save(1, {"step": 1})
    checkpointer.before_update()
    outcomes: list[snapshot.SaveOutcome] = []
    await_other(lambda: outcomes.extend(checkpointer.poll()) or outcomes)
    assert [(o.step, o.committed, o.reason) for o in outcomes] == [(1, False, "no descriptor left")]
    assert checkpointer.save(2, {"step": 2}, wait=True)
    assert [(o.step, o.committed) for o in checkpointer.finish()] == [(2, True)]


def test_a_service_is_started_ahead_though_a_refused_start_has_just_removed_its_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locate = service.locate_service

    def locate_and_remove(folder: Path) -> ServiceLocation:
        folder.rmdir()
        return locate(folder)

    with monkeypatch.context() as patches:
        patches.setattr(service, "locate_service", locate_and_remove)
        checkpoint.start_service(background(), run)
    location = service_protocol.locate_service(service_protocol.private_folder(run))
    await_other(location.find_service_pid)  # no client has connected, so only this start can have started it
    checkpointer = Checkpointer(background(), run, full_shards(logical_state(1)))
    checkpointer.prepare()
    checkpointer.finish()


def test_a_service_that_was_started_ahead_is_the_one_that_a_trainer_meets(run: Path) -> None:
    config = background()
    checkpoint.start_service(config, run)
    location = service_protocol.locate_service(service_protocol.private_folder(run))
    pid = service_pid(run)
    checkpoint.start_service(config, run)
    assert location.find_service_pid() == pid == service_pid(run)
    checkpointer = Checkpointer(config, run, full_shards(logical_state(1)))
    checkpointer.prepare()
    checkpointer.finish()
    # Nothing is started without background saves.
    other = run / "host-other"
    checkpoint.start_service(background(background=False), other)
    assert service_protocol.locate_service(service_protocol.private_folder(other)).find_service_pid() is None
