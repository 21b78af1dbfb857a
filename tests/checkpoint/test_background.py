"""Saving in the background: the service outlives trainers, memory comes before storage, copies survive a lost host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megascale.checkpoint import Checkpointer, latest, load, pending, service, steps, wire
from megascale.checkpoint import folder as folders
from megascale.checkpoint.image import Slot
from megascale.checkpoint.index import Index
from megascale.checkpoint.local import Disk, LocalStorage
from megascale.checkpoint.memory import ask
from megascale.checkpoint.pending import finish_pending
from megascale.checkpoint.replica import Replicas, partners
from megascale.checkpoint.staging import Staging, next_slot
from megascale.checkpoint.torch_index import torch_metadata
from megascale.config import CheckpointConfig
from megascale.errors import DataError

from .conftest import assert_same, blank, context, cut, logical_state, run_group, whole


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
    sock = service.connect(wire.private_folder(run))
    pid = ask(sock, {"do": "hello"})["pid"]
    sock.close()
    return pid


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run folder; its service (and those of host-* folders in it) is stopped afterwards."""
    folder = tmp_path / "run"
    folder.mkdir()
    yield folder
    for host in (folder, *folder.glob("host-*")):
        place = wire.private_folder(host)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(place / "checkpoint.sock"))
            os.kill(ask(sock, {"do": "hello"})["pid"], signal.SIGKILL)
        except OSError:
            pass
        finally:
            sock.close()


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
    sock = service.connect(wire.private_folder(run))
    while not any(h["step"] == step for h in ask(sock, {"do": "list"})["held"]):
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
    assert pending.try_commit(storage, 3, generation) is None
    (place / part).write_bytes(whole)
    assert pending.try_commit(storage, 3, generation) is not None


def test_two_may_commit_a_save_at_once(run: Path) -> None:
    _, generation = _saved_not_committed(run)
    both = threading.Barrier(2)

    class Slow(Disk):
        def replace(self, old: Path, new: Path) -> None:
            both.wait(timeout=20)  # both have written theirs
            super().replace(old, new)

    storages = [LocalStorage(run / "checkpoints", Slow()) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda storage: pending.try_commit(storage, 3, generation), storages))
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
    metadata = torch_metadata(plan.committed(pending.BLANK, index.columns["crc"]))
    pending.begin(storage, 3, generation, 2, 2, json.loads(json.dumps(commit.state)), plan.to_bytes(), metadata)
    for rank, name in enumerate(plan.files):
        size, crc = commit.files[f"{generation}-{name}"]
        crcs = index.columns["crc"][index.columns["in_file"] == rank].tolist()
        pending.add_part(storage, 3, generation, {rank: pending.Written(size, crc, crcs)})


def test_a_save_is_skipped_while_memory_is_in_use(run: Path) -> None:
    checkpointer = Checkpointer(_config(), run, whole(_large(1)))
    begun = [checkpointer.save(step, {}) for step in range(1, 6)]
    outcomes = checkpointer.finish()
    assert begun[0]
    assert len(outcomes) == sum(begun)
    assert all(o.committed for o in outcomes)
    assert not all(begun), "five saves of 33 MB began within their own copying"


class Hosts:
    """Processes whose services complete images, copy them to peers and free slots each at its own pace; the choices of
    slots and of memory for copies are the real ones."""

    def __init__(self, ranks: int, slots: int, above: int = 0) -> None:
        self.above, self.number, self.nothing = above, above, Index({}, [], {"tensor": np.zeros(0, np.int32)})
        self.own = [[""] * slots for _ in range(ranks)]  # what each service has whole
        self.filled = [[""] * slots for _ in range(ranks)]
        self.copies = Replicas()
        # As each trainer knows it.
        self.free, self.whole = np.ones((ranks, slots), bool), np.zeros((ranks, slots), bool)
        self.under_way: list[tuple[int, int, str, Any]] = []  # (rank, slot, what comes next, with what)

    def room(self, rank: int, slot: int, generation: str) -> Slot:
        slots = self.free.shape[1]
        message = {"rank": rank, "slot": slot, "slots": slots, "size": 1, "generation": generation, "above": self.above}
        return self.copies._room(message, self.nothing)

    def copy(self, rank: int, slot: int, generation: str) -> None:
        """A copy that was there before."""
        room = self.room(rank, slot, generation)
        room.generation = generation
        room.busy.release()

    def images(self) -> tuple[list[set[str]], list[set[str]]]:
        """Of each rank what is whole, of its own and of its copies."""
        own = [{g for g in of_rank if g} for of_rank in self.own]
        held = self.copies.held()
        return own, [{s.generation for r, s in held if r == rank} for rank in range(len(own))]

    def play(self, moves: list[int], check: Callable[[], None]) -> None:
        """Go on with one of the events under way, or begin a save on all, as each move says."""
        try:
            for move in moves:
                if self.under_way and move % 3:
                    self._go_on(*self.under_way.pop(move % len(self.under_way)))
                else:
                    self._save(check)
                check()
        finally:
            for slots in self.copies._slots.values():
                for slot in slots:
                    slot.memory.close()

    def _go_on(self, rank: int, slot: int, event: str, room: Any) -> None:
        generation = self.filled[rank][slot]
        if event == "frame":
            self.own[rank][slot] = generation
            self.under_way.append((rank, slot, "push", None))
        elif event == "push":
            try:
                self.under_way.append((rank, slot, "pushed", self.room(rank, slot, generation)))
            except BlockingIOError:  # told as a problem of the copy; the image is whole here
                self.whole[rank, slot] = self.free[rank, slot] = True
        elif event == "pushed":
            room.generation = generation
            room.busy.release()
            self.whole[rank, slot] = True
            self.under_way.append((rank, slot, "free", None))
        else:
            self.free[rank, slot] = True

    def _save(self, check: Callable[[], None]) -> None:
        begun = np.array([[g[:8] == f"{self.above:08d}" for g in of_rank] for of_rank in self.filled]) & self.whole
        free, whole, origin = (list(flags) for flags in (self.free.all(0), self.whole.all(0), begun.any(0)))
        chosen = {next_slot(free, whole, filled, origin, self.above > 0) for filled in self.filled}
        assert len(chosen) == 1, "each takes another"
        slot = chosen.pop()
        if slot is None:
            return
        self.number += 1
        for rank, filled in enumerate(self.filled):
            self.own[rank][slot], filled[slot] = "", f"{self.number:08d}-b"
            self.free[rank, slot] = self.whole[rank, slot] = False
            self.under_way.append((rank, slot, "frame", None))
            check()


MOVES = st.lists(st.integers(0, 1 << 30), min_size=5, max_size=90)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 3), st.integers(2, 3), MOVES)
def test_some_image_is_whole_everywhere_whenever_all_are_killed(ranks: int, slots: int, moves: list[int]) -> None:
    """Of own images and of copies, each for itself: either may be lost."""
    hosts, had = Hosts(ranks, slots), [False, False]

    def check() -> None:
        for i, held in enumerate(hosts.images()):
            common = set.intersection(*held)
            had[i] = had[i] or bool(common)
            assert common or not had[i]

    hosts.play(moves, check)
    if not hosts.under_way:
        free, whole = [True] * slots, list(hosts.whole.all(0))
        assert next_slot(free, whole, hosts.filled[0], [False] * slots, False) is not None


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1), st.lists(st.booleans(), min_size=2, max_size=3), st.integers(0, 7), MOVES)
def test_what_a_run_began_from_stays_until_it_has_made_more(
    slot: int, lost: list[bool], newer: int, moves: list[int]
) -> None:
    """Some hosts were lost and have nothing; their images are copies, beside which a newer one may lie that not all
    had."""
    assume(any(not newer >> rank & 1 for rank in range(len(lost))))  # else the run had begun from that
    hosts = Hosts(len(lost), 2, above=6)
    for rank, gone in enumerate(lost):
        images = {slot: "00000006-a"} | ({1 - slot: "00000007-a"} if newer >> rank & 1 else {})
        for place, generation in images.items():
            if gone:
                hosts.copy(rank, place, generation)
            else:
                hosts.own[rank][place] = hosts.filled[rank][place] = generation
                hosts.whole[rank, place] = True

    def check() -> None:
        own, copies = hosts.images()
        assert set.intersection(*(a | b for a, b in zip(own, copies, strict=True))) - {"00000007-a"}

    hosts.play(moves, check)


def test_a_copy_that_still_comes_costs_no_whole_one() -> None:
    copies, index = Replicas(), Index({}, [], {"tensor": np.zeros(0, np.int32)})

    def room(slots: int, slot: int, generation: str, above: int = 0) -> Slot:
        message = {"rank": slots, "slot": slot, "slots": slots, "size": 8, "generation": generation, "above": above}
        return copies._room(message, index)

    for slots in (1, 2):
        first = room(slots, 0, "00000001-a")
        first.generation = "00000001-a"
        first.busy.release()
        coming = room(slots, slots - 1, "00000002-a")
        assert coming is not first
        with pytest.raises(BlockingIOError):
            room(slots, slots - 1, "00000003-a")
        coming.busy.release()  # it did not come
        # A new run begins from the first, whichever slot it fills; then that one's turn comes.
        again = room(slots, 0, "00000002-b", above=1)
        assert again is coming
        assert first.generation
        again.generation = "00000002-b"
        again.busy.release()
        assert room(slots, slots - 1, "00000003-b", above=1) is first


def test_an_image_that_is_not_whole_everywhere_is_overwritten_first(run: Path) -> None:
    checkpointer = Checkpointer(_config(memory_interval=1), run, whole(logical_state(1)))
    for step in (1, 2):
        assert checkpointer.save(step, {"step": step}, persist=False, wait=True)
    checkpointer.finish(over=False)
    # Killed while step 3 came into the first slot: a new trainer must not touch the second, which has step 2.
    sock = service.connect(wire.private_folder(run))
    ask(sock, {"do": "fill", "rank": 0, "slot": 0})
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
            wire.prove(there, token, server=True)
        except ConnectionError as error:
            errors.append(error)

    for token, good in ((b"right", True), (b"wrong", False)):
        thread = threading.Thread(target=other, args=(token,))
        thread.start()
        if good:
            wire.prove(here, b"right", server=False)
        else:
            with pytest.raises(ConnectionError, match="token"):
                wire.prove(here, b"right", server=False)
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
        os.kill(ask(sock, {"do": "hello"})["pid"], signal.SIGKILL)
        assert sock.recv(1) == b""  # it is gone
    assert (dead / "checkpoint.lock").exists()
    service.serve(mine, linger=-1.0)  # ends at once
    assert not mine.exists()
    assert not dead.exists()
    assert (alive / "checkpoint.sock").exists()
    with contextlib.closing(service.connect(alive)) as sock:
        os.kill(ask(sock, {"do": "hello"})["pid"], signal.SIGKILL)


def test_services_that_come_and_go_are_one_at_a_time(tmp_path: Path) -> None:
    """Many start while others end and remove the folder: never two at once."""
    place, inside, most = tmp_path / "place", 0, 0
    guard = threading.Lock()

    def come_and_go() -> None:
        nonlocal inside, most
        for _ in range(50):
            lock = service._take(place, create=True)
            if lock is None:
                continue
            with guard:
                inside += 1
                most = max(most, inside)
            with guard:
                inside -= 1
            service._leave(place, lock)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(come_and_go) for _ in range(8)]:
            done.result()
    assert most == 1
    assert not place.exists()
