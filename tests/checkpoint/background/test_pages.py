"""Shared memory that is mapped whole: every page is there, and a file that is too short says so at once."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from megascale.checkpoint.background import snapshot_memory
from megascale.checkpoint.background.snapshot_memory import PageFiller, fill_pages, map_shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")


@pytest.fixture
def handle():
    descriptor = os.memfd_create("megascale-test")
    yield descriptor
    os.close(descriptor)


def resident(mapped: mmap.mmap) -> int:
    """Bytes of it that this process has mapped."""
    begin = np.frombuffer(mapped, np.uint8).ctypes.data
    part = Path("/proc/self/smaps").read_text().partition(f"\n{begin:x}-")[2]
    return 1024 * int(re.search(r"Rss: +(\d+) kB", part)[1])


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("pages", [1, 3, 257])
@pytest.mark.parametrize("threads", [1, 2, 6])
def test_every_page_is_there(handle, monkeypatch, threads, pages, writable):
    monkeypatch.setattr(snapshot_memory, "_CALL_BYTES", 2 * mmap.PAGESIZE)
    monkeypatch.setattr(snapshot_memory, "usable_cores", lambda: threads)
    size = pages * mmap.PAGESIZE + 5
    data = os.urandom(size)
    os.write(handle, data)
    progress: list[int] = []
    if writable:
        mapped = mmap.mmap(handle, size)
        fill_pages(mapped, new=True, on_progress=progress.append)
        assert sum(progress) == size
    else:
        mapped = map_shared(handle, size, writable=False)
    assert resident(mapped) == (pages + 1) * mmap.PAGESIZE
    assert mapped[:] == data
    if writable:
        mapped[size - 1 : size] = b"x"
        assert os.pread(handle, 1, size - 1) == b"x"
    else:
        with pytest.raises(TypeError):
            mapped[0:1] = b"x"
    mapped.close()


def test_a_kernel_without_the_advice_maps_it_too(handle, monkeypatch):
    monkeypatch.setattr(snapshot_memory, "_CALL_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(snapshot_memory, "usable_cores", lambda: 4)
    calls = []

    def refuse(begin: int, length: int, advice: int) -> int:
        calls.append(advice)
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(snapshot_memory, "_find_madvise", lambda: refuse)
    os.ftruncate(handle, 64 * mmap.PAGESIZE)
    mapped = map_shared(handle, 64 * mmap.PAGESIZE)
    assert calls
    assert resident(mapped) == 64 * mmap.PAGESIZE


def test_pages_that_cannot_be_had_are_told_of(handle):
    """Not by a signal at the first access."""
    os.ftruncate(handle, 64 * mmap.PAGESIZE)
    mapped = mmap.mmap(handle, 64 * mmap.PAGESIZE)
    os.ftruncate(handle, 8 * mmap.PAGESIZE)
    with pytest.raises(OSError, match="Bad address"):
        fill_pages(mapped)
    filling = PageFiller(mapped)
    with pytest.raises(OSError, match="Bad address"):
        filling.wait(30.0)
    assert not filling.remaining_bytes


def test_filling_goes_on_meanwhile_and_ends_when_told(handle, monkeypatch):
    """Untouched pages are cleared at the first access."""
    monkeypatch.setattr(snapshot_memory, "_CALL_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(snapshot_memory, "_CLEARING_THREADS", 1)
    begun = threading.Semaphore(0)
    goes_on = threading.Semaphore(3)
    real = snapshot_memory._find_madvise()

    def slow(begin: int, length: int, advice: int) -> int:
        begun.release()
        goes_on.acquire()
        return real(begin, length, advice)

    monkeypatch.setattr(snapshot_memory, "_find_madvise", lambda: slow)
    os.ftruncate(handle, 64 * mmap.PAGESIZE)
    mapped = mmap.mmap(handle, 64 * mmap.PAGESIZE)
    filling = PageFiller(mapped)
    for _ in range(4):
        begun.acquire()
    assert not filling.wait(0.0)
    assert filling.remaining_bytes == 61 * mmap.PAGESIZE
    mapped[-1:] = b"x"
    with pytest.raises(BufferError):
        mapped.close()
    goes_on.release()
    stopper = threading.Thread(target=filling.stop)
    stopper.start()
    while stopper.is_alive():
        goes_on.release()
        stopper.join(0.01)
    assert filling.wait(0.0)
    assert not filling.remaining_bytes
    mapped.close()
    assert os.pread(handle, 1, 64 * mmap.PAGESIZE - 1) == b"x"


def test_one_mapping_is_filled_after_the_other_by_turn(monkeypatch):
    """A host's processes need the cores too, and each of them its first snapshot's memory before any its second's."""
    order: list[int] = []
    running, goes_on = threading.Semaphore(0), threading.Semaphore(0)

    def fill(mapped: list[int], stop: threading.Event, **_: object) -> None:
        order.append(mapped[0])
        running.release()
        if not stop.is_set():
            goes_on.acquire()

    monkeypatch.setattr(snapshot_memory, "fill_pages", fill)
    fillings = [PageFiller([number], turn) for number, turn in enumerate((0, 1, 0, 1, 0))]
    running.acquire()
    fillings[4].stop()  # while it waits: it need not any more
    running.acquire()
    for _ in range(3):
        goes_on.release()
        assert running.acquire(timeout=30)
    goes_on.release()
    assert all(filling.wait(30) for filling in fillings)
    assert order == [0, 4, 2, 1, 3]


def test_the_kernel_may_use_huge_pages_for_staging_memory():
    memory = snapshot_memory.StagingMemory(4 << 20)
    assert memory.page_filler.wait(60)
    address = np.frombuffer(memory.map, np.uint8).ctypes.data
    part = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")[2]
    flags = re.search(r"VmFlags: (.*)", part)[1].split()
    memory.close()
    assert "hg" in flags
