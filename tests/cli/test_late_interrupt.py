"""Ctrl-C after a command's work, while Python ends: a line of text, and the command's exit code."""

from __future__ import annotations

import subprocess
import sys

# The command prints, and leaves `{teardown}` for the end of the process.
PROGRAM = """
import os, signal, sys, threading
import typer
from megascale.cli.main import run_app

def press_key():
    os.kill(os.getpid(), signal.SIGINT)

def wait_for_end():
    threading.main_thread().join()
    {presses}

class Teardown:
    # The default arguments stay while Python destroys the module.
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT, is_finalizing=sys.is_finalizing):
        assert is_finalizing()
        kill(pid, number)

app = typer.Typer()

@app.command()
def work() -> None:
    print("done")
    {teardown}

def make_app():
    return app

sys.argv = ["work"]
run_app(make_app)
"""


def run(teardown: str, presses: str = "pass") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(teardown=teardown, presses=presses)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


def test_while_threads_end_the_first_interrupt_is_a_line_and_the_second_ends_the_process() -> None:
    once = run("threading.Thread(target=wait_for_end).start()", "press_key()")
    assert (once.returncode, once.stdout) == (0, "done\n")
    assert once.stderr == "interrupted while the command ends; press Ctrl-C again to end it at once\n"
    # The second signal may arrive before the first is handled, so the thread repeats it.
    twice = run("threading.Thread(target=wait_for_end).start()", "while True: press_key()")
    assert (twice.returncode, twice.stdout, twice.stderr) == (130, "done\n", once.stderr)


def test_while_modules_are_destroyed_an_interrupt_is_ignored() -> None:
    ended = run("sys.modules['keeper'] = Teardown()")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
