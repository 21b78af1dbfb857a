"""Text that a tokenizer cannot represent is counted, said and, if it is most of a text, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, trainers

from megascale import api
from megascale.config import from_tree
from megascale.data.dataset.data_checks import check_text
from megascale.data.dataset.manifest import compute_bits_per_byte
from megascale.data.prepare import builder, worker_pool
from megascale.data.prepare.builder import build
from megascale.data.tokenizer.base import Tokenizer
from megascale.data.tokenizer.tokenizer import load_tokenizer, train_tokenizer
from megascale.errors import DataError

ENGLISH = "the quiet river walks under a green lamp"
RUSSIAN = "сегодня хорошая погода"
CHINESE = "今天天气很好"


def byte_level(alphabet: list[str]) -> Library:
    inner = Library(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([ENGLISH], trainer)
    return inner


def characters() -> Library:
    """A BPE of characters without an unknown token: what it does not know is dropped."""
    inner = Library(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.train_from_iterator(
        [ENGLISH], trainers.BpeTrainer(vocab_size=100, special_tokens=["</s>"], show_progress=False)
    )
    return inner


def word_piece() -> Library:
    inner = Library(models.WordPiece(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=100, special_tokens=["[UNK]", "[EOS]"], show_progress=False)
    inner.train_from_iterator([ENGLISH], trainer)
    return inner


def word_level() -> Library:
    vocabulary = {"[UNK]": 0, "</s>": 1} | {word: 2 + i for i, word in enumerate(dict.fromkeys(ENGLISH.split()))}
    inner = Library(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return inner


def unigram() -> Library:
    inner = Library(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=100, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    inner.train_from_iterator([ENGLISH] * 3, trainer)
    return inner


def loaded(inner: Library, folder: Path) -> Tokenizer:
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder / "tokenizer.json")


def visible(text: str) -> int:
    return len("".join(text.split()).encode())


@pytest.mark.parametrize("make", [lambda: byte_level([]), characters, word_piece, word_level, unigram])
def test_what_a_tokenizer_cannot_represent_is_counted(tmp_path: Path, make) -> None:
    arguments = loaded(make(), tmp_path)
    assert arguments.loses_text
    assert (
        arguments.count_lost_bytes([ENGLISH, "", "\n"]) <= 1
    )  # a line's end may be unknown to a byte-level vocabulary
    for text in (RUSSIAN, CHINESE):
        assert arguments.count_lost_bytes([text]) == pytest.approx(visible(text), abs=4)
        mixed = f"{ENGLISH} {text} {ENGLISH}"
        assert arguments.count_lost_bytes([ENGLISH, mixed]) == pytest.approx(visible(text), abs=4)


def test_text_is_not_lost_by_vocabularies_of_all_bytes(tmp_path: Path) -> None:
    assert not train_tokenizer([ENGLISH], 300).loses_text
    full = byte_level(sorted(pre_tokenizers.ByteLevel.alphabet()))
    assert not loaded(full, tmp_path).loses_text
    full.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "_")])
    assert not loaded(full, tmp_path).loses_text
    full.normalizer = normalizers.Replace("river", "")
    arguments = loaded(full, tmp_path)
    assert arguments.loses_text
    assert arguments.count_lost_bytes([ENGLISH]) == len("river")
    full.normalizer = None
    full.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation("removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    arguments = loaded(full, tmp_path)
    assert arguments.loses_text
    assert arguments.count_lost_bytes(["a, b!"]) == 2


def test_text_that_a_model_refuses_is_a_data_error(tmp_path: Path) -> None:
    arguments = loaded(Library(models.WordLevel({"a": 0, "</s>": 1}, unk_token="[UNK]")), tmp_path)
    assert arguments.encode("a") == [0]
    with pytest.raises(
        DataError, match=r"tokenizer\.json cannot encode this text: .*use a tokenizer that has tokens for all bytes"
    ):
        arguments.encode("river")


def records(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("make", [lambda: byte_level([]), word_piece])
@pytest.mark.parametrize("sampled", [True, False])
def test_a_tokenizer_of_another_language_is_refused(tmp_path: Path, make, sampled: bool, monkeypatch) -> None:
    """Before the text is encoded, or else when it turns out."""
    make().save(str(tmp_path / "tokenizer.json"))
    source = records(tmp_path / "a.jsonl", [f"{i} {CHINESE * 5}" for i in range(40)])
    if sampled:
        monkeypatch.setattr(worker_pool, "encode_pieces", lambda *_: pytest.fail("the text was encoded"))
    else:
        monkeypatch.setattr(builder, "_check_tokenizer", lambda *_: None)
    with pytest.raises(DataError, match=r"cannot represent \d+% of the text.*at most 50% may be; choose a tokenizer"):
        build(tmp_path / "out", inputs=[source], tokenizer=tmp_path / "tokenizer.json", progress=False)
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_bits_per_byte_count_what_is_lost(tmp_path: Path) -> None:
    """A model that predicts unknown tokens well would otherwise beat xz."""
    assert compute_bits_per_byte(0.0, 100, 1000, lost_bytes=500) == 4
    word_piece().save(str(tmp_path / "tokenizer.json"))
    source = records(tmp_path / "a.jsonl", [f"{ENGLISH} {RUSSIAN * (i % 4 == 0)} {'river ' * i}" for i in range(80)])
    built = build(tmp_path / "out", inputs=[source], tokenizer=tmp_path / "tokenizer.json", progress=False)
    part = built.manifest.parts["valid"]
    assert 0 < part.lost_bytes < part.bytes / 2
    assert f"cannot represent {built.manifest.parts['train'].lost_bytes:,} of" in built.manifest.notes[0]
    model = {"layers": 1, "hidden": 16, "heads": 2, "sequence_length": 8}
    train = {"runs": str(tmp_path / "runs"), "name": "a", "steps": 1, "micro_batch": 1, "global_batch": 1}
    data = {"train": [str(tmp_path / "out/train")], "valid": str(tmp_path / "out/valid")}
    tree = {"model": model, "data": data, "train": {**train, "threads": 1, "device": "cpu"}}
    api.train(from_tree({**tree, "observe": {"tensorboard": False}}))
    result = api.evaluate(tmp_path / "runs" / "a", device="cpu")
    expected = compute_bits_per_byte(result.loss, part.tokens, part.bytes) + 8 * part.lost_bytes / part.bytes
    assert result.bits_per_byte == pytest.approx(expected)


def test_text_tokenised_on_the_fly_is_judged_at_the_start(tmp_path: Path) -> None:
    def configured(source: Path):
        return from_tree({"data": {"train": [str(source)], "tokenizer": str(tmp_path / "tokenizer.json")}})

    word_piece().save(str(tmp_path / "tokenizer.json"))
    assert check_text(configured(records(tmp_path / "a.jsonl", [ENGLISH] * 9)).data) == []
    (note,) = check_text(configured(records(tmp_path / "b.jsonl", [ENGLISH] * 9 + [RUSSIAN])).data)
    assert "cannot represent about" in note
    with pytest.raises(DataError, match=r"data\.train=.*c\.jsonl: the tokenizer .* cannot represent"):
        check_text(configured(records(tmp_path / "c.jsonl", [RUSSIAN] * 9)).data)
    train_tokenizer([ENGLISH], 300).save(tmp_path / "tokenizer.json")
    assert check_text(configured(tmp_path / "c.jsonl").data) == []
