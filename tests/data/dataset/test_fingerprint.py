"""Files that are not what a run began with, and shards of another tokenizer, are refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale import config as configuration
from megascale.config import Config
from megascale.data.dataset.file_hash import fingerprint_file
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.prepare.builder import build
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import DataError
from tests.data.sample_sources import check_run, check_tokenizers_of


def configured(runs: Path, *train: Path, **data: Any) -> Config:
    tree = {"data": {"train": list(map(str, train)), **data}, "train": {"runs": str(runs)}}
    return configuration.from_tree(tree)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two token files of 1 MB, of which a fingerprint reads a part."""
    built = [tmp_path / "data" / name for name in ("one", "two")]
    built[0].parent.mkdir()
    for number, prefix in enumerate(built):
        with IndexedWriter(prefix, "uint16") as writer:
            writer.add(np.arange(500_000) % (60 + number))
    return built


def damage(kind: str, shards: list[Path]) -> None:
    first, second = (shard.with_suffix(".bin") for shard in shards)
    if kind == "missing":
        second.unlink()
    elif kind == "no index":
        second.with_suffix(".idx").unlink()
    elif kind == "cut off":
        os.truncate(second, 750_000)
    elif kind == "longer":
        with open(second, "ab") as file:
            file.write(bytes(2))
    elif kind == "another":
        second.write_bytes(second.read_bytes()[::-1])
    elif kind == "zeroed but for its ends":
        contents = second.read_bytes()
        second.write_bytes(contents[:4096] + bytes(len(contents) - 8192) + contents[-4096:])
    elif kind == "zeroed between even places":
        zeroed, contents = bytearray(second.stat().st_size), second.read_bytes()
        for start in ((len(contents) - 4096) * i // 15 for i in range(16)):
            zeroed[start : start + 4096] = contents[start : start + 4096]
        second.write_bytes(zeroed)
    else:
        first.rename(first.with_name("x"))
        second.rename(first)
        first.with_name("x").rename(second)


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        ("missing", r"two\.bin cannot be read"),
        ("no index", r"two\.idx cannot be read"),
        ("cut off", r"two\.bin was changed.*restore the files.*--train\.name"),
        ("longer", r"two\.bin was changed"),
        ("another", r"two\.bin was changed"),
        ("zeroed but for its ends", r"two\.bin was changed"),
        ("zeroed between even places", r"two\.bin was changed"),
        ("exchanged", r"one\.bin was changed.*two\.bin was changed"),
    ],
)
def test_token_files_between_stop_and_start(tmp_path: Path, shards: list[Path], kind: str, output: str) -> None:
    config = configured(tmp_path / "runs", *shards)
    check_run(config, 0, leader=True)
    check_run(config, 8, leader=False)
    damage(kind, shards)
    with pytest.raises(DataError, match=output):
        check_run(config, 8, leader=False)


def test_order_counts_and_place_does_not(tmp_path: Path, shards: list[Path]) -> None:
    check_run(configured(tmp_path / "runs", *shards), 0, leader=True)
    with pytest.raises(DataError, match="the order of files differs"):
        check_run(configured(tmp_path / "runs", *shards[::-1]), 8, leader=True)
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = [tmp_path / "moved" / shard.name for shard in shards]
    check_run(configured(tmp_path / "runs", *moved), 8, leader=True)
    with pytest.raises(DataError, match=r"two\.bin is missing"):
        check_run(configured(tmp_path / "runs", moved[0]), 8, leader=True)


def test_every_size_has_a_fingerprint(tmp_path: Path) -> None:
    observed = set()
    for size in (0, 1, 4095, 4096, 4097, 70_000, 1 << 18, (1 << 18) + 1, 1 << 20):
        (tmp_path / "a").write_bytes(bytes(size))
        observed.add(fingerprint_file(tmp_path / "a"))
    assert len(observed) == 9


@pytest.mark.parametrize("size", [5000, 200_000, 3_000_000, 50_000_000])
def test_a_part_of_a_file_that_changed_shows(tmp_path: Path, size: int) -> None:
    """A sixteenth of a file shows wherever it lies; a small file is read as a whole."""
    path = tmp_path / "a"
    with open(path, "wb") as file:
        file.truncate(size)
    before = fingerprint_file(path)
    assert fingerprint_file(path) == before
    for part in range(16):
        with open(path, "r+b") as file:
            file.seek(size * part // 16)
            file.write(b"x" * (size // 16))
        assert fingerprint_file(path) != before
        with open(path, "r+b") as file:
            file.seek(size * part // 16)
            file.write(bytes(size // 16))
    assert fingerprint_file(path) == before
    if size <= 200_000:
        with open(path, "r+b") as file:
            file.seek(size // 3)
            file.write(b"x")
        assert fingerprint_file(path) != before


def test_shards_of_another_tokenizer(tmp_path: Path) -> None:
    texts = [f"{i} " + "word and another one\n" * (i % 9) for i in range(60)]
    (tmp_path / "in").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "in" / f"{i}.txt").write_text(text)
    for name, size in (("a", 290), ("b", 280)):
        build(tmp_path / name, inputs=[tmp_path / "in"], vocab_size=size, progress=False)
    build(tmp_path / "c", inputs=[tmp_path / "in"], tokenizer=tmp_path / "a" / "tokenizer.json", progress=False)
    a, b, c = (tmp_path / name / "train" for name in "abc")
    check_tokenizers_of(configured(tmp_path, a, c))
    with pytest.raises(DataError, match=r"a/train and .*b/train belong to different tokenizers.*data build"):
        check_run(configured(tmp_path, a, b), 0, leader=True)
    # Text tokenised on the fly counts, and what data.tokenizer names, wherever it lies.
    elsewhere = [tmp_path / f"{name}.json" for name in "ab"]
    for path in elsewhere:
        load_tokenizer(tmp_path / path.stem / "tokenizer.json").save(path)
    check_tokenizers_of(configured(tmp_path, a, tmp_path / "in", weights=[1, 1], tokenizer=str(elsewhere[0])))
    for entries in ([a, tmp_path / "in"], [a]):
        with pytest.raises(DataError, match=r"a/train and .*b\.json belong to different tokenizers"):
            check_tokenizers_of(configured(tmp_path, *entries, weights=[1] * len(entries), tokenizer=str(elsewhere[1])))
