"""Streams of a process whose terminal, pipe or log goes away, and the signals that ask it to end."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from megascale.core import terminal


@contextlib.contextmanager
def lost(kind: str) -> Iterator[int]:
    """A descriptor that cannot be written."""
    if kind == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    elif kind == "closed pipe":
        reader, descriptor = os.pipe()
        os.close(reader)
    elif kind == "hung up":
        master, descriptor = os.openpty()
        os.close(master)
    else:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(
    ("kind", "number"),
    [("full", errno.ENOSPC), ("closed pipe", errno.EPIPE), ("hung up", errno.EIO), ("read only", errno.EBADF)],
)
def test_what_cannot_be_written_is_dropped_unless_it_is_required(kind, number):
    with lost(kind) as descriptor:
        file = terminal._OutputFile(descriptor, required=True)
        with pytest.raises(OSError) as raised:
            file.write(b"a line\n")
        assert raised.value.errno == number
        assert file.error is raised.value
        file.required = False
        stream = io.TextIOWrapper(io.BufferedWriter(file))
        stream.write("more than a buffer\n" * 10_000)
        stream.flush()


def test_a_disk_that_has_room_again_gets_the_lines_that_follow(tmp_path):
    path = tmp_path / "log"
    with open(path, "wb") as log, open("/dev/full", "wb") as full:
        file = terminal._OutputFile(os.dup(log.fileno()), required=False)
        stream = io.TextIOWrapper(io.BufferedWriter(file), line_buffering=True)
        stream.write("first\n")
        os.dup2(full.fileno(), file.fileno())
        stream.write("lost\n")
        os.dup2(log.fileno(), file.fileno())
        stream.write("last\n")
    assert path.read_text() == "first\nlast\n"


def test_a_reader_that_is_behind_loses_lines_and_stops_nothing(monkeypatch):
    monkeypatch.setattr(terminal, "_FULL_BUFFER_SECONDS", 0.01)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    file = terminal._OutputFile(writer, required=False)
    for _ in range(40):
        assert file.write(bytes(4096)) == 4096
    assert file.error is None
    os.close(reader)
    os.close(writer)


def test_closed_streams_become_the_null_device_for_children_too():
    """Else the first file that is opened has the number of stdout, and a child's words go into it."""
    code = (
        "import os, subprocess, sys\n"
        "from megascale.core import terminal\n"
        "terminal.open_streams()\n"
        "print('lost'); print('lost', file=sys.stderr); assert sys.stdin.read() == ''\n"
        'use = \'import os; os.write(1, b"x"); os.write(2, b"x"); os.read(0, 1)\'\n'
        "subprocess.run([sys.executable, '-c', use], check=True)\n"
        f"sys.exit(0 if open({__file__!r}).fileno() > 2 else 'a file has the number of a stream')\n"
    )
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code])
    assert done.returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_are_written_as_early_as_before(tmp_path, unbuffered):
    code = (
        "import os, signal, sys\n"
        "from megascale.core import terminal\n"
        "terminal.keep_working()\n"
        "print('printed'); print('an error', file=sys.stderr)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with open(tmp_path / "log", "wb") as log:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        subprocess.run([sys.executable, "-c", code], stdout=log, stderr=log, env=environment)
    assert (tmp_path / "log").read_text() == ("printed\n" if unbuffered else "") + "an error\n"


def test_a_hangup_that_nohup_ignores_is_no_end_signal():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert terminal.termination_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
        assert terminal.termination_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_blocked_call_is_interrupted():
    """The call waits for a pipe that stays empty, as a rank waits for another one."""
    reader, writer = os.pipe()

    def call() -> bytes:
        os.kill(os.getpid(), signal.SIGTERM)
        return os.read(reader, 1)

    with terminal.interrupt_on_termination(), pytest.raises(KeyboardInterrupt):
        terminal.call_interruptibly(call)
    os.close(writer)


def test_a_call_returns_its_result_or_raises_its_error():
    assert terminal.call_interruptibly(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        terminal.call_interruptibly(lambda: 1 // 0)


def test_a_forked_child_ends_by_the_signal_itself():
    reader, writer = os.pipe()
    with terminal.interrupt_on_termination():
        child = os.fork()
        if child == 0:
            os.write(writer, b"x")  # a child forgets signals that come before its first statement
            while True:  # Python handles a signal between two calls, so a blocking call could miss it
                os.sched_yield()
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        status = os.waitpid(child, 0)[1]
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_output_in_the_locale_c_writes_other_characters_as_escapes():
    """Foreign bytes in names are kept by Python's error handler of this locale, and other characters are not."""
    program = "from megascale.core import terminal\nterminal.open_streams()\nprint('\\u2502 \\xfc \\udcff')"
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, env=os.environ | environment)
    assert result.stdout == b"\\u2502 \\xfc \\udcff\n", result.stderr


@pytest.mark.parametrize(("size", "width"), [("0", 80), ("", 80), ("100", 100)])
def test_a_terminal_of_no_columns_is_one_of_unknown_size(size, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", size)
    terminal.ignore_empty_sizes()
    assert Console(file=io.StringIO()).width == width
