"""Lines of damaged files: each line once, long ones passed over, memory bounded."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.core import json_lines
from megascale.core.json_lines import RecordReader, read_bounded_lines


@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")), max_size=12), st.booleans())
def test_lines_are_those_of_the_file_with_none_for_long_ones(tmp_path_factory, lines, ends):
    file = tmp_path_factory.getbasetemp() / "lines"
    text = b"\n".join(lines) + (b"\n" if ends else b"")
    file.write_bytes(text)
    expected = text.split(b"\n")
    if not expected[-1]:
        expected.pop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "_SKIP_BLOCK_BYTES", 3)
        result = list(read_bounded_lines(file, max_bytes=10))
    assert result == [line if len(line) <= 10 else None for line in expected]


def test_records_leave_out_and_count_what_is_damaged(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_bytes(b'{"a": 1}\n\n[1]\n\xff\n{"a": 2}\n' + b"x" * (2 << 20) + b'\n{"a": "NaN"}\n' + b"[" * 5000)
    reader = RecordReader(file)
    assert [record["a"] == record["a"] for record in reader] == [True, True, False]
    assert reader.damaged_lines == 4
    assert "4 lines are damaged or longer than 1,048,576 bytes, and left out" in reader.describe_damage()
    file.write_bytes(b'{"a": 1}')
    assert list(reader) == [{"a": 1}]
    assert reader.describe_damage() == ""


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a pipe or a device"):
        list(read_bounded_lines(tmp_path / "pipe"))
