"""Tokenizers: text survives the way there and back, documents end where they should, bad files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config import DataConfig
from megascale.data.tokenizer import END_OF_DOCUMENT, Tokenizer, tokenizer_path
from megascale.errors import ConfigError, DataError

WORDS = Tokenizer.train(["def spam(eggs):\n    return eggs + 1\n" * 20], 300)


@given(text=st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_survives(text: str) -> None:
    ids = WORDS.encode(text)
    assert WORDS.decode(ids) == text
    assert all(0 < i < WORDS.vocab_size for i in ids)


def test_end_of_document_in_text_is_plain_text() -> None:
    assert WORDS.end_of_document not in WORDS.encode(f"a{END_OF_DOCUMENT}b")
    tokens, lengths = WORDS.encode_documents(["one", "", END_OF_DOCUMENT])
    assert (tokens == WORDS.end_of_document).sum() == 3
    assert lengths.sum() == len(tokens)
    assert lengths[1] == 1


@given(texts=st.lists(st.text(max_size=40), max_size=8))
@settings(max_examples=50, deadline=None)
def test_documents_at_once_equal_one_by_one(texts: list[str]) -> None:
    tokens, lengths = WORDS.encode_documents(texts)
    assert tokens.tolist() == [i for text in texts for i in [*WORDS.encode(text), WORDS.end_of_document]]
    assert lengths.tolist() == [len(WORDS.encode(text)) + 1 for text in texts]


def test_training_is_repeatable_and_saved_whole(tmp_path: Path) -> None:
    text = ["".join(f"x{i} = {i * 7919 % 1000}\n" for i in range(500))]
    one, two = Tokenizer.train(text, 600), Tokenizer.train(text, 600)
    assert one.to_json() == two.to_json()
    one.save(tmp_path / "tokenizer.json")
    read = Tokenizer.load(tmp_path / "tokenizer.json")
    assert read.encode(text[0]) == one.encode(text[0])
    assert read.sha256 == one.sha256
    assert len(one.encode(text[0])) < 0.7 * len(text[0])


def test_end_of_document_is_found(tmp_path: Path) -> None:
    for name in ("</s>", "<|end_of_text|>"):
        (tmp_path / "tokenizer.json").write_text(WORDS.to_json().replace(END_OF_DOCUMENT, name))
        assert Tokenizer.load(tmp_path / "tokenizer.json").end_of_document == 0
    (tmp_path / "tokenizer.json").write_text(WORDS.to_json().replace(END_OF_DOCUMENT, "<fin>"))
    with pytest.raises(DataError, match="to end a document"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<fin>"}}))
    assert Tokenizer.load(tmp_path / "tokenizer.json").end_of_document == 0


def test_unusable_files(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "binary.json").write_bytes(b"\xff\x00")
    for name, says in [("bad.json", "cannot|can be read"), ("binary.json", "can be read"), ("no.json", "not exist")]:
        with pytest.raises(DataError, match=says):
            Tokenizer.load(tmp_path / name)
    with pytest.raises(DataError, match="is a folder"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="too small"):
        Tokenizer.train(["a"], 100)


def test_where_the_tokenizer_is_looked_for() -> None:
    assert tokenizer_path(DataConfig(train=["a/b/train", "c"])) == Path("a/b/tokenizer.json")
    assert tokenizer_path(DataConfig(train=["a/train"], tokenizer="x.json")) == Path("x.json")
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        tokenizer_path(DataConfig())
