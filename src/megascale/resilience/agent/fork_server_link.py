"""The agent's connection to its fork server (fork_server.py): the process, the orders to it and its reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megascale.core.failure import FailureLog, describe_exit
from megascale.resilience.agent.fork_server_process import ForkServerProcess, start_fork_server
from megascale.resilience.protocol.fork_messages import (
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    Broken,
    Fork,
    ForkServerReady,
    Instruct,
)
from megascale.services.messages import FrameReader, Message

log = logging.getLogger("megascale.agent")
_KILL_SECONDS = 5.0  # within which a killed fork server, which uses no device, ends


class ForkServerLink:
    """Connection to a fork server, which is started again after its end.

    Args:
        log_file: file for the output of the server.
        on_report: called for each report of the server.
        on_end: called when the server has ended, unless the agent has ended it by `kill`.
        started: server that this process has started already, or None.

    Attributes:
        process: the server's process; None before the start and after `kill`.
        is_ready: whether the server has imported its modules.
        start_failure: report of a server that could not import its modules.
        end_reason: reason for which the agent ended the server with its ranks; "" if the agent did not.
    """

    def __init__(
        self,
        log_file: Path,
        on_report: Callable[[Message], None],
        on_end: Callable[[], None],
        started: ForkServerProcess | None = None,
    ) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.is_ready = False
        self.start_failure: Broken | None = None
        self.end_reason = ""
        self.on_report = on_report
        self._on_end = on_end
        self._log_file = log_file
        self._started = started
        self._socket: socket.socket | None = None
        self._start_time = 0.0  # `time.monotonic()` at the start of the server
        self._read_task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Return whether the server can receive orders."""
        return self._socket is not None

    def start(self, modules: Sequence[str]) -> None:
        """Start a server that imports `modules`. There must be no earlier one.

        The first call connects to the server that was started before the agent's imports, if it imports `modules`.
        """
        started = self._started
        self._started = None
        if started is not None and started.modules != tuple(modules):
            started.socket.close()
            _kill_server(started.process)
            started = None
        if started is None:
            started = start_fork_server(self._log_file, modules)
        self.process = started.process
        self._start_time = started.start_time
        self._socket = started.socket
        self.is_ready = False
        self.start_failure = None
        self.end_reason = ""  # an earlier server may have ended without ranks that needed its reason
        self._read_task = asyncio.get_running_loop().create_task(self._read_reports(started.socket))

    def disconnect(self) -> None:
        """Read no more reports."""
        if self._read_task is not None:
            self._read_task.cancel()
        if self._socket is not None:
            self._socket.close()
        self._read_task = None
        self._socket = None

    def kill(self) -> None:
        """Kill the server. The kernel ends the server's ranks with it."""
        self.disconnect()
        if self.process is not None:
            _kill_server(self.process)
        self.process = None

    def send(self, order: Fork | Instruct) -> None:
        """Send an order to the server. A server that has ended gets no order, and `on_end` reports its end."""
        assert self._socket is not None
        # Blocking is safe, because the socket's buffer has space for the orders of all ranks.
        self._socket.setblocking(True)
        try:
            self._socket.sendall(TO_FORK_SERVER.encode_frame(order))
        except (BrokenPipeError, ConnectionResetError) as error:
            log.warning("an order did not reach the fork server: %s", error)
        finally:
            self._socket.setblocking(False)

    def describe_end(self) -> str:
        """Return why the server has ended, and forget the agent's reason."""
        assert self.process is not None
        # The server may close its socket shortly before it ends.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        description = describe_exit(self.process.returncode or 0)
        reason = self.end_reason or f"its fork server (process {self.process.pid}) ended with {description}"
        self.end_reason = ""
        return reason

    async def _read_reports(self, sock: socket.socket) -> None:
        """Handle the reports of the server until it ends."""
        loop = asyncio.get_running_loop()
        frames = FrameReader(FROM_FORK_SERVER)
        try:
            while data := await loop.sock_recv(sock, 65536):
                for message in frames.feed(data):
                    self._handle_report(message)
        except OSError as error:
            log.warning("the connection to the fork server ended: %s", error)
        except Exception as error:
            # Without the reports, the ends of the server's ranks would stay unknown, so the server is replaced.
            FailureLog(log, "reading from the fork server").note(error, "the server and its ranks are ended")
            if not self.end_reason:
                self.end_reason = f"reports of the fork server cannot be read: {error}"
            if self.process is not None:
                self.process.kill()
        self._read_task = None  # so that `disconnect` does not cancel this task
        self._on_end()

    def _handle_report(self, message: Message) -> None:
        if isinstance(message, ForkServerReady):
            self.is_ready = True
            log.info("the fork server has imported its modules in %.2f s", time.monotonic() - self._start_time)
        elif isinstance(message, Broken):
            self.start_failure = message
        self.on_report(message)


def _kill_server(process: subprocess.Popen[bytes]) -> None:
    """Kill a fork server, and wait at most _KILL_SECONDS for its end."""
    process.kill()
    try:
        process.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning("the killed fork server (process %d) has not ended", process.pid)
