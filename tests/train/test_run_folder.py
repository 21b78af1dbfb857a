"""Files of a run folder that are read when it goes on: a cut end is dropped, other damage is named."""

from __future__ import annotations

import json
import os

import pytest

from megascale.errors import DataError
from megascale.train.run_folder import RunFolder, read_records
from tests.conftest import lines
from tests.damaged_records import limited_memory


def test_a_cut_end_is_dropped_and_other_damage_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for end in ("", "\n", '\n{"step": 2, "lo', "\n[1]\n", "\n" + "x" * (2 << 20)):
        file.write_text('{"step": 1}' + end)
        assert read_records(file) == [{"step": 1}]
    for damage in ("[1]", '{"step": 2, "lo', "x" * (2 << 20), "[" * 5000):
        file.write_text('{"step": 1}\n' + damage + '\n{"step": 3}\n')
        with pytest.raises(DataError, match=r"metrics\.jsonl line 2 is not a record"):
            read_records(file)


def test_a_pipe_and_a_line_without_end_are_no_records(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    os.truncate(file, 1 << 28)
    with limited_memory(64 << 20):
        assert read_records(file) == [{"step": 1}]
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DataError, match="it is a pipe or a device"):
        read_records(file)
    os.mkfifo(tmp_path / "identity")
    with pytest.raises(DataError, match="identity cannot be read"):
        RunFolder(tmp_path).read_identity()


def test_going_back_keeps_lines_whose_step_is_known(tmp_path):
    folder = RunFolder(tmp_path)
    records = [{"step": 1}, {"step": "x"}, {"step": 10**400}, {"step": [1]}, {"step": 3}]
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    folder.drop_steps_after(2)
    assert lines(folder.metrics) == [{"step": 1}]
