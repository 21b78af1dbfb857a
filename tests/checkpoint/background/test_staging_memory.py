"""Staging memory: when it is in place, when a save may use it, which snapshot is given up for another."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megascale.checkpoint import Checkpointer
from megascale.checkpoint.background import service, service_protocol, snapshot, staging
from megascale.checkpoint.background.service import CheckpointService
from megascale.checkpoint.background.service_protocol import (
    FROM_SERVICE,
    TO_SERVICE,
    Allocate,
    AwaitPages,
    InvalidateSlot,
)
from megascale.checkpoint.background.staging import StagingSlot
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.storage.base import PAGE
from megascale.services.conversation import Conversation, read_peer_credentials
from tests.checkpoint.background.conftest import background, large_state
from tests.checkpoint.conftest import full_shards, logical_state

NOTHING = CheckpointIndex({}, [], {"tensor": np.zeros(0, np.int32)})


def test_a_save_is_skipped_while_memory_is_in_use(run: Path) -> None:
    checkpointer = Checkpointer(background(), run, full_shards(large_state(1)))
    begun = [checkpointer.save(step, {}) for step in range(1, 6)]
    outcomes = checkpointer.finish()
    assert begun[0]
    assert len(outcomes) == sum(begun)
    assert all(o.committed for o in outcomes)
    assert not all(begun), "five saves of 33 MB began within their own copying"


def test_with_memory_wait_no_copy_is_skipped_and_the_one_before_is_whole(run: Path) -> None:
    checkpointer = Checkpointer(background(memory_interval=1, memory_wait=True), run, full_shards(large_state(1)))
    for step in range(1, 6):
        assert checkpointer.save(step, {"step": step}, persist=False)
        assert checkpointer.snapshots is not None
        steps = [slot.generation for slot in checkpointer.snapshots._slots if slot.is_complete]
        # A process that is lost now has the step before. The first two go into empty slots, and wait for nothing.
        assert step <= 2 or steps
        checkpointer.before_update()
    outcomes = checkpointer.finish(run_ended=False)
    assert sorted((outcome.step, outcome.reason) for outcome in outcomes) == [(step, "") for step in range(1, 6)]
    assert Checkpointer(background(), run, full_shards(large_state(2))).load() == {"step": 5}


def test_a_write_to_storage_that_does_not_end_delays_one_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_SLOT_TIMEOUT", 0.1)
    checkpointer = Checkpointer(background(memory_interval=1, memory_wait=True), run, full_shards(logical_state(1)))
    for step in (1, 2):
        assert checkpointer.save(step, {"step": step}, persist=False)
    assert checkpointer.snapshots is not None
    slots = sorted(checkpointer.snapshots._slots, key=lambda slot: slot.generation)
    for slot in slots:
        slot.free.wait()
    slots[0].free.clear()  # as while it is written
    assert not checkpointer.save(3, {"step": 3}, persist=False)
    assert slots[1].is_complete
    assert checkpointer.save(4, {"step": 4}, persist=False)
    slots[1].free.wait()
    slots[0].free.set()
    assert checkpointer.save(5, {"step": 5}, persist=False)
    assert not checkpointer.snapshots._has_slot_timed_out
    checkpointer.finish(run_ended=False)


def test_staging_memory_that_a_process_has_kept_serves_its_next_checkpointer(run: Path) -> None:
    config = background(memory_interval=1, memory_wait=True)
    first = Checkpointer(config, run, full_shards(logical_state(1)))
    for step in (1, 2):
        assert first.save(step, {"step": step}, persist=False)
    slots = list(first.leave())
    mappings = [slot.map for slot in slots]
    assert len(slots) == 2
    assert not any(slot.pairs for slot in slots)  # nothing holds the live memory

    second = Checkpointer(config, run, full_shards(logical_state(7)), reused_slots=slots)
    assert second.load() == {"step": 2}
    second.prepare()
    assert second.snapshots is not None
    assert [slot.map for slot in second.snapshots._slots] == mappings
    assert second.save(3, {"step": 3}, persist=False)
    second.finish(run_ended=False)
    assert Checkpointer(config, run, full_shards(logical_state(8))).load() == {"step": 3}


def test_state_that_stands_at_the_newest_step_in_memory_is_left_alone(run: Path) -> None:
    config = background(memory_interval=1)
    first = Checkpointer(config, run, full_shards(logical_state(1)))
    assert first.save(4, {"step": 4}, persist=False, wait=True)
    kept = first.keep_state(attempt=1)
    first.finish(run_ended=False)
    for step, stays in ((4, True), (3, False), (-1, False), (None, False)):
        state = logical_state(2)
        second = Checkpointer(config, run, full_shards(state))
        live = None if step is None else replace(kept, step=step, shards=second.shards)
        assert second.load(live=live) == {"step": 4}
        assert second.is_standing is stays
        expected = logical_state(2 if stays else 1)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_memory_wait_without_copies_in_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set checkpoint\.memory_interval"):
        background(memory_wait=True)


def test_memory_that_a_service_does_not_free_is_given_up_after_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_PREPARE_TIMEOUT", 0.05)
    host, trainer = CheckpointService(linger=1.0), mock.Mock()
    trainer.body = b""
    monkeypatch.setattr(CheckpointIndex, "from_bytes", lambda data: NOTHING)
    host.on_allocate(trainer, Allocate(rank=0, size=PAGE, slots=1))
    (memory_slot,) = host.slots[0]
    descriptor = os.dup(memory_slot.memory.descriptor)
    slot = StagingSlot(descriptor, PAGE, NOTHING, [], torch.device("cpu"))
    ours, theirs = socket.socketpair()
    connection = Conversation(ours, TO_SERVICE, FROM_SERVICE)
    served = threading.Thread(target=serve_until_closed, args=(host, Conversation(theirs, FROM_SERVICE, TO_SERVICE)))
    served.start()
    with memory_slot.busy, pytest.raises(TimeoutError, match=r"has not freed this memory for 0\.05 s: it still writes"):
        slot.prepare(connection, AwaitPages(0, 0), threading.Event())
    slot.prepare(connection, AwaitPages(0, 0), threading.Event())  # free again
    connection.close()
    served.join()
    slot.close()
    memory_slot.memory.close()


def serve_until_closed(host: CheckpointService, trainer: Conversation) -> None:
    with trainer, contextlib.suppress(EOFError):
        host.handle_trainer(trainer)


def test_a_service_that_does_not_answer_while_memory_comes_into_place_is_replaced(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit, the first save to storage would wait for its answer for ever."""
    monkeypatch.setattr(snapshot, "_REPLY_TIMEOUT", 1.0)
    monkeypatch.setattr(snapshot, "_WAIT_AT_START_BYTES", 0)
    real = StagingSlot.prepare
    has_failed = threading.Event()

    def prepare(slot: StagingSlot, sock: Conversation, question: AwaitPages, stop: threading.Event) -> None:
        if has_failed.is_set():
            real(slot, sock, question, stop)
            return
        pid, _ = read_peer_credentials(sock.sock)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                real(slot, sock, question, stop)
        finally:
            os.kill(pid, signal.SIGCONT)
            has_failed.set()
        raise TimeoutError("timed out")

    monkeypatch.setattr(StagingSlot, "prepare", prepare)
    checkpointer = Checkpointer(background(), run, full_shards(logical_state(1)))
    while not checkpointer.save(1, {"step": 1}):
        checkpointer.before_update()
    assert has_failed.is_set()
    assert [(outcome.step, outcome.committed) for outcome in checkpointer.finish()][-1] == (1, True)


def test_memory_comes_into_place_under_the_first_steps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots in memory are skipped till then, and saves to disk wait. The end of the run does not wait."""
    is_ready, real = threading.Event(), StagingSlot.prepare

    def prepare(slot: StagingSlot, sock: Conversation, question: AwaitPages, stop: threading.Event) -> None:
        while not is_ready.wait(0.01) and not stop.is_set():
            pass
        real(slot, sock, question, stop)

    monkeypatch.setattr(StagingSlot, "prepare", prepare)
    monkeypatch.setattr("megascale.checkpoint.background.snapshot._WAIT_AT_START_BYTES", 0)
    config = background(memory_interval=1)
    checkpointer = Checkpointer(config, run, full_shards(logical_state(1)))
    assert not checkpointer.save(1, {"step": 1}, persist=False)
    timer = threading.Timer(0.1, is_ready.set)
    timer.start()
    assert checkpointer.save(2, {"step": 2})
    assert is_ready.is_set()
    checkpointer.before_update()
    assert checkpointer.save(3, {"step": 3}, persist=False, wait=True)
    assert [o.reason for o in checkpointer.finish(run_ended=False)] == [""] * 2
    is_ready.clear()
    second = Checkpointer(config, run, full_shards(logical_state(2)))
    assert second.load() == {"step": 3}
    second.prepare()
    assert not second.finish()  # at once, with nothing in place


def test_memory_that_does_not_come_into_place_is_asked_for_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not written to, which a signal might answer; whether it is small, and had before the first step, or not."""

    def prepare(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    for at_once in (1 << 30, 0):
        monkeypatch.setattr("megascale.checkpoint.background.snapshot._WAIT_AT_START_BYTES", at_once)
        checkpointer = Checkpointer(background(), run, full_shards(logical_state(1)))
        with monkeypatch.context() as patched:
            patched.setattr(StagingSlot, "prepare", prepare)
            checkpointer.prepare()
            assert checkpointer.snapshots is not None
            assert not checkpointer.snapshots.wait_for_memory()
            assert checkpointer.snapshots._choose_slot(wait=True) is None
        assert checkpointer.save(1, {"step": 1})
        assert [(o.committed, o.reason) for o in checkpointer.finish(run_ended=False)] == [(True, "")]


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
        first[1].memory.page_filler.problem = OSError(errno.ENOMEM, "Cannot allocate memory")
        ours.on_allocate(sock, Allocate(0, 4096, 2))
        assert ours.slots[0] is not first
        assert all(slot.memory.page_filler.wait(30) for slot in ours.slots[0])
    finally:
        for slot in ours.slots.get(0, []):
            slot.memory.close()


def test_an_image_that_is_not_whole_everywhere_is_overwritten_first(run: Path) -> None:
    checkpointer = Checkpointer(background(memory_interval=1), run, full_shards(logical_state(1)))
    for step in (1, 2):
        assert checkpointer.save(step, {"step": step}, persist=False, wait=True)
    checkpointer.finish(run_ended=False)
    # Killed while step 3 came into the first slot: a new trainer must not touch the second, which has step 2.
    sock = service.connect_checkpoint_service(service_protocol.private_folder(run))
    sock.request(InvalidateSlot(0, 0))
    second = Checkpointer(background(memory_interval=1), run, full_shards(logical_state(2)))
    assert second.load() == {"step": 2}
    second.prepare()
    assert second.snapshots is not None
    assert second.snapshots._choose_slot(wait=False) == 0
    second.finish(run_ended=False)


class Left(Exception):
    """Order to leave the attempt."""


def test_a_process_that_must_leave_does_not_wait_for_its_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service may still send the memory's last snapshot to a host that is lost."""
    must_leave = threading.Event()

    def check() -> None:
        if must_leave.is_set():
            raise Left

    def prepare(slot: StagingSlot, sock: Conversation, question: AwaitPages, stop: threading.Event) -> None:
        must_leave.set()
        stop.wait()

    monkeypatch.setattr(StagingSlot, "prepare", prepare)
    monkeypatch.setattr("megascale.checkpoint.background.snapshot._WAIT_AT_START_BYTES", 0)
    config = background(memory_interval=1)
    checkpointer = Checkpointer(config, run, full_shards(logical_state(1)), check=check)
    with pytest.raises(Left):
        checkpointer.save(1, {"step": 1})
    assert len(checkpointer.leave()) == 2
