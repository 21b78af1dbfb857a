"""Text tokenised on the fly: each token once an epoch, pure in (seed, number), for any cache; damage is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascale import config as configuration
from megascale.config import Config
from megascale.data.dataset import text_stream as streams
from megascale.data.dataset.file_hash import fingerprint_file
from megascale.data.dataset.formats import is_text
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.loader.feed import find_cause
from megascale.data.loader.ring import COUNTERS
from megascale.data.tokenizer.tokenizer import load_tokenizer, train_tokenizer
from megascale.errors import ConfigError, DataError
from tests.data.sample_sources import check_run, open_samples

TEXTS = [f"{i} " + "word and another one\n" * (i % 9) + "ü" * (i % 4) for i in range(120)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    train_tokenizer(TEXTS, 300).save(path)
    return path


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MIN_PIECE_BYTES", 700)


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def write_all(folder: Path) -> None:
    """The texts, a third in each kind of file."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(TEXTS[:40]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[40:80]).encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[80:]}), folder / "c.parquet", row_group_size=7)


def configured(arguments: Path, *train: Path, length: int = 8, seed: int = 1, **data: Any) -> Config:
    keys = {
        "train": list(map(str, train)),
        "tokenizer": str(arguments),
        "shuffle_tokens": 100,
        "loader_threads": 2,
        **data,
    }
    tree = {"model": {"sequence_length": length, "vocab_size": 300}, "data": keys, "train": {"seed": seed}}
    return configuration.from_tree(tree)


def all_tokens(arguments: Path) -> list[int]:
    tokens, _ = load_tokenizer(arguments).encode_documents(TEXTS)
    return tokens.tolist()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("length", [4, 8, 33])
def test_in_order_it_is_the_text(tokenizer: Path, tmp_path: Path, length: int) -> None:
    write_all(tmp_path / "text")
    source = open_samples(configured(tokenizer, tmp_path / "text", length=length, shuffle=False))
    tokens = all_tokens(tokenizer)
    windows = (len(tokens) - 1) // length
    batch = source.read_tokens(0, windows)
    assert batch[:, :-1].ravel().tolist() == tokens[: windows * length]
    assert batch[:, 1:].ravel().tolist() == tokens[1 : windows * length + 1]
    assert source.read_tokens(windows, 1)[0].tolist() == batch[0].tolist()  # the next epoch
    assert source.count_epochs(2 * windows) == 2.0
    assert source.meter.bytes_read >= sum(f.stat().st_size for f in (tmp_path / "text").iterdir())
    source.close()


@pytest.mark.usefixtures("small_pieces")
@given(seed=st.integers(0, 9), group=st.integers(1, 3000), length=st.sampled_from([3, 8, 20]), at=st.integers(0, 400))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_window_once_an_epoch_and_pure(
    tokenizer: Path, tmp_path: Path, seed: int, group: int, length: int, at: int
) -> None:
    """Asked from the start, from the middle, with an index or without: the same; and nothing twice in an epoch."""
    if not (tmp_path / "text").exists():
        write_all(tmp_path / "text")
    config = configured(tokenizer, tmp_path / "text", length=length, seed=seed, shuffle_tokens=group)
    full = open_samples(config, tmp_path / "index")
    count = (len(all_tokens(tokenizer)) - 1) // length
    ids, batch = full.find_sample_ids(0, 2 * count + 5), full.read_tokens(0, 2 * count + 5)
    full.close()
    for epoch in (0, 1):
        part = ids[epoch * count : (epoch + 1) * count]
        assert (part[:, 0] == epoch).all()
        assert np.sort(part[:, 2]).tolist() == list(range(count))
    at = min(at, count)
    for index in (None, tmp_path / "index"):
        repeated = open_samples(config, index)
        assert np.array_equal(repeated.read_tokens(at, 7), batch[at : at + 7])
        assert np.array_equal(repeated.find_sample_ids(at, 7), ids[at : at + 7])
        assert np.array_equal(repeated.read_tokens(count + 2, 3), batch[count + 2 : count + 5])
        repeated.close()


@pytest.mark.usefixtures("small_pieces")
def test_an_epoch_holds_the_text_once(tokenizer: Path, tmp_path: Path) -> None:
    """Shuffled pieces, shuffled windows: put back in order, an epoch's tokens are those of the text."""
    write_all(tmp_path / "text")
    source = open_samples(configured(tokenizer, tmp_path / "text"))
    tokens = all_tokens(tokenizer)
    count = (len(tokens) - 1) // 8
    counts = np.bincount(source.read_tokens(0, count)[:, :-1].ravel(), minlength=300)
    remaining = np.bincount(tokens, minlength=300) - counts
    assert (remaining >= 0).all()
    assert remaining.sum() == len(tokens) - 8 * count  # the last few, as in token files
    orders = [source.read_tokens(e * count, count) for e in (0, 1)]
    assert not np.array_equal(*orders)
    source.close()


@pytest.mark.usefixtures("small_pieces")
def test_a_blend_with_token_files(tokenizer: Path, tmp_path: Path) -> None:
    write_all(tmp_path / "text")
    with IndexedWriter(tmp_path / "train", "uint16") as writer:
        writer.add(np.full(500, 7))
    assert not is_text(str(tmp_path / "train"))
    with pytest.raises(ConfigError, match=r"data\.weights"):
        open_samples(configured(tokenizer, tmp_path / "train", tmp_path / "text"))
    source = open_samples(configured(tokenizer, tmp_path / "train", tmp_path / "text", weights=[1, 3]))
    with np.errstate(all="raise"):  # text has no windows that are known beforehand to divide by
        ids = source.find_sample_ids(0, 80)
    batch = source.read_tokens(0, 80)
    assert np.bincount(ids[:, 1]).tolist() == [20, 60]
    assert (batch[ids[:, 1] == 0] == 7).all()
    text = ids[ids[:, 1] == 1]
    assert len(np.unique(text, axis=0)) == 60
    assert (batch[ids[:, 1] == 1] != 7).any()
    source.close()


@pytest.mark.usefixtures("small_pieces")
def test_text_that_changes_under_a_run_is_named(tokenizer: Path, tmp_path: Path) -> None:
    """Same size, same spots looked at by the fingerprint: the checksum of the tokens finds it all the same."""
    file = tmp_path / "a.jsonl"
    file.write_text(lines(TEXTS * 40))
    config = configured(tokenizer, file)
    source = open_samples(config, tmp_path / "index")
    epoch = next(n for n in range(0, 10**6, 500) if source.find_sample_ids(n, 1)[0, 0] == 1)
    source.read_tokens(0, 4)
    print_of = fingerprint_file(file)
    text = file.read_bytes()
    for at in range(len(text) // 3, len(text)):
        if text[at : at + 4] == b"word":
            file.write_bytes(text[:at] + b"sword"[:4] + text[at + 4 :])
            if fingerprint_file(file) == print_of:
                break
    source.close()
    repeated = open_samples(config, tmp_path / "index")
    with pytest.raises(DataError, match=r"a\.jsonl has changed since this run first read it"):
        repeated.read_tokens(0, epoch)
    repeated.close()


def test_files_are_those_of_the_first_start(tokenizer: Path, tmp_path: Path) -> None:
    write_all(tmp_path / "text")
    tree = configured(tokenizer, tmp_path / "text").model_dump()
    tree["train"]["runs"] = str(tmp_path / "runs")
    config = configuration.from_tree(tree)
    check_run(config, 0, leader=True)
    check_run(config, 8, leader=True)
    file = tmp_path / "text" / "a.jsonl"
    before = file.read_bytes()
    file.write_bytes(before[:-30])
    with pytest.raises(DataError, match=r"a\.jsonl was changed.*--train\.name"):
        check_run(config, 8, leader=False)
    file.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl is missing"):
        check_run(config, 8, leader=True)
    file.write_bytes(before)
    (tmp_path / "text" / "d.jsonl").write_text(lines(TEXTS))
    with pytest.raises(DataError, match=r"d\.jsonl is new"):
        check_run(config, 8, leader=True)
    (tmp_path / "text" / "d.jsonl").unlink()
    check_run(config, 8, leader=True)
    check_run(config, 0, leader=True)
    words_now = tmp_path / "tokenizer.json"
    train_tokenizer(TEXTS[:60], 290).save(words_now)
    tree["data"]["tokenizer"] = str(words_now)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        check_run(configuration.from_tree(tree), 8, leader=True)


def test_bad_text_is_named(tokenizer: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text(lines(["a"]))
    with pytest.raises(DataError, match="use a shorter sequence or more text"):
        open_samples(configured(tokenizer, short, length=64)).read_tokens(0, 1)
    cut = tmp_path / "cut.jsonl"
    cut.write_text(lines(TEXTS)[:-20])
    with pytest.raises(DataError, match=r"cut\.jsonl.*is not JSON"):
        open_samples(configured(tokenizer, cut)).read_tokens(0, 900)
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(lines(TEXTS).encode())[:-40])
    with pytest.raises(DataError, match="cut off in the middle"):
        open_samples(configured(tokenizer, packed)).read_tokens(0, 1)
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "dataset.json").write_text("{}")
    with pytest.raises(DataError, match=r"name its token file, .*built/train"):
        open_samples(configured(tokenizer, tmp_path / "built"))


def test_a_damaged_index_costs_nothing_but_counting(tokenizer: Path, tmp_path: Path) -> None:
    write_all(tmp_path / "text")
    config = configured(tokenizer, tmp_path / "text")
    source = open_samples(config, tmp_path / "index")
    batch = source.read_tokens(0, 30)
    source.close()
    (index,) = (tmp_path / "index").iterdir()
    index.write_bytes(index.read_bytes()[:-5])
    repeated = open_samples(config, tmp_path / "index")
    assert np.array_equal(repeated.read_tokens(0, 30), batch)
    repeated.close()


@pytest.mark.parametrize("kind", ["decompression", "CPU"])
def test_counters_tell_what_reading_is_made_of(tokenizer: Path, tmp_path: Path, kind: str) -> None:
    """Much to unpack and little to tokenise, and the other way round."""
    packed = kind == "decompression"
    noise = np.random.default_rng(0)
    rows = [{"text": f"{i} word", "more": noise.bytes(20_000).hex()} for i in range(100)]
    if not packed:
        rows = [{"text": "word and another one\n" * 300} for _ in range(100)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    file.write_bytes(gzip.compress(text, 1) if packed else text)
    source = open_samples(configured(tokenizer, file))
    source.read_tokens(0, 20)
    source.close()
    meter = source.meter
    assert meter.bytes_read >= (file.stat().st_size if packed else 1)
    report = find_cause(dict.fromkeys(COUNTERS, 0.0), {name: getattr(meter, name, 0.0) for name in COUNTERS})
    assert report.endswith((kind, "other processes on the CPU"))  # the latter on a busy machine
