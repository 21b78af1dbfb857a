"""Tokenizers: text survives the way there and back, documents end where they should, bad files are named."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from megascale.config import DataConfig
from megascale.core.untrusted_files import LFS_POINTER
from megascale.data.dataset.indexed import IndexedDataset
from megascale.data.prepare.builder import build
from megascale.data.tokenizer import base
from megascale.data.tokenizer.base import END_OF_DOCUMENT
from megascale.data.tokenizer.huggingface_file import _train_interruptibly
from megascale.data.tokenizer.tokenizer import find_tokenizer_path, load_run_tokenizer, load_tokenizer, train_tokenizer
from megascale.errors import ConfigError, DataError

WORDS = train_tokenizer(["def spam(eggs):\n    return eggs + 1\n" * 20], 300)


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
    assert tokens.tolist() == [i for text in texts for i in WORDS.encode(text) + [WORDS.end_of_document]]
    assert lengths.tolist() == [len(WORDS.encode(text)) + 1 for text in texts]


def test_training_is_repeatable_and_saved_whole(tmp_path: Path) -> None:
    text = ["".join(f"x{i} = {i * 7919 % 1000}\n" for i in range(500))]
    first, second = train_tokenizer(text, 600), train_tokenizer(text, 600)
    assert first.to_json() == second.to_json()
    first.save(tmp_path / "tokenizer.json")
    read = load_tokenizer(tmp_path / "tokenizer.json")
    assert read.encode(text[0]) == first.encode(text[0])
    assert read.sha256 == first.sha256
    assert len(first.encode(text[0])) < 0.7 * len(text[0])


def test_end_of_document_is_found(tmp_path: Path) -> None:
    for name in ("</s>", "<|end_of_text|>"):
        (tmp_path / "tokenizer.json").write_text(WORDS.to_json().replace(END_OF_DOCUMENT, name))
        assert load_tokenizer(tmp_path / "tokenizer.json").end_of_document == 0
    (tmp_path / "tokenizer.json").write_text(WORDS.to_json().replace(END_OF_DOCUMENT, "<fin>"))
    with pytest.raises(DataError, match="to end a document"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<fin>"}}))
    assert load_tokenizer(tmp_path / "tokenizer.json").end_of_document == 0


def test_a_configured_end_survives_a_build(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text(WORDS.to_json().replace(END_OF_DOCUMENT, "<fin>"))
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<fin>"}))
    (tmp_path / "book.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    build(tmp_path / "out", inputs=[tmp_path / "book.txt"], tokenizer=tmp_path / "tok/tokenizer.json", progress=False)
    arguments = load_run_tokenizer(DataConfig(train=[str(tmp_path / "out" / "train")]))
    assert arguments.decode([arguments.end_of_document]) == "<fin>"


def unigram() -> Library:
    """Return a model as sentencepiece models are converted: whole-word marks, bytes for unknown characters."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("th", -4.0)] + [
        (c, -6.0) for c in "abdehint"
    ]
    pieces += [(f"<0x{b:02X}>", -9.0) for b in range(256)]
    inner = Library(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    inner.add_special_tokens(["</s>"])
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return inner


def wordpiece() -> Library:
    vocabulary = {"[UNK]": 0, "[EOS]": 1, "the": 2, "th": 3, "##ing": 4, "in": 5}
    inner = Library(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    return inner


@pytest.mark.parametrize("make", [unigram, wordpiece])
def test_other_kinds_of_hugging_face_files(tmp_path: Path, make) -> None:
    """The ids are the library's own, without what it would add, cut off or fill up."""
    text = "the thing in the Hat ✓"
    inner = make()
    inner.save(str(tmp_path / "tokenizer.json"))
    inner.no_truncation()
    inner.no_padding()
    expected = inner.encode(text, add_special_tokens=False).ids
    arguments = load_tokenizer(tmp_path / "tokenizer.json")
    assert arguments.encode(text) == expected
    assert arguments.end_of_document == 1
    assert arguments.vocab_size == inner.get_vocab_size()
    tokens, lengths = arguments.encode_documents([text, "the"])
    assert tokens[: lengths[0]].tolist() == list(expected) + [1]
    if make is unigram:
        assert arguments.decode(expected) == text


def word_level() -> Library:
    inner = Library(models.WordLevel({"<unk>": 0, "</s>": 1, "<s>": 2, "the": 3, "hat": 4}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner


def word_pieces_of_whole_words() -> Library:
    vocabulary = {"[UNK]": 0, "</s>": 1, "<s>": 2, "the": 3, "hat": 4, "<": 5, "##s": 6, "##>": 7}
    inner = Library(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["[UNK]", "<s>", "</s>"])
    return inner


def byte_pairs(**settings: object) -> Library:
    """A vocabulary in which `</s>` is also what merges of characters come to, or a word as a whole."""
    arguments = ["</s>", "<s>", "</", "s>", "the", "th", "hat", "ha"] + list("</>estha")
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(arguments))}
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("<", "s>"), ("t", "h"), ("th", "e"), ("h", "a"), ("ha", "t")]
    inner = Library(models.BPE(vocabulary, [] if settings else merges, **settings))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>", "</s>"])
    return inner


def byte_pairs_with_a_prefix() -> Library:
    """Tokens inside a word are marked, as in WordPiece; a merge takes the mark away."""
    arguments = ["</s>", "<s>", "t", "<", *(f"##{c}" for c in "/s>hea"), "##s>", "##/s>", "th", "the"]
    vocabulary = {word: number for number, word in enumerate(arguments)}
    merges = [("##s", "##>"), ("##/", "##s>"), ("<", "##/s>"), ("t", "##h"), ("th", "##e")]
    inner = Library(models.BPE(vocabulary, merges, continuing_subword_prefix="##"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>", "</s>"])
    return inner


def an_end_that_is_not_marked_as_special() -> Library:
    inner = byte_pairs()
    record = json.loads(inner.to_str())
    record["added_tokens"] = [{**token, "special": False} for token in record["added_tokens"]]
    return Library.from_str(json.dumps(record))


@pytest.mark.parametrize(
    "make",
    [
        unigram,
        word_level,
        word_pieces_of_whole_words,
        byte_pairs,
        lambda: byte_pairs(ignore_merges=True),
        byte_pairs_with_a_prefix,
        an_end_that_is_not_marked_as_special,
    ],
)
def test_special_tokens_written_in_a_text_end_no_document(tmp_path: Path, make) -> None:
    """No model kind makes a piece, word or merge with a special token's name from text."""
    inner = make()
    if inner.token_to_id("<s>") is not None:
        number = inner.token_to_id("<s>")
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    inner.save(str(tmp_path / "tokenizer.json"))
    arguments = load_tokenizer(tmp_path / "tokenizer.json")
    plain = "the hat the th"
    assert arguments.encode(plain) == inner.encode(plain, add_special_tokens=False).ids
    special = {arguments.end_of_document, *arguments.begin_of_prompt}
    hostile = "the </s> hat <s> the </s><s> <unk> [UNK] th"
    ids = arguments.encode(hostile)
    assert not special & set(ids)
    assert max(ids) < arguments.vocab_size == inner.get_vocab_size()
    tokens, lengths = arguments.encode_documents([hostile, plain, "</s>"])
    ends = np.flatnonzero(tokens == arguments.end_of_document)
    assert ends.tolist() == (np.cumsum(lengths) - 1).tolist()
    arguments.save(tmp_path / "again.json")
    assert load_tokenizer(tmp_path / "again.json").encode(hostile) == ids
    assert arguments.decode([arguments.end_of_document]) == "</s>"


def with_begin(template: str, begin: str) -> Library:
    inner = Library.from_str(WORDS.to_json())
    inner.add_special_tokens(["<|begin|>"])
    number = inner.token_to_id(begin)
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=[(begin, number)])
    return inner


@pytest.mark.parametrize("template", ["<|begin|> $A", "<|begin|> <|begin|> $A", "<|begin|> $A <|begin|>"])
def test_documents_begin_as_prompts_do(tmp_path: Path, template: str) -> None:
    """Continued training of Llama or Mistral without `<s>` would see texts begin as the model never met them."""
    with_begin(template, "<|begin|>").save(str(tmp_path / "tokenizer.json"))
    arguments = load_tokenizer(tmp_path / "tokenizer.json")
    begin = [arguments.vocab_size - 1] * template.split("$A")[0].count("<|begin|>")
    assert list(arguments.begin_of_document) == begin
    assert arguments.encode_prompt("spam") == (begin + arguments.encode("spam"))
    texts = ["def spam", "", "eggs"]
    tokens, lengths = arguments.encode_documents(texts)
    documents = [arguments.encode_prompt(text) + [arguments.end_of_document] for text in texts]
    assert tokens.tolist() == [i for document in documents for i in document]
    assert lengths.tolist() == [len(document) for document in documents]


def test_a_begin_that_is_the_end_is_not_repeated(tmp_path: Path) -> None:
    with_begin(f"{END_OF_DOCUMENT} $A", END_OF_DOCUMENT).save(str(tmp_path / "tokenizer.json"))
    arguments = load_tokenizer(tmp_path / "tokenizer.json")
    assert arguments.encode_prompt("spam") == ([arguments.end_of_document] + arguments.encode("spam"))
    tokens, _ = arguments.encode_documents(["spam"])
    assert tokens.tolist() == (arguments.encode("spam") + [arguments.end_of_document])


def test_a_data_set_begins_its_documents_as_the_template_says(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    with_begin("<|begin|> $A", "<|begin|>").save(str(tmp_path / "tok/tokenizer.json"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(30)))
    built = build(
        tmp_path / "out", inputs=[tmp_path / "a.jsonl"], tokenizer=tmp_path / "tok/tokenizer.json", progress=False
    )
    arguments = load_tokenizer(tmp_path / "out/tokenizer.json")
    data = IndexedDataset(tmp_path / "out/train")
    assert all(data.read_document(d)[0] == arguments.begin_of_document[0] for d in range(data.documents))
    assert built.manifest.tokenizer["begin_of_document"] == [arguments.vocab_size - 1]
    assert built.manifest.notes == ["each document begins with <|begin|>, as the tokenizer's template begins a prompt"]


def test_long_documents_are_cut_at_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_SLICE_CHARACTERS", 50)
    monkeypatch.setattr(base, "_BATCH_CHARACTERS", 120)
    text = "".join(f"def f{i}(x): return x + {i}\n" for i in range(40)) + "y" * 120
    ids = WORDS.encode(text)
    assert WORDS.decode(ids) == text
    tokens, lengths = WORDS.encode_documents([text, "", text])
    assert tokens.tolist() == (ids + [0, 0] + ids + [0])
    assert lengths.tolist() == [len(ids) + 1, 1, len(ids) + 1]
    received: list[str] = []
    library = SimpleNamespace(train_from_iterator=lambda texts, trainer: received.extend(texts))
    _train_interruptibly(library, [text], trainer=None)  # a long text would need 90 times its size
    assert "".join(received) == text
    assert max(map(len, received)) <= 50
    monkeypatch.undo()
    lines = WORDS.encode("".join(f"def f{i}(x): return x + {i}\n" for i in range(40)))
    assert ids[: len(lines)] == lines  # slices that end with a line change nothing


def test_unusable_files(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "binary.json").write_bytes(b"\xff\x00")
    for name, output in [("bad.json", "cannot|can be read"), ("binary.json", "can be read"), ("no.json", "not exist")]:
        with pytest.raises(DataError, match=output):
            load_tokenizer(tmp_path / name)
    with pytest.raises(DataError, match="is a folder"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="too small"):
        train_tokenizer(["a"], 100)
    with pytest.raises(ConfigError, match=r"vocab_size=99999999999 is too large: at most 16777216 .*--vocab-size"):
        train_tokenizer(["a"], 99_999_999_999)


def test_where_the_tokenizer_is_looked_for() -> None:
    assert find_tokenizer_path(DataConfig(train=["a/b/train", "c"])) == Path("a/b/tokenizer.json")
    assert find_tokenizer_path(DataConfig(train=["a/train"], tokenizer="x.json")) == Path("x.json")
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        find_tokenizer_path(DataConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"eos_token": ["</s>"]}', r"eos_token=\['</s>'\]; write the name of one token"),
        ('{"eos_token": {"content": 4}}', "eos_token=4"),
        ('{"eos_token": "</s>"', r"tokenizer_config\.json is not JSON .*; copy it again, or remove it"),
        ("[]", r"tokenizer_config\.json is not a JSON object"),
    ],
)
def test_settings_that_do_not_name_the_end_are_refused(tmp_path: Path, settings: str, message: str) -> None:
    """Without an error, the first known name would end the documents instead of the configured token."""
    WORDS.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_byte_order_mark_before_the_settings_is_no_damage(tmp_path: Path) -> None:
    train_tokenizer(["a b"], 300, ["<end>"]).save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}', encoding="utf-8-sig")
    assert load_tokenizer(tmp_path / "tokenizer.json").end_of_document == 1


def test_a_tokenizer_that_draws_its_tokens_is_refused(tmp_path: Path) -> None:
    record = json.loads(WORDS.to_json())
    record["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"model\.dropout=0\.1.*set it to null"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_pointer_in_the_position_of_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(LFS_POINTER + b"v1\noid sha256:0\nsize 9\n")
    with pytest.raises(DataError, match=r"pointer of Git LFS.*git lfs pull"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_an_interruption_ends_the_training_of_a_tokenizer() -> None:
    """A real library call holds the caller for minutes; this one ends only if its texts do."""
    begun, refused = threading.Event(), threading.Event()

    class Library:
        def train_from_iterator(self, texts: Iterator[str], trainer: object) -> None:
            next(texts)
            begun.set()
            os.kill(os.getpid(), signal.SIGINT)
            try:
                for _ in texts:
                    pass
            except Exception:
                refused.set()

    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            _train_interruptibly(Library(), itertools.repeat("text"), None)
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    assert begun.is_set()
    assert refused.wait(60)


def test_an_error_in_the_training_text_is_raised() -> None:
    def read_texts() -> Iterator[str]:
        yield "text"
        raise DataError("a file is damaged")

    with pytest.raises(DataError, match="a file is damaged"):
        train_tokenizer(read_texts(), 300)


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer", "adds_blank"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()]), None, True),
        (pre_tokenizers.Metaspace(prepend_scheme="first"), None, True),
        (pre_tokenizers.Metaspace(prepend_scheme="never"), None, False),
        (pre_tokenizers.Digits(), normalizers.Sequence([normalizers.Prepend("\u2581")]), True),
    ],
)
def test_files_that_contradict_each_other_on_a_blank_are_refused(tmp_path, pre_tokenizer, normalizer, adds_blank):
    """The releases of transformers follow different files, so neither is known to be the model's."""
    library_tokenizer = Library(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="<|endoftext|>"))
    library_tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        library_tokenizer.normalizer = normalizer
    library_tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings_file = tmp_path / "tokenizer_config.json"
    for value in (adds_blank, None):
        settings_file.write_text(json.dumps({"add_prefix_space": value}))
        load_tokenizer(tmp_path / "tokenizer.json")
    settings_file.write_text(json.dumps({"add_prefix_space": not adds_blank}))
    with pytest.raises(DataError, match=r"tokenizer_config\.json has add_prefix_space=(true|false), .* set or remove"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_json_is_parsed_once(tmp_path, monkeypatch):
    """Those of large vocabularies have megabytes."""
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["some text"], 300).save(path)
    text = path.read_text()
    parsed: list[str] = []
    parse = json.loads

    def count(document, **options):
        parsed.append(document)
        return parse(document, **options)

    monkeypatch.setattr(json, "loads", count)
    load_tokenizer(path)
    assert parsed.count(text) == 1
