"""tiktoken encodings from local files: a tiny rank file, and the patterns of the published encodings."""

from __future__ import annotations

import base64
import json
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megascale.data.dataset.indexed import IndexedDataset
from megascale.data.prepare.builder import build
from megascale.data.tokenizer.tiktoken_file import PUBLISHED, TiktokenTokenizer
from megascale.data.tokenizer.tokenizer import load_tokenizer
from megascale.errors import DataError

tiktoken = pytest.importorskip("tiktoken")

RANKS = {bytes([b]): b for b in range(256)} | {b"th": 256, b"the": 257, b" the": 258, b"in": 259, b"ing": 260}
END = "<|endoftext|>"


def rank_file(path: Path, ranks: dict[bytes, int] = RANKS) -> Path:
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))
    return path


def described(tmp_path: Path) -> Path:
    (tmp_path / "tiny.json").write_text(json.dumps({"pattern": r" ?\p{L}+|.|\n", "special_tokens": {END: 270}}))
    return rank_file(tmp_path / "tiny.tiktoken")


def test_rank_file_with_description(tmp_path: Path) -> None:
    arguments = load_tokenizer(described(tmp_path))
    assert isinstance(arguments, TiktokenTokenizer)
    assert arguments.encode("the thing") == [257, 32, 256, 260]
    assert (arguments.vocab_size, arguments.end_of_document) == (271, 270)
    assert arguments.decode(arguments.encode("in ✓") + [270]) == f"in ✓{END}"
    assert 270 not in arguments.encode(END)
    tokens, lengths = arguments.encode_documents(["the", "", END])
    assert tokens.tolist() == ([257, 270, 270] + arguments.encode(END) + [270])
    assert lengths.tolist() == [2, 1, len(tokens) - 3]


def test_saved_as_tokenizer_json_it_is_the_same(tmp_path: Path) -> None:
    arguments = load_tokenizer(described(tmp_path))
    arguments.save(tmp_path / "tokenizer.json")
    repeated = load_tokenizer(tmp_path / "tokenizer.json")
    assert repeated.to_json() == arguments.to_json()
    assert repeated.encode("nothing in the text") == arguments.encode("nothing in the text")


def test_data_set_with_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i in range(40):
        (tmp_path / "in" / f"{i}.txt").write_text(f"the thing number {i}\n")
    build(tmp_path / "out", inputs=[tmp_path / "in"], tokenizer=described(tmp_path), progress=False)
    arguments = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    first = IndexedDataset(tmp_path / "out" / "train").read_document(0)
    assert arguments.decode(first[:-1]) == "the thing number 0\n"
    assert first[-1] == 270


@pytest.fixture(scope="module")
def published() -> dict[str, dict]:
    """Return the arguments of tiktoken's own constructors for the published encodings, with a small rank file."""
    module = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(module, "load_tiktoken_bpe", lambda *_, **__: RANKS)
    try:
        return {name: getattr(module, name)() for name in PUBLISHED}
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_encodings_are_known(tmp_path: Path, published: dict[str, dict], name: str) -> None:
    arguments = load_tokenizer(rank_file(tmp_path / f"{name}.tiktoken"))
    assert arguments.end_of_document == published[name]["special_tokens"][END]


@given(text=st.text(st.sampled_from("aZé1 23\n\r\t'sS’LlVEve.,!/-ǅ中ा　 \u0301"), max_size=40) | st.text(max_size=40))
@example(text="\r\t")
@example(text="a\n \n ")
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_their_patterns_cut_text_alike(published: dict[str, dict], name: str, text: str) -> None:
    """Every pair of bytes is a token, so the ids show the cuts of the pattern."""
    ours, theirs = build_pair(name, published[name]["pat_str"])
    assert ours.encode(text) == theirs.encode_ordinary(text)


@lru_cache
def build_pair(name: str, pattern: str) -> tuple:
    pairs = {bytes([b]): b for b in range(256)}
    pairs |= {bytes([a, b]): 256 + 256 * a + b for a in range(256) for b in range(256)}
    theirs = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=pairs, special_tokens={})
    return TiktokenTokenizer(name, PUBLISHED[name][0], pairs, {END: 1 << 20}, END), theirs


@pytest.mark.parametrize(
    ("content", "output"),
    [
        ("YQ== 0\nnonsense\n", "line 2: 'nonsense'"),
        ("YQ== 0\n!! 1\n", "line 2"),
        ("YQ== 0\n", "no token for byte 0"),
    ],
)
def test_bad_rank_files(tmp_path: Path, content: str, output: str) -> None:
    (tmp_path / "r50k_base.tiktoken").write_text(content)
    with pytest.raises(DataError, match=output):
        load_tokenizer(tmp_path / "r50k_base.tiktoken")


def test_bad_descriptions(tmp_path: Path) -> None:
    path = rank_file(tmp_path / "own.tiktoken")
    with pytest.raises(DataError, match=r"is unknown.*own\.json next to it"):
        load_tokenizer(path)
    for record, output in [
        ("{}", "does not describe"),
        (
            '{"pattern": "(", "special_tokens": {"<|endoftext|>": 300}}',
            r"understands: .*; correct the pattern and the ",
        ),
        ('{"pattern": ".", "special_tokens": {"<pad>": 300}}', "no special token"),
    ]:
        (tmp_path / "own.json").write_text(record)
        with pytest.raises(DataError, match=output):
            load_tokenizer(path)
    (tmp_path / "tokenizer.json").write_text('{"kind": "megascale/tiktoken", "ranks": 5}')
    with pytest.raises(DataError, match="damaged"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("special_tokens", "end", "message"),
    [
        (
            {END: 104},
            None,
            r"'h' and '<\|endoftext\|>' have the same id 104; take an id in special_tokens of tiny\.json",
        ),
        ({END: 270, "<x>": 270}, None, "'<x>' have the same id 270"),
        ({END: "270"}, None, "the id of '<.*>' is '270'; write an integer"),
        ({END: -1}, None, "is -1; write an integer"),
        ([END], None, "special_tokens an object"),
        ({END: 270}, ["x"], r"no special token \['x'\] to end a document with"),
    ],
)
def test_ids_that_mean_two_tokens_are_refused(
    tmp_path: Path, special_tokens: object, end: object, message: str
) -> None:
    file = described(tmp_path)
    record = {"pattern": r"\p{L}+|.|\n", "special_tokens": special_tokens, "end_of_document": end}
    (tmp_path / "tiny.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=message):
        load_tokenizer(file)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{base64.b64encode(b'zz').decode()} 257", "'the' and 'zz' have the same id 257; copy the rank file again"),
        (f"{base64.b64encode(b'th').decode()} 261", "line 262: the token has the ranks 256 and 261; copy the file"),
    ],
)
def test_a_rank_file_with_a_rank_or_a_token_twice_is_refused(tmp_path: Path, line: str, message: str) -> None:
    file = described(tmp_path)
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(DataError, match=message):
        load_tokenizer(file)


def test_text_that_a_pattern_skips_is_counted(tmp_path: Path) -> None:
    file = described(tmp_path)
    assert load_tokenizer(file).count_lost_bytes(["the thing!\n"]) == 0
    (tmp_path / "tiny.json").write_text(json.dumps({"pattern": r"\p{L}+", "special_tokens": {END: 270}}))
    # The blank is white space, which is not counted.
    assert load_tokenizer(file).count_lost_bytes(["the thing, ✓", "in"]) == len(",✓".encode())


def test_ids_without_a_token_have_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(described(tmp_path))
    assert tokenizer.decode([257, 265, 5000, 260]) == "theing"


def test_an_export_drops_what_the_pattern_skips(tmp_path: Path) -> None:
    for pattern in (r" ?\p{L}+|.|\n", r"\p{L}+"):
        (tmp_path / "tiny.json").write_text(json.dumps({"pattern": pattern, "special_tokens": {END: 270}}))
        tokenizer = load_tokenizer(rank_file(tmp_path / "tiny.tiktoken"))
        assert isinstance(tokenizer, TiktokenTokenizer)
        text = "the thing, in ✓!\n"
        assert tokenizer.to_tokenizers().encode(text).ids == tokenizer.encode(text)
