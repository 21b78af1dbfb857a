"""Variables of launchers that name no rank, and limits of the operating system."""

from __future__ import annotations

import errno
import os

import pytest

from megascale.config import from_tree
from megascale.core.failure import describe_write_failure
from megascale.core.layout import lay_out
from megascale.errors import ConfigError, FitError
from megascale.train import host_check
from megascale.train.host_check import check_local_ranks
from megascale.train.rank_info import find_rank_info

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "RANK=1 with WORLD_SIZE=1 is not a rank from 0 to WORLD_SIZE - 1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 with WORLD_SIZE=0"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK=3 is set in the environment of a single process"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
    ],
)
def test_variables_that_name_no_rank_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        find_rank_info(from_tree({"train": {"device": "cpu"}}))


@pytest.mark.parametrize("rank", ["3", "-1"])
def test_a_rank_outside_of_a_larger_world_reaches_the_rendezvous(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    """There it raises an alarm (tests/exact/test_bad_input.py), so that the other ranks do not wait."""
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    config = from_tree({"train": {"device": "cpu", "threads": 1, "global_batch": 16}, "model": {"vocab_size": 64}})
    rank_info = find_rank_info(config)
    assert rank_info.rank == int(rank)
    check_local_ranks(lay_out(config, 2), rank_info, saves_checkpoints=False)


def test_a_local_rank_without_a_size_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    assert find_rank_info(from_tree({"train": {"device": "cpu", "threads": 1}})).local_rank == 3


@pytest.mark.parametrize(
    ("number", "name", "words"),
    [
        (errno.EFBIG, "logs/rank-0.log", ["logs/rank-0.log is at its size limit", "ulimit -f"]),
        (
            errno.ENOSPC,
            "logs/rank-0.log",
            ["the disk is full", "logs/rank-0.log", "bytes are free", "another train.runs"],
        ),
        (errno.ENOSPC, None, ["the disk is full: a file, probably of", "bytes are free", "another train.runs"]),
        (errno.ENOSPC, "../cache/x", ["the disk is full", "cache/x", "move its folder"]),
        (errno.EDQUOT, "metrics.jsonl", ["the quota of the disk is used up", "metrics.jsonl", "another train.runs"]),
        (errno.EROFS, "metrics.jsonl", ["metrics.jsonl cannot be written", "right to write", "another train.runs"]),
        (errno.EACCES, "plots/loss.png", ["plots/loss.png cannot be written", "another train.runs"]),
    ],
)
def test_a_failed_write_names_path_space_and_key(tmp_path, number: int, name: str | None, words: list[str]) -> None:
    path = None if name is None else os.path.normpath(tmp_path / "run" / name)
    text = describe_write_failure(OSError(number, os.strerror(number), path), tmp_path / "run", "train.runs")
    for word in words:
        assert word in text
    assert ("full" in text) == (number == errno.ENOSPC)


def test_ranks_of_an_agent_compare_copies_with_all_memory_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of a job on other machines cannot make this check."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MEGASCALE_NODE": "a"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    train = {"device": "cpu", "threads": 1, "global_batch": 16}
    checkpoint = {"background": True, "memory_interval": 1, "replicas": True}
    config = from_tree({"train": train, "model": {"vocab_size": 64}, "checkpoint": checkpoint})
    rank_info = find_rank_info(config)
    layout = lay_out(config, 2)
    check_local_ranks(layout, rank_info, saves_checkpoints=True)
    monkeypatch.setattr(host_check, "measure_memory_limit", lambda: (1 << 20, "MemTotal"))
    with pytest.raises(FitError, match=r"checkpoint.slots=2.* MemTotal leaves 1 MiB"):
        check_local_ranks(layout, rank_info, saves_checkpoints=True)
