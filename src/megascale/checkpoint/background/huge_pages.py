"""Anonymous shared memory on huge pages. Needs no torch and, since it also runs as a script, nothing of this package.

The kernel clears, maps, page-locks and frees memory page by page. With pages of 2 MiB instead of 4 KiB that takes about
a tenth of the time (dev/log.md, 2026-11-28), which counts for snapshots of tens of gigabytes.

The memory of `os.memfd_create` has huge pages only if the host's administrator has set
/sys/kernel/mm/transparent_hugepage/shmem_enabled, which is `never` by default. A mounted tmpfs has a setting of its
own. The tmpfs of this module has no path. The kernel frees it with its last open file. Mounting needs CAP_SYS_ADMIN.
A process without it starts a child process that has it within a user namespace, and receives the tmpfs from the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import subprocess
import sys
from functools import cache

log = logging.getLogger("megascale.checkpoint.background.huge_pages")

_LIBRARY = ctypes.CDLL(None, use_errno=True)
# System calls of Linux 5.2 and their constants, which Python's os module lacks.
_FSOPEN = 430
_FSCONFIG = 431
_FSMOUNT = 432
_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1
_SET_STRING, _CREATE = 1, 6  # commands of fsconfig
_MOUNT_ATTRIBUTES = 2 | 4 | 8  # MOUNT_ATTR_NOSUID, NODEV and NOEXEC
_NEW_NAMESPACES = 0x10000000 | 0x00020000  # CLONE_NEWUSER and CLONE_NEWNS
_OPTIONS = {"huge": "advise", "size": "0", "mode": "700"}  # size=0: no limit besides the host's memory
_CHILD_SECONDS = 10.0
# Smaller memory is cleared in some milliseconds, for which no tmpfs is mounted.
LEAST_BYTES = 64 << 20


def open_memory(size: int) -> int:
    """Return the descriptor of new shared memory of `size` bytes, on huge pages if the host permits them.

    The kernel uses huge pages in mappings with the advice MADV_HUGEPAGE.

    Raises:
        OSError: the memory cannot be made.
    """
    descriptor = -1
    if size >= LEAST_BYTES:
        mount = find_mount()
        if mount is not None:
            with contextlib.suppress(OSError):
                descriptor = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=mount)
    if descriptor < 0:
        descriptor = os.memfd_create("megascale-checkpoint", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def identify_memory(descriptor: int) -> str:
    """Return device and inode of shared memory, which are unique on the host while it is open."""
    status = os.fstat(descriptor)
    return f"{status.st_dev}:{status.st_ino}"


@cache
def find_mount() -> int | None:
    """Return this process's tmpfs with huge pages as a descriptor, or None if the host permits none."""
    try:
        mount = mount_tmpfs()
    except OSError:
        try:
            mount = _mount_in_child()
        except (OSError, subprocess.SubprocessError) as error:
            log.info(
                "staging memory has small pages, which are slow to clear and to page-lock: %s. Allow user namespaces, "
                "or write `advise` to /sys/kernel/mm/transparent_hugepage/shmem_enabled",
                error,
            )
            return None
    log.info("staging memory is in a tmpfs with huge pages")
    return mount


def mount_tmpfs() -> int:
    """Return a new tmpfs without a path as a descriptor. Raises OSError if the process may not mount."""
    context = _call(_FSOPEN, b"tmpfs", _FSOPEN_CLOEXEC)
    try:
        for name, value in _OPTIONS.items():
            _call(_FSCONFIG, context, _SET_STRING, name.encode(), value.encode(), 0)
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        return _call(_FSMOUNT, context, _FSMOUNT_CLOEXEC, _MOUNT_ATTRIBUTES)
    finally:
        os.close(context)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """Return the result of a system call. Raises OSError if it fails."""
    result = int(_LIBRARY.syscall(number, *arguments))
    if result < 0:
        raise _make_error()
    return result


def _make_error() -> OSError:
    """Return the error of the last call of the C library."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _mount_in_child() -> int:
    """Return a tmpfs that a child process has mounted in a user namespace. Raises OSError or SubprocessError."""
    parent_end, child_end = socket.socketpair()
    with parent_end:
        with child_end:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        try:
            _, errors = process.communicate(timeout=_CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        if process.returncode:
            raise OSError(errors.strip().rpartition("\n")[2] or f"exit code {process.returncode}")
        _, descriptors, _, _ = socket.recv_fds(parent_end, 1, 1)
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def _send_mount(descriptor: int) -> None:
    """Mount a tmpfs in a new user namespace, and send it over the socket `descriptor`. Raises OSError."""
    user, group = os.getuid(), os.getgid()
    if _LIBRARY.unshare(_NEW_NAMESPACES) != 0:
        raise _make_error()
    files = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in files.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    with socket.socket(fileno=descriptor) as parent:
        socket.send_fds(parent, [b"m"], [mount_tmpfs()])


if __name__ == "__main__":
    _send_mount(int(sys.argv[1]))
