"""Commands that lose their terminal, pipe or log. Training goes on, and commands that print end with a message."""

from __future__ import annotations

import signal

import pytest

from megascale import checkpoint
from megascale.cli.main import is_run_for_effect
from tests.conftest import lines
from tests.exact.processes import wait_for_step
from tests.forked import PACED, Forked

PIPE = "import os; reader, writer = os.pipe(); [os.dup2(writer, n) for n in (1, 2)]; os.close(reader); os.close(writer)"
FULL = "import os; full = os.open('/dev/full', os.O_WRONLY); [os.dup2(full, n) for n in (1, 2)]"
STDOUT_FULL = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
ABSENT = (
    "import os, sys; [os.close(n) for n in (0, 1, 2)]\n"
    "sys.stdin = sys.stdout = sys.stderr = sys.__stdin__ = sys.__stdout__ = sys.__stderr__ = None"
)


@pytest.mark.parametrize("before", [PIPE, FULL, ABSENT], ids=["closed pipe", "full disk", "absent"])
def test_training_goes_on_to_its_end(tiny, tmp_path, before):
    process = Forked(["train", tiny], before=before)
    assert process.wait(timeout=120) == 0
    run = tmp_path / "runs" / "tiny"
    assert lines(run / "events.jsonl")[-1]["event"] == "run_finished"
    assert checkpoint.latest(run / "checkpoints") == 8


def test_training_of_several_ranks_goes_on_to_its_end(tiny, tmp_path):
    process = Forked(["train", tiny, "--parallel.data=2"], before=PIPE)
    assert process.wait(timeout=120) == 0
    assert lines(tmp_path / "runs" / "tiny" / "events.jsonl")[-1]["event"] == "run_finished"


def test_a_lost_stdout_is_said_on_stderr(tiny):
    process = Forked(["train", tiny, "--train.steps=1"], before=STDOUT_FULL, split=True)
    output = process.communicate(timeout=120)[1]
    assert process.returncode == 0
    assert output == "note: standard output is lost (No space left on device); the command continues without it\n"


@pytest.mark.parametrize("arguments", [[], ["--parallel.data=2"]], ids=["one process", "two ranks"])
def test_a_closed_session_saves(tiny, tmp_path, arguments):
    command = ["train", tiny, "--train.steps=100000", "--checkpoint.interval=0"] + list(arguments)
    process = Forked(command, before=f"{PIPE}\n{PACED}")
    run = tmp_path / "runs" / "tiny"
    wait_for_step(run, 2, process)
    for _ in range(2):  # a shell and the kernel each send one
        process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 130
    event = lines(run / "events.jsonl")[-1]
    assert (event["event"], event["saved"]) == ("interrupted", event["step"])


def test_under_nohup_a_closed_session_changes_nothing(tiny, tmp_path):
    ignored = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{PACED}"
    process = Forked(["train", tiny, "--train.steps=40", "--checkpoint.interval=0"], before=ignored)
    wait_for_step(tmp_path / "runs" / "tiny", 2, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 0
    assert checkpoint.latest(tmp_path / "runs" / "tiny" / "checkpoints") == 40


@pytest.mark.parametrize(("before", "code", "arguments"), [(STDOUT_FULL, 1, 1), (PIPE, 1, 0), (ABSENT, 0, 0)])
def test_a_command_that_prints_ends_without_a_traceback(before, code, arguments):
    process = Forked(["config", "train"], before=before, split=True)
    output = process.communicate(timeout=60)[1]
    assert process.returncode == code
    error = "error: standard output cannot be written: No space left on device\n"
    assert output == error * arguments


@pytest.mark.parametrize(
    ("arguments", "work"),
    [
        (["train", "job.toml"], True),
        (["train", "--dry-run"], False),
        (["data", "build", "--out", "x"], True),
        (["data", "build", "--out", "x", "--json"], False),
        (["data", "inspect", "x"], False),
        (["generate", "runs/x"], False),
        (["plot", "runs/x"], True),
        ([], False),
    ],
)
def test_which_commands_go_on(arguments, work):
    assert is_run_for_effect(arguments) is work
