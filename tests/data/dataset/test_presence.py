"""Data that is not there is named as such, and not as a missing tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megascale import api
from megascale.config import Config, from_tree
from megascale.data.dataset.indexed import IndexedWriter
from megascale.errors import DataError


def configured(entry: Path | str, **data: object) -> Config:
    return from_tree({"data": {"train": [str(entry)], **data}})


@pytest.mark.parametrize("name", ["nosuch", "nosuch.bin", "nosuch.jsonl"])
def test_data_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"data\.train={name} does not exist: .*in {tmp_path}.*data build") as error:
        api.resolve(configured(name))
    assert "tokenizer" not in str(error.value)


def test_the_folder_of_a_data_set_is_named(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(DataError, match=rf"name its token file, {tmp_path}/train"):
        api.resolve(configured(tmp_path))


def test_data_that_is_there_lacks_only_its_tokenizer(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "train", "uint16") as writer:
        writer.add(np.arange(9))
    (tmp_path / "text.txt").write_text("text")
    for entry in ("train", "train.bin", "train.idx", "text.txt"):
        with pytest.raises(DataError, match=r"tokenizer .*tokenizer\.json does not exist; set data\.tokenizer"):
            api.resolve(configured(tmp_path / entry))


def test_data_of_other_machines_is_not_asked_for(tmp_path: Path) -> None:
    """A configuration with its own tokenizer is complete without the data, as on a login node."""
    from megascale.data.tokenizer.tokenizer import train_tokenizer

    train_tokenizer(["text"], 260).save(tmp_path / "tokenizer.json")
    config = api.resolve(configured("elsewhere/train", tokenizer=str(tmp_path / "tokenizer.json")))
    assert config.model.vocab_size == 260
