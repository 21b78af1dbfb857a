"""Status records that are damaged count as none; a message of any characters fits its file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.core.calls import CallLog, read_calls
from megascale.core.status import _HEADER, Status, StatusFile, read_status
from tests.damaged_records import json_values

SOUND = asdict(Status(rank=0, pid=os.getpid(), phase="train", step=3, time_ns=1, compute_seconds=0.5))


def write(file: Path, record: Any) -> Path:
    """Write a status file as a trainer does, with any record."""
    body = json.dumps(record).encode()
    file.write_bytes((_HEADER.pack(2, len(body)) + body).ljust(4096, b"\0"))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which rank 0 of this process has a record of calls."""
    folder = tmp_path_factory.mktemp("status")
    CallLog(folder, 0, 1).close()
    return folder


@settings(max_examples=200)
@given(st.sampled_from(sorted(SOUND)), json_values)
def test_a_record_with_a_field_of_any_value_is_none_or_fits_the_schema(folder, name, value):
    result = read_status(write(folder / "rank-0.status", SOUND | {name: value}))
    if result is not None:
        assert type(result.step) is int
        assert 0 <= result.step < 1 << 53
        assert result.rank >= 0
        assert 0.0 <= result.compute_seconds <= 1e9
        assert len(result.phase) <= 200
        assert result.checksum == "" or result.checksum.partition(":")[0].isdecimal()


@settings(max_examples=100)
@given(st.one_of(json_values, st.binary(max_size=300).map(lambda data: data.decode("latin-1"))))
def test_any_other_record_is_none(folder, value):
    assert read_status(write(folder / "rank-0.status", value)) is None


def test_a_missing_key_a_pipe_and_a_large_file_are_none_or_bounded(folder, tmp_path):
    assert read_status(write(folder / "rank-0.status", SOUND)) is not None
    for name in ("rank", "pid", "phase", "step", "time_ns"):
        assert read_status(write(folder / "rank-0.status", {k: v for k, v in SOUND.items() if k != name})) is None
    os.mkfifo(tmp_path / "rank-0.status")
    os.mkfifo(tmp_path / "rank-0.calls")
    assert read_status(tmp_path / "rank-0.status") is None
    assert read_calls(tmp_path / "rank-0.calls") is None
    large = write(folder / "rank-1.status", SOUND)
    os.truncate(large, 1 << 40)  # sparse: reading it whole takes all memory
    assert read_status(large) is not None


@pytest.mark.parametrize("character", ["\N{GRINNING FACE}", "\udcff", "\0", "e"])
def test_a_message_of_any_characters_leaves_a_record(tmp_path, character):
    status = StatusFile(tmp_path, 0)
    status.update("failed", 7, message=400 * character)
    result = read_status(status.path)
    assert result is not None
    assert (result.phase, result.step) == ("failed", 7)
    assert set(result.message) == {"?" if character == "\udcff" else character}
    status.close()
