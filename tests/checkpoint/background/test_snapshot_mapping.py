"""Pages of a snapshot are mapped while its first chunks are read, and not at all if nothing of it is read."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from megascale.checkpoint.background import snapshot_memory
from megascale.checkpoint.background.load_from_memory import MemorySnapshots
from megascale.checkpoint.background.service_protocol import OpenedSnapshot, OpenSnapshot
from megascale.checkpoint.background.staging import StagingSlot
from megascale.checkpoint.format.index import CheckpointIndex

CONTENT = bytes(range(256)) * 64


class Service:
    """What a conversation with the checkpoint service gives for one snapshot."""

    def __init__(self) -> None:
        self.body = b"index"
        self.files: list[int] = []

    def request(self, message: OpenSnapshot) -> OpenedSnapshot:
        self.files = [self.open_memory()]
        return OpenedSnapshot(state="{}", crcs=(), step=7, size=len(CONTENT))

    def open_memory(self) -> int:
        """Return a descriptor of the snapshot's memory."""
        handle = os.memfd_create("snapshot")
        os.write(handle, CONTENT)
        return handle


def test_a_snapshot_in_a_slot_of_this_process_is_read_from_the_slot(monkeypatch):
    service = Service()
    memory = service.open_memory()
    slot = StagingSlot(memory, CheckpointIndex.make_empty(), [], torch.device("cpu"))
    monkeypatch.setattr(service, "open_memory", lambda: os.dup(memory))
    monkeypatch.setattr(snapshot_memory, "fill_pages", lambda *_, **__: pytest.fail("the pages are mapped already"))
    snapshots = MemorySnapshots(service, "1", [slot])  # type: ignore[arg-type]
    assert bytes(snapshots.read(3, 10, 300)) == CONTENT[10:300]
    assert snapshots.find_range(3, 10, 300).memory.tobytes() == CONTENT[10:300]
    other = MemorySnapshots(Service(), "1", [slot])  # type: ignore[arg-type]
    assert other.find_range(3, 10, 300).memory is None
    os.close(memory)


def test_memory_that_is_not_page_locked_is_read_instead():
    """A device would copy from it slowly, and would keep the thread waiting."""
    memory = Service().open_memory()
    slot = StagingSlot(memory, CheckpointIndex.make_empty(), [], torch.device("cuda", 0))
    assert slot.copyable_memory is None
    os.close(memory)


def test_reads_do_not_wait_until_all_pages_are_mapped(monkeypatch):
    has_begun, may_end = threading.Event(), threading.Event()

    def fill_pages(mapping, *, writable):
        assert not writable
        has_begun.set()
        may_end.wait(60)

    monkeypatch.setattr(snapshot_memory, "fill_pages", fill_pages)
    service = Service()
    snapshots = MemorySnapshots(service, "1")  # type: ignore[arg-type]
    assert snapshots.open(3).index == b"index"
    assert not has_begun.is_set()  # a rank whose state stays reads nothing
    assert bytes(snapshots.read(3, 10, 300)) == CONTENT[10:300]
    assert has_begun.wait(60)
    assert bytes(snapshots.read(3, 0, len(CONTENT))) == CONTENT
    may_end.set()


def test_a_snapshot_is_open_until_the_load_ends():
    service = Service()
    snapshots = MemorySnapshots(service, "1")  # type: ignore[arg-type]
    descriptor = snapshots.open(3).descriptor
    assert os.pread(descriptor, 20, 10) == CONTENT[10:30]
    del snapshots
    with pytest.raises(OSError):
        os.fstat(descriptor)
