"""Files that are not what a run began with, and shards of another tokenizer, are refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale import config as configuration
from megascale.config import Config
from megascale.data.build.builder import build
from megascale.data.dataset.file_hash import fingerprint
from megascale.data.dataset.fingerprint import check_tokenizers, watch
from megascale.data.dataset.indexed import IndexedWriter
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import DataError


def configured(runs: Path, *train: Path, **data: Any) -> Config:
    tree = {"data": {"train": list(map(str, train)), **data}, "train": {"runs": str(runs)}}
    return configuration.from_tree(tree)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two token files of 200 kB."""
    made = [tmp_path / "data" / name for name in ("one", "two")]
    made[0].parent.mkdir()
    for number, prefix in enumerate(made):
        with IndexedWriter(prefix, "uint16") as writer:
            writer.add(np.arange(100_000) % (60 + number))
    return made


def damage(kind: str, shards: list[Path]) -> None:
    one, two = (shard.with_suffix(".bin") for shard in shards)
    if kind == "missing":
        two.unlink()
    elif kind == "no index":
        two.with_suffix(".idx").unlink()
    elif kind == "cut off":
        os.truncate(two, 150_000)
    elif kind == "longer":
        with open(two, "ab") as file:
            file.write(bytes(2))
    elif kind == "another":
        two.write_bytes(two.read_bytes()[::-1])
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
        ("exchanged", r"one\.bin was changed.*two\.bin was changed"),
    ],
)
def test_token_files_between_stop_and_start(tmp_path: Path, shards: list[Path], kind: str, says: str) -> None:
    config = configured(tmp_path / "runs", *shards)
    watch(config, 0, leader=True)
    watch(config, 8, leader=False)
    damage(kind, shards)
    with pytest.raises(DataError, match=says):
        watch(config, 8, leader=False)


def test_order_counts_and_place_does_not(tmp_path: Path, shards: list[Path]) -> None:
    watch(configured(tmp_path / "runs", *shards), 0, leader=True)
    with pytest.raises(DataError, match="the order of files differs"):
        watch(configured(tmp_path / "runs", *shards[::-1]), 8, leader=True)
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = [tmp_path / "moved" / shard.name for shard in shards]
    watch(configured(tmp_path / "runs", *moved), 8, leader=True)
    with pytest.raises(DataError, match=r"two\.bin is missing"):
        watch(configured(tmp_path / "runs", moved[0]), 8, leader=True)


def test_every_size_has_a_fingerprint(tmp_path: Path) -> None:
    seen = set()
    for size in (0, 1, 4095, 4096, 4097, 70_000):
        (tmp_path / "a").write_bytes(bytes(size))
        seen.add(fingerprint(tmp_path / "a"))
    assert len(seen) == 6


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
        watch(configured(tmp_path, a, b), 0, leader=True)
    # Text tokenised on the fly counts, and what data.tokenizer names, wherever it lies.
    elsewhere = [tmp_path / f"{name}.json" for name in "ab"]
    for path in elsewhere:
        load_tokenizer(tmp_path / path.stem / "tokenizer.json").save(path)
    check_tokenizers(configured(tmp_path, a, tmp_path / "in", weights=[1, 1], tokenizer=str(elsewhere[0])))
    for entries in ([a, tmp_path / "in"], [a]):
        with pytest.raises(DataError, match=r"a/train and .*b\.json belong to different tokenizers"):
            check_tokenizers(configured(tmp_path, *entries, weights=[1] * len(entries), tokenizer=str(elsewhere[1])))
