"""A tokenizer file of another kind is named, with how to make a tokenizer.json of it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from megascale.data.tokenizer.tokenizer import load_tokenizer, train_tokenizer
from megascale.errors import DataError

RANKS = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)).encode()
SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x0c\n\x03\xe2\x96\x81\x15\xff\xfe\x00\xc0"


@pytest.mark.parametrize(
    ("name", "data", "output"),
    [
        ("tokenizer.model", RANKS, r"a tiktoken rank file .like Llama 3's.*NAME\.tiktoken.*NAME\.json"),
        ("ranks.txt", RANKS, "a tiktoken rank file"),
        ("tokenizer.model", SENTENCEPIECE, "a sentencepiece model.*AutoTokenizer.*save_pretrained"),
        ("spiece.model", b"\n\x0e\n\x05<pad>\x15\x00\x00\x00\x00\x18\x02", "a sentencepiece model"),
        ("other", SENTENCEPIECE, "a sentencepiece model"),
        ("merges.txt", b"#version: 0.2\nt h\n", r"a list of merges .merges\.txt.*AutoTokenizer"),
        ("vocab.json", b'{"a": 0, "b": 1}', r"a vocabulary without its rules .vocab\.json"),
        ("tokenizer_config.json", b'{"tokenizer_class": "X"}', r"the settings of a tokenizer"),
        ("tekken.json", json.dumps({"vocab": [{"rank": 0, "token_bytes": "AA=="}]}).encode(), "a Tekken vocabulary"),
        ("list.json", b"[]", "JSON of another kind"),
        ("new.json", b'{"model": {"type": "Unheard"}}', "JSON of another kind, or of a newer version"),
        ("latin.json", b'{"model": "caf\xe9"}', "not text in UTF-8"),
        ("vocab.txt", b"[PAD]\n[UNK]\n", "not JSON.*AutoTokenizer"),
        ("empty.json", b"", "empty"),
    ],
)
def test_the_kind_and_the_remedy_are_named(tmp_path: Path, name: str, data: bytes, output: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"{name} is not a tokenizer\.json.*it is {output}"):
        load_tokenizer(tmp_path / name)


def test_a_folder_without_a_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(SENTENCEPIECE)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(DataError, match=rf"from_pretrained\('{tmp_path}'\).save_pretrained"):
            load_tokenizer(path)
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(DataError, match=r"pass the path of the tokenizer\.json inside"):
        load_tokenizer(tmp_path)


def test_ids_that_the_library_would_change_or_share_are_refused(tmp_path: Path) -> None:
    """The library gives added tokens the next ids, whatever the file has. Shared ids cannot be decoded."""
    tokenizer = train_tokenizer(["some text"], 300)
    record = json.loads(tokenizer.to_json())
    vocab_size = tokenizer.vocab_size
    added_token = dict(record["added_tokens"][0], content="<far>", id=vocab_size + 7)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**record, "added_tokens": [*record["added_tokens"], added_token]}))
    match = (
        rf"tokenizer\.json has the added token '<far>' with id {vocab_size + 7}, and the library gives it {vocab_size},"
    )
    with pytest.raises(DataError, match=match):
        load_tokenizer(file)
    added_token["id"] = vocab_size
    file.write_text(json.dumps({**record, "added_tokens": [*record["added_tokens"], added_token]}))
    assert load_tokenizer(file).vocab_size == vocab_size + 1
    vocabulary = record["model"]["vocab"]
    vocabulary["b"] = vocabulary["a"]
    file.write_text(json.dumps(record))
    with pytest.raises(DataError, match=rf"the id {vocabulary['a']} for '[ab]' and for '[ab]'; copy the file again"):
        load_tokenizer(file)
