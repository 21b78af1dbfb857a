"""The fork server of a node: imports everything a trainer needs once, then forks one process a rank when asked.

It takes orders from a socket that its agent hands it (protocol/fork_messages.py) and tells of children that end: one
that ends with an exception tells its number and words through a pipe, which needs no disk. It holds no thread and no
device, so that a fork is safe, and it ends (and its children with it) when the agent does.

Run as `python -m megascale.resilience.agent.fork_server FD AGENT NAME...` by the agent, never by people. A name is a
module, imported before the first order, or MODULE:FUNCTION, called once there is nothing else to do: what it works out
is there in processes that are forked later, those of a recovery above all.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys

from megascale.core import terminal
from megascale.core.exit_record import NO_RECORD, record_of
from megascale.core.failure import disable_bytecode_cache, words_of
from megascale.core.openmp import sleep_at_barriers
from megascale.resilience.protocol.fork_messages import (
    FROM_CHILD,
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    Broken,
    Ended,
    Fork,
    Forked,
    ForkServerReady,
    Frames,
    LastWords,
    framed,
)
from megascale.services.host_service import die_with_parent
from megascale.services.messages import Message

ENTRY = "megascale.cli.main"
COMMAND = "megascale.cli.train"  # which it loads
_IDLE = 1.0  # seconds without an order: none is on its way


def serve(sock: socket.socket, names: list[str]) -> None:
    """Import what is named, then fork on demand until the agent closes its end."""
    later = [name for name in names if ":" in name]
    try:
        for name in [ENTRY, COMMAND, *names]:
            importlib.import_module(name.partition(":")[0])
    except BaseException as error:
        import traceback

        tail = _text(traceback.format_exc()[-4000:])
        _say(sock, Broken(_text(words_of(error)[:2000]), record_of(error), tail))
        raise
    gc.collect()
    gc.freeze()  # what is imported stays shared between the children
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    report_read, report_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    last_words: dict[int, LastWords] = {}
    orders, reports = Frames(TO_FORK_SERVER), Frames(FROM_CHILD)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _say(sock, ForkServerReady(os.getpid()))
    while True:
        readable, _, _ = select.select([sock.fileno(), wake_read], [], [], _IDLE if later else None)
        if not readable:
            _call_early(later.pop(0))
        if wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _reap(sock, report_read, reports, last_words)
        if sock.fileno() in readable:
            data = sock.recv(65536)
            if not data:
                return
            for order in orders.feed(data):
                _fork(sock, order, (wake_read, wake_write, report_read), report_write)


def _call_early(name: str) -> None:
    """Call MODULE:FUNCTION; what fails here would fail or be done later by the children themselves."""
    module, _, function = name.partition(":")
    try:
        getattr(sys.modules[module], function)()
    except Exception:
        import traceback

        traceback.print_exc()


def _say(sock: socket.socket, message: Message) -> None:
    sock.sendall(framed(FROM_FORK_SERVER, message))


def _text(text: str) -> str:
    """Text with "?" for bytes that are none, such as in names of files."""
    return text.encode(errors="replace").decode()


def _reap(sock: socket.socket, pipe: int, reports: Frames, last_words: dict[int, LastWords]) -> None:
    """Report children that have ended. `pipe`: where they write their exception; kept in `last_words` by pid."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(pipe, 65536):  # each message was written at once, and before its writer ended
                for words in reports.feed(data):
                    last_words[words.pid] = words
        words = last_words.pop(pid, LastWords(pid, NO_RECORD, ""))
        _say(sock, Ended(pid, status, words.record, words.error))


def _fork(sock: socket.socket, order: Fork, pipes: tuple[int, ...], reports: int) -> None:
    server = os.getpid()
    pid = os.fork()
    if pid:
        _say(sock, Forked(order.rank, order.attempt, pid))
        return
    code = 1
    try:
        die_with_parent(server)
        disable_bytecode_cache()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        sock.close()
        for pipe in pipes:
            os.close(pipe)
        _become(order)
        code = _call(reports)
    except BaseException as error:
        import traceback

        _report(reports, error)  # first: on a full disk what follows may fail
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become(order: Fork) -> None:
    """Environment, arguments and log of the rank."""
    os.environ.update(order.env)
    sys.argv = ["megascale", *order.words]
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    # A log is read while it grows: whole lines, at once.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _report(reports: int, error: BaseException) -> None:
    """Say which exception ends this process."""
    words = LastWords(os.getpid(), record_of(error), _text(words_of(error)[:1000]))
    data = framed(FROM_CHILD, words)
    assert len(data) <= select.PIPE_BUF, "it must be written as a whole"
    with contextlib.suppress(OSError):
        os.write(reports, data)


def _call(reports: int) -> int:
    """The same entry as the command line's; its exit code."""
    import atexit

    try:
        importlib.import_module(ENTRY).main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else (0 if end.code is None else 1)
        if code:
            _report(reports, end)
    atexit._run_exitfuncs()
    return code


def main() -> None:
    """Entry of the process."""
    die_with_parent(int(sys.argv[2]))
    # A terminal's Ctrl-C is for the driver, which has trainers save first. So are the SIGTERM that Slurm sends to all
    # processes of a job and the SIGHUP of a session that closes. The agent ends this one by SIGKILL.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sleep_at_barriers()
    terminal.keep_working()  # its log may lie on a full disk
    with socket.socket(fileno=int(sys.argv[1])) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(sock, sys.argv[3:])


if __name__ == "__main__":
    main()
