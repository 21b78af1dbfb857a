"""Standard streams that survive the loss of their terminal, pipe or log: output is dropped, the process continues."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from megascale.errors import EXIT_INTERRUPTED

T = TypeVar("T")
_FULL_BUFFER_SECONDS = 1.0  # how long a write to a full non-blocking pipe waits for its reader
_STDERR = 2  # file descriptor


class _OutputFile(io.FileIO):
    """File of stdout or stderr that ignores write errors, unless the output is the purpose of the command.

    Attributes:
        required: whether write errors are raised.
        error: the last write error, or None.
    """

    def __init__(self, descriptor: int, required: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.required = required
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write `data` and return the number of bytes that were written or dropped."""
        written = None
        try:
            written = super().write(data)
            if written is None:  # non-blocking, and its buffer is full
                select.select([], [self], [], _FULL_BUFFER_SECONDS)
                written = super().write(data)
        except OSError as error:
            if self.error is None:
                self._report(error)
            self.error = error
            if self.required:
                raise
        if written is None:
            return memoryview(data).nbytes
        return written

    def _report(self, error: OSError) -> None:
        if self.required or self.fileno() == _STDERR:
            return
        text = f"note: standard output is lost ({error.strerror}); the command continues without it\n"
        with contextlib.suppress(OSError):
            os.write(_STDERR, text.encode())


_output: _OutputFile | None = None  # file behind stdout, once `open_streams` has replaced it


def open_streams() -> None:
    """Make stdin, stdout and stderr usable for a command.

    A stream that is closed at the start becomes the null device. Otherwise the next file that is opened would get the
    stream's descriptor, and child processes would write their output into that file. Errors of stderr are ignored from
    now on. Errors of stdout are raised until `ignore_lost_output` is called.
    """
    global _output
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - open for the life of the process
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        _output = _OutputFile(sys.stdout.fileno(), required=True)
        sys.stdout = _make_text_stream(_output, sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        sys.stderr = _make_text_stream(_OutputFile(sys.stderr.fileno(), required=False), sys.stderr)


def ignore_empty_sizes() -> None:
    """Remove a terminal size of 0 from the environment, which some consoles set if they do not know the size.

    rich takes the value as it is, and prints nothing.
    """
    for name in ("COLUMNS", "LINES"):
        if os.environ.get(name, "").strip().lstrip("0") == "":
            os.environ.pop(name, None)


def _make_text_stream(file: _OutputFile, stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a text stream onto `file` with the properties of `stream`.

    Characters that the encoding lacks are written as escapes instead of raising an error.
    """
    with contextlib.suppress(OSError):
        stream.flush()
    is_unbuffered = stream.write_through  # PYTHONUNBUFFERED
    errors = stream.errors
    # In the locale C, Python sets surrogateescape, which keeps bytes of foreign names but not other characters.
    is_utf8 = codecs.lookup(stream.encoding).name == "utf-8"
    if errors == "strict" or (errors == "surrogateescape" and not is_utf8):
        errors = "backslashreplace"
    return io.TextIOWrapper(
        file if is_unbuffered else io.BufferedWriter(file),  # type: ignore[arg-type]
        encoding=stream.encoding,
        errors=errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def ignore_lost_output() -> None:
    """Ignore errors of stdout from now on. Commands whose purpose is not their output call this."""
    if _output is not None:
        _output.required = False


def keep_working() -> None:
    """Open the standard streams of a process that must survive lost output, such as a service."""
    open_streams()
    ignore_lost_output()


def is_output_error(error: OSError) -> bool:
    """Return whether `error` was raised because stdout cannot be written."""
    return _output is not None and error is _output.error


def print_error(text: str) -> None:
    """Print a line to stderr, or drop it if stderr cannot be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def call_interruptibly(call: Callable[[], T]) -> T:
    """Return the result of a call of a library that handles no signal until it returns, such as a wait for other ranks.

    The call runs in a thread, and the caller's thread handles signals. After an exception of a signal handler the call
    continues until the process ends.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="interruptible call", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class _TerminationError(KeyboardInterrupt):
    """SIGTERM or SIGHUP.

    Python ends a process by SIGINT after a KeyboardInterrupt in code that was compiled from text, such as a dataclass,
    even if the exception was handled. A subclass keeps the exit code.
    """


@contextlib.contextmanager
def interrupt_on_termination() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C in the context, so that the command removes its temporary files.

    Forked children end as without the context. Commands with handlers of their own, such as `train`, replace these.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        raise _TerminationError

    numbers = [number for number in termination_signals() if number != signal.SIGINT]
    previous_handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def report_late_interrupts() -> None:
    """Print a line for Ctrl-C from now on, while Python waits for threads and runs exit functions.

    A command calls this when its work and its exit code are settled. Without it, Python would end the process by the
    signal and without a text. A second Ctrl-C ends the process at once. While Python destroys modules at the very end,
    it calls no handlers, and Ctrl-C is ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    has_come = False

    def report(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if has_come:
            os._exit(EXIT_INTERRUPTED)
        has_come = True
        with contextlib.suppress(OSError):
            os.write(_STDERR, b"interrupted while the command ends; press Ctrl-C again to end it at once\n")

    signal.signal(signal.SIGINT, report)


def ignore_interrupts_at_exit() -> None:
    """Ignore Ctrl-C once all exit functions that are registered later have run."""
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def termination_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a process to end: SIGINT, SIGTERM, and SIGHUP unless it is ignored (nohup)."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return tuple(signals)
