"""Variables of launchers that name no rank, and limits of the operating system."""

from __future__ import annotations

import errno

import pytest

from megascale.config import from_tree
from megascale.core.failure import describe_full_disk
from megascale.errors import ConfigError
from megascale.train.rank_info import find_rank_info

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 with WORLD_SIZE=2 is not a rank from 0 to WORLD_SIZE - 1"),
        ({"RANK": "1"}, "RANK=1 with WORLD_SIZE=1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 with WORLD_SIZE=2"),
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


def test_a_local_rank_without_a_size_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert find_rank_info(from_tree({"train": {"device": "cpu", "threads": 1}})).local_rank == 3


def test_a_size_limit_is_not_called_a_full_disk() -> None:
    assert "ulimit -f" in describe_full_disk(OSError(errno.EFBIG, "File too large"))
    assert "the disk is full" in describe_full_disk(OSError(errno.ENOSPC, "No space left on device"))
