"""Impossible input: every rank ends before the first step, with one paragraph that names rank, value and remedy."""

from __future__ import annotations

import signal

import pytest

from tests.exact.processes import Start, end, ranks, run_ranks, wait_for_step

PAIR = ["--parallel.tensor=2", "--rendezvous.timeout=60"]


def assert_told(ended, code, *parts):
    for item in ended:
        assert item.code == code, item
        assert "Traceback" not in item.said
        for part in parts:
            assert part in item.said, item


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--parallel.tensor=3"], ["model.heads=4", "parallel.tensor=3", "--parallel.tensor=2"]),
        (
            ["--parallel.pipeline=2", "--parallel.layer_split=2,1"],
            ["layer_split=[2, 1]", "adds up to 3", "model.layers=2"],
        ),
        (["--parallel.data=3"], ["train.global_batch=4", "2 x 3", "--train.global_batch=6"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_what_does_not_divide_is_said_once_before_any_process_starts(arguments, parts, tiny, megascale, tmp_path):
    result = megascale("train", tiny, *arguments)
    assert result.returncode == 3, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in " ".join(result.stderr.split()), result.stderr
    assert result.stderr.count("error:") == 1
    assert not (tmp_path / "runs").exists()


def test_what_does_not_divide_is_said_by_ranks_that_somebody_else_started(tiny):
    ended = run_ranks(tiny, ["--train.global_batch=6"], [Start(0, 2), Start(1, 2)])
    assert_told(ended, 3, "train.global_batch=6", "2 x 2", "--train.global_batch=8")


def test_another_world_size(tiny):
    six = ["--train.micro_batch=1", "--train.global_batch=6", "--rendezvous.timeout=60"]
    ended = run_ranks(tiny, six, [Start(0, 2), Start(1, 3)])
    assert_told(ended, 2, "WORLD_SIZE is 3 on rank 1 but 2 on rank 0")


def test_a_rank_that_comes_after_the_start_has_failed(tiny):
    """Rank 5 raises the alarm at once; rank 0, who serves the store, stays until rank 1 has heard of it too."""
    late = "import time; time.sleep(4)"
    small = ["--train.micro_batch=1", "--train.global_batch=3", "--rendezvous.timeout=60"]
    ended = run_ranks(tiny, small, [Start(0, 3), Start(1, 3, before=late), Start(5, 3)])
    assert_told(ended, 2, "rank 5 is outside a world of 3")


def test_other_settings(tiny):
    ended = run_ranks(tiny, PAIR, [Start(0, 2), Start(1, 2, ("--lr.peak=0.5",))])
    assert_told(ended, 2, "lr.peak is 0.5 on rank 1 but 0.01 on rank 0", "the same configuration file")


def test_other_versions(tiny):
    newer = "import megascale; megascale.__version__ = '99.9'"
    ended = run_ranks(tiny, PAIR, [Start(0, 2), Start(1, 2, before=newer)])
    assert_told(ended, 2, "megascale is 99.9 on rank 1", "installed versions")


def test_a_rank_that_never_comes(tiny):
    small = ["--train.micro_batch=1", "--train.global_batch=3", "--rendezvous.timeout=12"]
    ended = run_ranks(tiny, small, [Start(0, 3), Start(2, 3)])
    assert_told(ended, 1, "rank 1 of 3 did not come", "rendezvous.timeout=12", "look at its log")


def test_rank_0_never_comes(tiny):
    ended = run_ranks(tiny, ["--parallel.tensor=2", "--rendezvous.timeout=5"], [Start(1, 2)])
    assert_told(ended, 1, "rank 0 did not start", "rendezvous.timeout=5", "MASTER_ADDR=127.0.0.1")


def test_a_rank_that_dies_while_groups_are_made(tiny, tmp_path):
    """Rank 1 ends after rank 0 has left the default group's creation, which would report a broken connection."""
    entered = tmp_path / "rank-0-makes-groups"
    notes = (
        "import pathlib, megascale.rendezvous.start_job as start\n"
        "make_groups = start.make_groups\n"
        "def note_and_make(*arguments, **options):\n"
        f"    pathlib.Path({str(entered)!r}).touch()\n"
        "    return make_groups(*arguments, **options)\n"
        "start.make_groups = note_and_make"
    )
    dies = (
        "import os, pathlib, time, megascale.rendezvous.start_job as start\n"
        "def wait_and_die(*arguments, **options):\n"
        f"    while not pathlib.Path({str(entered)!r}).exists():\n"
        "        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), 9)\n"
        "start.make_groups = wait_and_die"
    )
    small = PAIR + ["--rendezvous.group_timeout=8"]
    waiting, killed = run_ranks(tiny, small, [Start(0, 2, before=notes), Start(1, 2, before=dies)])
    assert killed.code == -signal.SIGKILL
    assert_told([waiting], 1, "rank 0 could not meet rank 1 in group tensor/0", "--rendezvous.group_timeout")


def test_a_rank_that_hangs_in_a_step(tiny, tmp_path):
    """Neither rank waits for ever: the one that waits gives up, and the one that hung finds itself alone."""
    arguments = PAIR + ["--rendezvous.group_timeout=10", "--train.steps=100000"]
    with ranks(tiny, arguments, [Start(0, 2), Start(1, 2)]) as (waiting, hanging):
        wait_for_step(tmp_path / "runs" / "tiny", 2, waiting)
        hanging.send_signal(signal.SIGSTOP)
        first = end(waiting)
        hanging.send_signal(signal.SIGCONT)
        ended = [first, end(hanging)]
    assert_told(ended, 1, "lost contact with another rank in step", "group_timeout=10")
