"""A node's checkpoint service: it outlives trainers and agents on purpose, so whoever wants it gone must find it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from megascale.checkpoint.background.service_protocol import private_folder


def end_services(run: Path, node: str) -> list[int]:
    """Kill the checkpoint services of a node on this host, and with them what they hold in memory: their pids."""
    folder, ended = os.fsencode(private_folder(run, node)), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder in (process / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
                ended.append(int(process.name))
    return ended
