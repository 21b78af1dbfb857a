"""A node's checkpoint service: it outlives trainers and agents on purpose, so whoever wants it gone must find it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from megascale.checkpoint.background.service_protocol import private_folder


def find_services(run: Path, node: str) -> list[int]:
    """Process ids of the checkpoint services of a node on this host."""
    folder, found = os.fsencode(private_folder(run, node)), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder in (process / "cmdline").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def end_checkpoint_services(run: Path, node: str) -> list[int]:
    """Kill them, and with them what they hold in memory: their pids."""
    ended = []
    for pid in find_services(run, node):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            ended.append(pid)
    return ended
