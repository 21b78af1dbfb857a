"""Shared memory on huge pages: from a tmpfs of this process or of its child, and without either."""

from __future__ import annotations

import logging
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megascale.checkpoint.background import huge_pages
from megascale.checkpoint.background.huge_pages import LEAST_BYTES, identify_memory, open_memory
from megascale.checkpoint.background.snapshot_memory import StagingMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")


def may_mount() -> bool:
    """Return whether this user may mount a tmpfs, in a user namespace of its own if necessary."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "-o", "huge=advise"]
    try:
        return subprocess.run([*command, "none", "/mnt"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


needs_mount = pytest.mark.skipif(not may_mount(), reason="this host permits no user namespaces, or has no huge pages")


def count_huge_bytes(mapping: mmap.mmap) -> int:
    """Return the bytes of a mapping that are on huge pages."""
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    region = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")[2]
    huge = re.search(r"ShmemPmdMapped: +(\d+) kB", region)
    assert huge is not None
    return 1024 * int(huge[1])


@needs_mount
def test_staging_memory_has_huge_pages_in_each_of_its_mappings():
    memory = StagingMemory(LEAST_BYTES + 5 * mmap.PAGESIZE)
    try:
        assert memory.page_filler.wait(60)
        peer_mapping = mmap.mmap(memory.descriptor, 0, mmap.MAP_SHARED)
        peer_mapping[-1:] = b"x"
        assert memory.map[-1:] == b"x"
        assert peer_mapping[:LEAST_BYTES].count(0) == LEAST_BYTES  # reading maps the pages
        # Free memory may be fragmented, but not all of it.
        assert count_huge_bytes(memory.map) >= LEAST_BYTES // 2
        assert count_huge_bytes(peer_mapping) >= LEAST_BYTES // 2
    finally:
        memory.close()


@needs_mount
def test_a_child_process_mounts_a_tmpfs_for_a_process_without_the_right(monkeypatch):
    def refuse() -> int:
        raise PermissionError("not permitted")

    monkeypatch.setattr(huge_pages, "mount_tmpfs", refuse)
    mount = huge_pages.find_mount.__wrapped__()
    assert mount is not None
    assert not os.get_inheritable(mount)
    monkeypatch.setattr(huge_pages, "find_mount", lambda: mount)
    descriptor = open_memory(LEAST_BYTES)
    mapping = mmap.mmap(descriptor, 0)
    os.close(mount)  # the memory outlives the descriptor of its tmpfs
    mapping.madvise(mmap.MADV_HUGEPAGE)
    mapping[:2] = b"ab"
    assert os.pread(descriptor, 3, 0) == b"ab\0"
    assert count_huge_bytes(mapping)
    mapping.close()
    os.close(descriptor)


@needs_mount
def test_memory_of_two_services_is_told_apart_by_its_file_system(monkeypatch):
    """Each tmpfs counts its inodes from the same number, and a trainer keeps the memory of a lost service mapped."""
    descriptors = []
    for _ in range(2):
        mount = huge_pages._mount_in_child()
        monkeypatch.setattr(huge_pages, "find_mount", lambda mount=mount: mount)
        descriptors.append(open_memory(LEAST_BYTES))
        os.close(mount)
    assert os.fstat(descriptors[0]).st_ino == os.fstat(descriptors[1]).st_ino
    assert identify_memory(descriptors[0]) != identify_memory(descriptors[1])
    assert identify_memory(descriptors[0]) == identify_memory(os.dup(descriptors[0]))
    for descriptor in descriptors:
        os.close(descriptor)


def test_without_a_tmpfs_memory_has_small_pages_and_the_log_names_the_remedy(monkeypatch, caplog):
    def refuse() -> int:
        raise PermissionError("not permitted")

    monkeypatch.setattr(huge_pages, "mount_tmpfs", refuse)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with caplog.at_level(logging.INFO):
        assert huge_pages.find_mount.__wrapped__() is None
    assert "shmem_enabled" in caplog.text
    monkeypatch.setattr(huge_pages, "find_mount", lambda: None)
    descriptor = open_memory(LEAST_BYTES)
    assert os.fstat(descriptor).st_size == LEAST_BYTES
    assert "memfd:" in os.readlink(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)
