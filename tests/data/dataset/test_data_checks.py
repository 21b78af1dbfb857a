"""Checks of a run's data before it starts: lengths at their limits, what is required, and what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.config import Config, from_tree
from megascale.data.dataset.data_checks import (
    SOURCES_FILE,
    check_data,
    check_entry,
    compare_fingerprints,
    find_repeated_data,
    find_trained_validation,
    fingerprint_sources,
    list_skipped_text,
)
from megascale.data.dataset.file_hash import fingerprint_file
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.dataset.samples import SampleSource
from megascale.data.tokenizer.tokenizer import train_tokenizer
from megascale.errors import ConfigError, DataError
from tests.data.sample_sources import check_run, plan_host_of


def write(prefix: Path, tokens: int) -> str:
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add(np.arange(tokens))
    return str(prefix)


def configured(tmp_path: Path, *train: str, **data: Any) -> Config:
    model = {"sequence_length": 8, "vocab_size": 512}
    train_section = {"runs": str(tmp_path), "micro_batch": 4}
    return from_tree({"data": {"train": list(train), **data}, "model": model, "train": train_section})


def test_a_file_holds_at_least_one_sample(tmp_path: Path) -> None:
    enough, short = write(tmp_path / "enough", 9), write(tmp_path / "short", 8)
    check_data(configured(tmp_path, enough).data, 8, needs_tokenizer=False)
    with pytest.raises(DataError, match=r"short has 8 tokens and one sample needs model\.sequence_length \+ 1 = 9"):
        check_data(configured(tmp_path, enough, short).data, 8, needs_tokenizer=False)
    with pytest.raises(DataError, match=r"nosuch\.idx does not exist"):
        check_data(configured(tmp_path, enough, valid=str(tmp_path / "nosuch")).data, 8, needs_tokenizer=False)
    check_data(configured(tmp_path).data, 8, needs_tokenizer=True)  # without data there is nothing to encode


def test_a_tokenizer_is_required_only_for_text(tmp_path: Path) -> None:
    tokens = write(tmp_path / "train", 9)
    (tmp_path / "text.txt").write_text("text")
    for entries, needs_tokenizer in (([tokens], True), ([str(tmp_path / "text.txt")], False)):
        data = configured(tmp_path, *entries).data
        with pytest.raises((ConfigError, DataError), match="tokenizer"):
            check_data(data, 8, needs_tokenizer=needs_tokenizer)
    train_tokenizer(["text"], 260).save(tmp_path / "tokenizer.json")
    tokenizer = str(tmp_path / "tokenizer.json")
    check_data(configured(tmp_path, tokens, tokenizer=tokenizer).data, 8, needs_tokenizer=True)
    check_data(configured(tmp_path, str(tmp_path / "text.txt"), tokenizer=tokenizer).data, 8, needs_tokenizer=False)


def test_an_entry_is_a_pair_or_text(tmp_path: Path) -> None:
    for name in ("a.bin", "b.idx", "c.txt"):
        (tmp_path / name).write_bytes(b"x")
    for name in ("a", "b", "a.bin", "c.txt"):
        check_entry(str(tmp_path / name))
    with pytest.raises(
        DataError, match=rf"data\.train={tmp_path}/d does not exist.*nor {tmp_path}/d\.bin nor .*d\.idx"
    ):
        check_entry(str(tmp_path / "d"))
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(DataError, match=rf"is the folder of a built data set; name its token file, {tmp_path}/train"):
        check_entry(str(tmp_path))


def test_every_file_of_the_data_has_a_fingerprint(tmp_path: Path) -> None:
    """The tokenizer counts where text is tokenised during training."""
    tokens = write(tmp_path / "train", 9)
    pair = [Path(f"{tokens}.bin"), Path(f"{tokens}.idx")]
    expected = {str(path): fingerprint_file(path) for path in pair}
    assert fingerprint_sources(configured(tmp_path, tokens).data) == expected
    text, tokenizer = tmp_path / "text.txt", tmp_path / "tokenizer.json"
    text.write_text("text")
    train_tokenizer(["text"], 260).save(tokenizer)
    data = configured(tmp_path, str(text), tokens, weights=[1, 1], tokenizer=str(tokenizer)).data
    files = [text] + pair + [tokenizer]
    assert list(fingerprint_sources(data).items()) == [(str(path), fingerprint_file(path)) for path in files]
    pair[0].unlink()
    with pytest.raises(DataError, match=r"train\.bin cannot be read \(No such file or directory\); put it back"):
        fingerprint_sources(data)


def test_three_differences_are_named(tmp_path: Path) -> None:
    record = tmp_path / "sources.json"
    compare_fingerprints(record, {"a": "1"})  # without a record nothing is compared
    record.write_text("damaged")
    compare_fingerprints(record, {"a": "1"})
    record.write_text(json.dumps({"a": "1", "b": "2", "c": "3"}))
    compare_fingerprints(record, {"x": "1", "y": "2", "z": "3"})  # moved
    with pytest.raises(DataError, match=r"began with: a was changed; c is missing; d is new \(recorded in"):
        compare_fingerprints(record, {"a": "9", "b": "2", "d": "4"})
    with pytest.raises(DataError, match=r"began with: c is missing; d is new; e is new and 1 more \(recorded in"):
        compare_fingerprints(record, {"a": "1", "b": "2", "d": "4", "e": "5", "f": "6"})
    with pytest.raises(DataError, match="the order of files differs"):
        compare_fingerprints(record, {"b": "2", "a": "1", "c": "3"})


def test_the_record_is_written_at_the_first_start_and_after_an_accepted_change(tmp_path: Path) -> None:
    config = configured(tmp_path, write(tmp_path / "train", 9))
    record = config.run_folder / "samples" / SOURCES_FILE
    record.parent.mkdir(parents=True)
    check_run(config, 0, leader=False)
    assert not record.exists()
    check_run(config, 8, leader=True)  # a run of an earlier release has no record
    first = record.read_text()
    assert json.loads(first) == fingerprint_sources(config.data)
    write(tmp_path / "train", 10)
    with pytest.raises(DataError, match=r"train\.bin was changed"):
        check_run(config, 8, leader=True)
    assert record.read_text() == first
    check_run(config, 0, leader=True)  # a run that begins anew
    second = record.read_text()
    assert second != first
    write(tmp_path / "train", 11)
    accepted = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"accept_changes": ["data.train"]})}
    )
    check_run(accepted, 8, leader=True)
    assert record.read_text() not in (first, second)
    check_run(config, 8, leader=True)


@pytest.mark.parametrize("ring_steps", [1, 3])
@pytest.mark.parametrize("global_batch", [4, 32])
def test_a_ring_holds_some_steps_and_at_least_four_micro_batches(
    tmp_path: Path, ring_steps: int, global_batch: int
) -> None:
    tree = {
        "data": {"train": [write(tmp_path / "train", 9)], "ring_steps": ring_steps},
        "model": {"sequence_length": 8, "vocab_size": 64},
        "train": {"runs": str(tmp_path), "micro_batch": 2, "global_batch": global_batch, "seed": 11},
    }
    microbatches = global_batch // 2 // 2
    plan = plan_host_of(from_tree(tree), 2, 0, 2)
    assert plan.shape.depth == max(4, ring_steps * microbatches)
    assert (plan.shape.rows, plan.shape.columns) == (9, 2)
    assert plan.shares == ((0, microbatches), (microbatches, microbatches))
    assert (plan.has_leader, plan.seed, plan.index) == (True, 11, f"{tmp_path}/.index")
    assert not plan_host_of(from_tree(tree), 2, 1, 1).has_leader
    # Each sample of every step is read once, in order of its number, by one stream.
    numbers = range(2 * microbatches)
    first_samples = [plan.find_first_sample(100, stream, number) for number in numbers for stream in (0, 1)]
    assert sorted(first_samples) == list(range(100, 100 + 2 * global_batch, 2))
    assert [plan.find_first_sample(100, 0, number) for number in numbers] == sorted(
        plan.find_first_sample(100, 0, number) for number in numbers
    )
    assert plan.find_first_sample(100, 1, 0) == 100 + global_batch // 2


def test_a_plan_is_the_same_on_each_process_of_its_host_only(tmp_path: Path) -> None:
    config = configured(tmp_path, write(tmp_path / "train", 9))
    plan = plan_host_of(config, 2, 0, 2)
    assert type(plan).from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["leader"] is True
    assert plan.hash == plan_host_of(config, 2, 0, 2).hash != plan_host_of(config, 2, 1, 1).hash
    assert 0 <= plan.hash < 1 << 63
    assert all(plan_host_of(config, 2, 0, 2).reads_tokens(rank) for rank in (0, 1))
    assert not plan.reads_tokens(2)


def test_notes_name_text_that_is_left_out_and_validation_on_trained_tokens(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a")
    (tmp_path / "text" / "b.jsonl.xz").write_bytes(b"\xfd7zXZ\x00")
    [note] = list_skipped_text(configured(tmp_path, str(tmp_path / "text")).data)
    assert note == "data.train leaves out files (.xz is not read: compress it with gzip or zstd instead): 1"
    train, valid = write(tmp_path / "train", 99), write(tmp_path / "valid", 98)
    assert list_skipped_text(configured(tmp_path, train).data) == []
    assert find_trained_validation(configured(tmp_path, train, valid=valid).data) == []
    copy = write(tmp_path / "copy", 99)
    [note] = find_trained_validation(configured(tmp_path, valid, train, valid=copy).data)
    assert note.startswith(f"data.valid={copy} has the tokens of {train} in data.train")


def test_a_repeated_token_file_has_a_note(tmp_path: Path) -> None:
    first, copy, other = write(tmp_path / "first", 99), write(tmp_path / "copy", 99), write(tmp_path / "other", 98)
    assert find_repeated_data(configured(tmp_path, first, other).data) == []
    [note] = find_repeated_data(configured(tmp_path, first, other, copy).data)
    assert note.startswith(f"data.train has text of {first} again in {copy}, so samples are repeated within an epoch")
    [note] = find_repeated_data(configured(tmp_path, other, other, weights=[1, 2]).data)
    assert f"{other} again in {other}" in note


def test_weighted_text_in_two_entries_is_repeated_and_not_left_out(tmp_path: Path) -> None:
    """Without weights the text of all entries is one stream, which reads each file once."""
    folder = tmp_path / "texts"
    folder.mkdir()
    text = folder / "a.txt"
    text.write_text("some text\n" * 9)
    entries = [str(folder), str(text)]
    plain, weighted = configured(tmp_path, *entries).data, configured(tmp_path, *entries, weights=[1, 2]).data
    assert list_skipped_text(plain) == ["data.train leaves out files (named twice): 1"]
    assert find_repeated_data(plain) == []
    assert list_skipped_text(weighted) == []
    assert find_repeated_data(weighted)[0].startswith(f"data.train has text of {folder} again in {text}")


def test_weights_whose_sum_is_infinite_are_shares_like_others(tmp_path: Path) -> None:
    files = [write(tmp_path / "first", 99), write(tmp_path / "other", 98)]
    huge = SampleSource(configured(tmp_path, *files, weights=[1e308, 1e308]).data, 8, vocab_size=None, seed=1)
    equal = SampleSource(configured(tmp_path, *files, weights=[1, 1]).data, 8, vocab_size=None, seed=1)
    assert huge.count_passes(100) == equal.count_passes(100)
    assert huge.count_epochs(100) > 0
    assert huge.find_sample_ids(0, 20).tolist() == equal.find_sample_ids(0, 20).tolist()
    with pytest.raises(ConfigError, match=r"1\.0 is less than 1e-05 of their sum"):
        SampleSource(configured(tmp_path, *files, weights=[1, 1e308]).data, 8, vocab_size=None, seed=1)
