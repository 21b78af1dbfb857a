"""Pages of a snapshot are mapped while its first chunks are read, and not at all if nothing of it is read."""

from __future__ import annotations

import os
import threading

import pytest

from megascale.checkpoint.background import snapshot_memory
from megascale.checkpoint.background.load_from_memory import MemorySnapshots
from megascale.checkpoint.background.service_protocol import OpenedSnapshot, OpenSnapshot

CONTENT = bytes(range(256)) * 64


class Service:
    """What a conversation with the checkpoint service gives for one snapshot."""

    def __init__(self) -> None:
        self.body = b"index"
        self.files: list[int] = []

    def request(self, message: OpenSnapshot) -> OpenedSnapshot:
        handle = os.memfd_create("snapshot")
        os.write(handle, CONTENT)
        self.files = [handle]
        return OpenedSnapshot(state="{}", crcs=(), step=7, size=len(CONTENT))


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
