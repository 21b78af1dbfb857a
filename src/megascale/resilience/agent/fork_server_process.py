"""Process of a fork server (fork_server.py), which an agent starts.

This module imports little. The agent starts the first server before it imports its own modules (main.py), so that both
processes import theirs at the same time.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megascale.core.python_process import module_command

LOG_FILE = "forkserver.log"  # in the folder of the node

# Modules of this package's trainer. Names, because the agent must not import the trainer. The server calls the function
# MODULE:FUNCTION when it is idle.
TRAINER_MODULES = (
    "megascale.cli.main",
    "megascale.cli.train",
    "megascale.api",
    "rich.table",
    "megascale.train.loop",
    "megascale.train.rank_info",
    "megascale.ops.launch:warm_up_forks",
)


class ForkServerProcess(NamedTuple):
    """Started process of a fork server.

    Attributes:
        process: the process, a child of the agent.
        socket: the agent's end of the connection, which does not block.
        modules: names of the modules that the server imports.
        start_time: `time.monotonic()` at the start.
    """

    process: subprocess.Popen[bytes]
    socket: socket.socket
    modules: tuple[str, ...]
    start_time: float


def start_fork_server(log_file: Path, modules: Sequence[str]) -> ForkServerProcess:
    """Start a server that imports `modules` and ends with this process.

    Args:
        log_file: file for the output of the server.
    """
    agent_end, server_end = socket.socketpair()
    agent_end.setblocking(False)
    start_time = time.monotonic()
    module = "megascale.resilience.agent.fork_server"
    with open(log_file, "ab") as out:
        process = subprocess.Popen(
            module_command(module, str(server_end.fileno()), str(os.getpid()), *modules),
            pass_fds=[server_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    server_end.close()
    return ForkServerProcess(process, agent_end, tuple(modules), start_time)
