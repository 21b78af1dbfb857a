"""Lines of a JSON-lines file that a crash has cut: they go, and no other record goes with them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from megascale.core.json_lines import RecordReader, append_record
from tests.conftest import lines


@pytest.mark.parametrize(
    "tail", ['{"step": 2, "ids', "\0\0\0\0", "{", '"text"', '{"step": 2, "ids": "' + "x" * 200_000]
)
@pytest.mark.parametrize("before", [0, 2])
def test_a_cut_line_is_removed_before_the_next(tmp_path: Path, before: int, tail: str) -> None:
    file = tmp_path / "events.jsonl"
    for step in range(before):
        append_record(file, {"step": step})
    with open(file, "a") as out:
        out.write(tail)
    assert list(RecordReader(file)) == [{"step": step} for step in range(before)]
    for step in (8, 9):
        append_record(file, {"step": step})
    assert [record["step"] for record in lines(file)] == (list(range(before)) + [8, 9])


def test_a_line_that_lacks_its_end_alone_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}')
    append_record(file, {"step": 3})
    assert lines(file) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_stopped_writer_holds_up_no_other(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"step": 1}\n{"st')
    with open(file, "rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        append_record(file, {"step": 2})
    append_record(file, {"step": 3})
    assert file.read_text().splitlines()[1] == '{"st'
    assert list(RecordReader(file)) == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.parametrize("cut", [b"", b'{"st'])
def test_without_room_for_a_line_the_file_is_as_it_was(tmp_path: Path, cut: bytes) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b'{"step": 1}\n' + cut)
    write: Callable[[int, bytes], int] = os.write
    with (
        mock.patch("os.write", lambda handle, data: write(handle, data[:5])),
        pytest.raises(OSError, match="No space left") as failed,
    ):
        append_record(file, {"step": 2})
    assert failed.value.errno == errno.ENOSPC
    assert file.read_bytes() == b'{"step": 1}\n'


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"

    def write(writer: int) -> None:
        for number in range(50):
            append_record(file, {"writer": writer, "number": number, "text": "x" * (97 * writer * number % 9001)})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for writer in range(4):
        assert [r["number"] for r in records if r["writer"] == writer] == list(range(50))
