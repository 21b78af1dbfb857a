"""Tests of files that appear complete while several threads write them."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from megascale.core.atomic_files import write_atomically
from megascale.data.dataset.indexed import IndexedDataset, IndexedWriter
from megascale.data.dataset.text_stream import TextIndex
from megascale.data.prepare.chat_builder import _WeightedWriter
from megascale.data.tokenizer.convert_tokenizer import copy_file


def run_together(count, act):
    """Call `act(number)` in `count` threads that begin at once, and raise the first error."""
    begin = threading.Barrier(count)
    errors = []

    def run(number):
        try:
            begin.wait()
            act(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_that_write_one_file_leave_one_of_their_texts(tmp_path):
    file = tmp_path / "made" / "record.json"
    texts = [json.dumps({"writer": number, "text": "ä" * 20_000}) for number in range(4)]
    for _ in range(5):
        run_together(4, lambda number: write_atomically(file, texts[number]))
        assert file.read_text(encoding="utf-8") in texts
    assert list(file.parent.iterdir()) == [file]


def test_a_failed_write_leaves_the_old_text_alone(tmp_path):
    file = tmp_path / "record"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "\ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_two_writers_of_one_token_file_do_not_share_a_temporary_file(tmp_path):
    """Both were open under one process number: the second emptied what the first had written."""
    first = IndexedWriter(tmp_path / "tokens", np.uint16)
    first.add([1, 2, 3])
    second = IndexedWriter(tmp_path / "tokens", np.uint16)
    second.add([4, 5])
    first.close()
    second.close()
    assert IndexedDataset(tmp_path / "tokens").stream.tolist() == [4, 5]


def test_weights_of_two_writers_are_apart(tmp_path):
    writers = [_WeightedWriter(tmp_path / "tokens", np.dtype(np.uint16)) for _ in range(2)]
    names = {writer._temporary for writer in writers}
    for writer in writers:
        with writer:
            pass
    assert len(names) == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_threads_copy_one_file_and_save_one_index(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(bytes(1 << 20))
    run_together(4, lambda _: copy_file(source, tmp_path / "copies" / "target"))
    assert (tmp_path / "copies" / "target").read_bytes() == source.read_bytes()

    def save(number):
        index = TextIndex(4, tmp_path / "index" / "counts.npy")
        index.record(number, np.arange(number + 1))
        index.save()

    for _ in range(5):
        run_together(4, save)
    for folder in ("copies", "index"):
        assert not list((tmp_path / folder).glob("*.tmp"))
