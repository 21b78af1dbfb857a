"""Files that are not what a run began with, and shards of another tokenizer, are refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale import config as configuration
from megascale.config import Config
from megascale.data.dataset.file_hash import even_part, fingerprint
from megascale.data.dataset.fingerprint import check_run_data, check_tokenizers
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.prepare.builder import build
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import DataError


def configured(runs: Path, *train: Path, **data: Any) -> Config:
    tree = {"data": {"train": list(map(str, train)), **data}, "train": {"runs": str(runs)}}
    return configuration.from_tree(tree)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two token files of 1 MB, of which a fingerprint reads a part."""
    made = [tmp_path / "data" / name for name in ("one", "two")]
    made[0].parent.mkdir()
    for number, prefix in enumerate(made):
        with IndexedWriter(prefix, "uint16") as writer:
            writer.add(np.arange(500_000) % (60 + number))
    return made


def damage(kind: str, shards: list[Path]) -> None:
    one, two = (shard.with_suffix(".bin") for shard in shards)
    if kind == "missing":
        two.unlink()
    elif kind == "no index":
        two.with_suffix(".idx").unlink()
    elif kind == "cut off":
        os.truncate(two, 750_000)
    elif kind == "longer":
        with open(two, "ab") as file:
            file.write(bytes(2))
    elif kind == "another":
        two.write_bytes(two.read_bytes()[::-1])
    elif kind == "zeroed but for its ends":
        contents = two.read_bytes()
        two.write_bytes(contents[:4096] + bytes(len(contents) - 8192) + contents[-4096:])
    elif kind == "zeroed between even places":
        zeroed, contents = bytearray(two.stat().st_size), two.read_bytes()
        for start in ((len(contents) - 4096) * i // 15 for i in range(16)):
            zeroed[start : start + 4096] = contents[start : start + 4096]
        two.write_bytes(zeroed)
    else:
        one.rename(one.with_name("x"))
        two.rename(one)
        one.with_name("x").rename(two)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", r"two\.bin cannot be read"),
        ("no index", r"two\.idx cannot be read"),
        ("cut off", r"two\.bin was changed.*put the files back.*--train\.name"),
        ("longer", r"two\.bin was changed"),
        ("another", r"two\.bin was changed"),
        ("zeroed but for its ends", r"two\.bin was changed"),
        ("zeroed between even places", r"two\.bin was changed"),
        ("exchanged", r"one\.bin was changed.*two\.bin was changed"),
    ],
)
def test_token_files_between_stop_and_start(tmp_path: Path, shards: list[Path], kind: str, says: str) -> None:
    config = configured(tmp_path / "runs", *shards)
    check_run_data(config, 0, leader=True)
    check_run_data(config, 8, leader=False)
    damage(kind, shards)
    with pytest.raises(DataError, match=says):
        check_run_data(config, 8, leader=False)


def test_order_counts_and_place_does_not(tmp_path: Path, shards: list[Path]) -> None:
    check_run_data(configured(tmp_path / "runs", *shards), 0, leader=True)
    with pytest.raises(DataError, match="the order of files differs"):
        check_run_data(configured(tmp_path / "runs", *shards[::-1]), 8, leader=True)
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = [tmp_path / "moved" / shard.name for shard in shards]
    check_run_data(configured(tmp_path / "runs", *moved), 8, leader=True)
    with pytest.raises(DataError, match=r"two\.bin is missing"):
        check_run_data(configured(tmp_path / "runs", moved[0]), 8, leader=True)


def test_every_size_has_a_fingerprint(tmp_path: Path) -> None:
    seen = set()
    for size in (0, 1, 4095, 4096, 4097, 70_000, 1 << 18, (1 << 18) + 1, 1 << 20):
        (tmp_path / "a").write_bytes(bytes(size))
        seen.add(fingerprint(tmp_path / "a"))
    assert len(seen) == 9


@pytest.mark.parametrize("size", [5000, 200_000, 3_000_000, 50_000_000])
def test_a_part_of_a_file_that_changed_shows(tmp_path: Path, size: int) -> None:
    """A sixteenth of a file shows wherever it lies; a small file is read as a whole."""
    path = tmp_path / "a"
    with open(path, "wb") as file:
        file.truncate(size)
    before = fingerprint(path)
    assert fingerprint(path) == before
    for part in range(16):
        with open(path, "r+b") as file:
            file.seek(size * part // 16)
            file.write(b"x" * (size // 16))
        assert fingerprint(path) != before
        with open(path, "r+b") as file:
            file.seek(size * part // 16)
            file.write(bytes(size // 16))
    assert fingerprint(path) == before
    if size <= 200_000:
        with open(path, "r+b") as file:
            file.seek(size // 3)
            file.write(b"x")
        assert fingerprint(path) != before


def test_a_record_of_an_older_version_is_compared_as_far_as_it_goes(tmp_path: Path, shards: list[Path]) -> None:
    config = configured(tmp_path / "runs", *shards)
    check_run_data(config, 0, leader=True)
    record = config.run_folder / "samples" / "sources.json"
    record.write_text(json.dumps({path: even_part(value) for path, value in json.loads(record.read_text()).items()}))
    check_run_data(config, 8, leader=True)
    damage("another", shards)
    with pytest.raises(DataError, match=r"two\.bin was changed"):
        check_run_data(config, 8, leader=True)


def test_shards_of_another_tokenizer(tmp_path: Path) -> None:
    texts = [f"{i} " + "word and another one\n" * (i % 9) for i in range(60)]
    (tmp_path / "in").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "in" / f"{i}.txt").write_text(text)
    for name, size in (("a", 290), ("b", 280)):
        build(tmp_path / name, inputs=[tmp_path / "in"], vocab_size=size, progress=False)
    build(tmp_path / "c", inputs=[tmp_path / "in"], tokenizer=tmp_path / "a" / "tokenizer.json", progress=False)
    a, b, c = (tmp_path / name / "train" for name in "abc")
    check_tokenizers(configured(tmp_path, a, c))
    with pytest.raises(DataError, match=r"a/train and .*b/train belong to different tokenizers.*data build"):
        check_run_data(configured(tmp_path, a, b), 0, leader=True)
    # Text tokenised on the fly counts, and what data.tokenizer names, wherever it lies.
    elsewhere = [tmp_path / f"{name}.json" for name in "ab"]
    for path in elsewhere:
        load_tokenizer(tmp_path / path.stem / "tokenizer.json").save(path)
    check_tokenizers(configured(tmp_path, a, tmp_path / "in", weights=[1, 1], tokenizer=str(elsewhere[0])))
    for entries in ([a, tmp_path / "in"], [a]):
        with pytest.raises(DataError, match=r"a/train and .*b\.json belong to different tokenizers"):
            check_tokenizers(configured(tmp_path, *entries, weights=[1] * len(entries), tokenizer=str(elsewhere[1])))
