"""Saving in the background: the service outlives trainers, memory comes before storage, copies survive a lost host."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.checkpoint import Checkpointer, latest, load, object_collectives, steps
from megascale.checkpoint.background import pending_saves, replica_address, replica_token, service, service_protocol
from megascale.checkpoint.background.last_snapshot import LastSnapshot
from megascale.checkpoint.background.pending_saves import finish_pending
from megascale.checkpoint.background.replica import partners
from megascale.checkpoint.background.service_protocol import (
    COPIES,
    Allocate,
    AwaitPages,
    Fill,
    ListHeld,
    Register,
    Staged,
)
from megascale.checkpoint.background.staging import Copy, SaveOutcome, Staging
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.torch_index import torch_metadata
from megascale.checkpoint.storage.local_disk import Disk, LocalStorage
from megascale.config import CheckpointConfig
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.errors import DataError, TrainingError
from megascale.services.conversation import Conversation, prove
from megascale.services.host_service import Place
from tests.checkpoint.conftest import assert_same, blank, context, cut, logical_state, run_group, whole


def _config(**keys: Any) -> CheckpointConfig:
    return CheckpointConfig(**{"background": True, "linger": 20.0, **keys})


def _await(condition: Any, seconds: float = 20.0) -> Any:
    """Wait for another process; fails if it does not come."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)
    return value


def _service_pid(run: Path) -> int:
    sock = service.connect(service_protocol.private_folder(run))
    pid = sock.ask(Register()).pid
    sock.close()
    return pid


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run folder; its service (and those of host-* folders in it) is stopped afterwards."""
    folder = tmp_path / "run"
    folder.mkdir()
    yield folder
    for host in (folder, *folder.glob("host-*")):
        if pid := service_protocol.place(service_protocol.private_folder(host)).owner():
            os.kill(pid, signal.SIGKILL)


def test_saves_what_was_there_when_it_began(run: Path) -> None:
    tensors = logical_state(1)
    checkpointer = Checkpointer(_config(), run, whole(tensors))
    assert checkpointer.load() is None
    for step in (1, 2, 3):
        assert checkpointer.save(step, {"step": step}, wait=True)
        checkpointer.before_update()
        for t in tensors.values():
            t.copy_(logical_state(step + 1)[next(n for n, u in tensors.items() if u is t)])
    outcomes = checkpointer.finish()
    assert [(o.step, o.committed, o.why) for o in outcomes] == [(1, True, ""), (2, True, ""), (3, True, "")]
    assert steps(run / "checkpoints") == [2, 3]
    got = blank(tensors)
    assert load(run / "checkpoints", whole(got)) == {"step": 3}
    assert_same(got, logical_state(3))
    # Nothing but what the commit names is left beside it.
    place = run / "checkpoints" / "step-3"
    assert sorted(p.name.split("-")[-1] for p in place.iterdir()) == [
        ".metadata",
        "00000.distcp",
        "COMMIT",
        "index.npz",
    ]


def _large(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2048, 4096), float(step)), "b": torch.arange(10) + step}


def _die_when_staged(run: str, step: int) -> None:
    """Save and be killed as soon as the service has the whole image, while it is still being written."""
    checkpointer = Checkpointer(_config(), Path(run), whole(_large(step)))
    checkpointer.load()
    torch.set_num_threads(1)
    checkpointer.shards = whole(_large(step))
    checkpointer.save(step, {"step": step})
    sock = service.connect(service_protocol.private_folder(run))
    while not any(h.step == step for h in sock.ask(ListHeld()).held):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def test_staged_state_is_saved_and_found_after_the_trainer_was_killed(run: Path) -> None:
    for step in (1, 2):
        trainer = context.Process(target=_die_when_staged, args=(str(run), step))
        trainer.start()
        trainer.join(60)
        assert trainer.exitcode == -signal.SIGKILL
        _await(lambda step=step: latest(run / "checkpoints") == step)
        got = blank(_large(0))
        assert load(run / "checkpoints", whole(got)) == {"step": step}
        assert_same(got, _large(step))
    got = blank(_large(0))
    checkpointer = Checkpointer(_config(), run, whole(got))
    assert checkpointer.load() == {"step": 2}
    assert checkpointer.loaded_from == "memory"
    assert_same(got, _large(2))


def _several(step: int) -> dict[str, torch.Tensor]:
    """More than a service needs to hear how far a copy is before the last chunk."""
    return {f"w{i}": torch.full((1024, 10240), float(step + i)) for i in range(4)}


def _die_while_staging(run: str) -> None:
    """Save, then be killed when the service has heard of half of the next save's chunks and begun its file."""
    tensors = _several(1)
    checkpointer = Checkpointer(_config(), Path(run), whole(tensors))
    checkpointer.save(1, {"step": 1})
    checkpointer.before_update()
    _await(lambda: any(o.committed for o in checkpointer.poll()))
    copy = Staging.copy

    def stop_half_way(staging: Staging) -> Iterator[int]:
        for rows in copy(staging):
            if rows > 2:
                _await(lambda: list((Path(run) / "checkpoints" / "step-2").glob("*.distcp")))
                os.kill(os.getpid(), signal.SIGKILL)
            yield rows

    Staging.copy = stop_half_way  # type: ignore[method-assign]
    checkpointer.save(2, {"step": 2})
    checkpointer.before_update()


def test_a_half_staged_state_leaves_nothing(run: Path) -> None:
    trainer = context.Process(target=_die_while_staging, args=(str(run),))
    trainer.start()
    trainer.join(60)
    assert trainer.exitcode == -signal.SIGKILL
    _await(lambda: not (run / "checkpoints" / "step-2").exists())
    got = blank(_several(0))
    checkpointer = Checkpointer(_config(), run, whole(got))
    assert checkpointer.load() == {"step": 1}
    assert_same(got, _several(1))
    assert checkpointer.save(3, {"step": 3}, wait=True)
    assert [(o.step, o.committed) for o in checkpointer.finish()] == [(3, True)]


def _save_in_memory(rank: int, size: int, run: Path, how: str) -> None:
    checkpointer = Checkpointer(_config(memory_interval=1), run, cut(logical_state(5), how, rank, size))
    checkpointer.load()
    assert checkpointer.save(5, {"step": 5})
    checkpointer.before_update()
    checkpointer.finish(over=False)


def _load_from_memory(rank: int, size: int, run: Path, how: str) -> tuple[str, dict]:
    got = blank(logical_state())
    checkpointer = Checkpointer(_config(), run, cut(got, how, rank, size))
    state = checkpointer.load()
    for a, b in zip(cut(got, how, rank, size), cut(logical_state(5), how, rank, size), strict=True):
        assert torch.equal(a.tensor, b.tensor)
    return checkpointer.loaded_from, state


def test_memory_loads_on_another_layout(run: Path) -> None:
    run_group(3, _save_in_memory, run, "flat")
    assert run_group(2, _load_from_memory, run, "columns") == [("memory", {"step": 5})] * 2
    # The folder gone, the memory of its run is of no account.
    for path in sorted((run / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert Checkpointer(_config(), run, whole(blank(logical_state()))).load() is None


def _on_two_hosts(rank: int, size: int, run: Path, save_it: bool) -> Any:
    """Ranks 0, 1 on one host, 2, 3 on another: each host is a run folder, hence a service, of its own."""
    tensors = logical_state(5) if save_it else blank(logical_state())
    config = _config(replicas=True, location=str(run / "checkpoints"))
    host = run / f"host-{rank // 2}"
    host.mkdir(exist_ok=True)
    checkpointer = Checkpointer(config, host, cut(tensors, "flat", rank, size))
    state = checkpointer.load()
    if save_it:
        checkpointer.save(4, {"step": 4})
        checkpointer.save(5, {"step": 5}, persist=False, wait=True)
        outcomes = checkpointer.finish(over=False)
        return sorted((o.step, o.committed, o.why, o.replica) for o in outcomes)
    for a, b in zip(cut(tensors, "flat", rank, size), cut(logical_state(5), "flat", rank, size), strict=True):
        assert torch.equal(a.tensor, b.tensor)
    return checkpointer.loaded_from, state


def test_a_lost_host_is_replaced_by_its_peers_copies(run: Path) -> None:
    outcomes = run_group(4, _on_two_hosts, run, True)
    assert outcomes[0] == [(4, True, "", None), (5, False, "", None)]
    assert outcomes[3] == [(4, False, "", None), (5, False, "", None)]
    assert run_group(4, _on_two_hosts, run, False) == [("memory", {"step": 5})] * 4
    os.kill(_service_pid(run / "host-1"), signal.SIGKILL)
    assert run_group(4, _on_two_hosts, run, False) == [("a peer's memory", {"step": 5})] * 4
    for host in ("host-0", "host-1"):
        os.kill(_service_pid(run / host), signal.SIGKILL)
    # Both gone: only step 4 was written.
    got = blank(logical_state())
    checkpointer = Checkpointer(_config(location=str(run / "checkpoints")), run / "host-0", whole(got))
    assert checkpointer.load() == {"step": 4}
    assert checkpointer.loaded_from == "storage"


def _kept_at_each_update(rank: int, size: int, run: Path) -> list[bool]:
    """Of each update whether the peer's service held the copy of the step before it, complete."""
    tensors = logical_state(1)
    config = _config(replicas=True, memory_interval=1, location=str(run / "checkpoints"))
    checkpointer = Checkpointer(config, run / f"host-{rank}", cut(tensors, "flat", rank, size))
    checkpointer.prepare()
    assert checkpointer.snapshots is not None
    checkpointer.snapshots._last = LastSnapshot(60.0)  # a busy machine is no reason to go on without
    peer = service.connect(service_protocol.private_folder(run / f"host-{1 - rank}"))
    kept = []
    for step in range(1, 13):
        assert checkpointer.save(step, {"step": step}, persist=False, wait=True)
        checkpointer.before_update(step + 1)
        held = peer.ask(ListHeld()).held
        kept.append(any(each.replica and each.rank == rank and each.step == step for each in held))
    peer.close()
    checkpointer.finish(over=False)
    return kept


def test_an_update_waits_for_the_last_snapshot_at_the_peer(run: Path) -> None:
    """So that a host that is lost costs one step: the state after it is not made before the state before it is safe."""
    assert run_group(2, _kept_at_each_update, run) == [[True] * 12] * 2


def test_a_peer_that_does_not_answer_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    def copy(step: int) -> Copy:
        return Copy(SaveOutcome(step), _staged(step), 0.0)

    last = LastSnapshot(most=0.01)
    last.wait()  # there is none
    late = copy(1)
    last.begins(late)
    last.wait()
    assert "the snapshot of step 1 is not at the peer" in caplog.text
    last.begins(copy(2))
    last.wait()
    assert "step 2" not in caplog.text
    late.kept.set()
    last.wait()
    assert "the snapshot of step 2 is not at the peer" in caplog.text


def _staged(step: int) -> Staged:
    return Staged(
        rank=0, slot=0, step=step, generation="", identity="", state="", ranks=1, size=0, persist=False, storage="",
        needed=0, keep=1, above=0, local=(0,), leader=True, plan="", peer=("10.0.0.1", 1), token="",
    )  # fmt: skip


def _spoken(rank: int, size: int, run: Path, token: str) -> tuple[str, bytes]:
    """(what a start with replicas failed of, all that this process said to the others)."""
    if token:
        os.environ[REPLICA_VARIABLE] = token * (rank + 1)
    said, dump = bytearray(), object_collectives.dump

    def heard(value: Any) -> bytes:
        data = dump(value)
        said.extend(data)
        return data

    object_collectives.dump = heard  # type: ignore[assignment]
    config = _config(replicas=True, location=str(run / "checkpoints"))
    checkpointer = Checkpointer(config, run / f"host-{rank}", cut(logical_state(1), "flat", rank, size))
    try:
        checkpointer.prepare()
    except TrainingError as error:
        return str(error), bytes(said)
    checkpointer.finish()
    return "", bytes(said)


def test_the_replicas_token_is_never_sent_and_must_be_the_same(run: Path) -> None:
    for host in ("host-0", "host-1"):
        (run / host).mkdir()
    told = run_group(2, _spoken, run, "")
    file = run / "checkpoints" / replica_token.FILE
    token = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [error for error, _ in told] == ["", ""]
    assert all(len(said) > 100 for _, said in told)
    for secret in (token.encode(), bytes.fromhex(token), token.encode().hex().encode()):
        assert all(secret not in said for _, said in told)
    for error, _ in run_group(2, _spoken, run, "x" * 32):
        assert "ranks [1] have another token than rank 0" in error
    file.chmod(0o644)
    for error, _ in run_group(2, _spoken, run, ""):
        assert "chmod 600" in error


def test_addresses_that_other_machines_reach_are_told(caplog: pytest.LogCaptureFixture) -> None:
    replica_address.tell_open([("127.0.0.1", 1), ("::1", 2)])
    assert not caplog.records
    replica_address.tell_open([(f"10.0.0.{n}", 7) for n in range(6)] * 2)
    (record,) = caplog.records
    said = record.getMessage()
    assert "10.0.0.0:7, 10.0.0.1:7, 10.0.0.2:7, 10.0.0.3:7 and 2 more" in said
    assert "checkpoint.replica_address" in said
    assert "set checkpoint.replicas=false" in said


def test_a_dead_service_is_reported_and_replaced(run: Path) -> None:
    tensors = logical_state(1)
    checkpointer = Checkpointer(_config(), run, whole(tensors))
    checkpointer.save(1, {})
    checkpointer.before_update()
    _await(lambda: any(o.committed for o in checkpointer.poll()))
    os.kill(_service_pid(run), signal.SIGKILL)
    checkpointer.save(2, {}, wait=True)
    checkpointer.before_update()
    failed = _await(checkpointer.poll)
    assert "ended" in failed[0].why or "pipe" in failed[0].why
    assert checkpointer.save(3, {}, wait=True)
    assert [(o.step, o.committed) for o in checkpointer.finish()] == [(3, True)]


def test_full_disk_is_an_outcome_and_costs_nothing(run: Path, small_disk: Path) -> None:
    tensors = {"w": torch.zeros(100_000)}
    checkpointer = Checkpointer(_config(location=str(small_disk / "c")), run, whole(tensors))
    checkpointer.save(1, {"step": 1})
    big = Checkpointer(_config(location=str(small_disk / "c")), run, whole({"w": torch.zeros(1 << 20)}))
    assert [o.committed for o in checkpointer.finish(over=False)] == [True]
    big.save(2, {})
    (outcome,) = big.finish()
    assert not outcome.committed
    assert "is full: a checkpoint needs 4,198,400 bytes" in outcome.why
    assert sorted(p.name for p in (small_disk / "c").iterdir()) == ["ID", "step-1"]


def _parts_only(rank: int, size: int, run: Path) -> None:
    """Save, with a first process whose service never looks for the others' parts."""
    checkpointer = Checkpointer(_config(), run / f"host-{rank}", cut(logical_state(3), "rows", rank, size))
    (run / f"host-{rank}").mkdir(exist_ok=True)
    checkpointer.folder = run / "checkpoints"
    checkpointer.save(3, {"step": 3})
    checkpointer.finish(over=False)


def test_whole_save_without_commit_is_finished_at_the_next_start(run: Path) -> None:
    run_group(2, _parts_only, run)
    storage = LocalStorage(run / "checkpoints")
    assert latest(storage) == 3
    _uncommit(storage)
    assert latest(storage) is None
    got = blank(logical_state())
    checkpointer = Checkpointer(_config(background=False), run, whole(got))
    assert checkpointer.load() == {"step": 3}
    assert_same(got, logical_state(3))
    assert finish_pending(storage) == []


def test_a_part_that_is_being_put_in_place_does_not_count_yet(run: Path) -> None:
    storage, generation = _saved_not_committed(run)
    part, place = f"{generation}-part-00001.json", run / "checkpoints" / "step-3"
    whole = (place / part).read_bytes()
    # Seen in the list, and in place under its own name before it is read.
    (place / part).unlink()
    (place / f"{part}.0123abcd.part").symlink_to("gone")
    assert pending_saves.try_commit(storage, 3, generation) is None
    (place / part).write_bytes(whole)
    assert pending_saves.try_commit(storage, 3, generation) is not None


def test_two_may_commit_a_save_at_once(run: Path) -> None:
    _, generation = _saved_not_committed(run)
    both = threading.Barrier(2)

    class Slow(Disk):
        def replace(self, old: Path, new: Path) -> None:
            both.wait(timeout=20)  # both have written theirs
            super().replace(old, new)

    storages = [LocalStorage(run / "checkpoints", Slow()) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda storage: pending_saves.try_commit(storage, 3, generation), storages))
    assert done[0] == done[1] is not None
    assert done[0] is not None
    folders.withdraw(storages[0], 3, generation)  # one that believes it has failed takes nothing from the other
    got = blank(logical_state())
    assert load(run / "checkpoints", whole(got)) == {"step": 3}
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
    checkpointer = Checkpointer(_config(background=False), run, whole(logical_state(1)))
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
    metadata = torch_metadata(plan.committed(pending_saves.BLANK, index.columns["crc"]))
    pending_saves.begin(storage, 3, generation, 2, 2, json.loads(json.dumps(commit.state)), plan.to_bytes(), metadata)
    for rank, name in enumerate(plan.files):
        size, crc = commit.files[f"{generation}-{name}"]
        crcs = index.columns["crc"][index.columns["in_file"] == rank].tolist()
        pending_saves.add_part(storage, 3, generation, {rank: pending_saves.Written(size, crc, crcs)})


def test_a_save_is_skipped_while_memory_is_in_use(run: Path) -> None:
    checkpointer = Checkpointer(_config(), run, whole(_large(1)))
    begun = [checkpointer.save(step, {}) for step in range(1, 6)]
    outcomes = checkpointer.finish()
    assert begun[0]
    assert len(outcomes) == sum(begun)
    assert all(o.committed for o in outcomes)
    assert not all(begun), "five saves of 33 MB began within their own copying"


def test_memory_comes_into_place_under_the_first_steps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays in memory is left out till then, what is to be written waits; the end does not."""
    there, real = threading.Event(), Staging.prepare

    def prepare(slot: Staging, sock: Conversation, question: AwaitPages, stop: threading.Event) -> None:
        while not there.wait(0.01) and not stop.is_set():
            pass
        real(slot, sock, question, stop)

    monkeypatch.setattr(Staging, "prepare", prepare)
    monkeypatch.setattr("megascale.checkpoint.background.snapshot._AT_ONCE", 0)
    config = _config(memory_interval=1)
    checkpointer = Checkpointer(config, run, whole(logical_state(1)))
    assert not checkpointer.save(1, {"step": 1}, persist=False)
    timer = threading.Timer(0.1, there.set)
    timer.start()
    assert checkpointer.save(2, {"step": 2})
    assert there.is_set()
    checkpointer.before_update()
    assert checkpointer.save(3, {"step": 3}, persist=False, wait=True)
    assert [o.why for o in checkpointer.finish(over=False)] == [""] * 2
    there.clear()
    again = Checkpointer(config, run, whole(logical_state(2)))
    assert again.load() == {"step": 3}
    again.prepare()
    assert not again.finish()  # at once, with nothing in place


def test_memory_that_does_not_come_into_place_is_asked_for_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not written to, which a signal might answer; whether it is small, and had before the first step, or not."""

    def prepare(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    for at_once in (1 << 30, 0):
        monkeypatch.setattr("megascale.checkpoint.background.snapshot._AT_ONCE", at_once)
        checkpointer = Checkpointer(_config(), run, whole(logical_state(1)))
        with monkeypatch.context() as patched:
            patched.setattr(Staging, "prepare", prepare)
            checkpointer.prepare()
            assert checkpointer.snapshots is not None
            assert not checkpointer.snapshots.wait_for_memory()
            assert checkpointer.snapshots._choose(wait=True) is None
        assert checkpointer.save(1, {"step": 1})
        assert [(o.committed, o.why) for o in checkpointer.finish(over=False)] == [(True, "")]


def test_memory_that_did_not_come_into_place_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for anew it is refused where it lacks, which a save then tells, instead of failing in silence each time."""
    monkeypatch.setattr(service, "CheckpointIndex", SimpleNamespace(from_bytes=lambda _: None))
    ours = service.CheckpointService(1.0)
    sock: Any = SimpleNamespace(body=b"", send=lambda *_, **__: None)
    try:
        ours.on_allocate(sock, Allocate(0, 4096, 2))
        first = ours.slots[0]
        ours.on_allocate(sock, Allocate(0, 4096, 2))
        assert ours.slots[0] is first
        first[1].memory.filling.problem = OSError(errno.ENOMEM, "Cannot allocate memory")
        ours.on_allocate(sock, Allocate(0, 4096, 2))
        assert ours.slots[0] is not first
        assert all(slot.memory.filling.wait(30) for slot in ours.slots[0])
    finally:
        for slot in ours.slots.get(0, []):
            slot.memory.close()


def test_an_image_that_is_not_whole_everywhere_is_overwritten_first(run: Path) -> None:
    checkpointer = Checkpointer(_config(memory_interval=1), run, whole(logical_state(1)))
    for step in (1, 2):
        assert checkpointer.save(step, {"step": step}, persist=False, wait=True)
    checkpointer.finish(over=False)
    # Killed while step 3 came into the first slot: a new trainer must not touch the second, which has step 2.
    sock = service.connect(service_protocol.private_folder(run))
    sock.ask(Fill(0, 0))
    again = Checkpointer(_config(memory_interval=1), run, whole(logical_state(2)))
    assert again.load() == {"step": 2}
    again.prepare()
    assert again.snapshots is not None
    assert again.snapshots._choose(wait=False) == 0
    again.finish(over=False)


def test_the_token_is_asked_for() -> None:
    here, there = socket.socketpair()
    errors: list[Exception] = []

    def other(token: bytes) -> None:
        try:
            prove(Conversation(there, COPIES, COPIES), token, "replicas", "server")
        except ConnectionError as error:
            errors.append(error)

    for token, good in ((b"right", True), (b"wrong", False)):
        thread = threading.Thread(target=other, args=(token,))
        thread.start()
        if good:
            prove(Conversation(here, COPIES, COPIES), b"right", "replicas", "client")
        else:
            with pytest.raises(ConnectionError, match="token"):
                prove(Conversation(here, COPIES, COPIES), b"right", "replicas", "client")
        thread.join()
    assert len(errors) == 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=40))
def test_partners_are_in_other_domains_where_that_can_be(domains: list[int]) -> None:
    found = partners(domains)
    assert sorted(found) == list(range(len(domains)))
    assert all(host != other for host, other in enumerate(found))
    largest = max(domains.count(d) for d in domains)
    same = sum(domains[host] == domains[other] for host, other in enumerate(found))
    # Of a domain with more than half of the hosts, some must pair among themselves.
    assert same <= max(0, 2 * largest - len(domains))


def test_what_killed_services_left_is_swept_and_what_runs_is_not(tmp_path: Path) -> None:
    """Folders of services under one parent, as those of all runs of a user."""
    dead, alive, mine = (tmp_path / name for name in ("dead", "alive", "mine"))
    for place in (dead, alive):
        service.connect(place, linger=60).close()
    with contextlib.closing(service.connect(dead)) as sock:
        os.kill(sock.ask(Register()).pid, signal.SIGKILL)
        assert sock.sock.recv(1) == b""
    with open(dead / "checkpoint.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which the kernel lets go of after its sockets, or before
    service.serve(mine, linger=-1.0)  # ends at once
    assert not mine.exists()
    assert not dead.exists()
    assert (alive / "checkpoint.sock").exists()
    with contextlib.closing(service.connect(alive)) as sock:
        os.kill(sock.ask(Register()).pid, signal.SIGKILL)


def test_services_that_come_and_go_are_one_at_a_time(tmp_path: Path) -> None:
    """Many start while others end and remove the folder: never two at once."""
    place, inside, most = Place(tmp_path / "place", "checkpoint"), 0, 0
    guard = threading.Lock()

    def come_and_go() -> None:
        nonlocal inside, most
        for _ in range(50):
            lock = place.take(make_folder=True)
            if lock is None:
                continue
            with guard:
                inside += 1
                most = max(most, inside)
            with guard:
                inside -= 1
            place.leave(lock)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(come_and_go) for _ in range(8)]:
            done.result()
    assert most == 1
    assert not place.folder.exists()


def test_a_service_that_is_not_to_linger_waits_for_its_first_visitor(tmp_path):
    place = service_protocol.private_folder(tmp_path / "run")
    with contextlib.closing(service.connect(place, linger=0.0)) as first:
        with contextlib.closing(service.connect(place, linger=0.0)):
            pass  # the same one: it is not alone yet
        assert first is not None
