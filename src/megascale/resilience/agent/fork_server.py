"""The fork server of a node: imports everything a trainer needs once, then forks one process a rank when asked.

It speaks JSON lines over a socket that its agent hands it. The agent says {"do": "fork", ...}; the server answers
{"forked": rank, "pid": N} and, when a child ends, {"ended": pid, "status": wait status, "errno": N, "error": TEXT}: a
child that ends with an exception tells its number and words through a pipe, which needs no disk. A server that cannot
import what trainers need says {"broken": TEXT, "errno": N, "tail": TRACEBACK}. It holds no thread and no device, so
that a fork is safe, and it ends (and its children with it) when the agent does.

Run as `python -m megascale.resilience.agent.fork_server FD MODULE...` by the agent, never by people.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from megascale.core.failure import errno_of, words_of

ENTRY = "megascale.cli.main"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends; end now if it is gone already (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def serve(sock: socket.socket, modules: list[str]) -> None:
    """Import `modules`, then fork on demand until the agent closes its end."""
    try:
        for name in [ENTRY, *modules]:
            importlib.import_module(name)
    except BaseException as error:
        import traceback

        _say(sock, {"broken": words_of(error), "errno": errno_of(error), "tail": traceback.format_exc()[-4000:]})
        raise
    gc.collect()
    gc.freeze()  # what is imported stays shared between the children
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    report_read, report_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    last_words: dict[int, dict[str, Any]] = {}
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _say(sock, {"ready": os.getpid()})
    buffer = b""
    while True:
        readable, _, _ = select.select([sock.fileno(), wake_read], [], [])
        if wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _reap(sock, report_read, last_words)
        if sock.fileno() in readable:
            data = sock.recv(65536)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                _fork(sock, json.loads(line), (wake_read, wake_write, report_read), report_write)


def _say(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")


def _reap(sock: socket.socket, reports: int, last_words: dict[int, dict[str, Any]]) -> None:
    """Report children that have ended. `reports`: where they write their exception; kept in `last_words` by pid."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(reports, 65536):  # each message was written at once, and before its writer ended
                for line in data.splitlines():
                    message = json.loads(line)
                    last_words[message.pop("pid")] = message
        _say(sock, {"ended": pid, "status": status} | last_words.pop(pid, {}))


def _fork(sock: socket.socket, order: dict[str, Any], pipes: tuple[int, ...], reports: int) -> None:
    server = os.getpid()
    pid = os.fork()
    if pid:
        _say(sock, {"forked": order["rank"], "attempt": order["attempt"], "pid": pid})
        return
    code = 1
    try:
        die_with_parent(server)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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


def _become(order: dict[str, Any]) -> None:
    """Environment, arguments and log of the rank."""
    os.environ.update(order["env"])
    sys.argv = ["megascale", *order["words"]]
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    # A log is read while it grows: whole lines, at once.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _report(reports: int, error: BaseException) -> None:
    """Say which exception ends this process."""
    for limit in (1000, 300):  # a character takes up to 12 bytes
        message = {"pid": os.getpid(), "errno": errno_of(error), "error": words_of(error)[:limit]}
        line = json.dumps(message).encode() + b"\n"
        if len(line) <= select.PIPE_BUF:  # so that it is written as a whole
            break
    with contextlib.suppress(OSError):
        os.write(reports, line)


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
    # A terminal's Ctrl-C is for the driver, which has trainers save first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(sock, sys.argv[3:])


if __name__ == "__main__":
    main()
