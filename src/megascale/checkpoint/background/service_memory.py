"""Memory that the checkpoint service of an earlier start of the run still has. Needs no torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megascale.checkpoint.background.service_protocol import locate_service, private_folder
from megascale.config import Config
from megascale.errors import MegascaleError


def measure_service_memory(config: Config) -> int:
    """Return the bytes of copies of the state that the run's checkpoint service on this host has, 0 without a service.

    A service stays for `checkpoint.linger` seconds after its trainers. The next start uses its memory again, so the
    host need not have that memory free.
    """
    if not config.checkpoint.background:
        return 0
    pid = None
    with contextlib.suppress(OSError, MegascaleError):
        pid = locate_service(private_folder(config.run_folder)).find_service_pid()
    if pid is None:
        return 0
    return read_shared_memory(pid)


def read_shared_memory(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the bytes of shared memory whose pages a process has mapped, 0 if that is unknown.

    Args:
        proc: folder of the kernel's files.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "RssShmem":
                return int(value.split()[0]) * 1024
    return 0
