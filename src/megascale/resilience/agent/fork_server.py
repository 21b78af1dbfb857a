"""The fork server of a node: it imports everything a trainer needs once, then forks one process per rank on request.

It takes orders from a socket of its agent (protocol/fork_messages.py) and reports children that end. A child that ends
with an exception reports it through a pipe, which needs no disk. The server has no threads and no GPU context, so
forking is safe. It ends with its agent, and its children end with it.

The agent runs `python -m megascale.resilience.agent.fork_server FD AGENT_PID NAME...`. A name is a module that is
imported before the first order, or MODULE:FUNCTION, which is called in the first idle second. Its results exist in
processes that are forked later, above all after a failure.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

from megascale.core import terminal
from megascale.core.exit_record import NO_RECORD, find_exit_record
from megascale.core.failure import describe_error
from megascale.core.process_orders import ORDERS_VARIABLE
from megascale.core.python_process import disable_bytecode_cache, drop_own_variables, sleep_at_barriers
from megascale.resilience.protocol.fork_messages import (
    FROM_CHILD,
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    Broken,
    Ended,
    Fork,
    Forked,
    ForkServerReady,
    Instruct,
    LastWords,
)
from megascale.services.host_service import die_with_parent
from megascale.services.messages import FrameReader, Message

ENTRY = "megascale.cli.main"
_IDLE_SECONDS = 1.0  # time without an order before MODULE:FUNCTION names are called


class ForkServer:
    """The server.

    Args:
        sock: connection to the agent.
        names: modules and functions to prepare.
    """

    def __init__(self, sock: socket.socket, names: Sequence[str]) -> None:
        self._socket = sock
        self._modules = [name.partition(":")[0] for name in names]
        self._functions = [name for name in names if ":" in name]
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._report_read, self._report_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._orders = FrameReader(TO_FORK_SERVER)
        self._reports = FrameReader(FROM_CHILD)
        self._last_words: dict[int, LastWords] = {}  # by process id
        self._programs: set[int] = set()  # process ids of children that execute another program
        self._order_pipes: dict[int, int] = {}  # process id -> writing end of its pipe of orders

    def serve(self) -> None:
        """Import the modules, then fork on request until the agent closes its end."""
        self._import_modules()
        gc.collect()
        gc.freeze()  # Imported objects stay in memory that the children share.
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._send(ForkServerReady(os.getpid()))
        while True:
            timeout = _IDLE_SECONDS if self._functions else None
            readable, _, _ = select.select([self._socket.fileno(), self._wakeup_read], [], [], timeout)
            if not readable:
                _call_function(self._functions.pop(0))
            if self._wakeup_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup_read, 4096)
                self._reap()
            if self._socket.fileno() in readable:
                data = self._socket.recv(65536)
                if not data:
                    return
                for order in self._orders.feed(data):
                    if isinstance(order, Instruct):
                        self._instruct(order)
                    else:
                        self._fork(order)

    def _import_modules(self) -> None:
        try:
            for name in self._modules:
                importlib.import_module(name)
        except BaseException as error:
            tail = _to_utf8(traceback.format_exc()[-4000:])
            self._send(Broken(_to_utf8(describe_error(error)[:2000]), find_exit_record(error), tail))
            raise

    def _send(self, message: Message) -> None:
        self._socket.sendall(FROM_FORK_SERVER.encode_frame(message))

    def _reap(self) -> None:
        """Report the children that have ended, with the exceptions that they wrote to the pipe."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._order_pipes:
                os.close(self._order_pipes.pop(pid))
            if pid in self._programs:
                self._programs.discard(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # a wrapper script leaves its children in its process group
            with contextlib.suppress(BlockingIOError):
                # A child writes its message at once and before its end.
                while data := os.read(self._report_read, 65536):
                    for report in self._reports.feed(data):
                        self._last_words[report.pid] = report
            last_words = self._last_words.pop(pid, LastWords(pid, NO_RECORD, ""))
            self._send(Ended(pid, status, last_words.record, last_words.error))

    def _instruct(self, order: Instruct) -> None:
        """Pass a line to a child. The pipe's buffer holds far more lines than a child has unread."""
        pipe = self._order_pipes.get(order.pid)
        if pipe is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.write(pipe, order.line)

    def _fork(self, order: Fork) -> None:
        server = os.getpid()
        orders_read = orders_write = -1
        if order.is_reused:
            orders_read, orders_write = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(orders_write, False)
        pid = os.fork()
        if pid:
            if order.is_reused:
                os.close(orders_read)
                self._order_pipes[pid] = orders_write
            if order.executes:
                self._programs.add(pid)
            self._send(Forked(order.rank, order.attempt, pid))
            return
        code = 1
        try:
            die_with_parent(server)
            disable_bytecode_cache()
            os.setsid()
            self._release_in_child()
            _set_up_rank(order)
            if order.is_reused:
                os.close(orders_write)
                os.environ[ORDERS_VARIABLE] = str(orders_read)
            if order.executes:
                _execute(order)
            code = self._run_trainer()
        except BaseException as error:
            report_exception(self._report_write, error)  # before the traceback, which may fail on a full disk
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _release_in_child(self) -> None:
        """Close the server's descriptors and restore the default signal handlers."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        self._socket.close()
        for descriptor in (self._wakeup_read, self._wakeup_write, self._report_read, *self._order_pipes.values()):
            os.close(descriptor)

    def _run_trainer(self) -> int:
        """Call the entry point of the command line; return its exit code."""
        code = 0
        try:
            importlib.import_module(ENTRY).main()
        except SystemExit as end:
            if isinstance(end.code, int):
                code = end.code
            elif end.code is not None:
                code = 1
            if code:
                report_exception(self._report_write, end)
        atexit._run_exitfuncs()
        return code


def report_exception(pipe: int, error: BaseException) -> None:
    """Write the exception that ends this child to the server's pipe."""
    message = LastWords(os.getpid(), find_exit_record(error), _to_utf8(describe_error(error)[:1000]))
    data = FROM_CHILD.encode_frame(message)
    assert len(data) <= select.PIPE_BUF, "larger messages are not written atomically"
    with contextlib.suppress(OSError):
        os.write(pipe, data)


def _call_function(name: str) -> None:
    """Call MODULE:FUNCTION; if it fails, the children fail or do the work themselves."""
    module, _, function = name.partition(":")
    try:
        getattr(sys.modules[module], function)()
    except Exception:
        traceback.print_exc()


def _to_utf8(text: str) -> str:
    """Return `text` with "?" for bytes of file names that are not UTF-8."""
    return text.encode(errors="replace").decode()


def _set_up_rank(order: Fork) -> None:
    """Set environment, arguments and log of a rank."""
    if order.executes:
        drop_own_variables()
    os.environ.update(order.env)
    sys.argv = ["megascale"] + list(order.arguments)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    # The agent reads the log while it grows, so each line is written at once.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _execute(order: Fork) -> None:
    """Replace this process by another trainer's program. Raise OSError if that is impossible.

    The process stays the leader of its group, and the kernel still ends it with the server.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python keeps ignoring a signal that its parent ignored
    if order.folder:
        os.chdir(order.folder)
    os.execvpe(order.arguments[0], order.arguments, os.environ)


def main() -> None:
    """Run the fork server of an agent."""
    die_with_parent(int(sys.argv[2]))
    # Ctrl-C in a terminal is for the driver, which lets trainers save first. So are the SIGTERM that Slurm sends to
    # all processes of a job, and the SIGHUP of a session that closes. The agent ends this process by SIGKILL.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sleep_at_barriers()
    terminal.keep_working()  # the log may be on a full disk
    with socket.socket(fileno=int(sys.argv[1])) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        ForkServer(sock, sys.argv[3:]).serve()


if __name__ == "__main__":
    main()
