"""The held-out share is as exact as the documents allow, and equal documents stay together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.data.dataset.manifest import Manifest
from megascale.data.dataset.sources import TextRecord
from megascale.data.prepare import builder
from megascale.data.prepare.split import Split, hash_text

TEXTS = [f"text {i} " + "größer ✓\n" * (i % 7) for i in range(200)]


def sides(split: Split, texts: list[str]) -> dict[str, int]:
    """Return the bytes on each side."""
    size = {"train": 0, "valid": 0}
    for text in texts:
        parts = split.split_document(TextRecord(text, 0))
        assert "".join(part for _, part in parts) == text
        for side, part in parts:
            size[side] += len(part.encode())
    return size


def of(texts: list[str], share: float) -> Split:
    return Split.for_documents([(hash_text(text), len(text.encode())) for text in texts], share)


@given(
    sizes=st.lists(st.integers(1, 1000) | st.integers(1, 100_000), min_size=20, max_size=60),
    share=st.floats(0.01, 0.5),
    repeat=st.integers(1, 40),
)
@settings(max_examples=80, deadline=None)
def test_known_documents_are_split_by_bytes(sizes: list[int], share: float, repeat: int) -> None:
    """Sizes vary, and one document may repeat. The split exceeds the request by at most one document."""
    texts = [f"{i}:" + "x" * size for i, size in enumerate(sizes)]
    texts += [texts[0]] * (repeat - 1)
    size = sides(of(texts, share), texts)
    total = sum(size.values())
    assert 0 < size["train"] < total
    assert size["valid"] <= 2 * share * total + len(texts)


@pytest.mark.parametrize("expected", [True, False])
def test_a_large_document_among_small_ones(expected: bool) -> None:
    """It gives its end; whole, it would be most of the held-out text."""
    for number in range(40):  # whichever way its hash falls
        book = f"{number}\n" + "A line of the book, as long as others are.\n" * 20_000
        texts = [f"note {i}\n" + "word " * 30 for i in range(25)] + [book]
        total = sum(map(len, texts))
        size = sides(of(texts, 0.05) if expected else Split.by_share(0.05, total), texts)
        assert 0.04 < size["valid"] / total < 0.06


def test_a_document_that_is_repeated_too_often_is_trained_on() -> None:
    texts = [f"text {i} " + "word " * 10 for i in range(60)]
    for often in texts:
        repeated = texts + [often] * 600
        split = of(repeated, 0.05)
        assert split.split_document(TextRecord(often, 0)) == [("train", often)]
        assert 0 < sides(split, repeated)["valid"] < 0.06 * sum(map(len, repeated))


@pytest.mark.parametrize("distinct", [2, 3, 10])
def test_of_documents_that_are_all_repeated_too_often_the_rarest_is_held_out(distinct: int) -> None:
    texts = [f"text {i} " + "word " * 10 for i in range(distinct) for _ in range(20 + i)]
    split = of(texts, 0.05)
    assert [split.split_document(TextRecord(text, 0))[0][0] for text in texts] == ["valid"] * 20 + ["train"] * (
        len(texts) - 20
    )


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("Title\n" + "word " * 4000, " "),
        ("Title\n" + "x" * 20_000, "x"),
        ("a line of text\n" * 1400 + "x" * 50, "\n"),
        ("x" * 19_100 + "\n" + "y" * 900, "\n"),  # the only line's end is after the point
        ("größer ✓\r\n" * 2000, "\n"),
    ],
)
def test_an_end_is_cut_where_a_line_or_word_ends_if_one_is_near(text: str, ends: str) -> None:
    (_, train), (_, valid) = Split.by_ends(0.05).split_document(TextRecord(text, 0))
    assert train + valid == text
    assert train.endswith(ends)
    assert 0.025 < len(valid) / len(text) < 0.075


def test_equal_documents_stand_on_one_side() -> None:
    split = Split.by_share(0.3, 1 << 30)
    for text in TEXTS:
        assert split.split_document(TextRecord(text, 0)) == split.split_document(TextRecord(text, 99))
    dealt = [split.split_document(TextRecord(text, 0))[0][0] for text in TEXTS]
    assert 0.2 < dealt.count("valid") / len(dealt) < 0.4


def share(manifest: Manifest) -> float:
    size = {name: part.bytes for name, part in manifest.parts.items()}
    return size["valid"] / sum(size.values())


@pytest.mark.parametrize("expected", [True, False])
@pytest.mark.parametrize("books", [1, 3])
def test_builds_of_few_books_keep_the_share(tmp_path: Path, expected: bool, books: int, monkeypatch) -> None:
    """Also where there is too much text to read beforehand."""
    if not expected:
        monkeypatch.setattr(builder, "_EXACT_SPLIT_BYTES", 0)
    (tmp_path / "in").mkdir()
    for i in range(books):
        (tmp_path / "in" / f"{i}.txt").write_text(f"Book {i}\n" + "some words of one long line " * 3000)
    built = builder.build(tmp_path / "out", inputs=[tmp_path / "in"], vocab_size=300, held_out=0.1, progress=False)
    assert 0.09 < share(built.manifest) < 0.11
    assert not [note for note in built.manifest.notes if "held out" in note]


def test_a_share_that_cannot_be_met_is_said(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i in range(20):
        (tmp_path / "in" / f"{i}.txt").write_text(f"note {i}")
    built = builder.build(tmp_path / "out", inputs=[tmp_path / "in"], vocab_size=300, held_out=0.02, progress=False)
    assert share(built.manifest) > 0.03
    (note,) = [note for note in built.manifest.notes if "held out" in note]
    assert "of the text is held out, where --held-out=0.02 requests 2.00%" in note


def test_a_vocabulary_that_is_smaller_than_requested_is_noted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 50)
    for vocab_size in (258, 5000):
        out = tmp_path / str(vocab_size)
        built = builder.build(out, inputs=[tmp_path / "a.txt"], vocab_size=vocab_size, progress=False)
        notes = [note for note in built.manifest.notes if "--vocab-size" in note]
        entries = built.manifest.tokenizer["vocab_size"]
        expected = f"the tokenizer has {entries} entries, where --vocab-size=5000 requests more"
        assert [note.partition(":")[0] for note in notes] == ([] if vocab_size == 258 else [expected])
