"""Fork server of a node: it imports a trainer's modules once, and then forks one process per rank on request.

The server receives orders from its agent over a socket (protocol/fork_messages.py), and reports children that end. A
child that ends with an exception reports the exception through a pipe, which needs no disk. The server has no threads
and no GPU context, so forking is safe. The server ends with its agent, and its children end with the server.

The agent runs `python -m megascale.resilience.agent.fork_server FD AGENT_PID NAME...`. A name is a module that is
imported before the first order, or MODULE:FUNCTION. Functions are called once the server is idle, so that processes
which are forked later, as after a failure, start with their results.
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
from pathlib import Path

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
    ForkFailed,
    ForkServerReady,
    Instruct,
    LastWords,
)
from megascale.services.host_service import die_with_parent
from megascale.services.messages import FrameReader, Message

ENTRY_MODULE = "megascale.cli.main"  # its function `main` runs a trainer
_IDLE_SECONDS = 1.0  # time without an order before the next function of MODULE:FUNCTION names is called
_GROUP_POLL_SECONDS = 0.2  # between two checks whether the processes of an ended program have ended
# Largest texts of a failure, in characters: the description and the traceback of a failed import.
_IMPORT_ERROR_CHARACTERS = 2000
_TRACEBACK_CHARACTERS = 4000
# Bytes of the description of a child's exception. Its message, which names a subject of up to 200 characters too, must
# fit into one atomic write to a pipe.
_CHILD_ERROR_BYTES = 3000


class ForkServer:
    """Server that forks ranks on the orders of an agent.

    Args:
        names: modules to import, and functions (MODULE:FUNCTION) to call.
    """

    def __init__(self, sock: socket.socket, names: Sequence[str]) -> None:
        self._socket = sock
        self._modules = [name.partition(":")[0] for name in names]
        self._functions = [name for name in names if ":" in name]
        # Python writes to the first pipe when a signal such as SIGCHLD comes. Children report exceptions by the second.
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._report_read, self._report_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._orders = FrameReader(TO_FORK_SERVER)
        self._reports = FrameReader(FROM_CHILD)
        self._exit_reports: dict[int, LastWords] = {}  # by process id
        self._programs: set[int] = set()  # process ids of children that execute another program
        # Wait statuses of programs that SIGTERM has ended while processes of their group still save; by process id.
        self._saving_groups: dict[int, int] = {}
        self._order_pipes: dict[int, int] = {}  # writing end of each child's pipe of orders, by process id

    def serve(self) -> None:
        """Import the modules, then fork on request until the agent closes its end."""
        gc.disable()  # Imports make many objects and little garbage: collections would take a fifth of their time.
        self._import_modules()
        gc.collect()
        gc.enable()
        gc.freeze()  # the garbage collector does not touch imported objects, so children share their memory
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # An ignored signal would not wake `select`.
        self._send(ForkServerReady(os.getpid()))
        while True:
            timeout = _IDLE_SECONDS if self._functions else None
            if self._saving_groups:
                timeout = _GROUP_POLL_SECONDS
            readable, _, _ = select.select([self._socket.fileno(), self._wakeup_read], [], [], timeout)
            self._report_ended_groups()
            if not readable and self._functions and not self._saving_groups:
                _call_function(self._functions.pop(0))
            if self._wakeup_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup_read, 4096)
                self._report_ended_children()
            if self._socket.fileno() in readable:
                data = self._socket.recv(65536)
                if not data:
                    return
                for order in self._orders.feed(data):
                    if isinstance(order, Instruct):
                        self._forward_order(order)
                    else:
                        self._fork(order)

    def _import_modules(self) -> None:
        """Import the modules. Report a failure to the agent before raising it."""
        try:
            for name in self._modules:
                importlib.import_module(name)
        except BaseException as error:
            traceback_tail = _to_utf8(traceback.format_exc()[-_TRACEBACK_CHARACTERS:])
            description = _to_utf8(describe_error(error)[:_IMPORT_ERROR_CHARACTERS])
            self._send(Broken(description, find_exit_record(error), traceback_tail))
            raise

    def _send(self, message: Message) -> None:
        self._socket.sendall(FROM_FORK_SERVER.encode_frame(message))

    def _report_ended_children(self) -> None:
        """Report the children that have ended, with the exceptions that they have written to the pipe."""
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
                has_terminated = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
                if has_terminated and _has_running_group(pid):
                    # The agent asks the whole group to save. SIGTERM ends a shell script before its trainer has saved.
                    self._saving_groups[pid] = status
                    continue
                # End the processes that a wrapper script has left in its process group.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(BlockingIOError):
                # A child writes its message atomically and before its end, so the pipe has complete messages.
                while data := os.read(self._report_read, 65536):
                    for report in self._reports.feed(data):
                        self._exit_reports[report.pid] = report
            exit_report = self._exit_reports.pop(pid, LastWords(pid, NO_RECORD, ""))
            self._send(Ended(pid, status, exit_report.record, exit_report.error))

    def _report_ended_groups(self) -> None:
        """Report programs that SIGTERM has ended once all processes of their group have ended.

        The agent kills the group at the end of its grace period.
        """
        for pid, status in list(self._saving_groups.items()):
            if not _has_running_group(pid):
                del self._saving_groups[pid]
                self._send(Ended(pid, status, NO_RECORD, ""))

    def _forward_order(self, order: Instruct) -> None:
        """Write an order to the pipe of a child. The pipe's buffer never fills, because children read their orders."""
        pipe = self._order_pipes.get(order.pid)
        if pipe is not None:
            with contextlib.suppress(OSError):  # the child has ended
                os.write(pipe, order.line)

    def _fork(self, order: Fork) -> None:
        """Fork a rank. The child runs the trainer, or executes the command of a foreign trainer, and never returns.

        A child with `order.is_reused` may take part in later attempts. It gets a pipe for the orders about them.
        """
        server = os.getpid()
        orders_read = orders_write = -1
        try:
            if order.is_reused:
                orders_read, orders_write = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(orders_write, False)
            pid = os.fork()
        except OSError as error:  # the other children continue
            for descriptor in (orders_read, orders_write):
                if descriptor >= 0:
                    os.close(descriptor)
            self._send(ForkFailed(order.rank, order.attempt, find_exit_record(error), describe_error(error)))
            return
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
            report_exception(self._report_write, error)  # first, because writing the traceback may fail on a full disk
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _release_in_child(self) -> None:
        """Close the server's descriptors, and restore the default signal handlers."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        self._socket.close()
        for descriptor in (self._wakeup_read, self._wakeup_write, self._report_read, *self._order_pipes.values()):
            os.close(descriptor)

    def _run_trainer(self) -> int:
        """Call the entry point of the command line, and return its exit code."""
        code = 0
        try:
            importlib.import_module(ENTRY_MODULE).main()
        except SystemExit as end:
            if isinstance(end.code, int):
                code = end.code
            elif end.code is not None:
                code = 1
            if code:
                report_exception(self._report_write, end)
        atexit._run_exitfuncs()  # os._exit, which ends a child, does not call them
        return code


def _has_running_group(group: int) -> bool:
    """Return whether a process of a process group runs. Zombies, which init may never collect, do not count."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
            state, process_group = fields[0], int(fields[2])
            if process_group == group and state not in (b"Z", b"X"):
                return True
    return False


def report_exception(pipe: int, error: BaseException) -> None:
    """Report the exception that ends this child to the server."""
    text = _to_utf8(describe_error(error)).encode()[:_CHILD_ERROR_BYTES].decode(errors="ignore")
    message = LastWords(os.getpid(), find_exit_record(error), text)
    data = FROM_CHILD.encode_frame(message)
    if len(data) > select.PIPE_BUF:  # larger messages are not written atomically
        data = FROM_CHILD.encode_frame(LastWords(os.getpid(), NO_RECORD, type(error).__name__))
    with contextlib.suppress(OSError):
        os.write(pipe, data)


def _call_function(name: str) -> None:
    """Call MODULE:FUNCTION. Log an error, which does not end the server: the children then do the work themselves."""
    module, _, function = name.partition(":")
    try:
        getattr(sys.modules[module], function)()
    except Exception:
        traceback.print_exc()


def _to_utf8(text: str) -> str:
    """Return `text` with "?" for characters that UTF-8 cannot encode, which file names may contain."""
    return text.encode(errors="replace").decode()


def _set_up_rank(order: Fork) -> None:
    """Set the environment, the arguments and the output of a rank."""
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
    # Write each line at once, because the agent reads the growing log.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _execute(order: Fork) -> None:
    """Replace this process by the command of a foreign trainer. Raises OSError if the command cannot be executed.

    The process stays the leader of its process group, and the kernel still ends it with the server.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Python program would otherwise ignore SIGINT like its parent
    if order.folder:
        os.chdir(order.folder)
    os.execvpe(order.arguments[0], order.arguments, os.environ)


def main() -> None:
    """Run the fork server of an agent."""
    die_with_parent(int(sys.argv[2]))
    # Three signals go to all processes but are meant for the driver, which lets trainers save first: Ctrl-C in a
    # terminal, SIGTERM from Slurm, and SIGHUP of a session that closes. The agent ends this process by SIGKILL.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sleep_at_barriers()
    terminal.keep_working()  # the log may be on a full disk
    with socket.socket(fileno=int(sys.argv[1])) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        ForkServer(sock, sys.argv[3:]).serve()


if __name__ == "__main__":
    main()
